//! Finds a VM of an earlier pager: its userfaultfd, kept by the service manager or by the VMM
//! itself, and what reports its end.

use super::VmRecord;
use crate::peer_process::PeerProcess;
use lacuna_sys::{Errno, PeerCredentials, Userfaultfd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::fstat;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// A VM that is taken back.
pub struct TakenVm {
    pub uffd: Userfaultfd,
    /// Its connection, if the service manager has kept it. Otherwise the process has a pidfd.
    pub socket: Option<UnixStream>,
    pub process: PeerProcess,
}

/// Why a VM is not taken back. It waits, unless the process has ended or closed its userfaultfd.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TakeBackError {
    /// Its process has ended.
    #[error("its process has ended")]
    Ended,
    /// There is no number for its process.
    #[error("no service manager has kept its userfaultfd, and its process has no number here")]
    NoProcess,
    /// The process does not give its descriptors.
    #[error(
        "its userfaultfd cannot be had ({0}): run the pager as the VMM's user with \
         kernel.yama.ptrace_scope 0, or with CAP_SYS_PTRACE; then restart the pager"
    )]
    Refused(Errno),
    /// No copy is left.
    #[error(
        "its process has closed its userfaultfd, so the kernel gives zeros for its missing pages: \
         end the VM, unless it has ended"
    )]
    Closed,
    /// The kernel gives all userfaultfds one inode.
    #[error("its userfaultfd cannot be told from others before Linux 5.12: restart the VM")]
    Ambiguous,
}

/// Finds the VM of `record`. `kept` is what the service manager has of it.
pub fn find(record: &VmRecord, kept: Vec<OwnedFd>) -> Result<TakenVm, TakeBackError> {
    let pidfd = record.pid.map(|pid| process(pid, record.started));
    let pidfd = pidfd.transpose()?;
    let (mut uffd, mut socket) = (None, None);
    for fd in kept {
        // A userfaultfd is no socket, so exactly one of the two takes it.
        match userfaultfd_inode(&fd).ok() == Some(record.userfaultfd) {
            true => uffd = Userfaultfd::try_from(fd).ok(),
            false => socket = Some(UnixStream::from(fd)),
        }
    }
    let uffd = match (uffd, &pidfd, record.pid) {
        (Some(uffd), ..) => uffd,
        (None, Some(pidfd), Some(pid)) => from_process(record, pidfd, pid)?,
        (None, ..) => return Err(TakeBackError::NoProcess),
    };
    if socket.is_none() && pidfd.is_none() {
        return Err(TakeBackError::NoProcess);
    }
    let process = PeerProcess::from(PeerCredentials {
        pid: record.pid,
        user: record.user,
        pidfd,
    });
    Ok(TakenVm {
        uffd,
        socket,
        process,
    })
}

/// The process with this number, if it was started at that time.
fn process(pid: i32, started: Option<u64>) -> Result<OwnedFd, TakeBackError> {
    let number = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw);
    let number = number.ok_or(TakeBackError::Ended)?;
    let pidfd = match pidfd_open(number, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH | Errno::INVAL) => return Err(TakeBackError::Ended),
        Err(errno) => return Err(TakeBackError::Refused(errno)),
    };
    // Read behind the open, so the pidfd is of the process with this start time.
    let is_same = started.is_none() || start_time(pid) == started;
    let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
    let polled = poll(&mut ended, Some(&Timespec::default()));
    polled.map_err(TakeBackError::Refused)?;
    match is_same && ended[0].revents().is_empty() {
        true => Ok(pidfd),
        false => Err(TakeBackError::Ended),
    }
}

/// Copies the userfaultfd from the VMM.
fn from_process(
    record: &VmRecord,
    pidfd: &OwnedFd,
    pid: i32,
) -> Result<Userfaultfd, TakeBackError> {
    let refused = TakeBackError::Refused;
    // A kernel with one inode for all has given it to this descriptor too.
    let other = eventfd(0, EventfdFlags::CLOEXEC).map_err(refused)?;
    if fstat(&other).map_err(refused)?.st_ino == record.userfaultfd {
        return Err(TakeBackError::Ambiguous);
    }
    let errno = |error: &std::io::Error| refused(Errno::from_io_error(error).unwrap_or(Errno::IO));
    let all = std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(|error| errno(&error))?;
    for entry in all {
        let entry = entry.map_err(|error| errno(&error))?;
        let is_userfaultfd = std::fs::read_link(entry.path())
            .is_ok_and(|name| name.as_os_str() == "anon_inode:[userfaultfd]");
        let number = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let Some(number) = number.filter(|_| is_userfaultfd) else {
            continue;
        };
        let copy = match pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty()) {
            Ok(copy) => copy,
            // Closed meanwhile.
            Err(Errno::BADF) => continue,
            Err(errno) => return Err(refused(errno)),
        };
        if userfaultfd_inode(&copy).ok() == Some(record.userfaultfd) {
            return Userfaultfd::try_from(copy).map_err(refused);
        }
    }
    Err(TakeBackError::Closed)
}

/// The inode number of a descriptor. Since Linux 5.12, each userfaultfd has its own.
///
/// # Errors
/// As `fstat(2)`.
pub fn userfaultfd_inode(fd: &impl AsFd) -> Result<u64, Errno> {
    fstat(fd).map(|stat| stat.st_ino)
}

/// When the process was started, in clock ticks since boot: field 22 of `/proc/PID/stat`.
pub fn start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may have any character.
    let (_, behind) = stat.rsplit_once(')')?;
    behind.split_whitespace().nth(19)?.parse().ok()
}
