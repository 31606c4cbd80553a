//! The slots of one VM, and how they change.

use crate::slot::gfn_range;
use crate::{Generation, Reader, Slot, SlotError, SlotFlags, SlotId, SlotSpec, Snapshot};
use arc_swap::ArcSwap;
use lacuna_addr::{GPA_BITS, Gpa, PAGE_SIZE};
use lacuna_sync::shim::Mutex;
use std::sync::Arc;

/// What a VM may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Most slots.
    pub slots: usize,
    /// The guest's physical address width, up to 48 bits.
    pub address_bits: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            slots: 509,
            address_bits: GPA_BITS,
        }
    }
}

/// The memory slots of one VM. Changes are serialised; readers never wait for them.
pub struct Slots<X> {
    current: Arc<ArcSwap<Snapshot<X>>>,
    writer: Mutex<()>,
    limits: Limits,
}

impl<X> Slots<X> {
    /// No slots.
    ///
    /// # Panics
    /// When the limits make no sense: no address bits, or more than tables translate.
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

    /// The slots now.
    pub fn snapshot(&self) -> Arc<Snapshot<X>> {
        self.current.load_full()
    }

    /// A reader of one's own: one per vCPU.
    pub fn reader(&self) -> Reader<X> {
        Reader::new(Arc::clone(&self.current))
    }

    /// Adds a slot.
    ///
    /// # Errors
    /// See [`SlotError`]; nothing has changed then.
    pub fn add(&self, spec: SlotSpec, attach: X) -> Result<Arc<Slot<X>>, SlotError> {
        let SlotSpec { id, flags, .. } = spec;
        let (gfns, hvas) = spec.ranges(self.gfn_limit())?;
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
            insert(
                slots,
                Slot {
                    id,
                    gfns,
                    hvas,
                    flags,
                    attach,
                },
            )
        })
    }

    /// Removes a slot and returns it. Its mappings are the caller's to remove, *afterwards* (see
    /// the crate's page).
    ///
    /// # Errors
    /// [`SlotError::Unknown`].
    pub fn remove(&self, id: SlotId) -> Result<Arc<Slot<X>>, SlotError> {
        self.change(|slots| take(slots, id))
    }

    fn gfn_limit(&self) -> u64 {
        (1u64 << self.limits.address_bits) / PAGE_SIZE as u64
    }

    /// Replaces the snapshot by one that `edit` made, one generation on.
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

impl<X: Clone> Slots<X> {
    /// Moves a slot to another guest address, with its backing and attachment. Returns the slot as
    /// it was and as it is: the old mappings are the caller's to remove, afterwards.
    ///
    /// # Errors
    /// See [`SlotError`]; nothing has changed then.
    pub fn relocate(&self, id: SlotId, guest: Gpa) -> Result<[Arc<Slot<X>>; 2], SlotError> {
        if guest.offset() != 0 {
            let (what, value) = ("guest address", guest.get());
            return Err(SlotError::Misaligned { id, what, value });
        }
        self.change(|slots| {
            let was = take(slots, id)?;
            let gfns = gfn_range(id, guest.gfn().get(), was.gfns.pages(), self.gfn_limit())?;
            let is = insert(
                slots,
                Slot {
                    gfns,
                    ..Slot::clone(&was)
                },
            )?;
            Ok([was, is])
        })
    }

    /// Changes a slot's flags. Returns the slot as it was and as it is: when it became read-only,
    /// its writable mappings are the caller's to remove, afterwards.
    ///
    /// # Errors
    /// [`SlotError::Unknown`].
    pub fn set_flags(&self, id: SlotId, flags: SlotFlags) -> Result<[Arc<Slot<X>>; 2], SlotError> {
        self.change(|slots| {
            let was = take(slots, id)?;
            let is = insert(
                slots,
                Slot {
                    flags,
                    ..Slot::clone(&was)
                },
            )?;
            Ok([was, is])
        })
    }
}

fn take<X>(slots: &mut Vec<Arc<Slot<X>>>, id: SlotId) -> Result<Arc<Slot<X>>, SlotError> {
    let i = slots
        .iter()
        .position(|slot| slot.id == id)
        .ok_or(SlotError::Unknown { id })?;
    Ok(slots.remove(i))
}

/// Adds `slot` if its frames are free.
fn insert<X>(slots: &mut Vec<Arc<Slot<X>>>, slot: Slot<X>) -> Result<Arc<Slot<X>>, SlotError> {
    let Slot { id, gfns, .. } = slot;
    if let Some(other) = slots
        .iter()
        .find(|other| other.gfns.intersect(gfns).is_some())
    {
        return Err(SlotError::Overlap {
            id,
            gfns,
            other: other.id,
            other_gfns: other.gfns,
        });
    }
    let slot = Arc::new(slot);
    slots.push(Arc::clone(&slot));
    Ok(slot)
}
