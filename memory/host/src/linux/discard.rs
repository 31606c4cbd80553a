//! Discards pages of Linux memory.
//!
//! ```text
//! page words -> Discarding   a fault from here on is Busy: its vCPU goes offline and tries again
//! invalidate                 no vCPU has a page any more
//! wait for users             nor has another thread
//! filled from outside?       then the pages leave the userfaultfd: see `outside`
//! MADV_DONTNEED
//! page words -> Zero, Empty  the next fault puts zeros in place, or asks the source
//! ```
//! Without the intermediate state, a vCPU might put zeros in place and write to them before
//! `MADV_DONTNEED`, and the write would be lost.

use crate::core::Core;
use crate::discard::Discarded;
use crate::error::HostError;
use crate::region::Region;
use crate::ticket::Ticket;
use lacuna_addr::{BackingRange, PAGE_SIZE};
use lacuna_frames::{PageNo, PageState};
use lacuna_linux::{LinuxBacking, LinuxMemory};
use lacuna_source::UnitContent;
use lacuna_sys::Errno;

impl Core {
    /// Discards the pages of `range`, which lies in `region`.
    pub fn discard_linux(
        &self,
        region: &Region,
        linux: &LinuxMemory,
        range: BackingRange,
        to: Discarded,
    ) -> Result<(), HostError> {
        let first = PageNo::of(range.start());
        let index = region.index_of(first);
        assert!(
            linux.is_whole(index, range.pages()),
            "{range:?} has a part of a huge page"
        );
        let unit = linux.unit() as usize;
        let mut taken = Vec::with_capacity(range.pages() as usize);
        for at in (0..range.pages() as usize).step_by(unit) {
            let mut pages = (at..at + unit).map(|i| first.plus(i));
            let mut take = |page| {
                let was = self.begin_discard(region, page, to)?;
                taken.push((page, was));
                Some(())
            };
            // If the first page of a unit stays, the others do.
            if pages.next().and_then(&mut take).is_some() {
                pages.for_each(|page| _ = take(page));
            }
        }
        // The region is removed, or all pages are lost. Another region may have its addresses.
        if taken.is_empty() {
            return Ok(());
        }
        region.notifier.invalidate(&[range]);
        linux.wait_for_users();
        let left = match &linux.outside {
            Some(_) => linux.unregister(index..index + range.pages()),
            None => Ok(()),
        };
        let dropped = match taken.len() as u64 == range.pages() {
            _ if left.is_err() => left,
            true => self.drop_bytes(linux, index, range.pages()),
            // Other pages of the range are lost, or their region is being removed.
            false => self.drop_some(region, linux, &taken),
        };
        let mut in_place = 0_i64;
        for (page, was) in taken.into_iter().rev() {
            in_place += i64::from(was == PageState::InPlace);
            // If discarding failed, the pages keep their bytes.
            let now = match dropped {
                Ok(()) => to.state(),
                Err(_) if self.reason_of_loss(page).is_some() => {
                    if was == PageState::InPlace {
                        linux.note_lost();
                    }
                    PageState::Lost
                }
                Err(_) => was,
            };
            let word = region
                .word(page)
                .map(|word| word.change(PageState::Discarding, now));
            debug_assert_eq!(word, Some(Ok(())), "only this thread ends the discard");
        }
        self.settled.bump();
        dropped.map_err(|errno| HostError::Discard {
            from: range.start(),
            reason: errno.to_string(),
        })?;
        linux.note_in_place(-in_place);
        Ok(())
    }

    /// Discards the bytes of these ascending pages, which lie in `region`. Skips a unit with only a
    /// part of its pages among them: it is lost, or its region is being removed. Zeros are in its
    /// place, or will be.
    fn drop_some(
        &self,
        region: &Region,
        linux: &LinuxMemory,
        pages: &[(PageNo, PageState)],
    ) -> Result<(), Errno> {
        let mut runs = pages.chunk_by(|a, b| a.0.plus(1) == b.0);
        runs.try_for_each(|run| {
            let start = region.index_of(run[0].0);
            let end = start + run.len() as u64;
            let start = start.next_multiple_of(linux.unit());
            let end = end - end % linux.unit();
            match start < end {
                true => self.drop_bytes(linux, start, end - start),
                false => Ok(()),
            }
        })
    }

    fn drop_bytes(&self, linux: &LinuxMemory, index: u64, pages: u64) -> Result<(), Errno> {
        let (pool, first, pages) = (&self.frames.pool, linux.pfn(index), pages as usize);
        match &linux.backing {
            LinuxBacking::Anonymous => pool.drop_linux(first, pages),
            LinuxBacking::Shared(_) => pool.punch_linux(first, pages),
            // A dropped page would have the file's content again.
            LinuxBacking::Private(_) => {
                pool.renew_linux(first, pages)?;
                pool.advise_linux(first, pages)
            }
        }
    }

    /// Returns the old state, or `None` if the page stays as it is: it has no readable bytes, or it
    /// is missing and shall be.
    fn begin_discard(&self, region: &Region, page: PageNo, to: Discarded) -> Option<PageState> {
        let word = region.word(page)?;
        loop {
            match word.load() {
                PageState::Empty | PageState::Fetching { .. } if to == Discarded::Missing => {
                    return None;
                }
                PageState::Fetching { .. } => {
                    // The source's answer is no longer needed. An answer in progress ends soon.
                    match self.ticket_with(page).filter(|_| region.has_units()) {
                        None => _ = self.answer(page, Ok(&[0; PAGE_SIZE])),
                        Some(ticket) => _ = self.complete_unit(&ticket, UnitContent::Zeros),
                    }
                    std::thread::yield_now();
                }
                // The page's bytes are no longer needed, so a read that has not begun is left out.
                // `Host::end_page_ins` has waited for those that had begun.
                PageState::PagingIn => {
                    let ticket = self.ticket_with(page);
                    if let Some(ticket) = ticket.filter(Ticket::claim) {
                        self.complete_page_in(&ticket, Ok(()));
                    }
                    std::thread::yield_now();
                }
                // Another thread takes the page away: this thread waits for its end.
                PageState::Discarding => std::thread::yield_now(),
                state => match word.advance(PageState::discarded) {
                    Ok(was) => return Some(was),
                    Err(_) if word.load() == state => return None,
                    Err(_) => {}
                },
            }
        }
    }
}
