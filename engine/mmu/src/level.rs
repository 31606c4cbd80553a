//! Forbids huge leaves in a range for a while, and allows them again.

use crate::rmap::parts;
use crate::{InBlock, Mmu, MmuFormat, Rmap};
use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_slots::Slot;
use lacuna_stage2::{Cursor, Exhausted};

impl<F: MmuFormat> Mmu<F> {
    /// The largest leaf that the slots allowed around `gfn` a moment ago; `None` if there is no
    /// slot.
    pub fn max_level(&self, gfn: Gfn) -> Option<Level> {
        let slots = self.slots.read();
        let rmap = &slots.find(gfn)?.attach;
        Some(match rmap.allows_gib(gfn) {
            true => Level::L1G,
            false => rmap.max_level(gfn),
        })
    }

    /// From now on every mapped page of `gfns`, and of the blocks that `gfns` overlaps in part, has
    /// a leaf of its own. Huge leaves are split in place, and none is made until
    /// [`Mmu::allow_huge`] was called as often as this function. A slot loses its counts when it is
    /// removed, moves or changes its flags.
    ///
    /// # Errors
    /// [`Exhausted`]: nothing is disallowed, but some leaves may have been split.
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

    /// Takes back one reason against huge leaves around `gfns`. A block gets a huge leaf in place
    /// if the host has it as a compound page and small leaves map all of it. Other blocks get one
    /// at a later fault, if they are compound pages then. The pages of a split block may be in
    /// contiguous frames by chance. Such a block gets no huge leaf, because reclaim would split it
    /// again for its pages.
    ///
    /// A block without such a reason does not change: its slot was added, was moved or changed its
    /// flags after [`Mmu::disallow_huge`].
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
        for slot in self.slots.read().iter() {
            self.collapse_gibs(slot, gfns);
        }
    }

    /// The first frame of the block around `gfn`, if small leaves map all of it, a huge leaf is
    /// allowed, and the host has the block whole. The small leaves map the frames from that one on:
    /// before the host put the pages there, it unmapped every page that was elsewhere, and later no
    /// fault with an older answer is admitted.
    ///
    /// The caller holds the range lock. If the host splits the block meanwhile, its next step is
    /// [`lacuna_host::MmuNotifier::split_huge`], which finds the leaf made from this answer.
    pub(crate) fn could_be_huge(&self, slot: &Slot<Rmap>, gfn: Gfn) -> Option<Pfn> {
        const FULL: InBlock = InBlock::Small(Level::L2M.pages() as u32);
        let rmap = &slot.attach;
        (rmap.max_level(gfn) == Level::L2M && rmap.block(gfn) == FULL)
            .then(|| self.host.huge_page(slot.backing_of(gfn)))
            .flatten()
            .map(|block| block.pfn)
    }

    /// Calls `visit` for each block of a slot that `gfns` overlaps, with the slot and a frame of
    /// the block, under the block's range lock. A 1 GiB leaf there is split first.
    fn each_block(
        &self,
        gfns: GfnRange,
        mut visit: impl FnMut(&mut Cursor<'_, F>, &Slot<Rmap>, Gfn),
    ) {
        for slot in self.slots.read().iter() {
            for part in slot.gfns.intersect(gfns).into_iter().flat_map(parts) {
                let mut cursor = self.block_cursor(&slot.attach, part.start());
                visit(&mut cursor, slot, part.start());
            }
        }
    }
}
