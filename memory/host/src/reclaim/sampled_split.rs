//! Reclaim of compound pages: which ones stay, and which ones are split.
//!
//! ```text
//!                not accessed for a turn            its pages are evicted like any others
//!   compound --------------------------------> split
//!     ^ |
//!     | | accessed, but pages were read back from swap,
//!     | | and it is the coldest compound page of its round
//!     | '--------------------------------> sampled split: its pages stay for one turn
//!     |                                        |
//!     | accessed at least half as often        | less often
//!     | as a page in swap was read back        |
//!     '----------------------------------------+-----> pages that were not accessed are evicted
//! ```
//! The accessed bit of a compound page says little, because one busy page of 512 sets it. If it is
//! not set for a whole turn, all 512 pages are cold, so the compound page is split and evicted
//! first.
//!
//! A compound page that is always accessed may still be mostly cold. If such pages were always
//! spared, 4 KiB pages would be thrashed in the remaining memory. Pages read back from swap show
//! that this happens. Then reclaim chooses the compound page with the least history among those
//! that the clock hand has met, and splits it for one turn when the hand meets it again. After the
//! turn it is compared with swap: pages read back meanwhile, divided by pages in swap.
//!
//! A wrong choice costs little: no page moves, and the pages are collapsed in place.

use crate::core::Core;
use crate::counters::Counters;
use crate::reclaim::collapse::Gathered;
use crate::reclaim::round::{Round, ScanPriority, Window};
use crate::region::Region;
use lacuna_addr::Pfn;
use lacuna_frames::{BLOCK, BlockNo, FrameBlockState, PageNo, Warmth, Youth};
use lacuna_sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Compound pages that the clock hand meets before it samples the coldest of them.
const ROUND: usize = 16;
/// Pages read back from swap before the next sampled split: about as many as one split frees.
const READ_BACK: u64 = 64;
/// A sampled block stays huge if its pages are accessed at least this often, in sixteenths of the
/// rate at which a page in swap is read back. Half of that rate is enough, because a compound page
/// saves faults and TLB entries.
const ASKED: u64 = 8;

/// A compound page that this thread has isolated.
struct IsolatedBlock {
    block: BlockNo,
    first: PageNo,
    region: Arc<Region>,
}

/// The decision about an accessed compound page.
enum Verdict {
    Spared,
    Sampled,
}

/// Whether reclaim spares the pages of a split block for a turn.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Grace {
    OneTurn,
    None,
}

impl Core {
    /// Handles a window of frames, all of one block, that the clock hand has reached.
    pub fn meet_block(&self, round: &mut Round, start: Pfn) -> Window {
        let Some((block, desc)) = self.frames.block_of(start) else {
            return Window::Frames;
        };
        let first_window = start == block.frame(0);
        match desc.state() {
            FrameBlockState::Split if round.priority == ScanPriority::TakeAll => Window::Frames,
            FrameBlockState::Split if first_window && desc.end_sample() => self.judge(round, block),
            FrameBlockState::Split if desc.is_sampled() => Window::Passed,
            FrameBlockState::Split => Window::Frames,
            FrameBlockState::Used
                if first_window && round.priority != ScanPriority::SpareCompound =>
            {
                self.meet_compound(round, block)
            }
            FrameBlockState::Used | FrameBlockState::Isolated => Window::Passed,
        }
    }

    fn meet_compound(&self, round: &mut Round, block: BlockNo) -> Window {
        let Some(isolated) = self.isolate_compound(block) else {
            return Window::Passed;
        };
        let desc = self.frames.block(block);
        if !round.may_take_from(isolated.first) {
            desc.publish();
            return Window::Passed;
        }
        let mut young = [false];
        if round.priority == ScanPriority::SpareAccessed {
            round.age(
                &isolated.region,
                &[isolated.first.block_range()],
                &mut young,
            );
        }
        if young == [true] {
            Counters::add(&self.stats.young, 1);
            let warmth = desc.remember(Youth::Young);
            match self.enter(warmth, block) {
                Verdict::Spared => desc.publish(),
                Verdict::Sampled => self.split(isolated, Grace::OneTurn),
            }
            return Window::Passed;
        }
        let _ = desc.remember(Youth::Old);
        self.split(isolated, Grace::None);
        Window::Frames
    }

    fn isolate_compound(&self, block: BlockNo) -> Option<IsolatedBlock> {
        let desc = self.frames.block(block);
        let first = desc.isolate()?;
        // None: a thread is removing the region, and needs the block.
        let region = self.regions.find(first);
        if region.is_none() {
            desc.publish();
        }
        let region = region?;
        Some(IsolatedBlock {
            block,
            first,
            region,
        })
    }

    /// Splits the compound page in `block` whose first page is `first`, because its pages are about
    /// to be discarded. `false`: another thread has isolated it.
    pub fn split_to_discard(&self, block: BlockNo, first: PageNo) -> bool {
        match self.isolate_compound(block) {
            Some(isolated) if isolated.first == first => self.split(isolated, Grace::None),
            // The block has been given to other pages.
            Some(isolated) => self.frames.block(isolated.block).publish(),
            None => return false,
        }
        true
    }

    /// Enters an accessed compound page into the round. A chosen block is split now, when the hand
    /// meets it, so that its pages have a whole turn.
    fn enter(&self, warmth: Warmth, block: BlockNo) -> Verdict {
        let read_back = self.stats.read_back.load(Ordering::Relaxed);
        let mut sampled = lock(&self.sampled_splits);
        if sampled.chosen.take_if(|chosen| *chosen == block).is_some() {
            return Verdict::Sampled;
        }
        sampled.met += 1;
        if sampled.coldest.is_none_or(|(least, _)| warmth < least) {
            sampled.coldest = Some((warmth, block));
        }
        if sampled.met == ROUND {
            sampled.met = 0;
            let coldest = sampled.coldest.take();
            if read_back >= sampled.read_back + READ_BACK {
                sampled.read_back = read_back;
                sampled.chosen = coldest.map(|(_, block)| block);
            }
        }
        Verdict::Spared
    }

    fn split(&self, isolated: IsolatedBlock, grace: Grace) {
        if grace == Grace::OneTurn {
            let read_back = self.stats.read_back.load(Ordering::Relaxed);
            self.frames.block(isolated.block).begin_sample(read_back);
        }
        let span = isolated.region.span(isolated.first);
        let span = span.expect("a compound page has a block word");
        self.frames
            .parts(span, isolated.block)
            .split(isolated.first);
        self.stats.remove_compound();
        Counters::add(&self.stats.splits, 1);
        isolated
            .region
            .notifier
            .split_huge(isolated.first.block_range());
    }

    /// Ends a sampled split. The pages are collapsed again if they were accessed often enough.
    fn judge(&self, round: &mut Round, block: BlockNo) -> Window {
        let Some(pages) = self.gather_frames(block) else {
            return Window::Frames;
        };
        let young = pages.age(round);
        let in_use = young.iter().filter(|young| **young).count();
        let worth = self.worth(block, in_use);
        if worth > ASKED {
            self.collapse_in_place(pages, block);
            self.frames.block(block).note_worth(worth);
            return Window::Passed;
        }
        self.spare(&pages, &young);
        self.let_be(pages);
        Window::Frames
    }

    /// How often a page of the sampled block was accessed, in sixteenths of the rate at which a
    /// page in swap was read back.
    fn worth(&self, block: BlockNo, in_use: usize) -> u64 {
        let read_back = self.stats.read_back.load(Ordering::Relaxed);
        let wanted = u64::from(self.frames.block(block).read_back_since(read_back));
        let swapped = self.swapped_out_now.load(Ordering::Relaxed).max(0) as u64;
        16 * in_use as u64 * swapped / (wanted * BLOCK as u64).max(1)
    }

    /// Marks the accessed pages as recent, so that the hand spares them. This thread has cleared
    /// their accessed bits.
    pub fn spare(&self, pages: &Gathered, young: &[bool]) {
        let frames = pages.states.iter().map(|state| state.frame());
        for (frame, _) in frames.zip(young).filter(|(_, young)| **young) {
            if let Some(frame) = frame {
                self.frames.desc(frame).mark_recent();
            }
        }
    }
}
