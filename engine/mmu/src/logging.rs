//! Turning a slot's log on and off, and a VM's way to notice writes. Nothing is unmapped for it.
//!
//! ```text
//! on     the slot says so; block by block: W goes, or D; one shoot-down
//!        who maps a page looks at the slot under the same lock: before the visit, its leaf is
//!        found by the visit; after it, it marks
//! off    the slot says so; all vCPUs leave once, and nobody repairs pages any more; block by
//!        block: 512 leaves are one again, or D is preset; no TLB is wrong, only the tables wait
//! ```
//! Of the 512 leaves hardly any is looked at. That they map one block of frames, the host and their
//! count say (`Mmu::could_be_huge`); what they allow differs in W alone, since a slot that becomes
//! read-only, or writable, is unmapped for it; and the first that has W decides about the block.

use crate::dirty::{Delivery, Detection, DirtyError, DirtyStats, HugeLeaves, Initially, Logging};
use crate::rmap::{Rmap, parts};
use crate::{InBlock, Mmu};
use lacuna_addr::GfnRange;
use lacuna_host::Host;
use lacuna_slots::{Slot, SlotId};
use lacuna_stage2::{Flush, Leaf, Removed};
use lacuna_sync::shim::Ordering;
use std::thread::yield_now;

impl Mmu {
    /// Where marks go, for the VM's whole life: before its first vCPU ([`Mmu::vcpu_mmu`]) and its
    /// first log. Bitmaps unless this is called.
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

    /// How writes are noticed.
    pub fn detection(&self) -> Detection {
        self.dirty.detection()
    }

    /// What it has cost each vCPU.
    pub fn dirty_stats(&self) -> Vec<DirtyStats> {
        self.dirty.stats()
    }

    /// From here on, how writes are noticed, in slots that log already too. With
    /// [`Detection::Pml`] every vCPU logs what it makes dirty, whether a slot wants to know or not:
    /// in slots that do not, no D is ever missing. Not for a vCPU's own thread: it waits for all
    /// vCPUs.
    pub fn set_detection(&self, detection: Detection) {
        let _change = self.lock_layout();
        if detection == self.dirty.detection() {
            return;
        }
        match detection {
            Detection::Pml => {
                self.dirty.vcpus_log.store(true, Ordering::SeqCst);
                // Before the first D goes, every walk logs.
                self.kick();
                self.dirty.set_detection(detection);
            }
            Detection::WriteProtect => {
                self.dirty.set_detection(detection);
                for slot in self.slots.snapshot().iter() {
                    if slot.attach.log().is_on() {
                        self.arm_all(slot);
                    }
                }
                // No leaf lacks D any more.
                self.dirty.vcpus_log.store(false, Ordering::SeqCst);
                self.kick();
            }
        }
    }

    /// Whether slot `id` logs which of its pages are written. On return, whatever is written later
    /// will be reported (on), or is logged no longer (off). What write protection has armed and is
    /// in no huge leaf costs one fault more. Not for a vCPU's own thread: it waits for all vCPUs.
    /// Without effect on a slot of which that is true already.
    ///
    /// # Errors
    /// No such slot; or all is to count as written and there is no bitmap.
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
            self.arm_all(slot);
        }
        Ok(())
    }

    fn log_off(&self, slot: &Slot<Rmap>) {
        let rmap = &slot.attach;
        rmap.log().turn_off();
        // Whoever is about to repair a page because the slot logged.
        self.kick();
        // Else every leaf that has W has D already.
        let no_d = self.dirty.vcpus_log.load(Ordering::Relaxed);
        let mut flush = Flush::none(&self.stage2);
        for part in parts(slot.gfns) {
            let gfn = part.start();
            let mut cursor = self.stage2.fault_cursor(gfn);
            if let Some(first) = self.could_be_huge(slot, gfn)
                && let Ok(Some((collapsed, table))) = cursor.collapse_unrepaired(gfn, first)
            {
                rmap.collapse(gfn, collapsed.at);
                flush.join(table);
            } else if no_d && rmap.block(gfn) != InBlock::Nothing {
                cursor.preset_dirty(part);
            }
        }
        flush.retire(&*self.qsbr);
        // Pages were logged until their D was there again: nobody shall find them later.
        self.sync();
    }

    /// Arms all of a slot, and waits.
    fn arm_all(&self, slot: &Slot<Rmap>) {
        let mut flush = Flush::none(&self.stage2);
        for part in parts(slot.gfns) {
            self.arm(&slot.attach, part, [part], &mut flush);
        }
        flush.finish(&*self.qsbr);
    }

    /// From the flush on, the next write to each of `runs`, which lie in `part` of one block, is
    /// noticed.
    pub(crate) fn arm<'s>(
        &'s self,
        rmap: &Rmap,
        part: GfnRange,
        runs: impl IntoIterator<Item = GfnRange>,
        flush: &mut Flush<'s>,
    ) {
        let mut cursor = self.stage2.fault_cursor(part.start());
        // A TLB may hold what somebody has removed and not waited for.
        flush.join(cursor.unsettled());
        if rmap.block(part.start()) == InBlock::Nothing {
            return;
        }
        if rmap.log().huge() == HugeLeaves::Eager {
            // Without a table it stays huge, and is split by the first write.
            let _ = self.split(&mut cursor, rmap, part.start());
        }
        let mut dirty = Told::new(&self.host);
        let taken = |was: Removed| {
            if was.leaf.dirty {
                dirty.add(was.leaf);
            }
        };
        flush.join(match self.dirty.detection() {
            Detection::WriteProtect => cursor.protect(runs, taken),
            Detection::Pml => cursor.clear_dirty(runs, taken),
        });
        dirty.tell();
    }

    /// Every vCPU that runs guest code leaves it, and flushes its log on the way.
    pub(crate) fn kick(&self) {
        let kick = self.qsbr.kick_all();
        while !self.qsbr.all_left(&kick) {
            yield_now();
        }
    }
}

/// Of a [`Told`].
const TOLD_AT_ONCE: usize = 32;

/// Leaves whose D was taken, told to the host some at a time. Their frames' descriptors may be
/// anywhere in memory: each is prefetched while the next entries are exchanged.
struct Told<'h> {
    host: &'h Host,
    leaves: [Option<Leaf>; TOLD_AT_ONCE],
    count: usize,
}

impl<'h> Told<'h> {
    fn new(host: &'h Host) -> Self {
        Self {
            host,
            leaves: [None; TOLD_AT_ONCE],
            count: 0,
        }
    }

    #[inline]
    fn add(&mut self, leaf: Leaf) {
        if self.count == TOLD_AT_ONCE {
            self.tell();
        }
        self.host.prefetch(leaf.pfn);
        self.leaves[self.count] = Some(leaf);
        self.count += 1;
    }

    /// The range lock is still held: before anybody can find D gone, the host knows.
    fn tell(&mut self) {
        for leaf in self.leaves[..self.count].iter().flatten() {
            self.host.mark_dirty(leaf.pfn, leaf.level);
        }
        self.count = 0;
    }
}
