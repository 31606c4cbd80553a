//! What a pager leaves to the next one: a folder with a file for each VM.
//!
//! ```text
//! folder/lock        flock: held until the last thread of a dead pager has left its last call
//! folder/vm-NAME     the VM, the states of its units, and the events that were read last
//! folder/new-NAME    a file that is not finished: its VM was not served
//! ```

mod file;
mod process;

pub use file::{VmRecord, VmState};
pub use process::{TakeBackError, TakenVm, start_time, userfaultfd_inode};

use crate::supervisor::Supervisor;
use file::StateFile;
use lacuna_sync::{Mutex, lock, lock_order};
use lacuna_sys::{Errno, Userfaultfd};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, fstatfs, mkdir, open, openat};
use rustix::io::{pread, pwrite};
use rustix::process::geteuid;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a new pager waits for the end of the last one.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bits of a mode.
const OTHERS_WRITE: u32 = 0o022;
const OTHERS: u32 = 0o077;
/// `TMPFS_MAGIC`.
const TMPFS: u64 = 0x0102_1994;

/// Why a pager cannot have its folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The folder, or a file in it.
    #[error("{0}: {1}")]
    Folder(String, #[source] Errno),
    /// It is on a disk.
    #[error("{0} is in no tmpfs: name a folder in /run or /dev/shm, where a write needs no disk")]
    NoTmpfs(String),
    /// Other users can write to it.
    #[error("other users can write to {0}: chown and chmod 700 it, or name another folder")]
    Foreign(String),
    /// Another pager has it.
    #[error("{0} belongs to the running pager {1}: end that pager, or name another folder")]
    InUse(String, String),
}

/// The folder of a pager. No other pager has it at the same time.
pub struct StateFolder {
    path: PathBuf,
    folder: OwnedFd,
    _lock: OwnedFd,
    supervisor: Supervisor,
    /// The VMs of an earlier pager that are not taken back.
    found: Mutex<Vec<StateFile>, lock_order::PagerFound>,
    /// Why files of an earlier pager cannot be read.
    damaged: Vec<String>,
}

impl StateFolder {
    /// Opens or makes the folder, and reads what an earlier pager has left there. Waits up to two
    /// seconds for the end of that pager.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn open(path: &Path, supervisor: Supervisor) -> Result<Self, StateError> {
        Self::open_within(path, supervisor, PATIENCE)
    }

    fn open_within(
        path: &Path,
        supervisor: Supervisor,
        patience: Duration,
    ) -> Result<Self, StateError> {
        let name = path.display().to_string();
        let failed = |errno| StateError::Folder(name.clone(), errno);
        match mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = open(path, flags, Mode::empty()).map_err(failed)?;
        if fstatfs(&folder).map_err(failed)?.f_type as u64 != TMPFS {
            return Err(StateError::NoTmpfs(name));
        }
        if !is_own(&folder, OTHERS_WRITE).map_err(failed)? {
            return Err(StateError::Foreign(name));
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let held = openat(&folder, "lock", flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        let until = Instant::now() + patience;
        while let Err(errno) = flock(&held, FlockOperation::NonBlockingLockExclusive) {
            if errno != Errno::WOULDBLOCK && errno != Errno::INTR {
                return Err(failed(errno));
            }
            if Instant::now() >= until {
                let mut holder = [0; 16];
                let read = pread(&held, &mut holder, 0).unwrap_or(0);
                let holder = String::from_utf8_lossy(&holder[..read]).trim().to_owned();
                return Err(StateError::InUse(name, holder));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // For the message of another pager.
        let holder = format!("{:<16}", std::process::id());
        let _ = pwrite(&held, holder.as_bytes(), 0);
        let (found, damaged) = file::find(path, &folder).map_err(failed)?;
        // A file is removed before the manager forgets its VM, and made before it keeps the VM.
        supervisor.forget_all_but(|name| path.join(name).exists());
        Ok(Self {
            path: path.to_owned(),
            folder,
            _lock: held,
            supervisor,
            found: Mutex::new(found),
            damaged,
        })
    }

    /// The service manager, which keeps descriptors.
    pub fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

    /// What is wrong with what the earlier pager has left: damaged files, and VMs whose socket no
    /// [`Pager::serve`](crate::Pager::serve) has had.
    pub fn complaints(&self) -> Vec<String> {
        let path = self.path.display();
        let damaged = self.damaged.iter().map(|reason| {
            format!("a VM waits, because {path}/{reason}: end the VM, and remove the file")
        });
        let all = lock(&self.found);
        let left = all.iter().map(|file| {
            let (name, socket) = (&file.record, file.record.socket.display());
            format!("the VM of {name} waits: start the pager with its socket {socket}")
        });
        damaged.chain(left).collect()
    }

    /// The file of a new VM. It exists when this returns.
    ///
    /// # Errors
    /// The folder is full.
    pub fn create(
        &self,
        record: &VmRecord,
        units: u64,
        (uffd, socket): (&Userfaultfd, &UnixStream),
    ) -> io::Result<VmState> {
        let state = VmState::create((&self.path, &self.folder), record, units)?;
        if let Some(name) = state.name() {
            let fds = [uffd.as_fd(), socket.as_fd()];
            self.supervisor.keep(name, &fds);
        }
        Ok(state)
    }

    /// The VM with the file `name` has ended, or is not served.
    pub fn remove(&self, name: &str) {
        // The file first: a descriptor without a file belongs to no VM.
        let _ = rustix::fs::unlinkat(&self.folder, name, rustix::fs::AtFlags::empty());
        self.supervisor.forget(name);
    }

    /// Takes back the VMs of the socket that `listener` has: `take` gets each, and returns why it
    /// cannot serve the VM. `complain` gets why a VM cannot be taken back.
    pub fn take_back(
        &self,
        socket: &Path,
        take: impl Fn(TakenVm, &VmRecord, VmState) -> Result<(), String>,
        complain: impl Fn(&str),
    ) {
        let of_socket = |file: &mut StateFile| file.record.socket == socket;
        let files: Vec<_> = lock(&self.found).extract_if(.., of_socket).collect();
        for file in files {
            let kept = self.supervisor.take(file.state.name().unwrap_or_default());
            let StateFile { record, state } = file;
            let (about, name) = (record.to_string(), state.name().map(str::to_owned));
            let taken = match process::find(&record, kept) {
                Ok(taken) => take(taken, &record, state),
                Err(error) => {
                    // Nothing is left to serve.
                    if let TakeBackError::Ended | TakeBackError::Closed = error {
                        self.remove(&name.unwrap_or_default());
                    }
                    match error {
                        TakeBackError::Ended => continue,
                        error => Err(error.to_string()),
                    }
                }
            };
            match taken {
                Ok(()) => complain(&format!("took back the VM of {about}")),
                Err(why) => complain(&format!("cannot take back the VM of {about}: {why}")),
            }
        }
    }
}

/// The path of a listening socket, by which the next pager finds the VMs of the same image.
///
/// # Errors
/// It has none.
pub fn path_of(listener: &UnixListener) -> io::Result<PathBuf> {
    let address = listener.local_addr()?;
    let path = address.as_pathname().map(Path::to_owned);
    path.ok_or_else(|| {
        let text = "a pager with a state folder needs a socket with a path";
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })
}

/// Whether it is this user's, and others have none of the rights `rights`.
fn is_own(fd: &OwnedFd, rights: u32) -> Result<bool, Errno> {
    let stat = fstat(fd)?;
    Ok(stat.st_uid == geteuid().as_raw() && stat.st_mode & rights == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::regions::RegionMessage;
    use file::VmRecord;
    use lacuna_skip::test;
    use std::cell::{Cell, RefCell};
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::process::Command;
    use std::sync::atomic::Ordering;
    use tempfile::TempDir;

    fn folder() -> TempDir {
        let folder = TempDir::new_in("/dev/shm");
        folder.unwrap_or_else(|error| lacuna_skip::skip_test(error))
    }

    fn open(folder: &TempDir) -> Result<StateFolder, StateError> {
        // Waits: a child of another test has the lock until it calls execve(2).
        StateFolder::open(folder.path(), Supervisor::from_environment().unwrap())
    }

    fn record(uffd: &Userfaultfd) -> VmRecord {
        let pid = std::process::id() as i32;
        let region = r#"{"base_host_virt_addr":4096,"size":12288,"offset":0,"page_size":4096}"#;
        let region: RegionMessage = serde_json::from_str(region).unwrap();
        VmRecord {
            socket: "/run/pager".into(),
            user: geteuid().as_raw(),
            pid: Some(pid),
            started: start_time(pid),
            memory: "a memory".into(),
            userfaultfd: userfaultfd_inode(uffd).unwrap(),
            regions: vec![region],
        }
    }

    fn uffd() -> Userfaultfd {
        Userfaultfd::open_user().unwrap_or_else(|errno| lacuna_skip::skip_test(errno))
    }

    /// What a pager says, and how many VMs it takes back.
    fn taken(folder: &StateFolder, socket: &str) -> (usize, Vec<String>) {
        let (count, said) = (Cell::new(0), RefCell::new(Vec::new()));
        let take = |vm: TakenVm, _: &VmRecord, _: VmState| {
            assert!(vm.process.pidfd().is_some());
            count.set(count.get() + 1);
            Ok(())
        };
        folder.take_back(Path::new(socket), take, |text| {
            said.borrow_mut().push(text.to_owned());
        });
        (count.get(), said.into_inner())
    }

    fn leave(path: &TempDir, record: &VmRecord, uffd: &Userfaultfd) -> String {
        let socket = UnixStream::pair().unwrap().0;
        let folder = open(path).unwrap();
        let state = folder.create(record, 3, (uffd, &socket)).unwrap();
        state.units()[1].store(3, Ordering::Relaxed);
        state.name().unwrap().to_owned()
    }

    #[test]
    fn the_next_pager_finds_a_vm() {
        let (path, own, _other) = (folder(), uffd(), uffd());
        leave(&path, &record(&own), &own);
        let next = open(&path).unwrap();
        {
            let found = lock(&next.found);
            assert_eq!(found[0].record, record(&own));
            let states = found[0].state.units().iter();
            let states: Vec<_> = states.map(|state| state.load(Ordering::Relaxed)).collect();
            assert_eq!(states, [0, 3, 0]);
        }
        let supervisor = Supervisor::from_environment().unwrap();
        let second = StateFolder::open_within(path.path(), supervisor, Duration::ZERO);
        assert!(matches!(second, Err(StateError::InUse(_, pid))
            if pid == std::process::id().to_string()));
        assert_eq!(taken(&next, "/run/other"), (0, vec![]));
        assert!(next.complaints()[0].ends_with("start the pager with its socket /run/pager"));
        let (count, said) = taken(&next, "/run/pager");
        if count == 0 {
            lacuna_skip::skip_test(&said[0]);
        }
        assert_eq!(next.complaints(), [""; 0]);
    }

    /// Their files are removed, and no other process is taken for them.
    #[test]
    fn ended_vms_are_forgotten() {
        let path = folder();
        let own = uffd();
        let mut child = Command::new("true").spawn().unwrap();
        // Not yet waited for: its number has a process, which has ended.
        let pid = child.id() as i32;
        while start_time(pid).is_none()
            || !fs::read_to_string(format!("/proc/{pid}/stat"))
                .unwrap()
                .contains(") Z")
        {
            std::thread::yield_now();
        }
        let started = start_time(pid);
        let ended = VmRecord {
            pid: Some(pid),
            started,
            ..record(&own)
        };
        let later = Some(record(&own).started.unwrap() + 1);
        let reused = VmRecord {
            started: later,
            ..record(&own)
        };
        let none = VmRecord {
            pid: Some(-7),
            ..record(&own)
        };
        for record in [ended, reused, none] {
            let name = leave(&path, &record, &own);
            assert_eq!(taken(&open(&path).unwrap(), "/run/pager"), (0, vec![]));
            assert!(!path.path().join(name).exists());
        }
        child.wait().unwrap();
        let closed = VmRecord {
            userfaultfd: u64::MAX,
            ..record(&own)
        };
        leave(&path, &closed, &own);
        let said = taken(&open(&path).unwrap(), "/run/pager").1;
        assert!(said[0].contains("closed its userfaultfd"), "{said:?}");
        assert_eq!(taken(&open(&path).unwrap(), "/run/pager"), (0, vec![]));
    }

    /// Files with changed bytes, cut files and others: none panics, and all but unfinished ones
    /// stay.
    #[test]
    fn damaged_files_are_reported() {
        let path = folder();
        let own = uffd();
        let name = leave(&path, &record(&own), &own);
        let file = path.path().join(name);
        let whole = fs::read(&file).unwrap();
        let mut rng = fastrand::Rng::with_seed(3);
        for round in 0..200 {
            let mut bytes = whole.clone();
            match round % 3 {
                0 => bytes.truncate(rng.usize(0..=4096 + 4096)),
                1 => bytes[rng.usize(0..16)] ^= rng.u8(1..),
                _ => bytes[4096 + rng.usize(0..300)] = rng.u8(..),
            }
            fs::write(&file, &bytes).unwrap();
            let folder = open(&path).unwrap();
            let complaints = folder.complaints();
            assert_eq!(complaints.len(), 1, "{round}: {complaints:?}");
            assert!(
                round % 3 > 1 || complaints[0].contains("remove the file"),
                "{round}"
            );
            taken(&folder, "/run/pager");
        }
        fs::write(&file, &whole).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        fs::write(path.path().join("new-1"), "").unwrap();
        fs::create_dir(path.path().join("vm-folder")).unwrap();
        let complaints = open(&path).unwrap().complaints();
        assert_eq!(complaints.len(), 2, "{complaints:?}");
        assert!(
            complaints
                .iter()
                .any(|text| text.contains("belongs to other users too"))
        );
        assert!(!path.path().join("new-1").exists());
    }

    #[test]
    fn wrong_folders_are_refused() {
        let path = folder();
        fs::set_permissions(path.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(open(&path), Err(StateError::Foreign(_))));
        fs::set_permissions(path.path(), Permissions::from_mode(0o755)).unwrap();
        assert!(open(&path).is_ok());
        let supervisor = Supervisor::from_environment().unwrap();
        let refused = StateFolder::open(Path::new("/proc/self"), supervisor);
        assert!(matches!(refused, Err(StateError::NoTmpfs(_))));
    }
}
