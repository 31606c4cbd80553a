//! All slots at one moment.

use crate::by_backing::ByBacking;
use crate::{Slot, SlotData, SlotId};
use lacuna_addr::{Gfn, GfnRange, SlotAddressRange};
use std::sync::Arc;

/// Counts changes: two snapshots of one VM are the same if and only if their generations are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct Generation(pub u64);

/// An immutable set of slots.
pub struct Snapshot<X: SlotData> {
    generation: Generation,
    /// Sorted by gfn, disjoint.
    slots: Box<[Arc<Slot<X>>]>,
    by_backing: ByBacking<X::Addr>,
}

/// A slot with backing in a range of addresses.
pub struct Overlap<'a, X: SlotData> {
    /// The slot.
    pub slot: &'a Arc<Slot<X>>,
    /// Its frames whose backing is in the range.
    pub gfns: GfnRange,
}

impl<X: SlotData> Snapshot<X> {
    /// Makes a snapshot of slots that do not overlap, in any order.
    pub(crate) fn new(generation: Generation, mut slots: Vec<Arc<Slot<X>>>) -> Self {
        slots.sort_unstable_by_key(|slot| slot.gfns.start());
        let by_backing = ByBacking::new(slots.iter().map(|slot| slot.backing));
        Self {
            generation,
            slots: slots.into(),
            by_backing,
        }
    }

    /// The number of the change that made this snapshot.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Every slot, ascending by gfn.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Arc<Slot<X>>> {
        self.slots.iter()
    }

    /// The number of slots.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there is no slot.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The slot with this number.
    pub fn get(&self, id: SlotId) -> Option<&Arc<Slot<X>>> {
        self.slots.iter().find(|slot| slot.id == id)
    }

    /// The slot of `gfn`.
    pub fn find(&self, gfn: Gfn) -> Option<&Arc<Slot<X>>> {
        self.position(gfn).map(|i| &self.slots[i])
    }

    /// Calls `hit` with each slot that has backing in `range`, also if slots share it. The order is
    /// descending by the start of their backing. Returns how many nodes of the index it read: at
    /// most log2(slots) + 2 if one slot holds all of `range` and does not share it.
    #[inline]
    pub fn overlapping(
        &self,
        range: SlotAddressRange<X::Addr>,
        mut hit: impl FnMut(Overlap<'_, X>),
    ) -> usize {
        self.by_backing.overlapping(range, |i| {
            let slot = &self.slots[i];
            let gfns = slot.gfns_of(range).expect("the index found an overlap");
            hit(Overlap { slot, gfns });
        })
    }

    /// The place of `gfn`'s slot in the gfn order.
    pub(crate) fn position(&self, gfn: Gfn) -> Option<usize> {
        let above = self.slots.partition_point(|slot| slot.gfns.start() <= gfn);
        let i = above.checked_sub(1)?;
        self.slots[i].gfns.contains(gfn).then_some(i)
    }

    #[inline]
    pub(crate) fn at(&self, i: usize) -> Option<&Arc<Slot<X>>> {
        self.slots.get(i)
    }
}

/// Asserts the invariants of a snapshot; for tests, the simulator and fuzzers.
///
/// # Panics
/// If an invariant does not hold.
pub fn assert_invariants<X: SlotData>(snapshot: &Snapshot<X>) {
    let mut ids = std::collections::HashSet::new();
    let mut last_end = 0;
    for slot in snapshot.iter() {
        assert!(ids.insert(slot.id), "{} exists twice", slot.id);
        assert_eq!(
            slot.gfns.pages(),
            slot.backing.pages(),
            "{}: frames and backing differ",
            slot.id
        );
        assert!(
            slot.gfns.start().get() >= last_end,
            "{} overlaps the slot below",
            slot.id
        );
        last_end = slot.gfns.end_raw();
        let same = |found: &Arc<Slot<X>>| Arc::ptr_eq(found, slot);
        assert!(
            snapshot.get(slot.id).is_some_and(same),
            "{} is not found by id",
            slot.id
        );
        for gfn in [slot.gfns.start(), slot.gfns.last()] {
            assert!(
                snapshot.find(gfn).is_some_and(same),
                "{} is not found by gfn",
                slot.id
            );
        }
        let mut found = 0;
        snapshot.overlapping(slot.backing, |hit| {
            if same(hit.slot) {
                assert_eq!(hit.gfns, slot.gfns, "{} is found only in part", slot.id);
                found += 1;
            }
        });
        assert_eq!(found, 1, "{} is not found by backing", slot.id);
    }
}
