//! The slots of one VM, and how they change.

use crate::{Generation, Reader, Slot, SlotData, SlotError, SlotId, SlotSpec, Snapshot};
use arc_swap::{ArcSwap, Guard};
use lacuna_addr::{GPA_BITS, GfnRange, PAGE_SIZE, SlotAddressRange};
use lacuna_sync::{Mutex, lock_order};
use std::ops::Deref;
use std::sync::Arc;

/// The limits of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The most slots.
    pub slots: usize,
    /// The guest's physical address width, up to 48 bits.
    pub address_bits: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            slots: 512,
            address_bits: GPA_BITS,
        }
    }
}

/// The current slots, for a moment: [`Slots::read`].
pub struct CurrentSlots<X: SlotData>(Guard<Arc<Snapshot<X>>>);

impl<X: SlotData> Deref for CurrentSlots<X> {
    type Target = Arc<Snapshot<X>>;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// The memory slots of one VM. Changes are serialised; readers never wait for them.
pub struct Slots<X: SlotData> {
    current: Arc<ArcSwap<Snapshot<X>>>,
    writer: Mutex<(), lock_order::SlotsWriter>,
    limits: Limits,
}

impl<X: SlotData> Slots<X> {
    /// A VM without slots.
    ///
    /// # Panics
    /// If the limits make no sense: no address bits, or more than tables translate.
    pub fn new(limits: Limits) -> Self {
        let bits = limits.address_bits;
        assert!(
            (12..=GPA_BITS).contains(&bits),
            "{bits} guest address bits are not 12..=48"
        );
        let empty = Snapshot::new(Generation::default(), Vec::new());
        Self {
            current: Arc::new(ArcSwap::from_pointee(empty)),
            writer: Mutex::new(()),
            limits,
        }
    }

    /// The current slots.
    pub fn snapshot(&self) -> Arc<Snapshot<X>> {
        self.current.load_full()
    }

    /// The current slots, for a moment, without a change of a shared count. A thread may hold a few
    /// of these at a time; each further one costs as much as [`Slots::snapshot`].
    #[inline]
    pub fn read(&self) -> CurrentSlots<X> {
        CurrentSlots(self.current.load())
    }

    /// A reader for one vCPU.
    pub fn reader(&self) -> Reader<X> {
        Reader::new(Arc::clone(&self.current))
    }

    /// Adds a slot. After all checks, `attach` makes the user's data from the slot's frames and
    /// their backing.
    ///
    /// # Errors
    /// See [`SlotError`]; nothing has changed then.
    pub fn add(
        &self,
        spec: SlotSpec<X::Addr>,
        attach: impl FnOnce(GfnRange, SlotAddressRange<X::Addr>) -> X,
    ) -> Result<Arc<Slot<X>>, SlotError> {
        let id = spec.id;
        let (gfns, backing) = spec.ranges(self.gfn_limit())?;
        self.change(|slots| {
            if slots.iter().any(|slot| slot.id == id) {
                return Err(SlotError::InUse { id });
            }
            if slots.len() >= self.limits.slots {
                return Err(SlotError::TooMany {
                    id,
                    limit: self.limits.slots,
                });
            }
            push(slots, spec, gfns, backing, attach)
        })
    }

    /// Replaces the slot with `spec`'s number by the slot that `spec` describes, at once: every
    /// reader finds one of the two. `attach` is as for [`Slots::add`]. The caller must remove the
    /// mappings of the old slot.
    ///
    /// # Errors
    /// As [`Slots::add`], and [`SlotError::Unknown`]; nothing has changed then.
    pub fn replace(
        &self,
        spec: SlotSpec<X::Addr>,
        attach: impl FnOnce(GfnRange, SlotAddressRange<X::Addr>) -> X,
    ) -> Result<Arc<Slot<X>>, SlotError> {
        let (gfns, backing) = spec.ranges(self.gfn_limit())?;
        self.change(|slots| {
            take(slots, spec.id)?;
            push(slots, spec, gfns, backing, attach)
        })
    }

    /// Removes a slot and returns it. The caller has removed its mappings, and refuses faults in
    /// its range until after this call (see the order at the head of the crate).
    ///
    /// # Errors
    /// [`SlotError::Unknown`].
    pub fn remove(&self, id: SlotId) -> Result<Arc<Slot<X>>, SlotError> {
        self.change(|slots| take(slots, id))
    }

    fn gfn_limit(&self) -> u64 {
        (1u64 << self.limits.address_bits) / PAGE_SIZE as u64
    }

    /// Replaces the snapshot by the snapshot that `edit` makes, with the next generation.
    fn change<T>(
        &self,
        edit: impl FnOnce(&mut Vec<Arc<Slot<X>>>) -> Result<T, SlotError>,
    ) -> Result<T, SlotError> {
        let _writer = self.writer.lock().expect("no panic while slots change");
        let old = self.current.load();
        let mut slots = old.iter().cloned().collect();
        let done = edit(&mut slots)?;
        let generation = Generation(old.generation().0 + 1);
        self.current
            .store(Arc::new(Snapshot::new(generation, slots)));
        Ok(done)
    }
}

fn take<X: SlotData>(slots: &mut Vec<Arc<Slot<X>>>, id: SlotId) -> Result<Arc<Slot<X>>, SlotError> {
    let i = slots
        .iter()
        .position(|slot| slot.id == id)
        .ok_or(SlotError::Unknown { id })?;
    Ok(slots.remove(i))
}

/// Adds the slot of `spec`, with these frames, if no other slot has them.
fn push<X: SlotData>(
    slots: &mut Vec<Arc<Slot<X>>>,
    spec: SlotSpec<X::Addr>,
    gfns: GfnRange,
    backing: SlotAddressRange<X::Addr>,
    attach: impl FnOnce(GfnRange, SlotAddressRange<X::Addr>) -> X,
) -> Result<Arc<Slot<X>>, SlotError> {
    let SlotSpec { id, flags, .. } = spec;
    check_free(slots, id, gfns)?;
    let slot = Arc::new(Slot {
        id,
        gfns,
        backing,
        flags,
        attach: attach(gfns, backing),
    });
    slots.push(Arc::clone(&slot));
    Ok(slot)
}

/// Checks that no other slot has `gfns`.
fn check_free<X: SlotData>(
    slots: &[Arc<Slot<X>>],
    id: SlotId,
    gfns: GfnRange,
) -> Result<(), SlotError> {
    let taken = |other: &&Arc<Slot<X>>| other.gfns.intersect(gfns).is_some();
    match slots.iter().find(taken) {
        None => Ok(()),
        Some(other) => Err(SlotError::Overlap {
            id,
            gfns,
            other: other.id,
            other_gfns: other.gfns,
        }),
    }
}
