//! The reverse map: from a guest frame of a slot to the leaf that maps it.
//!
//! One word a page and slot, 4 bytes: 0.1 % of the memory that the slot describes. A word is zero
//! when nothing maps the page; it is written only under the page's stripe, together with the leaf,
//! and `Mmu::verify` checks that the two agree. Larger levels get an array of their own when they
//! get leaves.

use lacuna_stage2::EntryRef;
use lacuna_sync::shim::{AtomicU32, Ordering};

/// Leaf locations of one slot's pages.
pub struct Rmap {
    words: Box<[AtomicU32]>,
}

impl Rmap {
    /// Nothing mapped.
    pub fn new(pages: u64) -> Self {
        Self {
            words: (0..pages).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Bytes of metadata.
    pub fn bytes(&self) -> usize {
        self.words.len() * size_of::<AtomicU32>()
    }

    pub(crate) fn get(&self, page: usize) -> Option<EntryRef> {
        EntryRef::from_bits(self.words[page].load(Ordering::Relaxed))
    }

    pub(crate) fn set(&self, page: usize, entry: EntryRef) {
        self.words[page].store(entry.to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn clear(&self, page: usize) {
        self.words[page].store(0, Ordering::Relaxed);
    }
}
