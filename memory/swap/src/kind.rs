//! The kinds of devices.

use crate::error::SetupFailed;
use crate::file::{FileStore, SwapFile};
use crate::memory::MemoryStore;
use crate::store::SwapStore;
use lacuna_addr::PageCount;
use std::path::PathBuf;

/// The place of swapped-out pages.
#[derive(Clone, Debug)]
pub enum Swap {
    /// An unlinked file in this folder.
    File(PathBuf),
    /// A file that was made before, for one VM at a time.
    Made(SwapFile),
    /// Compressed, inside the resident budget. If the pages do not compress well enough, the run
    /// ends with an error. A file has room for all of them.
    Memory,
}

impl Swap {
    /// A device for `capacity` pages, if it has a limit.
    ///
    /// # Errors
    /// The file cannot be made, or another VM has it.
    pub fn open(&self, capacity: PageCount) -> Result<Box<dyn SwapStore>, SetupFailed> {
        Ok(match self {
            Self::File(dir) => Box::new(FileStore::create(dir, capacity)?),
            Self::Made(file) => Box::new(FileStore::on(file, capacity)?),
            Self::Memory => Box::new(MemoryStore::new()),
        })
    }
}
