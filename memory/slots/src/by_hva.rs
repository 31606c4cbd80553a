//! Slots by backing address: an interval tree without pointers.
//!
//! Slots may share backing (a framebuffer mapped twice, a ROM aliased below 1 MiB), so a sorted
//! array alone cannot be searched. The array sorted by start is read as a balanced tree, the middle
//! of each part its root, and each node knows the largest end in its part:
//!
//! ```text
//!                      [start end | max_end]
//!             left half                     right half
//!   all starts <= ours                 all starts >= ours
//! ```
//! A query skips a part whose `max_end` is at or below its start, and a right half whose root
//! starts at or beyond its end: O(log n + hits).

use lacuna_addr::HvaRange;

/// One slot's backing, and where the slot is in the gfn order.
struct Node {
    hvas: HvaRange,
    max_end: u64,
    slot: u32,
}

pub(crate) struct ByHva(Box<[Node]>);

impl ByHva {
    /// From the backing of each slot, in the order of the slots.
    pub(crate) fn new(backings: impl Iterator<Item = HvaRange>) -> Self {
        let node = |(slot, hvas): (usize, HvaRange)| {
            let slot = u32::try_from(slot).expect("ids are 16 bits");
            Node {
                hvas,
                max_end: 0,
                slot,
            }
        };
        let mut nodes: Box<[Node]> = backings.enumerate().map(node).collect();
        nodes.sort_unstable_by_key(|n| (n.hvas.start().get(), n.slot));
        fill(&mut nodes);
        Self(nodes)
    }

    /// Calls `hit` with each slot whose backing overlaps `range`, in order of its start. Returns
    /// the nodes looked at.
    pub(crate) fn overlapping(&self, range: HvaRange, mut hit: impl FnMut(usize)) -> usize {
        let mut steps = 0;
        search(&self.0, range, &mut steps, &mut |node| {
            hit(node.slot as usize)
        });
        steps
    }
}

/// Sets `max_end` in each part; returns the whole part's.
fn fill(part: &mut [Node]) -> u64 {
    if part.is_empty() {
        return 0;
    }
    let middle = part.len() / 2;
    let (left, rest) = part.split_at_mut(middle);
    let (root, right) = rest.split_first_mut().expect("not empty");
    root.max_end = root.hvas.end().get().max(fill(left)).max(fill(right));
    root.max_end
}

fn search(part: &[Node], range: HvaRange, steps: &mut usize, hit: &mut impl FnMut(&Node)) {
    let (left, rest) = part.split_at(part.len() / 2);
    let Some((root, right)) = rest.split_first() else {
        return;
    };
    *steps += 1;
    if root.max_end <= range.start().get() {
        return;
    }
    search(left, range, steps, hit);
    if root.hvas.intersect(range).is_some() {
        hit(root);
    }
    if root.hvas.start() < range.end() {
        search(right, range, steps, hit);
    }
}
