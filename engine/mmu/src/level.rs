//! Where huge leaves are not wanted for a while, and when they are again.

use crate::rmap::parts;
use crate::{InBlock, Mmu, Rmap};
use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_slots::Slot;
use lacuna_stage2::{Cursor, Exhausted};

impl Mmu {
    /// The largest leaf that the slots allow around `gfn`; `None` where there is no slot.
    pub fn max_level(&self, gfn: Gfn) -> Option<Level> {
        let slots = self.slots.read();
        slots.find(gfn).map(|slot| slot.attach.max_level(gfn))
    }

    /// From here on every page of `gfns`, and of the blocks that it cuts, has a leaf of its own if
    /// it is mapped: huge leaves are split in place, and none is made until [`Mmu::allow_huge`] is
    /// called as often as this. A slot that goes, moves or changes its flags takes its counts with
    /// it.
    ///
    /// # Errors
    /// [`Exhausted`]: nothing is disallowed then, but some leaves may have been split.
    pub fn disallow_huge(&self, gfns: GfnRange) -> Result<(), Exhausted> {
        let _no_change = self.lock_layout();
        let mut done = 0;
        let mut result = Ok(());
        self.each_block(gfns, |cursor, slot, gfn| {
            result = result.and_then(|()| self.split(cursor, &slot.attach, gfn));
            if result.is_ok() {
                slot.attach.disallow(gfn);
                done += 1;
            }
        });
        if result.is_err() {
            let mut undone = 0..done;
            self.each_block(gfns, |_, slot, gfn| {
                if undone.next().is_some() {
                    slot.attach.allow(gfn);
                }
            });
        }
        result
    }

    /// One reason less against huge leaves around `gfns`. Blocks that the host has whole and that
    /// are mapped whole by small leaves get a huge one in place; others on a later fault, if the
    /// host has them whole then. A block that the host has by pages may be contiguous by chance:
    /// reclaim would split its huge leaf again, page by page.
    ///
    /// # Panics
    /// When they were not disallowed.
    pub fn allow_huge(&self, gfns: GfnRange) {
        let _no_change = self.lock_layout();
        self.each_block(gfns, |cursor, slot, gfn| {
            let rmap = &slot.attach;
            rmap.allow(gfn);
            if !rmap.log().is_on()
                && self.could_be_huge(slot, gfn).is_some()
                && let Ok(Some((collapsed, table))) = cursor.collapse(gfn)
            {
                rmap.collapse(gfn, collapsed.at);
                table.retire(&*self.qsbr);
            }
        });
    }

    /// The first frame of the block around `gfn`, if small leaves map all of it, one huge leaf may,
    /// and the host has it whole. The small leaves map the frames from that one on: the host had
    /// every page somewhere else unmapped before it put them there, and no fault with an older
    /// answer is admitted after that.
    ///
    /// Under its range lock: should the host split it meanwhile, it says so next
    /// ([`lacuna_host::MmuNotifier::split_huge`]), and that finds what is made of this answer.
    pub(crate) fn could_be_huge(&self, slot: &Slot<Rmap>, gfn: Gfn) -> Option<Pfn> {
        const FULL: InBlock = InBlock::Small(Level::L2M.pages() as u32);
        let rmap = &slot.attach;
        (rmap.max_level(gfn) == Level::L2M && rmap.block(gfn) == FULL)
            .then(|| self.host.compound_page(slot.hva(gfn)))
            .flatten()
    }

    /// Calls `visit` with each slot that has frames in `gfns` and a frame of each block of it that
    /// they touch, under its range lock.
    fn each_block(&self, gfns: GfnRange, mut visit: impl FnMut(&mut Cursor<'_>, &Slot<Rmap>, Gfn)) {
        for slot in self.slots.read().iter() {
            for part in slot.gfns.intersect(gfns).into_iter().flat_map(parts) {
                let mut cursor = self.stage2.fault_cursor(part.start());
                visit(&mut cursor, slot, part.start());
            }
        }
    }
}
