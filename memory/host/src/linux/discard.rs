//! Discards pages, as a balloon does: their bytes are not needed any more.
//!
//! ```text
//! page words -> Discarding   a fault from here on is Busy: its vCPU goes offline and tries again
//! invalidate                 no vCPU has a page any more
//! wait for users             nor has another thread
//! MADV_DONTNEED
//! page words -> Zero         the next fault puts zeros in place
//! ```
//! Without the state in between, a vCPU might put zeros in place and write to them before
//! `MADV_DONTNEED`, and the write would be lost.

use crate::error::HostError;
use crate::host::{Core, Host};
use crate::region::Region;
use crate::residency::{PageNo, PageState};
use lacuna_addr::{BackingRange, PAGE_SIZE};
use std::sync::atomic::Ordering;

/// Pages that are discarded at once. Their vCPUs are asked to flush once.
const AT_ONCE: u64 = 1 << 15;

impl Host {
    /// Takes the bytes of `range` away, which lies in one region of Linux memory: its pages read as
    /// zeros from now on, and the page source is not asked for them. A page that is lost stays so.
    ///
    /// Waits for vCPUs as [`MmuNotifier::invalidate`](crate::MmuNotifier::invalidate) does. The
    /// caller holds no lock.
    ///
    /// # Errors
    /// The range is not inside one region of Linux memory, or Linux refuses.
    pub fn discard(&self, range: BackingRange) -> Result<(), HostError> {
        let region = self.core.regions.find(PageNo::of(range.start()));
        let region = region.filter(|region| region.range().intersect(range) == Some(range));
        let region = region.ok_or(HostError::NoSuchRegion(range.start()))?;
        if region.linux.is_none() {
            return Err(HostError::Discard {
                from: range.start(),
                reason: "they belong to the resident budget, which reclaim frees".into(),
            });
        }
        let mut from = 0;
        while from < range.pages() {
            let start = range.start().checked_add_pages(from).expect("in the range");
            let pages = AT_ONCE.min(range.pages() - from);
            let part = BackingRange::new(start, pages).expect("aligned");
            self.core.discard(&region, part)?;
            from += pages;
        }
        Ok(())
    }
}

impl Core {
    fn discard(&self, region: &Region, range: BackingRange) -> Result<(), HostError> {
        let Some(linux) = &region.linux else {
            return Ok(());
        };
        let first = PageNo::of(range.start());
        let pages = || (0..range.pages() as usize).map(|i| first.plus(i));
        let mut taken = Vec::with_capacity(range.pages() as usize);
        for page in pages() {
            taken.extend(self.begin_discard(region, page).map(|was| (page, was)));
        }
        region.notifier.invalidate(&[range]);
        linux.wait_for_users();
        let index = region.index_of(first);
        let dropped = match taken.len() as u64 == range.pages() {
            true => self
                .frames
                .pool
                .drop_linux(linux.pfn(index), range.pages() as usize),
            // Other pages of the range are lost, or their region is being removed.
            false => taken.iter().try_for_each(|(page, _)| {
                self.frames
                    .pool
                    .drop_linux(linux.pfn(region.index_of(*page)), 1)
            }),
        };
        let mut in_place = 0;
        for (page, was) in taken {
            in_place += u64::from(was == PageState::InPlace);
            // Pages whose bytes could not be taken away keep them.
            let now = match dropped {
                Ok(()) => PageState::Zero,
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
        linux.in_place.fetch_sub(in_place, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the state before, or `None` if the page has no bytes that anything could read.
    fn begin_discard(&self, region: &Region, page: PageNo) -> Option<PageState> {
        let word = region.word(page)?;
        loop {
            match word.load() {
                PageState::Fetching { .. } => {
                    // The source need not answer any more. If it is answering, that ends soon.
                    let _ = self.answer(page, Ok(&[0; PAGE_SIZE]));
                    std::thread::yield_now();
                }
                // Another thread discards the page: this thread waits for its end.
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
