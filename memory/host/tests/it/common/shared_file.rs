//! A swap device on a file. The test has a handle to the same file. So it can truncate the file, or
//! write to it, after pages were swapped out.

use lacuna_addr::PageCount;
use lacuna_host::{Page, Reads, SwapEntry, SwapError, SwapStore, WriteFailed};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

pub struct SharedFile(pub Arc<File>);

impl SwapStore for SharedFile {
    fn describe(&self) -> String {
        "shared file".into()
    }

    fn capacity(&self) -> PageCount {
        PageCount::new(4096)
    }

    fn read(&self, entry: SwapEntry, page: &mut Page) -> Result<(), SwapError> {
        let read = self.0.read_exact_at(&mut page.0, entry.offset());
        read.map_err(|error| SwapError::Io(error.to_string()))
    }

    fn reads(&self) -> Reads<'_> {
        Reads::File(self.0.as_fd())
    }

    fn write(&self, first: SwapEntry, pages: &[Page]) -> Result<(), WriteFailed> {
        let bytes: Vec<u8> = pages.iter().flat_map(|page| page.0).collect();
        let written = self.0.write_all_at(&bytes, first.offset());
        written.map_err(|error| WriteFailed {
            done: 0,
            error: SwapError::Io(error.to_string()),
        })
    }

    fn discard(&self, _entry: SwapEntry) {}
}
