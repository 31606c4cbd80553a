//! One VM's stage-2 translation.

use crate::change::RangeCounts;
use crate::cursor::{Cursor, Guards};
use crate::format::block_numbers;
use crate::{Counts, EntryRef, Ept, TableFormat};
use lacuna_addr::{Gfn, GfnRange};
use lacuna_sync::shim::AtomicU64;
use lacuna_sync::{InvalidateSeq, Mutex, RangeLocks, lock_order};
use lacuna_tables::{Arena, Exhausted, TableId};
use std::collections::HashMap;
use std::marker::PhantomData;

/// The tables of one VM, in the format `F`, with the locks over them.
pub struct Stage2<F = Ept> {
    /// The pages of all tables.
    pub(crate) arena: Arena,
    /// The table where every walk begins.
    pub(crate) root: TableId,
    /// The locks under which entries are changed, and their invalidation sequences.
    pub(crate) range_locks: RangeLocks,
    /// What is mapped: one share for each range lock, written under that lock.
    pub(crate) counts: Box<[RangeCounts]>,
    /// For each 1 GiB leaf: the table for its split.
    pub(crate) deposits: Mutex<HashMap<EntryRef, TableId>, lock_order::DepositedTables>,
    format: PhantomData<F>,
}

impl Stage2 {
    /// The number of range locks. It is large enough that a few dozen vCPUs seldom contend, and
    /// small enough for a caller to take all of them.
    pub const RANGE_LOCKS: usize = 256;

    /// The number of entries in a cache line.
    pub const LINE: u64 = 64 / size_of::<u64>() as u64;

    /// Empty EPT tables: [`Stage2::with_format`] for [`Ept`].
    ///
    /// # Errors
    /// [`Exhausted`]: `arena` has no table for the root.
    pub fn new(arena: Arena) -> Result<Self, Exhausted> {
        Self::with_format(arena)
    }
}

impl<F: TableFormat> Stage2<F> {
    /// Empty tables in `arena`. The arena belongs to this VM only: its limbo has the grace
    /// periods of one VM.
    ///
    /// # Errors
    /// [`Exhausted`]: `arena` has no table for the root.
    pub fn with_format(arena: Arena) -> Result<Self, Exhausted> {
        let root = arena.alloc()?;
        Ok(Self {
            arena,
            root,
            range_locks: RangeLocks::new(Stage2::RANGE_LOCKS),
            counts: (0..Stage2::RANGE_LOCKS)
                .map(|_| RangeCounts::default())
                .collect(),
            deposits: Mutex::new(HashMap::new()),
            format: PhantomData,
        })
    }

    /// The invalidation sequence near `gfn`. Read it *before* looking up the slot and asking the
    /// host for the page, and pass it to [`Cursor::invalidate_retry`].
    #[inline]
    pub fn invalidate_seq(&self, gfn: Gfn) -> InvalidateSeq {
        self.range_locks.invalidate_seq(gfn.block().get())
    }

    /// As [`Stage2::invalidate_seq`], for all of `range`: for a cursor over that range.
    pub fn invalidate_seq_of(&self, range: GfnRange) -> InvalidateSeq {
        self.range_locks.invalidate_seq_of(block_numbers(range))
    }

    /// Locks the block of 512 frames around `gfn`. Allocates nothing.
    #[inline]
    pub fn fault_cursor(&self, gfn: Gfn) -> Cursor<'_, F> {
        let guard = self.range_locks.lock(gfn.block().get());
        Cursor::new(self, gfn.block().range(), Guards::One(guard))
    }

    /// Takes every range lock of `range`, ascending.
    pub fn cursor(&self, range: GfnRange) -> Cursor<'_, F> {
        let indices = self.range_locks.indices(block_numbers(range));
        let guards = indices
            .into_iter()
            .map(|index| self.range_locks.lock_index(index))
            .collect();
        Cursor::new(self, range, Guards::Many(guards))
    }

    /// The counts of what is mapped. Exact if no cursor is in use.
    pub fn counts(&self) -> Counts {
        self.counts
            .iter()
            .map(RangeCounts::read)
            .fold(Counts::default(), Counts::plus)
    }

    /// The arena of the tables.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    #[inline]
    pub(crate) fn entry(&self, at: EntryRef) -> &AtomicU64 {
        self.arena.entry(at.table(), at.index())
    }

    #[inline]
    pub(crate) fn counts_of(&self, gfn: Gfn) -> &RangeCounts {
        &self.counts[self.range_locks.index_of(gfn.block().get())]
    }
}
