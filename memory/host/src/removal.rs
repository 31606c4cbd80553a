//! A region goes away with its pages, wherever they are.

use crate::balance::TICK;
use crate::desc::FrameState;
use crate::error::HostError;
use crate::head::{BLOCK, BlockNo, HeadState};
use crate::host::{Core, Host, lock};
use crate::region::{Region, Span};
use crate::residency::{PageNo, PageState, PageWord};
use lacuna_addr::HvaRange;
use std::sync::atomic::Ordering;

#[derive(PartialEq, Eq)]
enum Removal {
    Done,
    Busy,
}

impl Host {
    /// Removes a whole region with its pages, in frames and in swap. The caller has unmapped it and
    /// stopped whoever could fault there; a fault that comes nevertheless finds the page lost.
    /// Waits for the region's reads and writes in flight, so it is called with no lock held.
    pub fn remove_region(&self, range: HvaRange) -> Result<(), HostError> {
        let region = self.core.regions.remove(range)?;
        loop {
            let seen = self.core.settled.generation();
            let mut left = 0;
            for (page, word) in region.headless() {
                left += usize::from(self.core.remove_page(&region, page, word) == Removal::Busy);
            }
            for span in region.spans() {
                left += usize::from(self.core.remove_span(&region, span) == Removal::Busy);
            }
            if left == 0 {
                return Ok(());
            }
            self.io.hurry(&region);
            self.io.help(&self.core, seen, TICK);
        }
    }
}

impl Core {
    fn remove_span(&self, region: &Region, span: Span<'_>) -> Removal {
        match span.head.load() {
            HeadState::Gone => Removal::Done,
            HeadState::Untouched => match span.head.change(HeadState::Untouched, HeadState::Gone) {
                Ok(()) => Removal::Done,
                Err(_) => Removal::Busy,
            },
            HeadState::Whole { block } => self.remove_block(region, span, block),
            HeadState::Small => {
                let removals = span
                    .pages()
                    .map(|(page, word)| self.remove_page(region, page, word));
                let busy = removals.filter(|removal| *removal == Removal::Busy);
                if busy.count() == 0 {
                    Removal::Done
                } else {
                    Removal::Busy
                }
            }
        }
    }

    fn remove_block(&self, region: &Region, span: Span<'_>, block: BlockNo) -> Removal {
        let desc = self.frames.block(block);
        match desc.isolate() {
            Some(owner) if owner == span.first => {}
            Some(_) => {
                // It has just been split, and its frames have become another block of pages.
                desc.publish();
                return Removal::Busy;
            }
            None => return Removal::Busy,
        }
        span.head
            .change(HeadState::Whole { block }, HeadState::Gone)
            .expect("only who isolated a block changes its head");
        desc.loosen();
        self.stats.note_loose();
        region.add_resident(-(BLOCK as i64));
        self.frames.give_block(block);
        Removal::Done
    }

    /// Empties one page of a removed region.
    fn remove_page(&self, region: &Region, page: PageNo, word: &PageWord) -> Removal {
        let state = word.load();
        let removed = match (state, state.removed()) {
            (PageState::Gone, _) => return Removal::Done,
            (PageState::Reading { .. }, _) => {
                self.cancel_read(page);
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
                    // The page has just left the frame, which is another's now.
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
            self.frames.give([frame.index() as u32]);
            region.add_resident(-1);
        }
        if let Some(slot) = state.slot() {
            self.free_slot(slot);
        }
        if let PageState::Swapped { .. } = state {
            self.away.fetch_sub(1, Ordering::Relaxed);
        }
        if state == PageState::Lost {
            lock(&self.lost).remove(&page);
        }
        Removal::Done
    }
}
