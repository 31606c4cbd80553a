//! Collapse: the pages of a split block become a compound page.
//!
//! ```text
//! gather ------> age -----> in place: all 512 are in one block already ------> Collapsed, Compound
//! isolate all,   accessed?                                                      then unmapped
//! or none        |
//!                '--------> by copy: Evicting, unmapped, copied to a free block -> same
//! ```
//! **In place**, the pages stay in their frames, so existing mappings stay valid. The pages are
//! unmapped afterwards, only so that the next access maps 2 MiB.
//!
//! **By copy**, a fault may take a page back before its page word becomes Collapsed. The collapse
//! is then undone: all pages stay in their old frames.
//!
//! In both cases no page can leave its frame meanwhile, because this thread has isolated the
//! descriptors of all frames.
//!
//! The swap entries of the pages are freed. A compound page has no copy in swap, so pages with a
//! swap entry count as dirty.

use crate::core::Core;
use crate::counters::Counters;
use crate::host::Host;
use crate::reclaim::round::{Round, ScanPriority};
use crate::region::{HugePages, Region, RegionList};
use lacuna_addr::{BackingRange, Pfn};
use lacuna_frames::{BLOCK, BlockNo, Desc, Dirt, FrameState, PageBlockState, PageNo, PageState};
use lacuna_sync::lock;
use std::sync::Arc;

/// The most pages without a frame (they read as zeros) in a collapsed block. A collapse gives each
/// of them a frame, so this bounds the added memory.
const EMPTY: usize = BLOCK / 16;
/// A block is collapsed if at least so many of its pages were accessed since their accessed bits
/// were cleared.
const IN_USE: usize = BLOCK / 2;
/// The most blocks that one step looks at.
const LOOK: usize = 64;

/// The result of [`Host::collapse_step`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Collapse {
    /// A block of pages was collapsed.
    Made,
    /// No block was collapsed; there are more blocks to look at.
    Looked,
    /// No block was collapsed, and there is nothing more to do for now: this was the last block, or
    /// free memory is low, or the host never makes huge pages.
    Idle,
}

/// The pages of a split block, all isolated: none leaves its frame before [`Core::let_be`].
pub(crate) struct Gathered {
    region: Arc<Region>,
    first: PageNo,
    /// The state of each page: Resident, Zero or Empty.
    pub states: Vec<PageState>,
}

impl Gathered {
    /// Returns which of the pages were accessed, and clears their accessed bits.
    pub fn age(&self, round: &mut Round) -> Vec<bool> {
        let ranges: Vec<BackingRange> = (0..BLOCK).map(|i| self.first.plus(i).range()).collect();
        let mut young = vec![false; BLOCK];
        round.age(&self.region, &ranges, &mut young);
        young
    }

    /// The block of frames, if every page is in one block at its own place.
    fn block(&self) -> Option<BlockNo> {
        let block = BlockNo::of(self.states[0].frame()?);
        let own = (0..BLOCK).map(|i| Some(block.frame(i)));
        let frames = self.states.iter().map(|state| state.frame());
        frames.eq(own).then_some(block)
    }

    fn frames(&self) -> impl Iterator<Item = Pfn> {
        self.states.iter().filter_map(|state| state.frame())
    }
}

impl Host {
    /// One step of collapsing blocks in the background, for a thread without more urgent work. The
    /// step looks at some blocks, until it finds a split block with all pages resident or zeros. It
    /// collapses that block if enough of its pages were accessed. If the pages are not yet in one
    /// block of frames, the step also needs a free block.
    ///
    /// The step calls MMU notifiers, so the caller must not hold a lock.
    pub fn collapse_step(&self) -> Collapse {
        let core = &*self.core;
        if core.huge() == HugePages::Never || core.is_low() {
            return Collapse::Idle;
        }
        let mut round = Round::new(core, ScanPriority::SpareAccessed);
        let step = core.collapse_next(&mut round);
        round.end();
        step
    }
}

impl Core {
    fn collapse_next(&self, round: &mut Round) -> Collapse {
        let regions = self.regions.snapshot();
        for _ in 0..LOOK {
            let Some((region, first)) = self.next_block(&regions) else {
                return Collapse::Idle;
            };
            if region.wants_huge(self.huge(), first)
                && let Some(pages) = self.gather(&region, first)
            {
                return self.collapse(round, pages);
            }
        }
        Collapse::Looked
    }

    /// The next block. After the last block it returns `None` once, then starts again at the first.
    fn next_block(&self, regions: &RegionList) -> Option<(Arc<Region>, PageNo)> {
        let mut hand = lock(&self.collapser);
        let next = regions.iter().find_map(|region| {
            let first = PageNo::of(region.range().start()).max(*hand);
            region.span(first).map(|span| (region.clone(), span.first))
        });
        *hand = match &next {
            Some((_, first)) => first.plus(BLOCK),
            None => PageNo::new(0),
        };
        next
    }

    fn collapse(&self, round: &mut Round, pages: Gathered) -> Collapse {
        let young = pages.age(round);
        if young.iter().filter(|young| **young).count() < IN_USE {
            self.spare(&pages, &young);
            self.let_be(pages);
            return Collapse::Looked;
        }
        if let Some(block) = pages.block() {
            self.collapse_in_place(pages, block);
            return Collapse::Made;
        }
        self.spare(&pages, &young);
        let made = match self.frames.take_block() {
            Some(block) => self.collapse_by_copy(pages, block),
            None => {
                self.let_be(pages);
                Collapse::Looked
            }
        };
        if made != Collapse::Made {
            Counters::add(&self.stats.collapse_failures, 1);
        }
        made
    }

    /// Isolates the pages of a split block, if all of them are resident or zeros.
    fn gather(&self, region: &Arc<Region>, first: PageNo) -> Option<Gathered> {
        let span = region.span(first)?;
        if span.block_word.load() != PageBlockState::Split {
            return None;
        }
        let mut pages = Gathered {
            region: region.clone(),
            first,
            states: Vec::new(),
        };
        let states: Vec<PageState> = span.words.iter().map(|word| word.load()).collect();
        let is_zero = |state: &PageState| match state {
            PageState::Zero => true,
            // Never provided: it reads as zeros only if the region has no page source.
            PageState::Empty => region.origin.is_none(),
            _ => false,
        };
        let zeros = states.iter().filter(|state| is_zero(state)).count();
        let resident = |state: &&PageState| matches!(state, PageState::Resident { .. });
        if states.iter().filter(resident).count() + zeros < BLOCK || zeros > EMPTY {
            return None;
        }
        for (i, state) in states.into_iter().enumerate() {
            let isolated = match state.frame() {
                Some(frame) => self.isolate_from(frame, first.plus(i)),
                None => true,
            };
            // From here on the page stays in its frame. It may have left after its word was loaded
            // above and before the isolation, so compare again.
            if isolated && span.words[i].load() == state {
                pages.states.push(state);
                continue;
            }
            if let Some(frame) = state.frame().filter(|_| isolated) {
                self.frames.desc(frame).publish();
            }
            self.let_be(pages);
            return None;
        }
        Some(pages)
    }

    /// Isolates the pages in the frames of `block`, if they are the 512 pages of one block in
    /// order.
    pub fn gather_frames(&self, block: BlockNo) -> Option<Gathered> {
        let first = self.frames.desc(block.frame(0)).owner();
        let region = self.regions.find(first)?;
        if first != first.block_start() {
            return None;
        }
        let pages = self.gather(&region, first)?;
        if pages.block() != Some(block) {
            self.let_be(pages);
            return None;
        }
        Some(pages)
    }

    pub fn isolate_from(&self, frame: Pfn, page: PageNo) -> bool {
        let desc = self.frames.desc(frame);
        match desc.isolate() {
            Some(owner) if owner == page => true,
            Some(_) => {
                desc.publish();
                false
            }
            None => false,
        }
    }

    /// Ends the isolation of the pages.
    pub fn let_be(&self, pages: Gathered) {
        pages
            .frames()
            .for_each(|frame| self.frames.desc(frame).publish());
    }

    /// Collapses pages that already lie in one block of frames.
    pub fn collapse_in_place(&self, pages: Gathered, block: BlockNo) {
        let span = pages.region.span(pages.first).expect("gathered from it");
        let parts = self.frames.parts(span, block);
        for (state, desc) in pages.states.iter().zip(parts.frames) {
            if state.entry().is_some() {
                desc.mark_dirty();
            }
        }
        parts.desc.adopt(pages.first);
        {
            let _turn = lock(&self.collapsing);
            parts.collapse(&pages.states)
        }
        .expect("no thread moves an isolated page that is resident");
        // The descriptors of a compound page's frames are unused and say Free. Only their dirty
        // marks still count.
        let rest = |desc: &Desc| desc.set_state(FrameState::Free);
        parts.frames.iter().for_each(rest);
        parts.desc.publish();
        self.stats.add_compound();
        Counters::add(&self.stats.collapses, 1);
        self.free_entries(&pages.states);
        let range = pages.first.block_range();
        pages.region.notifier.invalidate(&[range]);
    }

    /// Copies pages to a free block and collapses them there.
    fn collapse_by_copy(&self, pages: Gathered, block: BlockNo) -> Collapse {
        let span = pages.region.span(pages.first).expect("gathered from it");
        let parts = self.frames.parts(span, block);
        let from: Vec<PageState> = pages
            .states
            .iter()
            .map(|state| state.evicted().unwrap_or(*state))
            .collect();
        for (word, state) in span.words.iter().zip(&pages.states) {
            if state.frame().is_some() {
                word.advance(PageState::evicted)
                    .expect("no thread moves an isolated page that is resident");
            }
        }
        let range = pages.first.block_range();
        pages.region.notifier.invalidate(&[range]);
        for (i, state) in pages.states.iter().enumerate() {
            // SAFETY: the block was taken from the free map, and no block word names it yet.
            let to = unsafe { self.frames.pool.exclusive(block.frame(i)) };
            let Some(frame) = state.frame() else {
                to.0.fill(0);
                continue;
            };
            self.frames.pool.frame(frame).read(0, &mut to.0);
            if state.entry().is_some() || self.frames.desc(frame).dirt() == Dirt::Dirty {
                parts.frames[i].mark_dirty();
            }
        }
        parts.desc.prepare(pages.first, Dirt::Clean);
        let collapsed = {
            let _turn = lock(&self.collapsing);
            parts.collapse(&from)
        };
        if collapsed.is_err() {
            for word in span.words {
                // Errors are expected: a fault has taken the page back, or the page has no frame.
                let _ = word.advance(PageState::rescued);
            }
            parts.frames.iter().for_each(Desc::free);
            self.frames.give_block(block);
            self.let_be(pages);
            return Collapse::Looked;
        }
        parts.desc.publish();
        self.stats.add_compound();
        Counters::add(&self.stats.collapses, 1);
        let moved = pages.frames().count();
        pages.region.add_resident((BLOCK - moved) as i64);
        self.free_entries(&pages.states);
        self.frames
            .give(pages.frames().map(|frame| frame.index() as u32));
        self.settled.bump();
        Collapse::Made
    }

    fn free_entries(&self, states: &[PageState]) {
        let entries = states.iter().filter_map(|state| state.entry());
        entries.for_each(|entry| self.free_entry(entry));
    }
}
