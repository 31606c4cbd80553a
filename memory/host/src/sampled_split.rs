//! The clock hand meets a block: which whole blocks stay, and which are split.
//!
//! ```text
//!             not accessed for a turn                  its pages leave like any others, the hand
//!   whole --------------------------------> split      goes on over them at once
//!     ^ |
//!     | | accessed, but pages that were evicted had to be read back meanwhile,
//!     | | and it is the coldest of its round
//!     | '--------------------------------> on trial: split, its pages left alone for one turn
//!     |                                        |
//!     | a page of it was accessed half as      | less often
//!     | often as one in swap was wanted back   |
//!     '----------------------------------------+-----> those not accessed leave
//! ```
//! The accessed bit of a block says little: one busy page of 512 sets it. So a block that is not
//! accessed for a whole turn is colder than any page that is not, and goes first. But a block that
//! always is accessed may still be mostly cold, and were it spared for ever, small pages would be
//! thrashed in what room is left. That shows: pages come back from swap. Each time some have, one
//! block is chosen, the one with the least history of those that the hand has met, and is put on
//! trial when the hand meets it again. What a page of it could be given up for is a page in swap,
//! and how often that is wanted is known: pages read back during the trial, by pages in swap. It
//! costs little to be wrong: no page moves, and a block that is worth it is made whole in place.

use crate::block::{FrameBlockState, Warmth, Youth};
use crate::block_word::{BLOCK, BlockNo};
use crate::collapse::Gathered;
use crate::host::{Core, lock};
use crate::reclaim::{Round, ScanPriority};
use crate::region::Region;
use crate::residency::PageNo;
use crate::stats::Counters;
use lacuna_addr::Pfn;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Whole blocks that the hand meets before the coldest of them is put on trial.
const ROUND: usize = 16;
/// Pages read back from swap before another block is put on trial: about what one sets free.
const READ_BACK: u64 = 64;
/// How much more often a page of a block must be used than a page in swap is wanted, in sixteenths.
/// Half as often is enough: a whole block is worth more than its pages, in faults and in TLBs.
const ASKED: u64 = 8;
/// What the hand does with a window of frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Window {
    /// Looks at each.
    Frames,
    /// Passes over it: it belongs to a whole block, or to one on trial.
    Passed,
}

/// The blocks of this round.
#[derive(Default)]
pub(crate) struct SampledSplits {
    met: usize,
    coldest: Option<(Warmth, BlockNo)>,
    /// Whose trial begins when the hand meets it.
    chosen: Option<BlockNo>,
    /// Pages that had been read back when the last trial began.
    read_back: u64,
}

/// A whole block that this thread has isolated.
struct IsolatedBlock {
    block: BlockNo,
    first: PageNo,
    region: Arc<Region>,
}

/// What becomes of a block that is in use.
enum Verdict {
    Spared,
    Sampled,
}

/// Whether the hand leaves a split block's pages alone for a turn.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Grace {
    OneTurn,
    None,
}

impl Core {
    /// The hand reaches a window of frames, all of one block.
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
        // None: the region is being removed, and the thread that removes it needs the block.
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

    /// Enters a block that is in use into the round. Whether its own trial begins: a block that was
    /// chosen waits for the hand to meet it, so that its pages have a whole turn.
    fn enter(&self, warmth: Warmth, block: BlockNo) -> Verdict {
        let read_back = self.stats.swapped_in.load(Ordering::Relaxed);
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
            let read_back = self.stats.swapped_in.load(Ordering::Relaxed);
            self.frames.block(isolated.block).begin_sample(read_back);
        }
        let span = isolated.region.span(isolated.first);
        let span = span.expect("a whole block has a block_word");
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

    /// The trial is over: the block is whole again if its pages are in use more than those in swap
    /// would be in their place.
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

    /// How much more often a page of a block on trial was accessed than a page in swap was wanted
    /// back, in sixteenths.
    fn worth(&self, block: BlockNo, in_use: usize) -> u64 {
        let read_back = self.stats.swapped_in.load(Ordering::Relaxed);
        let wanted = u64::from(self.frames.block(block).read_back_since(read_back));
        let swapped = self.swapped_out_now.load(Ordering::Relaxed).max(0) as u64;
        16 * in_use as u64 * swapped / (wanted * BLOCK as u64).max(1)
    }

    /// Has the hand pass over pages whose accessed bits were taken.
    pub fn spare(&self, pages: &Gathered, young: &[bool]) {
        let frames = pages.states.iter().map(|state| state.frame());
        for (frame, _) in frames.zip(young).filter(|(_, young)| **young) {
            if let Some(frame) = frame {
                self.frames.desc(frame).mark_recent();
            }
        }
    }
}
