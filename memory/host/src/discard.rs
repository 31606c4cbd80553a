//! Discards pages: their bytes are no longer needed. A discarded page reads as zeros, as after a
//! balloon took it; or it is missing again, and its source will provide it.
//!
//! ```text
//! isolate the frame            no other thread moves the page
//! page word -> Discarding      a fault from here on is Busy: its vCPU goes offline and tries again
//! invalidate                   no vCPU has the page any more
//! free the frame
//! page word -> Zero, or Empty  the next fault takes a frame of zeros, or asks the source
//! ```
//! A page without a frame is not mapped, so only its word and its swap entry change. For Linux
//! memory, see `linux::discard`.

use crate::core::Core;
use crate::error::HostError;
use crate::host::Host;
use crate::region::Region;
use crate::settled::TICK;
use lacuna_addr::{BackingRange, PAGE_SIZE, Pfn};
use lacuna_frames::{PageBlockState, PageNo, PageState, PageWord};
use lacuna_linux::LinuxMemory;
use std::sync::atomic::Ordering;

/// How many pages are discarded at once, rounded up to whole huge pages of hugetlbfs. Their vCPUs
/// are asked to flush once.
const AT_ONCE: u64 = 1 << 15;

/// What a discarded page is afterwards.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Discarded {
    Zeros,
    Missing,
}

impl Discarded {
    pub const fn state(self) -> PageState {
        match self {
            Self::Zeros => PageState::Zero,
            Self::Missing => PageState::Empty,
        }
    }
}

/// The outcome for one page.
enum Step {
    Done,
    /// The page is Discarding, and its isolated frame may still be mapped.
    Unmap(Pfn),
    /// Another thread is moving the page: try again.
    Busy,
}

impl Host {
    /// Discards the bytes of `range`, which lies in one region: its pages read as zeros from now
    /// on, and the page source gets no request for them. A lost page stays lost.
    ///
    /// Waits for vCPUs as [`MmuNotifier::invalidate`](crate::MmuNotifier::invalidate) does, and for
    /// reads and writes of these pages in flight. The caller holds no lock.
    ///
    /// # Errors
    /// The range is not inside one region, it has a part of a huge page of a memory file, or Linux
    /// refuses.
    pub fn discard(&self, range: BackingRange) -> Result<(), HostError> {
        self.discard_as(range, Discarded::Zeros)
    }

    /// Discards the bytes of `range`, which lies in one region with a page source: its pages are
    /// missing again, as if they were never provided. A request that is in flight stays so, and its
    /// answer counts. As [`Host::discard`] otherwise.
    ///
    /// # Errors
    /// As [`Host::discard`]; or the region has no page source, or a handler that fills it from
    /// outside.
    pub fn make_missing(&self, range: BackingRange) -> Result<(), HostError> {
        self.discard_as(range, Discarded::Missing)
    }

    fn discard_as(&self, range: BackingRange, to: Discarded) -> Result<(), HostError> {
        let region = self.core.regions.find(PageNo::of(range.start()));
        let region = region.filter(|region| region.range().intersect(range) == Some(range));
        let region = region.ok_or(HostError::NoSuchRegion(range.start()))?;
        let refused = |reason: &str| HostError::Discard {
            from: range.start(),
            reason: reason.into(),
        };
        let index = region.index_of(PageNo::of(range.start()));
        let whole = |linux: &LinuxMemory| linux.is_whole(index, range.pages());
        if !region.linux.as_ref().is_none_or(whole) {
            return Err(refused("they are parts of huge pages"));
        }
        if to == Discarded::Missing && (region.origin.is_none() || region.outside().is_some()) {
            return Err(refused("no page source would provide them again"));
        }
        let unit = region.linux.as_ref().map_or(1, LinuxMemory::unit);
        let mut from = 0;
        while from < range.pages() {
            let start = range.start().checked_add_pages(from).expect("in the range");
            let pages = AT_ONCE.next_multiple_of(unit).min(range.pages() - from);
            let part = BackingRange::new(start, pages).expect("aligned");
            match &region.linux {
                Some(linux) => {
                    self.end_page_ins(&region, part);
                    self.core.discard_linux(&region, linux, part, to)?;
                }
                None => self.discard_frames(&region, part, to),
            }
            from += pages;
        }
        Ok(())
    }

    /// Waits until no page of `range` is on its way back from Linux's swap. A read that has not
    /// begun is left out. This thread may be the only one that delivers completions.
    fn end_page_ins(&self, region: &Region, range: BackingRange) {
        let first = PageNo::of(range.start());
        loop {
            let seen = self.core.settled.generation();
            let mut is_one_begun = false;
            for page in (0..range.pages() as usize).map(|at| first.plus(at)) {
                if region.word(page).map(PageWord::load) != Some(PageState::PagingIn) {
                    continue;
                }
                if let Some(ticket) = self.core.ticket_with(page) {
                    match ticket.claim() {
                        true => self.core.complete_page_in(&ticket, Ok(())),
                        false => is_one_begun = true,
                    }
                }
            }
            if !is_one_begun {
                return;
            }
            self.io.hurry(region);
            self.io.help(&self.core, seen, TICK);
        }
    }

    /// Each page is discarded once: a guest that runs may use it again before the last one is.
    fn discard_frames(&self, region: &Region, range: BackingRange, to: Discarded) {
        let first = PageNo::of(range.start());
        let mut pages: Vec<_> = (0..range.pages() as usize).map(|i| first.plus(i)).collect();
        loop {
            let seen = self.core.settled.generation();
            self.core.discard_some(region, &mut pages, to);
            if pages.is_empty() {
                return;
            }
            // The thread that made a ticket may not start it soon.
            let tickets = pages.iter().filter_map(|page| self.core.ticket_with(*page));
            tickets.for_each(|ticket| self.start(&ticket));
            self.io.hurry(region);
            self.io.help(&self.core, seen, TICK);
        }
    }
}

impl Core {
    /// Discards the ascending `pages`, and keeps those that another thread is moving.
    fn discard_some(&self, region: &Region, pages: &mut Vec<PageNo>, to: Discarded) {
        let mut taken: Vec<(PageNo, Pfn)> = Vec::new();
        pages.retain(|page| match self.discard_page(region, *page, to) {
            Step::Done => false,
            Step::Unmap(frame) => {
                taken.push((*page, frame));
                false
            }
            Step::Busy => true,
        });
        if taken.is_empty() {
            return;
        }
        let runs = taken.chunk_by(|(a, _), (b, _)| a.plus(1) == *b);
        let ranges: Vec<_> = runs
            .filter_map(|run| BackingRange::new(run[0].0.addr(), run.len() as u64))
            .collect();
        region.notifier.invalidate(&ranges);
        region.add_resident(-(taken.len() as i64));
        self.frames
            .give(taken.iter().map(|(_, frame)| frame.index() as u32));
        for (page, _) in taken {
            let word = region.word(page);
            let ended = word.map(|word| word.change(PageState::Discarding, to.state()));
            debug_assert_eq!(ended, Some(Ok(())), "only this thread ends the discard");
        }
        self.settled.bump();
    }

    fn discard_page(&self, region: &Region, page: PageNo, to: Discarded) -> Step {
        let Some(word) = region.word(page) else {
            return Step::Done;
        };
        loop {
            if let Some(step) = self.open_block(region, page, to) {
                return step;
            }
            let state = word.load();
            // If another thread changes the word first, look again.
            match state {
                PageState::Lost | PageState::Gone => return Step::Done,
                // It is missing, and requested.
                PageState::Fetching { .. } if to == Discarded::Missing => return Step::Done,
                // The source's answer is no longer needed. An answer in progress ends soon.
                PageState::Fetching { .. } => {
                    let _ = self.answer(page, Ok(&[0; PAGE_SIZE]));
                    if word.load() == state {
                        return Step::Busy;
                    }
                }
                PageState::Empty | PageState::Zero => {
                    if word.change(state, to.state()).is_ok() {
                        return Step::Done;
                    }
                }
                PageState::Swapped { entry } => {
                    if word.change(state, to.state()).is_ok() {
                        self.free_entry(entry);
                        self.swapped_out_now.fetch_sub(1, Ordering::Relaxed);
                        return Step::Done;
                    }
                }
                PageState::Resident { frame, entry } => {
                    if !self.isolate_from(frame, page) {
                        return Step::Busy;
                    }
                    if word.change(state, PageState::Discarding).is_ok() {
                        entry.into_iter().for_each(|entry| self.free_entry(entry));
                        return Step::Unmap(frame);
                    }
                    self.frames.desc(frame).publish();
                }
                PageState::Evicting { .. }
                | PageState::Writeback { .. }
                | PageState::Reading { .. }
                | PageState::Collapsed
                | PageState::Discarding
                | PageState::InPlace
                | PageState::PagedOut
                | PageState::PagingIn => return Step::Busy,
            }
        }
    }

    /// Makes the page's own word say where the page is. Otherwise returns the outcome.
    fn open_block(&self, region: &Region, page: PageNo, to: Discarded) -> Option<Step> {
        let span = region.span(page)?;
        loop {
            match span.block_word.load() {
                PageBlockState::Split => return None,
                PageBlockState::Gone => return Some(Step::Done),
                // It is missing; or without a page source it reads as zeros.
                PageBlockState::Untouched
                    if region.origin.is_none() || to == Discarded::Missing =>
                {
                    return Some(Step::Done);
                }
                PageBlockState::Untouched => {
                    let (from, to) = (PageBlockState::Untouched, PageBlockState::Split);
                    let _ = span.block_word.change(from, to);
                }
                PageBlockState::Compound { block } => {
                    if !self.split_to_discard(block, span.first) {
                        return Some(Step::Busy);
                    }
                }
            }
        }
    }
}
