//! Removes a region and its pages, whether they are in frames or in swap.
//!
//! ```text
//! remove it from the region list   only threads that have found the region before still use it
//! for each block:
//!     page words -> Gone           a fault from here on resolves to Lost
//!     invalidate                   the pages are unmapped, a fault that resolved one of them
//!                                  before must retry, and no vCPU can access the frames
//!     free the frames
//! ```
//! A page without a frame is not mapped, so only its word and its swap entry are freed. A block
//! without any fault so far has no page state but its block word, so its page words are not read.

use crate::core::Core;
use crate::error::HostError;
use crate::host::Host;
use crate::region::Region;
use crate::settled::TICK;
use lacuna_addr::{BackingRange, Pfn};
use lacuna_frames::{
    BLOCK, BlockNo, FrameState, PageBlockState, PageNo, PageState, PageWord, Span,
};
use lacuna_sync::lock;
use std::sync::atomic::Ordering;

#[derive(PartialEq, Eq)]
pub(crate) enum Removal {
    Done,
    /// Another thread has isolated a frame, or an operation is in flight: try again.
    Busy,
}

impl Host {
    /// Removes a whole region with its pages, in frames and in swap. The region's
    /// [`MmuNotifier`](crate::MmuNotifier) unmaps the pages. A later fault on one of them resolves
    /// to [`Resolution::Lost`](crate::Resolution::Lost).
    ///
    /// Waits for the region's reads and writes in flight, and for vCPUs as
    /// [`MmuNotifier::invalidate`](crate::MmuNotifier::invalidate) does. The caller holds no lock.
    pub fn remove_region(&self, range: BackingRange) -> Result<(), HostError> {
        let region = self.core.regions.remove(range)?;
        if region.linux.is_some() {
            return self.remove_linux(&region);
        }
        loop {
            let seen = self.core.settled.generation();
            let mut busy = 0;
            if let Some(tail) = region.tail_range() {
                let removal = self.core.remove_pages(&region, tail, region.tail());
                busy += usize::from(removal == Removal::Busy);
            }
            for span in region.spans() {
                busy += usize::from(self.core.remove_span(&region, span) == Removal::Busy);
            }
            if busy == 0 {
                self.spare_caches.drain();
                return Ok(());
            }
            self.io.hurry(&region);
            self.io.help(&self.core, seen, TICK);
        }
    }
}

impl Core {
    fn remove_span(&self, region: &Region, span: Span<'_>) -> Removal {
        match span.block_word.load() {
            PageBlockState::Gone => Removal::Done,
            PageBlockState::Untouched => match span
                .block_word
                .change(PageBlockState::Untouched, PageBlockState::Gone)
            {
                Ok(()) => Removal::Done,
                Err(_) => Removal::Busy,
            },
            PageBlockState::Compound { block } => self.remove_block(region, span, block),
            PageBlockState::Split => {
                self.remove_pages(region, span.first.block_range(), span.pages())
            }
        }
    }

    /// Removes the pages of `range`, which is not a huge block: each page has its own state.
    fn remove_pages<'r>(
        &self,
        region: &Region,
        range: BackingRange,
        pages: impl Iterator<Item = (PageNo, &'r PageWord)>,
    ) -> Removal {
        let mut frames: Vec<Pfn> = Vec::new();
        let mut busy = 0;
        for (page, word) in pages {
            let removal = self.remove_page(page, word, &mut frames);
            busy += usize::from(removal == Removal::Busy);
        }
        if !frames.is_empty() {
            region.notifier.invalidate(&[range]);
            region.add_resident(-(frames.len() as i64));
            self.frames
                .give(frames.iter().map(|frame| frame.index() as u32));
            self.settled.bump();
        }
        match busy {
            0 => Removal::Done,
            _ => Removal::Busy,
        }
    }

    fn remove_block(&self, region: &Region, span: Span<'_>, block: BlockNo) -> Removal {
        let desc = self.frames.block(block);
        match desc.isolate() {
            Some(owner) if owner == span.first => {}
            Some(_) => {
                // The block was split after the block word was read, and its frames were given to
                // another block of pages.
                desc.publish();
                return Removal::Busy;
            }
            None => return Removal::Busy,
        }
        span.block_word
            .change(PageBlockState::Compound { block }, PageBlockState::Gone)
            .expect("only the thread that isolated a block changes its block_word");
        region.notifier.invalidate(&[span.first.block_range()]);
        desc.mark_split();
        self.stats.remove_compound();
        region.add_resident(-(BLOCK as i64));
        self.frames.give_block(block);
        self.settled.bump();
        Removal::Done
    }

    /// Removes one page. Its frame may still be mapped, so the frame stays isolated and is added to
    /// `frames`: the caller frees it after the invalidation.
    pub fn remove_page(&self, page: PageNo, word: &PageWord, frames: &mut Vec<Pfn>) -> Removal {
        let state = word.load();
        let removed = match (state, state.removed()) {
            (PageState::Gone, _) => return Removal::Done,
            (PageState::Reading { .. } | PageState::PagingIn, _) => {
                self.cancel_read(page);
                return Removal::Busy;
            }
            (PageState::Fetching { .. }, _) => {
                self.cancel_fetch(page);
                return Removal::Busy;
            }
            (_, None) => return Removal::Busy,
            (_, Some(removed)) => removed,
        };
        if let Some(frame) = state.frame() {
            let desc = self.frames.desc(frame);
            match desc.isolate() {
                Some(owner) if owner == page => {}
                Some(_) => {
                    // The page has left the frame since `word` was read; another page has it now.
                    desc.publish();
                    return Removal::Busy;
                }
                None => return Removal::Busy,
            }
        }
        if word.change(state, removed).is_err() {
            if let Some(frame) = state.frame() {
                self.frames.desc(frame).publish();
            }
            return Removal::Busy;
        }
        if let Some(frame) = state.frame() {
            debug_assert_eq!(self.frames.desc(frame).state(), FrameState::Isolated);
            frames.push(frame);
        }
        if let Some(entry) = state.entry() {
            self.free_entry(entry);
        }
        if let PageState::Swapped { .. } = state {
            self.swapped_out_now.fetch_sub(1, Ordering::Relaxed);
        }
        if state == PageState::Lost {
            lock(&self.lost).remove(&page);
        }
        Removal::Done
    }
}
