//! Turning a slot's log on and off, and a VM's way to notice writes. Nothing is unmapped for it.
//!
//! ```text
//! on     the slot says so; block by block: W goes, or D; one shoot-down
//!        who maps a page looks at the slot under the same stripe: before the visit, its leaf is
//!        found by the visit; after it, it marks
//! off    the slot says so; block by block: D is preset, and 512 leaves are one again; no TLB is
//!        wrong, only the tables wait
//! ```

use crate::dirty::{Delivery, Detection, DirtyError, DirtyStats, HugeLeaves, Initially, Logging};
use crate::rmap::{Rmap, parts};
use crate::{InBlock, Mmu, Recovery, Shape};
use lacuna_addr::{Gfn, GfnRange, HvaRange, Level};
use lacuna_slots::{Slot, SlotId};
use lacuna_stage2::{Cursor, Flush, Removed, Shootdown};
use lacuna_sync::shim::{Ordering, fence};

impl Mmu {
    /// Where marks go, for the VM's whole life: before its first vCPU ([`Mmu::faulter`]) and its
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
    /// will be reported (on), or no longer costs anything (off). Not for a vCPU's own thread: it
    /// waits for all vCPUs. Without effect on a slot of which that is true already.
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

    /// Ends the logging of slot `id`, with huge leaves to come back in one of the ways to do it.
    /// [`Recovery::InPlace`] is [`Mmu::set_logging`].
    ///
    /// # Errors
    /// No such slot.
    pub fn end_logging_as(&self, id: SlotId, recovery: Recovery) -> Result<(), DirtyError> {
        if recovery == Recovery::InPlace {
            return self.set_logging(id, Logging::Off);
        }
        let _change = self.lock_layout();
        let slot = self.slot(id)?;
        if slot.attach.log().is_on() {
            slot.attach.log().turn_off();
            self.drop_leaves(&slot);
        }
        Ok(())
    }

    fn drop_leaves(&self, slot: &Slot<Rmap>) {
        let step: u64 = std::env::var("DROP").map_or(32, |v| v.parse().unwrap());
        let all = slot.hvas;
        for first in (0..all.pages()).step_by((step * Level::L2M.pages()) as usize) {
            let pages = (all.pages() - first).min(step * Level::L2M.pages());
            let start = all.start().checked_add_pages(first).expect("inside");
            let range = HvaRange::new(start, pages).expect("a part of a range");
            self.begin_invalidation(Shape::PerLevel, &[range]).finish();
        }
    }

    fn log_on(
        &self,
        slot: &Slot<Rmap>,
        initially: Initially,
        huge: HugeLeaves,
    ) -> Result<(), DirtyError> {
        let log = slot.attach.log();
        let bitmap = self
            .dirty
            .has_bitmaps()
            .then(|| log.clean_bitmap(slot.gfns.pages() as usize));
        if initially == Initially::AllSet {
            bitmap.ok_or(DirtyError::NoBitmap)?.set_all();
        }
        log.turn_on(huge);
        // Against the one in `wrote`: a host write either sees this, or is seen by whoever copies
        // the slot when this call has returned.
        fence(Ordering::SeqCst);
        if initially == Initially::Clean {
            self.arm_all(slot);
        }
        Ok(())
    }

    fn log_off(&self, slot: &Slot<Rmap>) {
        const FULL: InBlock = InBlock::Small(Level::L2M.pages() as u32);
        let rmap = &slot.attach;
        rmap.log().turn_off();
        let mut flush = Flush::none(&self.stage2);
        for part in parts(slot.gfns) {
            let gfn = part.start();
            let mut cursor = self.stage2.fault_cursor(gfn);
            if rmap.block(gfn) == InBlock::Nothing {
                continue;
            }
            cursor.preset_dirty(part);
            if rmap.most(gfn) == Level::L2M
                && rmap.block(gfn) == FULL
                && let Ok(Some((collapsed, table))) = cursor.collapse(gfn)
            {
                rmap.collapse(gfn, collapsed.at);
                flush.join(table);
            }
        }
        flush.retire(&*self.quiescence);
    }

    /// Arms all of a slot, and waits.
    fn arm_all(&self, slot: &Slot<Rmap>) {
        let mut flush = Flush::none(&self.stage2);
        for part in parts(slot.gfns) {
            self.arm(&slot.attach, part, [part], &mut flush);
        }
        flush.finish(&*self.quiescence);
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
        for run in runs {
            flush.join(self.arm_run(&mut cursor, run));
        }
    }

    fn arm_run<'s>(&self, cursor: &mut Cursor<'s>, run: GfnRange) -> Flush<'s> {
        let told = |was: Removed| {
            if was.leaf.dirty {
                self.host.mark_dirty(was.leaf.pfn, was.leaf.level);
            }
        };
        match self.dirty.detection() {
            Detection::WriteProtect => cursor.protect(run, told),
            Detection::Pml => cursor.clear_dirty(run, told),
        }
    }

    /// Every vCPU that runs guest code leaves it, and flushes its log on the way.
    pub(crate) fn kick(&self) {
        let epoch = self.quiescence.request();
        self.quiescence.wait(epoch);
    }

    /// Whether the host may write to `gfn` on its own.
    ///
    /// # Errors
    /// [`DirtyError::NoBitmap`]: the slot logs, and there is nowhere to say that it was not a vCPU.
    pub fn may_write(&self, gfn: Gfn) -> Result<(), DirtyError> {
        let slots = self.slots.read();
        let logs = slots
            .find(gfn)
            .is_some_and(|slot| slot.attach.log().is_on());
        if logs && !self.dirty.has_bitmaps() {
            return Err(DirtyError::NoBitmap);
        }
        Ok(())
    }

    /// The host has written to `gfn`, past the vCPUs. After the write, never before.
    pub fn wrote(&self, gfn: Gfn) {
        fence(Ordering::SeqCst);
        if let Some(slot) = self.slots.read().find(gfn)
            && slot.attach.log().is_on()
        {
            slot.attach.log().mark(slot.page(gfn));
        }
    }
}
