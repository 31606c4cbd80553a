//! Dirty tracking of a VM: the calls of `lacuna_mmu`, together with the vCPUs.
//!
//! ```text
//! set_delivery    before boot: bitmaps, or a ring for each vCPU
//! set_detection   any time: write faults, or the vCPUs' own logs
//! set_logging     on; copy all memory
//! get_dirty, or reap_rings + reset_rings; copy what they name; again and again
//! set_logging     off
//! ```
//! A vCPU flushes its log whenever it leaves guest code, before it counts as offline. So a harvest
//! only has to make all vCPUs leave once. No vCPU's thread may make these calls.

use crate::vm::Vm;
use lacuna_machine::{DetectionChoice, DirtyRings, DirtyTracking, TwoStepLog};
use lacuna_mmu::{Delivery, Detection, DirtyError, DirtyStats, Logging};
use lacuna_slots::SlotId;

impl Vm {
    /// Sets where writes are recorded, before [`Vm::boot`]. The default is bitmaps.
    ///
    /// # Errors
    /// [`DirtyError::TooLate`].
    pub fn set_delivery(&self, delivery: Delivery) -> Result<(), DirtyError> {
        self.mmu.set_delivery(delivery)
    }

    /// Sets how writes are detected from now on, also in slots that log already.
    pub fn set_detection(&self, detection: Detection) {
        self.mmu.set_detection(detection);
    }

    /// The slots, ascending by guest address.
    pub fn slots(&self) -> Vec<SlotId> {
        let slots = self.mmu.slots();
        slots.iter().map(|slot| slot.id).collect()
    }

    /// Turns the log of a slot on or off. A vCPU that has left because its ring was full stays out,
    /// even if no slot logs any more, until the rings are reaped and reset.
    ///
    /// # Errors
    /// As [`lacuna_mmu::Mmu::set_logging`].
    pub fn set_logging(&self, id: SlotId, logging: Logging) -> Result<(), DirtyError> {
        self.mmu.set_logging(id, logging)
    }

    /// Moves a slot's dirty bits into `out`, which has one word for 64 pages.
    ///
    /// # Errors
    /// As [`lacuna_mmu::Mmu::get_dirty`].
    pub fn get_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        self.mmu.get_dirty(id, out)
    }

    /// Copies a slot's dirty bits into `out`, and does not change them.
    ///
    /// # Errors
    /// As [`lacuna_mmu::Mmu::get_dirty`].
    pub fn peek_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        self.mmu.peek_dirty(id, out)
    }

    /// Of `pages` pages from `first_page` on, clears the dirty bits that `mask` names. Leaves in
    /// `mask` those that were set.
    ///
    /// # Errors
    /// As [`lacuna_mmu::Mmu::clear_dirty`].
    pub fn clear_dirty(
        &self,
        id: SlotId,
        first_page: usize,
        pages: usize,
        mask: &mut [u64],
    ) -> Result<(), DirtyError> {
        self.mmu.clear_dirty(id, first_page, pages, mask)
    }

    /// Passes the pages in all vCPUs' rings to `each`, and returns their number. Copy them after
    /// [`Vm::reset_rings`], never before.
    pub fn reap_rings(&self, each: impl FnMut(SlotId, usize)) -> usize {
        self.mmu.reap_rings(each)
    }

    /// Frees the entries that were reaped; returns their number. vCPUs that have left with
    /// [`Exit::DirtyRingFull`](lacuna_machine::Exit::DirtyRingFull) may be entered again.
    pub fn reset_rings(&self) -> usize {
        self.mmu.reset_rings()
    }

    /// The cost of dirty tracking for each vCPU.
    pub fn dirty_stats(&self) -> Vec<DirtyStats> {
        self.mmu.dirty_stats()
    }
}

impl DirtyTracking for Vm {
    fn delivery(&self) -> Delivery {
        self.mmu.delivery()
    }

    fn set_logging(&self, id: SlotId, logging: Logging) -> Result<(), DirtyError> {
        self.mmu.set_logging(id, logging)
    }

    fn get_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        self.mmu.get_dirty(id, out)
    }

    fn dirty_rings(&self) -> Option<&dyn DirtyRings> {
        matches!(self.mmu.delivery(), Delivery::Ring { .. }).then_some(self)
    }

    fn two_step_log(&self) -> Option<&dyn TwoStepLog> {
        self.mmu.delivery().has_bitmaps().then_some(self)
    }

    fn detection(&self) -> Option<&dyn DetectionChoice> {
        Some(self)
    }
}

impl DirtyRings for Vm {
    fn reap_rings(&self, each: &mut dyn FnMut(SlotId, usize)) -> Result<usize, DirtyError> {
        Ok(self.mmu.reap_rings(each))
    }

    fn reset_rings(&self) -> Result<usize, DirtyError> {
        Ok(self.mmu.reset_rings())
    }
}

impl TwoStepLog for Vm {
    fn peek_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        self.mmu.peek_dirty(id, out)
    }

    fn clear_dirty(
        &self,
        id: SlotId,
        first_page: usize,
        pages: usize,
        mask: &mut [u64],
    ) -> Result<(), DirtyError> {
        self.mmu.clear_dirty(id, first_page, pages, mask)
    }
}

impl DetectionChoice for Vm {
    fn current(&self) -> Detection {
        self.mmu.detection()
    }

    fn choose(&self, detection: Detection) {
        self.mmu.set_detection(detection);
    }

    fn dirty_stats(&self) -> Vec<DirtyStats> {
        self.mmu.dirty_stats()
    }
}
