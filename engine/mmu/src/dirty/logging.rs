//! Turns a slot's log on and off, and switches how a VM detects writes. Neither unmaps a page.
//!
//! ```text
//! on     set the slot's state to on; block by block clear W or D; one shoot-down. A 1 GiB leaf is
//!        split to 2 MiB leaves there
//!        a thread that maps a page reads the slot's state under the same range lock: if it comes
//!        before the visit, the visit finds its leaf; if it comes after, it marks the page
//! off    set the slot's state to off; kick all vCPUs and wait, so no fast page fault remains;
//!        block by block collapse 512 leaves, or preset D; TLBs stay valid, tables are retired;
//!        then collapse the 2 MiB leaves of each huge page of 1 GiB
//! ```
//! The collapse reads few of the 512 leaves. The host and the leaves' count prove that they map one
//! block of frames (`Mmu::could_be_huge`). Their rights differ only in W, because a slot is
//! unmapped when it becomes read-only or writable. The search stops at the first leaf with W, which
//! decides for the block.

use super::{Delivery, Detection, DirtyError, DirtyStats, HugeLeaves, Initially, Logging};
use crate::rmap::{Rmap, parts};
use crate::{InBlock, Mmu, MmuFormat};
use lacuna_addr::GfnRange;
use lacuna_host::Host;
use lacuna_slots::{Slot, SlotId};
use lacuna_stage2::{Flush, Leaf, Removed};
use lacuna_sync::assert_may_wait;
use lacuna_sync::shim::Ordering;
use std::thread::yield_now;

impl<F: MmuFormat> Mmu<F> {
    /// Sets where marks go, for the VM's whole life. Call it before the first vCPU
    /// ([`Mmu::vcpu_mmu`]) and the first log. The default is bitmaps.
    ///
    /// # Errors
    /// [`DirtyError::TooLate`].
    pub fn set_delivery(&self, delivery: Delivery) -> Result<(), DirtyError> {
        self.dirty.choose(delivery)
    }

    /// Where marks go.
    pub fn delivery(&self) -> Delivery {
        self.dirty.delivery()
    }

    /// How writes are detected.
    pub fn detection(&self) -> Detection {
        self.dirty.detection()
    }

    /// The cost of dirty tracking for each vCPU.
    pub fn dirty_stats(&self) -> Vec<DirtyStats> {
        self.dirty.stats()
    }

    /// Sets how writes are detected, also in slots that log already. With [`Detection::Pml`] every
    /// vCPU logs the pages for which it sets D, in all slots; in slots that do not log, D is
    /// never missing. No thread calls this while its vCPU is in the guest: it waits for all vCPUs.
    pub fn set_detection(&self, detection: Detection) {
        let _change = self.lock_layout();
        if detection == self.dirty.detection() {
            return;
        }
        match detection {
            Detection::Pml => {
                self.dirty.vcpus_log.store(true, Ordering::SeqCst);
                // Before the first D is cleared, every walk must log. The kick prevents this race:
                // a vCPU begins a walk without logging; this thread clears a D; the walk sets it
                // unrecorded.
                self.kick();
                self.dirty.set_detection(detection);
            }
            Detection::WriteProtect => {
                self.dirty.set_detection(detection);
                for slot in self.slots.snapshot().iter() {
                    if slot.attach.log().is_on() {
                        self.rearm_all(slot);
                    }
                }
                // Every leaf with W has D now.
                self.dirty.vcpus_log.store(false, Ordering::SeqCst);
                self.kick();
            }
        }
    }

    /// Turns the log of slot `id` on or off. After it returns, writes are logged (on), or are no
    /// longer logged (off). If the slot logs already, `On` changes nothing, not even with other
    /// settings. After `Off`, a write-protected page in an uncollapsed block costs one more fault
    /// at its next write. No thread calls this while its vCPU is in the guest: it waits for all
    /// vCPUs.
    ///
    /// # Errors
    /// There is no such slot; or all pages should count as written, but there is no bitmap.
    pub fn set_logging(&self, id: SlotId, logging: Logging) -> Result<(), DirtyError> {
        let _change = self.lock_layout();
        let slot = self.slot(id)?;
        match (logging, slot.attach.log().is_on()) {
            (Logging::On { initially, huge }, false) => self.log_on(&slot, initially, huge),
            (Logging::Off, true) => {
                self.log_off(&slot);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn log_on(
        &self,
        slot: &Slot<Rmap>,
        initially: Initially,
        huge: HugeLeaves,
    ) -> Result<(), DirtyError> {
        let log = slot.attach.log();
        self.dirty.settled_delivery();
        let bitmap = self
            .dirty
            .has_bitmaps()
            .then(|| log.clean_bitmap(slot.gfns.pages() as usize));
        if initially == Initially::AllSet {
            bitmap.ok_or(DirtyError::NoBitmap)?.set_all();
        }
        log.turn_on(huge);
        log.wait_for_writers();
        if initially == Initially::Clean {
            self.rearm_all(slot);
        }
        Ok(())
    }

    fn log_off(&self, slot: &Slot<Rmap>) {
        let rmap = &slot.attach;
        rmap.log().turn_off();
        // The kick prevents this race: a vCPU reads that the slot logs; this thread turns the log
        // off and looks for W in a block; the vCPU sets W there by a fast page fault. After the
        // kick, every such fault has ended, and later faults see that the log is off.
        self.kick();
        // If vCPUs do not log, every leaf with W has D already. So has a 1 GiB leaf that a fault
        // makes meanwhile (`Mmu::collapse_gib`): the reverse map has nothing in its blocks.
        let no_d = self.dirty.vcpus_log.load(Ordering::Relaxed);
        let mut flush = Flush::none(&self.stage2);
        for part in parts(slot.gfns) {
            let gfn = part.start();
            let mut cursor = self.stage2.fault_cursor(gfn);
            if let Some(first) = self.could_be_huge(slot, gfn)
                && let Ok(Some((collapsed, table))) = cursor.collapse_uniform(gfn, first)
            {
                rmap.collapse(gfn, collapsed.at);
                flush.join(table);
            } else if no_d && rmap.block(gfn) != InBlock::Nothing {
                cursor.preset_dirty(part);
            }
        }
        flush.retire(&*self.qsbr);
        self.collapse_gibs(slot, slot.gfns);
        // vCPUs have logged pages of this slot until the pages had D again. Flush their logs now,
        // while the slot does not log: otherwise they would mark these pages in its next log.
        self.sync();
    }

    /// Re-arms all pages of a slot, and waits for the TLB flush.
    fn rearm_all(&self, slot: &Slot<Rmap>) {
        let mut flush = Flush::none(&self.stage2);
        for part in parts(slot.gfns) {
            self.rearm_runs(&slot.attach, part, [part], &mut flush);
        }
        flush.finish(&*self.qsbr);
    }

    /// Re-arms the pages of `runs`, in `part` of one block: after `flush`, their next writes are
    /// detected.
    pub(crate) fn rearm_runs<'s>(
        &'s self,
        rmap: &Rmap,
        part: GfnRange,
        runs: impl IntoIterator<Item = GfnRange>,
        flush: &mut Flush<'s>,
    ) {
        let mut cursor = self.block_cursor(rmap, part.start());
        // Reclaim may have unmapped a page here and unlocked before it waits for its shoot-down.
        // The page then has no W or D to clear, but a TLB may still allow writes.
        flush.join(cursor.unsettled());
        if rmap.block(part.start()) == InBlock::Nothing {
            return;
        }
        if rmap.log().huge() == HugeLeaves::Eager {
            // If no table is free, the leaf stays huge, and the first write splits it.
            let _ = self.split(&mut cursor, rmap, part.start());
        }
        let mut dirty = Unreported::new(&self.host);
        let taken = |was: Removed| {
            if was.leaf.dirty {
                dirty.add(was.leaf);
            }
        };
        flush.join(match self.dirty.detection() {
            Detection::WriteProtect => cursor.protect(runs, taken),
            Detection::Pml => cursor.clear_dirty(runs, taken),
        });
        dirty.report();
    }

    /// Kicks all vCPUs, and waits until each has left guest code once and so flushed its log.
    pub(crate) fn kick(&self) {
        assert_may_wait();
        let kick = self.qsbr.kick_all();
        while !self.qsbr.all_left(&kick) {
            yield_now();
        }
    }
}

/// The capacity of an [`Unreported`].
const REPORTED_AT_ONCE: usize = 32;

/// Unreported leaves that have lost D. They are reported in groups: the descriptors of their frames
/// may be anywhere in memory, so each is prefetched while the next entries are exchanged.
struct Unreported<'h> {
    host: &'h Host,
    /// The first `count` are not reported yet.
    leaves: [Option<Leaf>; REPORTED_AT_ONCE],
    count: usize,
}

impl<'h> Unreported<'h> {
    fn new(host: &'h Host) -> Self {
        Self {
            host,
            leaves: [None; REPORTED_AT_ONCE],
            count: 0,
        }
    }

    #[inline]
    fn add(&mut self, leaf: Leaf) {
        if self.count == REPORTED_AT_ONCE {
            self.report();
        }
        self.host.prefetch(leaf.pfn);
        self.leaves[self.count] = Some(leaf);
        self.count += 1;
    }

    /// Call this while the range lock is held: then the host has D before the next holder of the
    /// lock can find it cleared.
    fn report(&mut self) {
        for leaf in self.leaves[..self.count].iter().flatten() {
            self.host.mark_dirty(leaf.pfn, leaf.level);
        }
        self.count = 0;
    }
}
