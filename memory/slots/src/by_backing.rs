//! Slots by backing address.
//!
//! Slots may share backing (a framebuffer mapped twice, a ROM aliased below 1 MiB). So a range can
//! lie in several slots that are far apart in the order of their starts. Each node therefore stores
//! its *outer*: the nearest node before it that ends beyond it.
//!
//! ```text
//! starts   [a]    [b]    [c]    [d]    [e]      the binary search reads only this
//! a        |=================================|
//! b               |====|                         outer = a
//! c                      |==|                    outer = a: b ends before c does
//! d                             |=====|          outer = a
//!                                  ^ searched: begins at d, the last that starts before the end of
//!                                    the range: d hit; c miss, so go to its outer; a hit; end
//! ```
//! If a node ends before the range, all nodes between it and its outer do too. So a search reads
//! log2(n) nodes to find the last one that starts in time, then one node for each hit, and one for
//! each nested slot that ends before the range. With disjoint slots it reads one node in all.

use core::hint::select_unpredictable;
use lacuna_addr::{SlotAddress, SlotAddressRange};

/// No earlier node ends beyond this one.
const NONE: u32 = u32::MAX;

/// The backing of one slot, and the place of the slot in the gfn order.
#[derive(Clone, Copy)]
struct Node<A> {
    end: A,
    outer: u32,
    slot: u32,
}

pub(crate) struct ByBacking<A> {
    starts: Box<[A]>,
    nodes: Box<[Node<A>]>,
}

impl<A: SlotAddress> ByBacking<A> {
    /// Takes the backing of each slot, in the order of the slots.
    pub(crate) fn new(backings: impl Iterator<Item = SlotAddressRange<A>>) -> Self {
        let mut sorted: Vec<(SlotAddressRange<A>, u32)> = backings.zip(0..).collect();
        sorted.sort_unstable_by_key(|(backing, slot)| (backing.start(), *slot));
        let mut nodes: Vec<Node<A>> = Vec::with_capacity(sorted.len());
        for (backing, slot) in &sorted {
            let end = backing.end();
            let mut outer = nodes.len().checked_sub(1).map_or(NONE, |last| last as u32);
            while outer != NONE && nodes[outer as usize].end <= end {
                outer = nodes[outer as usize].outer;
            }
            let slot = *slot;
            nodes.push(Node { end, outer, slot });
        }
        Self {
            starts: sorted.iter().map(|(backing, _)| backing.start()).collect(),
            nodes: nodes.into(),
        }
    }

    /// Calls `hit` with each slot whose backing overlaps `range`, in descending order of its start.
    /// Returns how many nodes it read.
    #[inline]
    pub(crate) fn overlapping(
        &self,
        range: SlotAddressRange<A>,
        mut hit: impl FnMut(usize),
    ) -> usize {
        let (from, to) = (range.start(), range.end());
        let (last, mut steps) = self.last_below(to);
        let mut next = last;
        while next != NONE {
            let node = self.nodes[next as usize];
            // The search has read `last`.
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

    /// The last node that starts below `address`, and the number of nodes read. It has no
    /// mispredictable branch: each step halves the rest and moves the base by a conditional move.
    /// The base starts below `address` unless it is the first node.
    #[inline]
    fn last_below(&self, address: A) -> (u32, usize) {
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
