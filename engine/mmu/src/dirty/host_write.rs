//! Writes past the TLBs: by devices, by loaders, and to the words of asynchronous faults.
//!
//! ```text
//! writer                                 thread that turns the log on
//! writers += 1; fence                    on = true; fence
//! on? then mark after the write,         wait until writers == 0: for writers that have not
//!   and writers -= 1 at once               seen it
//! write; mark, or writers -= 1           return: the copy that follows has what they wrote
//! ```
//! A writer keeps the slot that it has found. So its mark goes to the log of the written pages,
//! even if the slot moves meanwhile, because a moving slot keeps its log. If a slot is deleted and
//! made again over the same backing, it has another log. The VMM must ensure that no write is in
//! progress meanwhile.

use super::{Count, DirtyError};
use crate::{Mmu, MmuFormat, Rmap, VcpuMmu};
use lacuna_addr::Gfn;
use lacuna_slots::Slot;
use lacuna_sync::shim::{Ordering, fence};
use std::sync::Arc;

/// A write to one page of a slot, from before its first byte to after its last.
#[must_use = "the page is marked only when the write is reported as done"]
pub struct Writing {
    /// The slot as it was when the write began.
    slot: Arc<Slot<Rmap>>,
    /// The written page.
    gfn: Gfn,
    /// Whether the slot logged when the write began. Then the end of the write marks the page.
    logs: bool,
}

impl<F: MmuFormat> Mmu<F> {
    /// Begins a host write to the page at `gfn`, in `slot`. [`Writing::done`] ends the write.
    ///
    /// # Errors
    /// [`DirtyError::NoBitmap`]: the slot logs only into rings, and a host write has no vCPU's
    /// ring.
    pub fn host_write(&self, slot: &Arc<Slot<Rmap>>, gfn: Gfn) -> Result<Writing, DirtyError> {
        let writing = Writing::begin(slot, gfn);
        match writing.logs && !self.dirty.has_bitmaps() {
            true => Err(DirtyError::NoBitmap),
            false => Ok(writing),
        }
    }

    /// Begins a vCPU's write past its TLB. [`Writing::done_by`] ends the write.
    pub fn vcpu_write(&self, slot: &Arc<Slot<Rmap>>, gfn: Gfn) -> Writing {
        Writing::begin(slot, gfn)
    }
}

impl Writing {
    fn begin(slot: &Arc<Slot<Rmap>>, gfn: Gfn) -> Self {
        let log = slot.attach.log();
        log.writers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let logs = log.is_on();
        // This write will mark its page, so the start of the log need not wait for the write. If
        // such writes were counted, a steady stream of them could keep the count above zero for
        // ever.
        if logs {
            log.writers.fetch_sub(1, Ordering::Release);
        }
        Self {
            slot: Arc::clone(slot),
            gfn,
            logs,
        }
    }

    /// The write is complete.
    pub fn done(self) {
        if self.logs {
            self.slot.attach.log().mark(self.slot.page(self.gfn));
        }
    }

    /// The write is complete; this vCPU made it.
    pub fn done_by(self, vcpu: &mut VcpuMmu) {
        if self.logs {
            vcpu.marker.mark(&self.slot, self.gfn, Count::Fault);
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if !self.logs {
            let log = self.slot.attach.log();
            log.writers.fetch_sub(1, Ordering::Release);
        }
    }
}
