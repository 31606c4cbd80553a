//! Dirty tracking of a VM: the traits of `lacuna_machine`, by the calls of `lacuna_mmu`.
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
use lacuna_machine::{DetectionChoice, DirtyRings, DirtyTracking, LogReaders, TwoStepLog};
use lacuna_mmu::{Delivery, Detection, DirtyError, DirtyStats, Logging};
use lacuna_slots::{DetectedBy, SlotId};

impl Vm {
    /// Sets where writes are recorded, before the VM has vCPUs. The default is bitmaps.
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
}

impl DirtyTracking for Vm {
    fn delivery(&self) -> Delivery {
        self.mmu.delivery()
    }

    /// A vCPU that has left because of a full ring stays out until the rings are reaped and reset,
    /// even if no slot logs any more.
    fn set_logging(&self, id: SlotId, logging: Logging) -> Result<(), DirtyError> {
        self.mmu.set_logging(id, logging)
    }

    fn get_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        self.mmu.get_dirty(id, out)
    }

    fn put_back_dirty(&self, id: SlotId, dirty: &[u64]) -> Result<(), DirtyError> {
        self.mmu.put_back_dirty(id, dirty)
    }

    fn is_logging(&self, id: SlotId) -> bool {
        self.mmu.is_logging(id)
    }

    fn log_readers(&self) -> &LogReaders {
        &self.log_readers
    }

    fn dirty_rings(&self) -> Option<&dyn DirtyRings> {
        matches!(self.mmu.delivery(), Delivery::Ring { .. }).then_some(self)
    }

    fn two_step_log(&self) -> Option<&dyn TwoStepLog> {
        self.mmu.delivery().has_bitmaps().then_some(self)
    }

    fn detected_by(&self) -> DetectedBy {
        self.mmu.detection().into()
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
