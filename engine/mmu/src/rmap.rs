//! The reverse map: from a guest frame of a slot to its leaf. Each slot has one.
//!
//! ```text
//! gibs     [ at .. ][ nothing, 2 disallowed, 1 small ]           one for each 1 GiB in the slot
//! blocks   [ nothing ][ huge, at .. ][ 3 small, in this table ][ nothing ]   one for each 2 MiB
//! ```
//! An element of `gibs` is the place of a 1 GiB leaf. While there is one, its blocks have nothing;
//! it changes only under a cursor over all of them. Other code calls `Mmu::block_cursor` first,
//! which splits the leaf. The element also counts the blocks that exclude such a leaf, so that a
//! fault does not try to map one in vain.
//!
//! An element of `blocks` has one of three states: nothing is mapped; one 2 MiB leaf, and its
//! place; some 4 KiB leaves, their number and their table. All small leaves of a block are in one
//! table, and a gfn determines the index. So the reverse map has no list of small leaves: code that
//! needs the list reads the table. A split or a collapse changes 512 leaves, and still updates one
//! element of `blocks`.
//!
//! A table stays linked while leaves are in it. Code that unlinks a table, after an unmap of the
//! whole table or a collapse, also removes its leaves from the reverse map, under the same lock. If
//! two slots meet inside a block, their leaves are in one table, and each slot counts its own.
//!
//! Elements are written only under the block's range lock, together with the leaves. The two counts
//! of a 1 GiB change under the lock of any of its blocks. `Mmu::verify` checks that they agree.
//!
//! Blocks are numbered by guest frame ([`BlockNumber`]), so the first and the last may extend
//! beyond the slot. Such a block never has a 2 MiB leaf. If guest frames and backing are aligned
//! differently, no block of the slot has one. The *disallow count* of a block contains these
//! reasons for the life of the slot. Code that needs 4 KiB leaves for a while increments the count.
//!
//! The reverse map takes 12 bytes for each block, and 12 for each 1 GiB ([`Rmap::bytes`]).

use crate::dirty::SlotLog;
use lacuna_addr::{
    BackingAddr, BackingRange, BlockNumber, Gfn, GfnRange, Level, NoRoom, PAGE_SIZE, room_for,
};
use lacuna_slots::SlotData;
use lacuna_stage2::{EntryRef, Removed, Stage2, TableFormat};
use lacuna_sync::shim::{AtomicU32, Ordering};
use std::sync::Arc;

/// Pages in a block.
pub(crate) const BLOCK: u64 = Level::L2M.pages();
/// Pages in 1 GiB.
const GIB: u64 = Level::L1G.pages();

/// The places of one slot's leaves.
pub struct Rmap {
    /// The block of the slot's first frame.
    first: BlockNumber,
    /// One element for each block with frames of the slot, from `first` on.
    blocks: Box<[Block]>,
    /// The number of the first 1 GiB of guest frames that is wholly in the slot.
    first_gib: u64,
    /// One element for each 1 GiB wholly in the slot, from `first_gib` on. Empty if guest frames
    /// and backing are aligned differently.
    gibs: Box<[Gib]>,
    /// The slot's dirty log.
    log: Arc<SlotLog>,
}

#[derive(Default)]
struct Gib {
    /// The place of its leaf. Zero if it has none.
    at: AtomicU32,
    /// The number of its blocks with a disallow count above zero.
    disallowed: AtomicU32,
    /// The number of its blocks with small leaves.
    small: AtomicU32,
}

#[derive(Default)]
struct Block {
    /// The place of the block's huge leaf, or any place in the table of its small leaves. Zero if
    /// this slot has nothing mapped in the block.
    at: AtomicU32,
    /// The number of small leaves in the block that map pages of this slot.
    small: AtomicU32,
    /// The disallow count: the number of reasons against a huge leaf. Bit 31 is [`CUT`].
    disallow: AtomicU32,
}

/// The permanent reason against a huge leaf: the slot has only a part of the block, or guest frames
/// and backing are aligned differently.
const CUT: u32 = 1 << 31;

/// The leaves in one block of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InBlock {
    /// No leaf.
    Nothing,
    /// One leaf of 2 MiB, at this place.
    Huge(EntryRef),
    /// This number of 4 KiB leaves, at least one.
    Small(u32),
}

impl SlotData for Rmap {
    type Addr = BackingAddr;
}

impl Rmap {
    /// Whether there is room for the reverse map of a slot of `bytes` bytes.
    pub(crate) fn check_room(bytes: u64) -> Result<(), NoRoom> {
        // A slot with unaligned ends may have one more block.
        room_for::<Block>(bytes.div_ceil(BLOCK * PAGE_SIZE as u64) + 1)
    }

    /// An empty map for a slot with these frames and this backing.
    pub fn new(gfns: GfnRange, backing: BackingRange) -> Self {
        Self::with_log(gfns, backing, Arc::default())
    }

    /// An empty map for a slot that keeps this log.
    pub(crate) fn with_log(gfns: GfnRange, backing: BackingRange, log: Arc<SlotLog>) -> Self {
        let first_page = backing.start().get() / PAGE_SIZE as u64;
        let alike = |size| gfns.start().get() % size == first_page % size;
        let blocks_alike = alike(BLOCK);
        let block = |number: BlockNumber| {
            let whole = gfns.intersect(number.range()) == Some(number.range());
            Block {
                disallow: AtomicU32::new(if whole && blocks_alike { 0 } else { CUT }),
                ..Block::default()
            }
        };
        let first_gib = gfns.start().get().div_ceil(GIB);
        let gibs = match alike(GIB) {
            true => (gfns.end_raw() / GIB).saturating_sub(first_gib),
            false => 0,
        };
        Self {
            first: gfns.start().block(),
            blocks: gfns.blocks().map(block).collect(),
            first_gib,
            gibs: (0..gibs).map(|_| Gib::default()).collect(),
            log,
        }
    }

    /// The slot's dirty log.
    #[inline]
    pub(crate) fn log(&self) -> &Arc<SlotLog> {
        &self.log
    }

    /// Bytes of metadata.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.blocks) + size_of_val(&*self.gibs)
    }

    /// The place of the entry for `gfn` in the block's table. The entry is a leaf, or empty. `None`
    /// if this slot has no small leaf in the block.
    #[inline]
    pub(crate) fn place(&self, gfn: Gfn) -> Option<EntryRef> {
        let block = self.block_of(gfn);
        match block.small.load(Ordering::Relaxed) {
            0 => None,
            _ => block.at().map(|at| at.beside(gfn)),
        }
    }

    /// The leaves of this slot in the block of `gfn`.
    #[inline]
    pub(crate) fn block(&self, gfn: Gfn) -> InBlock {
        let block = self.block_of(gfn);
        match block.small.load(Ordering::Relaxed) {
            0 => block.at().map_or(InBlock::Nothing, InBlock::Huge),
            count => InBlock::Small(count),
        }
    }

    /// The largest leaf that may map `gfn`. The answer is stable only while the block's range lock
    /// is held.
    #[inline]
    pub(crate) fn max_level(&self, gfn: Gfn) -> Level {
        match self.block_of(gfn).disallow.load(Ordering::Relaxed) {
            0 => Level::L2M,
            _ => Level::L4K,
        }
    }

    /// Adds a reason against a huge leaf around `gfn`. The caller holds the range lock, as for all
    /// methods below.
    pub(crate) fn disallow(&self, gfn: Gfn) {
        let count = &self.block_of(gfn).disallow;
        let was = count.load(Ordering::Relaxed);
        count.store(was + 1, Ordering::Relaxed);
        if let (0, Some(gib)) = (was, self.gib_of(gfn)) {
            gib.disallowed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Removes one reason added by [`Rmap::disallow`], if there is one. A moved slot has lost its
    /// reasons.
    pub(crate) fn allow(&self, gfn: Gfn) {
        let count = &self.block_of(gfn).disallow;
        let was = count.load(Ordering::Relaxed);
        if was & !CUT != 0 {
            count.store(was - 1, Ordering::Relaxed);
        }
        if let (1, Some(gib)) = (was, self.gib_of(gfn)) {
            gib.disallowed.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Asserts that the permanent reason ([`CUT`]) is the same here and in `fresh`, an empty map of
    /// the same slot.
    pub(crate) fn assert_disallowed_like(&self, fresh: &Self, gfn: Gfn) {
        let cut = |rmap: &Self| rmap.block_of(gfn).disallow.load(Ordering::Relaxed) & CUT;
        assert_eq!(cut(self), cut(fresh), "disallow count around gfn {gfn}");
    }

    /// A small leaf was mapped at an empty entry.
    #[inline]
    pub(crate) fn set_page(&self, gfn: Gfn, at: EntryRef) {
        let block = self.block_of(gfn);
        let count = block.small.load(Ordering::Relaxed);
        debug_assert!(count < SMALL_MAX, "gfn {gfn}: no room in its block");
        match count {
            0 => {
                debug_assert_eq!(block.at(), None, "the block of gfn {gfn}");
                block.at.store(at.to_bits(), Ordering::Relaxed);
            }
            // If the leaf were in another table, an invalidation would not find it, and its frame
            // would be reused while the leaf maps it.
            _ => assert_eq!(
                block.at().map(|place| place.beside(gfn)),
                Some(at),
                "gfn {gfn}: another table"
            ),
        }
        self.set_small(gfn, count + 1);
    }

    /// A huge leaf was mapped in an empty block.
    pub(crate) fn set_huge(&self, gfn: Gfn, at: EntryRef) {
        debug_assert_eq!(self.block(gfn), InBlock::Nothing, "the block of gfn {gfn}");
        self.set_block(gfn, Some(at), 0);
    }

    /// A leaf was removed.
    #[inline]
    pub(crate) fn clear(&self, removed: &Removed) {
        let Removed { gfn, at, leaf } = *removed;
        if leaf.level == Level::L1G {
            debug_assert_eq!(self.gib(gfn), Some(at));
            return self.store_gib(gfn, 0);
        }
        let block = self.block_of(gfn);
        if leaf.level == Level::L4K {
            debug_assert_eq!(self.place(gfn), Some(at), "gfn {gfn}: another table");
            match block.small.load(Ordering::Relaxed) {
                1 => self.set_block(gfn, None, 0),
                count => self.set_small(gfn, count - 1),
            }
        } else {
            debug_assert_eq!(self.block(gfn), InBlock::Huge(at));
            self.set_block(gfn, None, 0);
        }
    }

    /// The huge leaf around `gfn` was split; `beside` is the place of one of the small leaves.
    pub(crate) fn split(&self, gfn: Gfn, beside: EntryRef) {
        debug_assert!(
            matches!(self.block(gfn), InBlock::Huge(_)),
            "the block of gfn {gfn}"
        );
        self.set_block(gfn, Some(beside), SMALL_MAX);
    }

    /// The small leaves around `gfn` were collapsed to a huge one, at `at`.
    pub(crate) fn collapse(&self, gfn: Gfn, at: EntryRef) {
        debug_assert!(
            !matches!(self.block(gfn), InBlock::Huge(_)),
            "the block of gfn {gfn}"
        );
        self.set_block(gfn, Some(at), 0);
    }

    /// Calls `leaf` for each leaf that maps a frame of `part`, with the leaf's place and the first
    /// frame of `part` that it maps. `leaf` may remove the leaf. `part` is inside one block.
    /// Returns the number of table entries read.
    #[inline]
    pub(crate) fn leaves<F: TableFormat>(
        &self,
        stage2: &Stage2<F>,
        part: GfnRange,
        mut leaf: impl FnMut(EntryRef, Gfn),
    ) -> u64 {
        let first = part.start();
        let mut left = match self.block(first) {
            InBlock::Nothing => return 0,
            InBlock::Huge(at) => {
                leaf(at, first);
                return 1;
            }
            InBlock::Small(count) => count,
        };
        let table = self.place(first).expect("the block has small leaves");
        let mut entries = 0;
        for gfn in part.iter() {
            entries += 1;
            let at = table.beside(gfn);
            if stage2.has_leaf(at) {
                leaf(at, gfn);
                left -= 1;
                if left == 0 {
                    break;
                }
            }
        }
        entries
    }

    #[inline]
    fn block_of(&self, gfn: Gfn) -> &Block {
        &self.blocks[gfn.block().index_from(self.first)]
    }

    #[inline]
    fn set_block(&self, gfn: Gfn, at: Option<EntryRef>, small: u32) {
        let bits = at.map_or(0, EntryRef::to_bits);
        self.block_of(gfn).at.store(bits, Ordering::Relaxed);
        self.set_small(gfn, small);
    }

    #[inline]
    fn set_small(&self, gfn: Gfn, count: u32) {
        let small = &self.block_of(gfn).small;
        let was = small.load(Ordering::Relaxed);
        small.store(count, Ordering::Relaxed);
        if (was == 0) != (count == 0)
            && let Some(gib) = self.gib_of(gfn)
        {
            match count {
                0 => gib.small.fetch_sub(1, Ordering::Relaxed),
                _ => gib.small.fetch_add(1, Ordering::Relaxed),
            };
        }
    }
}

impl Block {
    #[inline]
    fn at(&self) -> Option<EntryRef> {
        EntryRef::from_bits(self.at.load(Ordering::Relaxed))
    }
}

impl Rmap {
    /// The place of the 1 GiB leaf that maps `gfn`. It is stable while a range lock of that 1 GiB
    /// is held.
    #[inline]
    pub(crate) fn gib(&self, gfn: Gfn) -> Option<EntryRef> {
        EntryRef::from_bits(self.gib_of(gfn)?.at.load(Ordering::Relaxed))
    }

    /// Each 1 GiB of the slot that may have a leaf, and that `gfns` overlaps.
    pub(crate) fn gibs(&self, gfns: GfnRange) -> impl Iterator<Item = GfnRange> {
        let numbers = self.first_gib..self.first_gib + self.gibs.len() as u64;
        let gib = |number| Some(GfnRange::gib_of(Gfn::new(number * GIB)?));
        let all = numbers.filter_map(gib);
        all.filter(move |gib| gib.intersect(gfns).is_some())
    }

    /// Whether a 1 GiB leaf may map `gfn` now. The answer is stable only while the caller holds a
    /// cursor over the 1 GiB.
    pub(crate) fn allows_gib(&self, gfn: Gfn) -> bool {
        let gib = self.gib_of(gfn);
        gib.is_some_and(|gib| gib.disallowed.load(Ordering::Relaxed) == 0)
    }

    /// Whether it is useful to try to map `gfn` by a 1 GiB leaf: it is allowed, and no small leaf
    /// excludes it. The answer is stable as for [`Rmap::allows_gib`].
    pub(crate) fn could_have_gib(&self, gfn: Gfn) -> bool {
        let gib = self.gib_of(gfn);
        self.allows_gib(gfn) && gib.is_some_and(|gib| gib.small.load(Ordering::Relaxed) == 0)
    }

    /// Asserts that the counts of `gib` agree with its blocks. The caller holds a cursor over it,
    /// as for all methods below.
    pub(crate) fn assert_gib_counts(&self, gib: GfnRange) {
        let counts = self.gib_of(gib.start()).expect("a 1 GiB of this slot");
        let (mut disallowed, mut small) = (0, 0);
        for block in gib.steps(Level::L2M).map(|gfn| self.block_of(gfn)) {
            disallowed += u32::from(block.disallow.load(Ordering::Relaxed) != 0);
            small += u32::from(block.small.load(Ordering::Relaxed) != 0);
        }
        let counted =
            [&counts.disallowed, &counts.small].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(counted, [disallowed, small], "{gib:?}");
    }

    /// A 1 GiB leaf was mapped, or its 2 MiB leaves were collapsed to it.
    pub(crate) fn set_gib(&self, gfn: Gfn, at: EntryRef) {
        for gfn in GfnRange::gib_of(gfn).steps(Level::L2M) {
            debug_assert!(
                !matches!(self.block(gfn), InBlock::Small(_)),
                "gfn {gfn}: small leaves in a 1 GiB leaf"
            );
            self.set_block(gfn, None, 0);
        }
        self.store_gib(gfn, at.to_bits());
    }

    /// The 1 GiB leaf around `gfn` was split; `beside` is the place of one of the 2 MiB leaves.
    pub(crate) fn split_gib(&self, gfn: Gfn, beside: EntryRef) {
        for gfn in GfnRange::gib_of(gfn).steps(Level::L2M) {
            self.set_huge(gfn, beside.beside_block(gfn));
        }
        self.store_gib(gfn, 0);
    }

    fn store_gib(&self, gfn: Gfn, bits: u32) {
        let gib = self.gib_of(gfn).expect("a 1 GiB of this slot");
        gib.at.store(bits, Ordering::Relaxed);
    }

    #[inline]
    fn gib_of(&self, gfn: Gfn) -> Option<&Gib> {
        let index = (gfn.get() / GIB).wrapping_sub(self.first_gib);
        self.gibs.get(index as usize)
    }
}

const SMALL_MAX: u32 = BLOCK as u32;

/// Cuts `range` at the boundaries of blocks. Ascending.
pub(crate) fn parts(range: GfnRange) -> impl Iterator<Item = GfnRange> {
    range.blocks().map(move |block| {
        let part = block.range().intersect(range);
        part.expect("a block of the range")
    })
}
