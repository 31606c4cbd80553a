//! Leaves of 1 GiB. Only memory in huge pages of that size has them.
//!
//! ```text
//! fault    the host has the 1 GiB whole: lock all of it, map it, or collapse its 2 MiB leaves
//! others   `block_cursor` locks one block. If a 1 GiB leaf maps it, that is split first, under a
//!          cursor over all of it; it cannot fail, because each such leaf has a table for that
//! unmap    of the whole 1 GiB: one leaf is removed, under a cursor over all of it
//! ```
//! A 1 GiB leaf spans 512 blocks, and so has every range lock. The locks cost a few microseconds,
//! once for 1 GiB, and the locks of one block stay what they are for all other work.

use crate::fault::ResolvedPage;
use crate::invalidate::{Counter, Invalidation, Visit};
use crate::rmap::Rmap;
use crate::{Mmu, MmuFormat};
use lacuna_addr::{Gfn, GfnRange, Level, Pfn};
use lacuna_host::Frame;
use lacuna_slots::Slot;
use lacuna_stage2::{Cursor, Leaf, MapError, Mapped};

impl<F: MmuFormat> Mmu<F> {
    /// Locks the block of `gfn`, which a slot with this reverse map has. No 1 GiB leaf maps the
    /// block then.
    #[inline]
    pub(crate) fn block_cursor(&self, rmap: &Rmap, gfn: Gfn) -> Cursor<'_, F> {
        loop {
            let cursor = self.stage2.fault_cursor(gfn);
            if rmap.gib(gfn).is_none() {
                return cursor;
            }
            drop(cursor);
            self.split_gib(rmap, gfn);
        }
    }

    /// Splits the 1 GiB leaf around `gfn`, if there is one. The caller holds no cursor.
    #[cold]
    pub(crate) fn split_gib(&self, rmap: &Rmap, gfn: Gfn) {
        let mut cursor = self.stage2.cursor(GfnRange::gib_of(gfn));
        // Another thread may have split or unmapped it before this thread had the locks.
        if rmap.gib(gfn).is_some()
            && let Some(split) = cursor.split_gib(gfn)
        {
            rmap.split_gib(gfn, split.first);
        }
    }

    /// Maps the 1 GiB around the page by one leaf with the page's rights. Returns whether one leaf
    /// maps it now. The cursor holds all of it, and no invalidation has begun or ended there since
    /// the host has reported that it has the 1 GiB whole.
    pub(crate) fn install_gib(
        &self,
        cursor: &mut Cursor<'_, F>,
        rmap: &Rmap,
        page: ResolvedPage,
    ) -> bool {
        let gfn = page.gfn;
        // Read under all range locks. If the log is turned on later, the thread that does so visits
        // each block, and splits this leaf.
        if rmap.log().is_on() || !rmap.allows_gib(gfn) {
            return false;
        }
        let first = GfnRange::gib_of(gfn).start();
        let into = gfn.get() - first.get();
        let pfn = u32::try_from(page.leaf.pfn.get() - into).expect("frame numbers have 32 bits");
        let leaf = Leaf {
            pfn: Pfn::new(pfn),
            ..page.leaf.at(Level::L1G)
        };
        match cursor.map_gib(first, leaf) {
            Ok(Mapped::New(at)) => rmap.set_gib(gfn, at),
            Ok(_) => {}
            Err(MapError::Occupied { .. }) => {
                return self.collapse_gib(cursor, rmap, first, Some(leaf));
            }
            // No table is left for a later split: the block gets its leaf.
            Err(_) => return false,
        }
        true
    }

    /// Collapses the 2 MiB leaves of each 1 GiB of `slot` in `gfns` to one leaf, where the host has
    /// the 1 GiB whole, and 2 MiB leaves map all of it.
    pub(crate) fn collapse_gibs(&self, slot: &Slot<Rmap>, gfns: GfnRange) {
        let rmap = &slot.attach;
        for first in rmap.gibs(gfns).map(GfnRange::start) {
            let whole = |frame: Frame| frame.level == Level::L1G;
            if !self
                .host
                .huge_page(slot.backing_of(first))
                .is_some_and(whole)
            {
                continue;
            }
            let mut cursor = self.stage2.cursor(GfnRange::gib_of(first));
            if !rmap.log().is_on() && rmap.allows_gib(first) {
                let _ = self.collapse_gib(&mut cursor, rmap, first, None);
            }
        }
    }

    /// Returns whether the 2 MiB leaves from `first` on are one leaf now. With `granted`, the
    /// blocks that are not mapped become parts of it.
    fn collapse_gib(
        &self,
        cursor: &mut Cursor<'_, F>,
        rmap: &Rmap,
        first: Gfn,
        granted: Option<Leaf>,
    ) -> bool {
        let Ok(Some((collapsed, table))) = cursor.collapse_gib(first, granted) else {
            return false;
        };
        rmap.set_gib(first, collapsed.at);
        table.retire(&*self.qsbr);
        // The thread that turns a log off presets D block by block. If it has not visited all
        // blocks yet, the collapse may have joined W without D, and a later visit finds no leaf.
        cursor.preset_dirty(GfnRange::gib_of(first));
        true
    }
}

impl<'m, F: MmuFormat, C: Counter> Invalidation<'m, F, C> {
    /// As [`Mmu::block_cursor`], for the unmapping of `gfns`: a 1 GiB leaf inside of them is
    /// removed as a whole.
    #[inline]
    pub(crate) fn block_cursor(&mut self, rmap: &Rmap, gfns: GfnRange, gfn: Gfn) -> Cursor<'m, F> {
        loop {
            let cursor = self.mmu.stage2.fault_cursor(gfn);
            if rmap.gib(gfn).is_none() {
                return cursor;
            }
            drop(cursor);
            let gib = GfnRange::gib_of(gfn);
            match gfns.intersect(gib) == Some(gib) {
                true => self.unmap_gib(rmap, gfn),
                false => self.mmu.split_gib(rmap, gfn),
            }
        }
    }

    #[cold]
    fn unmap_gib(&mut self, rmap: &Rmap, gfn: Gfn) {
        let mut cursor = self.mmu.stage2.cursor(GfnRange::gib_of(gfn));
        // Another thread may have split or unmapped it before this thread had the locks.
        let Some(at) = rmap.gib(gfn) else { return };
        // Begin under the same locks as the unmap, because of this race: this thread unmaps the
        // leaf and unlocks; thread B finds nothing mapped in a block of it, and no invalidation in
        // progress; B reuses the frames while a TLB still has the leaf.
        cursor.invalidate_begin();
        self.begun.gibs.push(GfnRange::gib_of(gfn));
        let mut visit = Visit {
            cursor: &mut cursor,
            rmap,
            flush: &mut self.flush,
            counter: &mut self.counter,
        };
        visit.counter.words(1);
        visit.counter.entries(1);
        self.mmu.unmap_leaf(at, gfn, &mut visit);
    }
}
