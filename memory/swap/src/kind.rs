//! The kinds of devices.

use crate::error::SetupFailed;
use crate::file::FileStore;
use crate::memory::MemoryStore;
use crate::store::SwapStore;
use lacuna_addr::PageCount;
use std::path::PathBuf;

/// The place of swapped-out pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Swap {
    /// An unlinked file in this folder.
    File(PathBuf),
    /// Compressed, inside the resident budget. If the pages do not compress well enough, the run
    /// ends with an error. A file has room for all of them.
    Memory,
}

impl Swap {
    /// A device for `capacity` pages, if it has a limit.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn open(&self, capacity: PageCount) -> Result<Box<dyn SwapStore>, SetupFailed> {
        Ok(match self {
            Self::File(dir) => Box::new(FileStore::create(dir, capacity)?),
            Self::Memory => Box::new(MemoryStore::new()),
        })
    }
}
