//! The memory files of a restored VM, which the VMM maps, and which of their pages are in place.
//!
//! ```text
//! Missing ──place: the first content to arrive──► Placing ──► InPlace, where a hole is zeros
//! ```
//! Each page is written once. A guest may write to a page as soon as it is in place, and a second
//! copy would undo that. The fault thread and the filling thread may both fetch a page: the first
//! one places it. So a fault never waits for a fetch of the filling thread.

use crate::error::OffloadError;
use crate::slots::{Slot, Slots};
use lacuna_addr::PAGE_SIZE;
use lacuna_source::Holes;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

const MISSING: u8 = 0;
const PLACING: u8 = 1;
const IN_PLACE: u8 = 2;

/// The memory files of a VM.
pub struct GuestMemory {
    slots: Vec<(Slot, File)>,
    /// One word for each page of the snapshot's memory file.
    pages: Box<[AtomicU8]>,
    in_place: AtomicU64,
}

impl GuestMemory {
    /// A memory file for each slot, with no page in place.
    ///
    /// # Errors
    /// The system has no room for them.
    pub fn new(slots: &Slots) -> Result<Self, OffloadError> {
        let files = slots
            .all()
            .iter()
            .map(|slot| Ok((*slot, memory_file(slot)?)));
        let files: Result<_, Errno> = files.collect();
        let pages = slots.bytes() / PAGE_SIZE as u64;
        Ok(Self {
            slots: files.map_err(OffloadError::system("make a memory file (memfd)"))?,
            pages: (0..pages).map(|_| AtomicU8::new(MISSING)).collect(),
            in_place: AtomicU64::new(0),
        })
    }

    /// The slots, each with its file.
    pub fn slots(&self) -> &[(Slot, File)] {
        &self.slots
    }

    /// Pages of all slots.
    pub fn pages(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Pages in place.
    pub fn in_place(&self) -> u64 {
        self.in_place.load(Ordering::Relaxed)
    }

    /// Whether `page` has no content yet.
    pub fn is_missing(&self, page: u64) -> bool {
        self.pages[page as usize].load(Ordering::Acquire) != IN_PLACE
    }

    /// Puts `page` in place, unless it is. Zeros are written too: in a hole the guest would fault
    /// again.
    ///
    /// # Errors
    /// The host has no memory for it.
    pub fn place(&self, page: u64, content: &[u8; PAGE_SIZE]) -> io::Result<()> {
        let state = &self.pages[page as usize];
        loop {
            let change = (Ordering::AcqRel, Ordering::Acquire);
            match state.compare_exchange(MISSING, PLACING, change.0, change.1) {
                Ok(_) => break,
                Err(IN_PLACE) => return Ok(()),
                // Another thread writes this page, for a microsecond.
                Err(_) => std::thread::yield_now(),
            }
        }
        let (file, offset) = self.file_of(page);
        let written = file.write_all_at(content, offset);
        match written {
            Ok(()) => {
                self.in_place.fetch_add(1, Ordering::Relaxed);
                state.store(IN_PLACE, Ordering::Release);
            }
            Err(_) => state.store(MISSING, Ordering::Release),
        }
        written
    }

    /// Puts zeros at a page that was in place, if the VMM has removed it since, as for a balloon.
    /// Its old content never returns.
    ///
    /// # Errors
    /// The host has no memory for it.
    pub fn place_removed(&self, page: u64) -> io::Result<()> {
        let (file, offset) = self.file_of(page);
        match Holes::default().is_hole(file, offset) {
            true => file.write_all_at(&[0; PAGE_SIZE], offset),
            false => Ok(()),
        }
    }

    fn file_of(&self, page: u64) -> (&File, u64) {
        let offset = page * PAGE_SIZE as u64;
        let after = self
            .slots
            .partition_point(|(slot, _)| slot.offset <= offset);
        let (slot, file) = &self.slots[after - 1];
        (file, slot.fd_offset + (offset - slot.offset))
    }
}

/// Its length is sealed: the VMM maps it, and would get SIGBUS beyond a new end.
fn memory_file(slot: &Slot) -> Result<File, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create(format!("lacuna-offload-{}", slot.slot), flags)?;
    rustix::fs::ftruncate(&file, slot.fd_offset + slot.length)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(File::from(file))
}

/// Where the kernel says which memory it gives huge pages.
pub const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage";

/// Checks in `folder`, which is [`HUGE_PAGES`], that no page written to a memory file becomes a
/// huge page. A VMM that registers its memory for missing faults alone would find zeros in its
/// rest.
///
/// # Errors
/// It may.
pub fn check_page_size(folder: &Path) -> Result<(), OffloadError> {
    let sizes = fs::read_dir(folder).into_iter().flatten().flatten();
    let of_sizes = sizes.map(|size| size.path());
    // A kernel without the files makes no huge pages.
    for file in of_sizes
        .chain([folder.to_owned()])
        .map(|at| at.join("shmem_enabled"))
    {
        let text = fs::read_to_string(&file).unwrap_or_default();
        if ["[always]", "[within_size]", "[force]"]
            .iter()
            .any(|on| text.contains(on))
        {
            let setting = format!("{} is {}", file.display(), text.trim());
            return Err(OffloadError::HugePages(setting));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FallocateFlags, fallocate};

    #[test]
    fn huge_pages_of_any_size_are_refused() {
        let folder = tempfile::TempDir::new().unwrap();
        let size = folder.path().join("hugepages-64kB");
        fs::create_dir(&size).unwrap();
        assert!(check_page_size(folder.path()).is_ok());
        for at in [folder.path(), &size] {
            let file = at.join("shmem_enabled");
            for (text, is_fine) in [
                ("always within_size advise [never] deny force", true),
                ("[always] within_size advise never", false),
                ("always [within_size] advise never", false),
                ("always within_size [advise] never", true),
            ] {
                fs::write(&file, text).unwrap();
                assert_eq!(check_page_size(folder.path()).is_ok(), is_fine, "{text}");
            }
        }
    }

    #[test]
    fn a_page_is_written_once_and_a_removed_one_gets_zeros() {
        let slot = Slot {
            slot: 0,
            gpa: 0,
            length: 3 << 12,
            fd_offset: 1 << 12,
            offset: 0,
        };
        let memory = GuestMemory::new(&Slots::checked(vec![slot]).unwrap()).unwrap();
        let read = |page: u64| {
            let mut bytes = [9; PAGE_SIZE];
            let file = &memory.slots()[0].1;
            file.read_exact_at(&mut bytes, (page + 1) << 12).unwrap();
            (bytes, Holes::default().is_hole(file, (page + 1) << 12))
        };
        memory.place(1, &[1; PAGE_SIZE]).unwrap();
        memory.place(1, &[2; PAGE_SIZE]).unwrap();
        memory.place(2, &[0; PAGE_SIZE]).unwrap();
        memory.place_removed(1).unwrap();
        assert_eq!(read(1), ([1; PAGE_SIZE], false));
        assert_eq!(read(2), ([0; PAGE_SIZE], false));
        assert_eq!(read(0), ([0; PAGE_SIZE], true));
        assert!(memory.is_missing(0) && memory.in_place() == 2);
        let file = &memory.slots()[0].1;
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(file, punch, 2 << 12, 1 << 12).unwrap();
        memory.place(1, &[3; PAGE_SIZE]).unwrap();
        memory.place_removed(1).unwrap();
        assert_eq!(read(1), ([0; PAGE_SIZE], false));
        assert!(file.set_len(1).is_err() && file.set_len(1 << 20).is_err());
    }
}
