//! Where huge leaves are not wanted for a while, and when they are again.

use crate::rmap::parts;
use crate::{InBlock, Mmu, Rmap};
use lacuna_addr::{Gfn, GfnRange, Level};
use lacuna_stage2::{Cursor, Exhausted};

impl Mmu {
    /// The largest leaf that the slots allow around `gfn`; `None` where there is no slot.
    pub fn most(&self, gfn: Gfn) -> Option<Level> {
        let slots = self.slots.read();
        slots.find(gfn).map(|slot| slot.attach.most(gfn))
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
        self.each_block(gfns, |cursor, rmap, gfn| {
            result = result.and_then(|()| self.split(cursor, rmap, gfn));
            if result.is_ok() {
                rmap.disallow(gfn);
                done += 1;
            }
        });
        if result.is_err() {
            let mut undone = 0..done;
            self.each_block(gfns, |_, rmap, gfn| {
                if undone.next().is_some() {
                    rmap.allow(gfn);
                }
            });
        }
        result
    }

    /// One reason less against huge leaves around `gfns`. Blocks that are mapped whole by small
    /// leaves, as one huge leaf would map them, get that in place; others on a later fault, if the
    /// host has them whole.
    ///
    /// # Panics
    /// When they were not disallowed.
    pub fn allow_huge(&self, gfns: GfnRange) {
        const FULL: InBlock = InBlock::Small(Level::L2M.pages() as u32);
        let _no_change = self.lock_layout();
        self.each_block(gfns, |cursor, rmap, gfn| {
            rmap.allow(gfn);
            if rmap.most(gfn) == Level::L2M
                && !rmap.log().is_on()
                && rmap.block(gfn) == FULL
                && let Ok(Some((collapsed, table))) = cursor.collapse(gfn)
            {
                rmap.collapse(gfn, collapsed.at);
                table.retire(&*self.quiescence);
            }
        });
    }

    /// Calls `visit` with a frame of each block of each slot that has frames in `gfns`, under its
    /// stripe.
    fn each_block(&self, gfns: GfnRange, mut visit: impl FnMut(&mut Cursor<'_>, &Rmap, Gfn)) {
        for slot in self.slots.read().iter() {
            for part in slot.gfns.intersect(gfns).into_iter().flat_map(parts) {
                let mut cursor = self.stage2.fault_cursor(part.start());
                visit(&mut cursor, &slot.attach, part.start());
            }
        }
    }
}
