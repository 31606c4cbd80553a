//! The record of a VM's working set.

use lacuna_addr::PageCount;
use lacuna_source::{Recorder, TouchedMemory, TouchesError};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Records which pages of the source the first served VM needs, in the order of first touch. A huge
/// page is recorded as its pages of 4 KiB, so a record fits VMs of each page size. A page that a
/// fill has brought is not needed, and not in the record.
pub struct Record {
    path: PathBuf,
    recorder: Recorder,
    is_taken: AtomicBool,
}

impl Record {
    /// A record for the file `path`, of a VM whose source has `pages` pages.
    pub fn new(path: PathBuf, pages: PageCount) -> Self {
        let memory = TouchedMemory {
            checksum: None,
            pages: pages.get(),
        };
        Self {
            path,
            recorder: Recorder::new(memory),
            is_taken: AtomicBool::new(false),
        }
    }

    /// Writes what is recorded so far, whole or not at all. The pager does this when the VM ends.
    ///
    /// # Errors
    /// As `Touches::save`.
    pub fn save(&self) -> Result<(), TouchesError> {
        self.recorder.touches().save(&self.path)
    }

    /// Whether a VM is recorded, or was.
    pub fn is_taken(&self) -> bool {
        self.is_taken.load(Ordering::Acquire)
    }

    /// For the first VM.
    pub(crate) fn take(&self) -> Option<Recorder> {
        let was_taken = self.is_taken.swap(true, Ordering::AcqRel);
        (!was_taken).then(|| self.recorder.clone())
    }
}
