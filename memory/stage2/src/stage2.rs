//! One VM's stage-2 translation.

use crate::change::StripeCounts;
use crate::cursor::{Cursor, Guards};
use crate::format::{block_of, block_range, blocks_of};
use crate::{Counts, EntryRef};
use lacuna_addr::{Gfn, GfnRange};
use lacuna_sync::shim::AtomicU64;
use lacuna_sync::{Snapshot, Stripes};
use lacuna_tables::{Arena, Exhausted, TableId};

/// The tables of one VM, with the locks over them.
pub struct Stage2 {
    pub(crate) arena: Arena,
    pub(crate) root: TableId,
    pub(crate) stripes: Stripes,
    pub(crate) counts: Box<[StripeCounts]>,
}

impl Stage2 {
    /// Enough stripes that two of a few dozen vCPUs seldom meet, few enough to lock them all.
    pub const STRIPES: usize = 256;

    /// Empty tables in `arena`, which becomes this VM's own: limbo is tagged with one VM's epochs.
    pub fn new(arena: Arena) -> Result<Self, Exhausted> {
        let root = arena.alloc()?;
        Ok(Self {
            arena,
            root,
            stripes: Stripes::new(Self::STRIPES),
            counts: (0..Self::STRIPES)
                .map(|_| StripeCounts::default())
                .collect(),
        })
    }

    /// The invalidation sequence near `gfn`. Take it *before* looking up the slot and asking the
    /// host for the page, and show it to [`Cursor::admits`].
    #[inline]
    pub fn snapshot(&self, gfn: Gfn) -> Snapshot {
        self.stripes.snapshot(block_of(gfn))
    }

    /// Locks the block of 512 frames around `gfn`. Allocates nothing.
    #[inline]
    pub fn fault_cursor(&self, gfn: Gfn) -> Cursor<'_> {
        let guard = self.stripes.lock(block_of(gfn));
        Cursor::new(self, block_range(gfn), Guards::One(guard))
    }

    /// Locks every stripe of `range`, ascending.
    pub fn cursor(&self, range: GfnRange) -> Cursor<'_> {
        let stripes = self.stripes.indices(blocks_of(range));
        let guards = stripes
            .into_iter()
            .map(|index| self.stripes.lock_index(index))
            .collect();
        Cursor::new(self, range, Guards::Many(guards))
    }

    /// What is mapped. Exact when no cursor is at work.
    pub fn counts(&self) -> Counts {
        self.counts
            .iter()
            .map(StripeCounts::read)
            .fold(Counts::default(), Counts::plus)
    }

    /// Where the tables live.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    #[inline]
    pub(crate) fn entry(&self, at: EntryRef) -> &AtomicU64 {
        self.arena.entry(at.table(), at.index())
    }

    #[inline]
    pub(crate) fn counts_of(&self, gfn: Gfn) -> &StripeCounts {
        &self.counts[self.stripes.index_of(block_of(gfn))]
    }
}
