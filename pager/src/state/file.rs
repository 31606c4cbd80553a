//! The file of one VM, which the next pager reads. It believes nothing in it that it can check: a
//! wrong state of a unit would be a wrong page, so the file is this user's alone.
//!
//! ```text
//! 0       "lacunavm", the version and the length of the record, u32 each
//! 2048    the events of the last read, and older ones
//! 4096    the record, as JSON
//! ...     from the next page on: the states of the units, a byte each
//! ```

use super::{OTHERS, is_own};
use crate::regions::{REGIONS_MAX, RegionMessage};
use lacuna_addr::PAGE_SIZE;
use lacuna_sys::{EVENT_BYTES, Errno, SharedBytes};
use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, fallocate, fstat, openat, renameat, unlinkat,
};
use rustix::io::{pread, pwrite};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU8;

const MAGIC: &[u8; 8] = b"lacunavm";
const VERSION: u32 = 1;
const EVENTS_AT: usize = 2048;
const RECORD_AT: usize = PAGE_SIZE;
/// More than a record with [`REGIONS_MAX`] regions and the longest path needs.
const RECORD_MAX: usize = 256 * REGIONS_MAX;
/// The most units: 2^40 pages of 4 KiB, which no address space has.
const UNITS_MAX: u64 = 1 << 40;
const _: () = assert!(EVENTS_AT + EVENT_BYTES <= RECORD_AT);

/// What the next pager has to know about a VM.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmRecord {
    /// The path of the socket to which the VMM has connected.
    pub socket: PathBuf,
    /// The VMM's user.
    pub user: u32,
    /// The VMM's process, unless it is in another PID namespace.
    pub pid: Option<i32>,
    /// When the process was started, in clock ticks since boot.
    pub started: Option<u64>,
    /// The identity of the image's memory: another memory's pages would be wrong ones.
    pub memory: String,
    /// The inode number of the userfaultfd. It is the same in each process.
    pub userfaultfd: u64,
    /// The regions, as the VMM has announced them.
    pub regions: Vec<RegionMessage>,
}

/// The VM's name in messages.
impl fmt::Display for VmRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("a process of another PID namespace"),
        }
    }
}

/// The part of a VM that outlives the pager: the states of its units, and the events that were read
/// last.
pub struct VmState {
    bytes: SharedBytes,
    states_at: usize,
    name: Option<String>,
}

/// A file that an earlier pager has left.
pub struct StateFile {
    pub record: VmRecord,
    pub state: VmState,
}

impl VmState {
    /// A VM that ends with the pager.
    ///
    /// # Errors
    /// As `mmap(2)`.
    pub fn anonymous(units: u64) -> Result<Self, Errno> {
        let bytes = SharedBytes::anonymous(size(RECORD_AT, units)?)?;
        Ok(Self {
            bytes,
            states_at: RECORD_AT,
            name: None,
        })
    }

    pub(super) fn create(
        (path, folder): (&Path, &OwnedFd),
        record: &VmRecord,
        units: u64,
    ) -> io::Result<Self> {
        let text = serde_json::to_vec(record)?;
        let states_at = states_at(text.len());
        let bytes = size(states_at, units)?;
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let name = format!("vm-{:016x}", u64::from_ne_bytes(random));
        let new = name.replace("vm-", "new-");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(folder, &new, flags, Mode::RUSR | Mode::WUSR)?;
        let create = || {
            // A write to a page that the folder has no room for would be a SIGBUS.
            fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
            let mut header = MAGIC.to_vec();
            header.extend(VERSION.to_le_bytes());
            header.extend((text.len() as u32).to_le_bytes());
            write_all(&file, &header, 0)?;
            write_all(&file, &text, RECORD_AT as u64)?;
            let state = Self::map(&file, (states_at, bytes), name.clone())?;
            renameat(folder, &new, folder, &name)?;
            Ok(state)
        };
        create().map_err(|errno: Errno| {
            let _ = unlinkat(folder, &new, AtFlags::empty());
            io::Error::other(format!("{}: {errno}", path.join(&new).display()))
        })
    }

    fn map(
        file: &OwnedFd,
        (states_at, bytes): (usize, usize),
        name: String,
    ) -> Result<Self, Errno> {
        let bytes = SharedBytes::of_file(file.as_fd(), bytes)?;
        // The kernel lets a removing thread continue before it copies the event here. The copy
        // must not fault: a process that is being killed may not get the page.
        bytes.keep_resident(RECORD_AT)?;
        Ok(Self {
            bytes,
            states_at,
            name: Some(name),
        })
    }

    /// Its file's name.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Where the events are read.
    pub fn events(&self) -> &[AtomicU8] {
        &self.bytes[EVENTS_AT..EVENTS_AT + EVENT_BYTES]
    }

    /// The states of the units.
    pub fn units(&self) -> &[AtomicU8] {
        &self.bytes[self.states_at..]
    }
}

fn states_at(record: usize) -> usize {
    RECORD_AT + record.next_multiple_of(PAGE_SIZE)
}

fn size(states_at: usize, units: u64) -> Result<usize, Errno> {
    let units = usize::try_from(units).map_err(|_| Errno::NOMEM)?;
    states_at.checked_add(units).ok_or(Errno::NOMEM)
}

fn write_all(file: &OwnedFd, bytes: &[u8], at: u64) -> Result<(), Errno> {
    match pwrite(file, bytes, at)? == bytes.len() {
        true => Ok(()),
        false => Err(Errno::NOSPC),
    }
}

/// The files that an earlier pager has left in `folder`, and why others cannot be read. Removes the
/// unfinished ones.
pub fn find(path: &Path, folder: &OwnedFd) -> Result<(Vec<StateFile>, Vec<String>), Errno> {
    let (mut found, mut damaged) = (Vec::new(), Vec::new());
    let entries = std::fs::read_dir(path).map_err(|error| io_errno(&error))?;
    for entry in entries {
        let entry = entry.map_err(|error| io_errno(&error))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("new-") {
            let _ = unlinkat(folder, &name, AtFlags::empty());
        } else if name.starts_with("vm-") {
            match StateFile::read(folder, &name) {
                Ok(file) => found.push(file),
                Err(reason) => damaged.push(format!("{name} {reason}")),
            }
        }
    }
    Ok((found, damaged))
}

fn io_errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

impl StateFile {
    fn read(folder: &OwnedFd, name: &str) -> Result<Self, String> {
        let unreadable = |errno: Errno| format!("cannot be read ({errno})");
        // A FIFO must not be waited for.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = openat(folder, name, flags, Mode::empty()).map_err(unreadable)?;
        if !is_own(&file, OTHERS).map_err(unreadable)? {
            return Err("belongs to other users too".into());
        }
        let mut header = [0; 16];
        let read = pread(&file, &mut header, 0).map_err(unreadable)?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        if read < header.len() || !header.starts_with(MAGIC) {
            return Err("is no state of a VM".into());
        }
        if word(8) != VERSION {
            let version = word(8);
            return Err(format!(
                "has version {version}, and this pager has {VERSION}"
            ));
        }
        let length = word(12) as usize;
        if length > RECORD_MAX {
            return Err("is damaged".into());
        }
        let mut text = vec![0; length];
        let read = pread(&file, &mut text, RECORD_AT as u64).map_err(unreadable)?;
        let record = serde_json::from_slice::<VmRecord>(&text[..read]);
        let record = record.map_err(|error| format!("is damaged ({error})"))?;
        let states_at = states_at(length);
        let size = u64::try_from(fstat(&file).map_err(unreadable)?.st_size).unwrap_or(0);
        let units = size.checked_sub(states_at as u64);
        units
            .filter(|units| (1..UNITS_MAX).contains(units))
            .ok_or("is too short")?;
        let size = usize::try_from(size).map_err(|_| "is too long")?;
        let state = VmState::map(&file, (states_at, size), name.to_owned()).map_err(unreadable)?;
        Ok(Self { record, state })
    }
}
