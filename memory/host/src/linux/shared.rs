//! Linux memory in a shared memory file, which other processes may map too.
//!
//! The file may have pages that this host has not put there. Without a page source its content is
//! the guest's memory. With a source, the file may already have a page that is not yet provided:
//!
//! ```text
//! CopiedIn    the source is asked; the copy finds the page (EEXIST), and the file's content counts
//! InFile      the same, and Host::provide_from_file says that the file has the page
//! ```
//! `InFile` is for a source that writes to the file itself. UFFDIO_CONTINUE maps a page from the
//! file, and fails where the file has none. The memory is not registered for minor faults: Linux
//! may unmap a page of the file at any time, and an access has to map it again by itself.
//!
//! Other code may remove a page from the file: by a hole, by a shorter file that grows again, or by
//! a discard in another region of the same file. If a source fills the region, the next access to
//! that page gets `SIGBUS`, and the page is lost.

use crate::core::Core;
use crate::error::HostError;
use crate::host::Host;
use crate::region::Region;
use lacuna_addr::BackingRange;
use lacuna_frames::{PageNo, PageState, PageWord};
use lacuna_linux::{LinuxError, LinuxMemory};
use lacuna_source::Answer;
use lacuna_sys::Errno;

impl Host {
    /// Provides the pages of `range`, which lies in one region of shared memory with a page source:
    /// their content is in the file. Returns how many of them were [`Answer::Taken`]: the others
    /// were already provided.
    ///
    /// # Errors
    /// The region is of another kind; or the file lacks a page. The pages before that page are
    /// provided.
    pub fn provide_from_file(&self, range: BackingRange) -> Result<usize, HostError> {
        let first = PageNo::of(range.start());
        let region = self.core.regions.find(first);
        let region = region.filter(|region| region.range().intersect(range) == Some(range));
        let region = region.ok_or(HostError::NoSuchRegion(range.start()))?;
        let linux = region.linux.as_ref();
        let linux = linux
            .filter(|linux| linux.is_filled_in_file())
            .ok_or_else(|| LinuxError::SharedMemory {
                reason: "the region is not one that its source fills in the file".into(),
            })?;
        let mut taken = 0;
        for page in 0..range.pages() as usize {
            let answer = self
                .core
                .provide_in_file(&region, linux, first.plus(page))?;
            taken += usize::from(answer == Answer::Taken);
        }
        Ok(taken)
    }
}

impl Core {
    fn provide_in_file(
        &self,
        region: &Region,
        linux: &LinuxMemory,
        page: PageNo,
    ) -> Result<Answer, HostError> {
        let lost = || HostError::from(self.lost_page(page));
        let word = region.word(page).ok_or_else(lost)?;
        let _user = linux.enter();
        match word.load() {
            PageState::Empty | PageState::Fetching { .. } => {}
            PageState::Gone | PageState::Lost => return Err(lost()),
            _ => return Ok(Answer::Late),
        }
        let mapped = linux.map_from_file(region.index_of(page));
        mapped.map_err(|errno| LinuxError::SharedMemory {
            reason: match errno {
                Errno::FAULT => format!("the file does not have page {}: write it", page.addr()),
                errno => format!("page {} cannot be mapped: {errno}", page.addr()),
            },
        })?;
        Ok(self.note_mapped(page, word, linux))
    }

    /// Records that the page of `word` is mapped.
    fn note_mapped(&self, page: PageNo, word: &PageWord, linux: &LinuxMemory) -> Answer {
        loop {
            match word.change(PageState::Empty, PageState::InPlace) {
                Ok(()) => {
                    linux.note_in_place(1);
                    return Answer::Taken;
                }
                // A fault has asked the source, and this is its answer. If another thread is
                // answering, its fill finds the page in place.
                Err(PageState::Fetching { .. }) => {
                    self.arrived_without_answer(page);
                    return Answer::Taken;
                }
                Err(PageState::Empty) => {}
                Err(_) => return Answer::Late,
            }
        }
    }
}
