//! The reverse map: from a guest frame of a slot to the leaf that maps it.
//!
//! ```text
//! blocks   [ 0 ][ leaf at .. ][ 3 small ][ 0 ]          one word a 2 MiB block
//! pages    . . . . . . . . . .[ at ][ at ][ at ]. . .   one word a page, read where leaves are
//! ```
//! A block word says that nothing is mapped, or where the 2 MiB leaf is, or how many 4 KiB leaves
//! there are; so an invalidation looks at one word for a block that is huge or empty, and at page
//! words only where small leaves are. Words are written only under the block's stripe, together
//! with the leaves, and `Mmu::verify` checks that they agree.
//!
//! Blocks are counted as the guest's frame numbers are (`gfn >> 9`), so the first and the last may
//! stick out of the slot. Such a block never has a 2 MiB leaf; nor has any block when the guest's
//! frames and the backing are not aligned alike. That is how the *disallow counts* begin; whoever
//! needs 4 KiB leaves for another reason counts them up for a while.
//!
//! It costs 4 bytes a page and 8 a block: [`Rmap::bytes`].

use crate::dirty::SlotLog;
use lacuna_addr::{Gfn, GfnRange, HvaRange, Level, PAGE_SIZE};
use lacuna_stage2::{EntryRef, Removed};
use lacuna_sync::shim::{AtomicU32, Ordering};
use std::sync::Arc;

/// Pages in a block.
pub(crate) const BLOCK: u64 = Level::L2M.pages();

/// Leaf locations of one slot, by level.
pub struct Rmap {
    gfns: GfnRange,
    pages: Box<[AtomicU32]>,
    blocks: Box<[Block]>,
    log: Arc<SlotLog>,
}

#[derive(Default)]
struct Block {
    /// A number of small leaves up to 512; or where the huge leaf is, which is more: the root is
    /// the first table, and holds none.
    word: AtomicU32,
    /// How many reasons there are against a huge leaf.
    disallow: AtomicU32,
}

/// What is mapped in one block of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InBlock {
    Nothing,
    /// One leaf of 2 MiB, here.
    Huge(EntryRef),
    /// So many leaves of 4 KiB.
    Small(u32),
}

impl Rmap {
    /// Nothing mapped, for a slot with these frames and this backing.
    pub fn new(gfns: GfnRange, hvas: HvaRange) -> Self {
        Self::with_log(gfns, hvas, Arc::default())
    }

    /// Nothing mapped, for a slot that goes on with this log.
    pub(crate) fn with_log(gfns: GfnRange, hvas: HvaRange, log: Arc<SlotLog>) -> Self {
        let first = gfns.start().block();
        let end = gfns.end_raw().div_ceil(BLOCK);
        let alike = gfns.start().get() % BLOCK == hvas.start().get() / PAGE_SIZE as u64 % BLOCK;
        let block = |number: u64| {
            let whole =
                gfns.start().get() <= number * BLOCK && (number + 1) * BLOCK <= gfns.end_raw();
            Block {
                word: AtomicU32::new(0),
                disallow: AtomicU32::new(u32::from(!(whole && alike))),
            }
        };
        Self {
            gfns,
            pages: (0..gfns.pages()).map(|_| AtomicU32::new(0)).collect(),
            blocks: (first..end).map(block).collect(),
            log,
        }
    }

    /// Which of the slot's pages are written, if somebody wants to know.
    #[inline]
    pub(crate) fn log(&self) -> &Arc<SlotLog> {
        &self.log
    }

    /// Bytes of metadata.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.pages) + size_of_val(&*self.blocks)
    }

    /// The leaf that maps the page alone.
    #[inline]
    pub(crate) fn page(&self, gfn: Gfn) -> Option<EntryRef> {
        EntryRef::from_bits(self.page_word(gfn).load(Ordering::Relaxed))
    }

    /// What is mapped in the block of `gfn`, as far as it is this slot's.
    #[inline]
    pub(crate) fn block(&self, gfn: Gfn) -> InBlock {
        match self.block_of(gfn).word.load(Ordering::Relaxed) {
            0 => InBlock::Nothing,
            count @ ..=MOST_SMALL => InBlock::Small(count),
            bits => InBlock::Huge(EntryRef::from_bits(bits).expect("a location, as it was stored")),
        }
    }

    /// The largest leaf that may map `gfn`. Good for good only under the block's stripe.
    #[inline]
    pub(crate) fn most(&self, gfn: Gfn) -> Level {
        match self.block_of(gfn).disallow.load(Ordering::Relaxed) {
            0 => Level::L2M,
            _ => Level::L4K,
        }
    }

    /// One more reason against a huge leaf around `gfn`. Under the stripe, as all below.
    pub(crate) fn disallow(&self, gfn: Gfn) {
        let count = &self.block_of(gfn).disallow;
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// One reason less.
    pub(crate) fn allow(&self, gfn: Gfn) {
        let count = &self.block_of(gfn).disallow;
        let was = count.load(Ordering::Relaxed);
        count.store(
            was.checked_sub(1).expect("it was disallowed"),
            Ordering::Relaxed,
        );
    }

    /// Asserts that the slot's place, as `fresh` has it, is among the reasons.
    pub(crate) fn assert_disallowed_like(&self, fresh: &Self, gfn: Gfn) {
        let count = |rmap: &Self| rmap.block_of(gfn).disallow.load(Ordering::Relaxed);
        assert!(
            count(self) >= count(fresh),
            "disallow count around gfn {gfn}"
        );
    }

    /// A small leaf was mapped.
    #[inline]
    pub(crate) fn set_page(&self, gfn: Gfn, at: EntryRef) {
        debug_assert_eq!(self.page(gfn), None, "gfn {gfn} has a leaf");
        self.page_word(gfn).store(at.to_bits(), Ordering::Relaxed);
        let word = &self.block_of(gfn).word;
        let count = word.load(Ordering::Relaxed);
        debug_assert!(count < MOST_SMALL, "gfn {gfn}: no room in its block");
        word.store(count + 1, Ordering::Relaxed);
    }

    /// A huge leaf was mapped where nothing was.
    pub(crate) fn set_huge(&self, gfn: Gfn, at: EntryRef) {
        debug_assert_eq!(self.block(gfn), InBlock::Nothing, "the block of gfn {gfn}");
        self.store_huge(gfn, at);
    }

    /// A leaf was removed.
    #[inline]
    pub(crate) fn clear(&self, removed: &Removed) {
        let Removed { gfn, at, leaf } = *removed;
        let word = &self.block_of(gfn).word;
        if leaf.level == Level::L4K {
            debug_assert_eq!(self.page(gfn), Some(at));
            self.page_word(gfn).store(0, Ordering::Relaxed);
            word.store(word.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
        } else {
            debug_assert_eq!(self.block(gfn), InBlock::Huge(at));
            word.store(0, Ordering::Relaxed);
        }
    }

    /// The huge leaf around `gfn` was split; `beside` is one of the small ones.
    pub(crate) fn split(&self, gfn: Gfn, beside: EntryRef) {
        debug_assert!(
            matches!(self.block(gfn), InBlock::Huge(_)),
            "the block of gfn {gfn}"
        );
        for page in block_range(gfn).iter() {
            let at = beside.beside(page);
            self.page_word(page).store(at.to_bits(), Ordering::Relaxed);
        }
        self.block_of(gfn).word.store(MOST_SMALL, Ordering::Relaxed);
    }

    /// The small leaves around `gfn` became a huge one, at `at`.
    pub(crate) fn collapse(&self, gfn: Gfn, at: EntryRef) {
        debug_assert!(
            !matches!(self.block(gfn), InBlock::Huge(_)),
            "the block of gfn {gfn}"
        );
        for page in block_range(gfn).iter() {
            self.page_word(page).store(0, Ordering::Relaxed);
        }
        self.store_huge(gfn, at);
    }

    /// Calls `leaf` with each leaf that maps a frame of `part`, which is inside one block, and with
    /// the first of those frames. `leaf` may remove it. Returns the words visited.
    #[inline]
    pub(crate) fn leaves(&self, part: GfnRange, mut leaf: impl FnMut(EntryRef, Gfn)) -> u64 {
        let mut left = match self.block(part.start()) {
            InBlock::Nothing => return 1,
            InBlock::Huge(at) => {
                leaf(at, part.start());
                return 1;
            }
            InBlock::Small(count) => count,
        };
        let mut words = 1;
        for gfn in part.iter() {
            words += 1;
            if let Some(at) = self.page(gfn) {
                leaf(at, gfn);
                left -= 1;
                if left == 0 {
                    break;
                }
            }
        }
        words
    }

    fn store_huge(&self, gfn: Gfn, at: EntryRef) {
        let bits = at.to_bits();
        assert!(bits > MOST_SMALL, "a leaf in the root table");
        self.block_of(gfn).word.store(bits, Ordering::Relaxed);
    }

    #[inline]
    fn page_word(&self, gfn: Gfn) -> &AtomicU32 {
        &self.pages[(gfn.get() - self.gfns.start().get()) as usize]
    }

    #[inline]
    fn block_of(&self, gfn: Gfn) -> &Block {
        &self.blocks[(gfn.block() - self.gfns.start().block()) as usize]
    }
}

const MOST_SMALL: u32 = BLOCK as u32;

/// The block around `gfn`.
pub(crate) fn block_range(gfn: Gfn) -> GfnRange {
    let first = Gfn::new(gfn.get() & !(BLOCK - 1)).expect("below gfn");
    GfnRange::new(first, BLOCK).expect("2^36 frames are whole blocks")
}

/// The parts of `range` in each of its blocks, ascending.
pub(crate) fn parts(range: GfnRange) -> impl Iterator<Item = GfnRange> {
    (range.start().block()..range.end_raw().div_ceil(BLOCK)).map(move |number| {
        let first = Gfn::new(number * BLOCK).expect("a block of the range");
        block_range(first)
            .intersect(range)
            .expect("a block of the range")
    })
}
