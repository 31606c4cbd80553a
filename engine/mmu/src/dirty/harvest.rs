//! Harvests the pages written since the last harvest: reads the marks, clears them, and re-arms the
//! pages.
//!
//! The order is essential: *kick* (the vCPUs' logs become visible), *take*, *re-arm*, *flush*, and
//! only then may the caller copy pages. If the copy lacks a write, the write came after the flush,
//! so it is detected again.

use super::rearm::Found;
use super::{DirtyError, bitmap_of};
use crate::rmap::Rmap;
use crate::{Detection, Mmu, MmuFormat};
use lacuna_slots::{Slot, SlotId};
use lacuna_stage2::Flush;
use lacuna_sync::shim::Ordering;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

impl<F: MmuFormat> Mmu<F> {
    /// Moves the slot's dirty bits into `out` and re-arms those pages: KVM's GET without manual
    /// protect. Copy the pages afterwards. No thread calls this while its vCPU is in the guest: it
    /// waits for all vCPUs.
    ///
    /// # Errors
    /// There is no such slot, it does not log, it has no bitmap, or the buffer has another size.
    pub fn get_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        let _no_change = self.lock_layout();
        let slot = self.slot(id)?;
        let bitmap = bitmap_of(&slot)?;
        check_words(&slot, bitmap.words(), out.len())?;
        self.sync();
        bitmap.take(0, out);
        self.rearm_words(&slot, 0, out);
        Ok(())
    }

    /// Copies the slot's dirty bits into `out` and changes nothing: KVM's GET with manual protect.
    /// [`Mmu::clear_dirty`] is its other half.
    ///
    /// # Errors
    /// As [`Mmu::get_dirty`].
    pub fn peek_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        let _no_change = self.lock_layout();
        let slot = self.slot(id)?;
        let bitmap = bitmap_of(&slot)?;
        check_words(&slot, bitmap.words(), out.len())?;
        self.sync();
        bitmap.copy(0, out);
        Ok(())
    }

    /// Clears and re-arms the pages in `mask`, which covers `pages` pages of the slot from
    /// `first_page` on. Leaves only the dirty ones in `mask`. Copy the pages afterwards.
    ///
    /// # Errors
    /// As [`Mmu::get_dirty`], and KVM's rules for the range.
    pub fn clear_dirty(
        &self,
        id: SlotId,
        first_page: usize,
        pages: usize,
        mask: &mut [u64],
    ) -> Result<(), DirtyError> {
        let _no_change = self.lock_layout();
        let slot = self.slot(id)?;
        bitmap_of(&slot)?.clear(first_page, pages, mask)?;
        self.rearm_words(&slot, first_page, mask);
        Ok(())
    }

    /// Marks pages again that were taken from the slot but could not be used.
    ///
    /// # Errors
    /// As [`Mmu::get_dirty`].
    pub fn put_back_dirty(&self, id: SlotId, words: &[u64]) -> Result<(), DirtyError> {
        let slot = self.slot(id)?;
        let bitmap = bitmap_of(&slot)?;
        check_words(&slot, bitmap.words(), words.len())?;
        bitmap.put_back(0, words);
        Ok(())
    }

    /// Whether the slot logs.
    pub fn is_logging(&self, id: SlotId) -> bool {
        self.slot(id).is_ok_and(|slot| slot.attach.log().is_on())
    }

    /// Passes the pages in all vCPUs' rings to `each`, as (slot, page of it), and returns their
    /// number. They stay in the rings until [`Mmu::reset_rings`]; copy the pages only after that. A
    /// slot may have been removed since, or be smaller. `each` must not call dirty tracking of this
    /// MMU. If it panics, its last page is not reaped, and this MMU stays usable.
    pub fn reap_rings(&self, mut each: impl FnMut(SlotId, usize)) -> usize {
        let no_change = self.lock_layout();
        self.sync();
        let mut rings = self.dirty.rings.lock().expect("no panic under this lock");
        let reap = || rings.iter_mut().map(|ring| ring.harvest(&mut each)).sum();
        let reaped = catch_unwind(AssertUnwindSafe(reap));
        // A panic continues after the locks are released, so that it does not poison them.
        drop((rings, no_change));
        reaped.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// The pages reaped since the last reset could not be used: the next [`Mmu::reap_rings`] reaps
    /// them again.
    pub fn put_back_rings(&self) {
        let mut rings = self.dirty.rings.lock().expect("no panic under this lock");
        rings.iter_mut().for_each(|ring| ring.put_back());
    }

    /// Frees the reaped entries, re-arms their pages, and returns the number of entries. Then the
    /// pages may be copied. No thread calls this while its vCPU is in the guest.
    pub fn reset_rings(&self) -> usize {
        let _no_change = self.lock_layout();
        let slots = self.slots.snapshot();
        let mut rings = self.dirty.rings.lock().expect("no panic under this lock");
        let mut found = Found::default();
        for ring in rings.iter_mut() {
            ring.reset(|id, page| found.add(id, page));
        }
        drop(rings);
        let mut flush = Flush::none(&self.stage2);
        let count = found.each_slot(|id, pages| {
            // The slot may have been removed, and another may have its number.
            let slot = slots.get(id).filter(|slot| slot.attach.log().is_on());
            if let Some(slot) = slot {
                self.rearm(slot, pages.in_blocks(slot.gfns), &mut flush);
            }
        });
        flush.finish(&*self.qsbr);
        count
    }

    /// Marks all pages logged so far by vCPUs.
    pub(crate) fn sync(&self) {
        if self.dirty.vcpus_log.load(Ordering::Relaxed) {
            debug_assert!(Detection::Pml == self.dirty.detection());
            self.kick();
        }
    }
}

fn check_words(slot: &Slot<Rmap>, needed: usize, given: usize) -> Result<(), DirtyError> {
    let id = slot.id;
    match needed == given {
        true => Ok(()),
        false => Err(DirtyError::Words { id, needed, given }),
    }
}
