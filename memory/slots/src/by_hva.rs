//! Slots by backing address.
//!
//! Slots may share backing (a framebuffer mapped twice, a ROM aliased below 1 MiB), so a range can
//! lie in several slots that are far apart in the order of their starts. Each node therefore knows
//! its *outer*: the nearest node before it that ends beyond it.
//!
//! ```text
//! starts   [a]    [b]    [c]    [d]    [e]      the binary search reads nothing else
//! a        |=================================|
//! b               |====|                         outer = a
//! c                      |==|                    outer = a: b ends before c does
//! d                             |=====|          outer = a
//!                                  ^ searched: from d, the last that starts in time, downward:
//!                                    d hit, c miss, so is all above its outer; a hit, end
//! ```
//! A node that ends too early takes all between itself and its outer with it. So a search costs
//! log2(n) nodes for the last that starts in time, then one node a hit and one for each slot nested
//! in others that ends before the range begins: with disjoint slots, one in all.

use core::hint::select_unpredictable;
use lacuna_addr::HvaRange;

/// No node before this one ends beyond it.
const NONE: u32 = u32::MAX;

/// One slot's backing, and where the slot is in the gfn order.
#[derive(Clone, Copy)]
struct Node {
    end: u64,
    outer: u32,
    slot: u32,
}

pub(crate) struct ByHva {
    starts: Box<[u64]>,
    nodes: Box<[Node]>,
}

impl ByHva {
    /// From the backing of each slot, in the order of the slots.
    pub(crate) fn new(backings: impl Iterator<Item = HvaRange>) -> Self {
        let mut sorted: Vec<(HvaRange, u32)> = backings.zip(0..).collect();
        sorted.sort_unstable_by_key(|(hvas, slot)| (hvas.start().get(), *slot));
        let mut nodes: Vec<Node> = Vec::with_capacity(sorted.len());
        for (hvas, slot) in &sorted {
            let end = hvas.end().get();
            let mut outer = nodes.len().checked_sub(1).map_or(NONE, |last| last as u32);
            while outer != NONE && nodes[outer as usize].end <= end {
                outer = nodes[outer as usize].outer;
            }
            let slot = *slot;
            nodes.push(Node { end, outer, slot });
        }
        Self {
            starts: sorted.iter().map(|(hvas, _)| hvas.start().get()).collect(),
            nodes: nodes.into(),
        }
    }

    /// Calls `hit` with each slot whose backing overlaps `range`, in descending order of its start.
    /// Returns how often it looked at a node.
    #[inline]
    pub(crate) fn overlapping(&self, range: HvaRange, mut hit: impl FnMut(usize)) -> usize {
        let (from, to) = (range.start().get(), range.end().get());
        let (last, mut steps) = self.last_below(to);
        let mut next = last;
        while next != NONE {
            let node = self.nodes[next as usize];
            // The search has looked at `last`.
            steps += usize::from(next != last);
            next = if node.end > from {
                hit(node.slot as usize);
                next.wrapping_sub(1)
            } else {
                node.outer
            };
        }
        steps
    }

    /// The last node that starts below `address`, and the looks it took. Without a branch that
    /// could be guessed wrongly: each step halves what is left and moves the base, which starts
    /// below `address` unless it is the first, by a conditional move.
    #[inline]
    fn last_below(&self, address: u64) -> (u32, usize) {
        let mut base = 0;
        let mut left = self.starts.len();
        let mut steps = 0;
        while left > 1 {
            let half = left / 2;
            let below = self.starts[base + half] < address;
            base = select_unpredictable(below, base + half, base);
            left -= half;
            steps += 1;
        }
        if base > 0 {
            return (base as u32, steps);
        }
        match self.starts.first() {
            Some(first) if *first < address => (0, steps + 1),
            Some(_) => (NONE, steps + 1),
            None => (NONE, steps),
        }
    }
}
