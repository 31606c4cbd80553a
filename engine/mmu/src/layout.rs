//! Adds, removes and moves slots.
//!
//! ```text
//! invalidate_begin over the slot      faults there are refused from here on
//! unmap, shoot down                   nothing of the old layout is mapped or in a TLB
//! publish                             readers see the new snapshot
//! invalidate_end                      faults there see the new layout
//! ```
//! The new place of a moving slot needs no exclusion: a fault there finds no slot before the new
//! snapshot is published, and the slot after that. A slot that moves or changes its flags gets a
//! new reverse map. A notifier call that still works with the old snapshot finds the old map, which
//! is empty. In a shared map it would find leaves of the new layout, but hold the range locks of
//! the old guest frames. The disallow counts start again too. The slot keeps its dirty log, which
//! names pages by their index in the slot.

use crate::{Mmu, MmuFormat, Rmap, SlotSpec};
use lacuna_addr::{BackingRange, Gpa, PAGE_SIZE};
use lacuna_slots::{Slot, SlotError, SlotFlags, SlotId};
use lacuna_sync::MutexGuard;
use lacuna_sync::shim::Ordering;
use std::sync::Arc;

/// The flags that a slot may have.
const SUPPORTED: SlotFlags = SlotFlags::READONLY
    .union(SlotFlags::EXIT_ON_MISSING)
    .union(SlotFlags::EXIT_ON_NONRESIDENT);

impl<F: MmuFormat> Mmu<F> {
    /// Adds a slot.
    ///
    /// # Errors
    /// As [`lacuna_slots::Slots::add`], and [`SlotError::ForeignBacking`] for memory outside this
    /// MMU's regions, because nothing would notify this MMU when its pages are evicted. The flags'
    /// errors are as for [`Mmu::set_slot_flags`]. Nothing has changed then.
    pub fn add_slot(&self, spec: SlotSpec) -> Result<(), SlotError> {
        let backing = BackingRange::new(spec.backing, spec.bytes / PAGE_SIZE as u64);
        // An invalid range has an error of its own.
        if backing.is_some_and(|backing| !self.host.is_notified(backing, self)) {
            let SlotSpec { id, backing, .. } = spec;
            return Err(SlotError::ForeignBacking { id, backing });
        }
        self.check_source(spec)?;
        self.insert_slot(spec)
    }

    /// A slot that exits has a source: it provides the pages for accesses that do not exit.
    fn check_source(&self, spec: SlotSpec) -> Result<(), SlotError> {
        match spec.flags.exits() && !self.host.has_source(spec.backing) {
            false => Ok(()),
            true => Err(SlotError::NoSource { id: spec.id }),
        }
    }

    /// Adds a slot over any addresses: tests of this crate use frames of their own.
    pub(crate) fn insert_slot(&self, spec: SlotSpec) -> Result<(), SlotError> {
        spec.flags.check(spec.id, SUPPORTED)?;
        let _change = self.lock_layout();
        let refused = |room| SlotError::NoRoom { id: spec.id, room };
        Rmap::check_room(spec.bytes).map_err(refused)?;
        self.slots.add(spec, Rmap::new).map(|_| ())
    }

    /// Deletes a slot and its mappings, and returns its backing, which keeps its content.
    ///
    /// # Errors
    /// [`SlotError::Unknown`].
    pub fn delete_slot(&self, id: SlotId) -> Result<BackingRange, SlotError> {
        let _change = self.lock_layout();
        let slot = self.slot(id)?;
        self.exclude(&slot, || self.slots.remove(id))?;
        Ok(slot.backing)
    }

    /// Moves a slot, with its content, to another guest address.
    ///
    /// # Errors
    /// As [`lacuna_slots::Slots::add`]; nothing has changed then.
    pub fn move_slot(&self, id: SlotId, guest: Gpa) -> Result<(), SlotError> {
        self.replace(id, |spec| SlotSpec {
            guest: guest.get(),
            ..spec
        })
    }

    /// Replaces the slot's flags.
    ///
    /// # Errors
    /// [`SlotError::Unknown`], [`SlotError::UnsupportedFlags`], [`SlotError::ReadOnlyExits`],
    /// [`SlotError::NoSource`].
    pub fn set_slot_flags(&self, id: SlotId, flags: SlotFlags) -> Result<(), SlotError> {
        flags.check(id, SUPPORTED)?;
        self.replace(id, |spec| SlotSpec { flags, ..spec })
    }

    fn replace(
        &self,
        id: SlotId,
        edit: impl FnOnce(SlotSpec) -> SlotSpec,
    ) -> Result<(), SlotError> {
        let _change = self.lock_layout();
        let old = self.slot(id)?;
        let wanted = edit(spec_of(&old));
        self.check_source(wanted)?;
        let log = Arc::clone(old.attach.log());
        self.exclude(&old, || {
            let attach = |gfns, backing| Rmap::with_log(gfns, backing, log);
            self.slots.replace(wanted, attach).map(|_| ())
        })
    }

    /// Runs `publish` while faults in `slot` are refused and none of its pages is mapped.
    fn exclude<T>(&self, slot: &Slot<Rmap>, publish: impl FnOnce() -> T) -> T {
        let mut cursor = self.stage2.cursor(slot.gfns);
        // Reclaim may have unmapped a page here and unlocked before it waits for its shoot-down.
        // This thread then finds nothing to unmap, but a TLB still has the page.
        let mut flush = cursor.unsettled();
        cursor.invalidate_begin();
        flush.join(cursor.unmap(slot.gfns, |removed| {
            slot.attach.clear(&removed);
            if removed.leaf.dirty {
                self.host.mark_dirty(removed.leaf.pfn, removed.leaf.level);
            }
        }));
        drop(cursor);
        flush.finish(&*self.qsbr);
        if self.dirty.vcpus_log.load(Ordering::Relaxed) {
            // The vCPUs' logs name pages by their address in the old layout. Flush them into the
            // slot's log before the new layout is published.
            self.kick();
        }
        let done = publish();
        self.stage2.cursor(slot.gfns).invalidate_end();
        done
    }

    pub(crate) fn lock_layout(&self) -> MutexGuard<'_, ()> {
        self.layout
            .lock()
            .expect("no panic while the layout changes")
    }

    pub(crate) fn slot(&self, id: SlotId) -> Result<Arc<Slot<Rmap>>, SlotError> {
        self.slots
            .snapshot()
            .get(id)
            .cloned()
            .ok_or(SlotError::Unknown { id })
    }
}

fn spec_of(slot: &Slot<Rmap>) -> SlotSpec {
    SlotSpec {
        id: slot.id,
        guest: slot.gfns.start().gpa().get(),
        backing: slot.backing.start(),
        bytes: slot.backing.pages() * PAGE_SIZE as u64,
        flags: slot.flags,
    }
}
