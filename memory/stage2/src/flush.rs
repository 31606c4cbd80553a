//! The TLB flush that a change of the tables needs, as a value.
//!
//! Every change that can leave a stale TLB entry, or a walk inside an unlinked table, returns a
//! [`Flush`]. It has the changed blocks and the unlinked tables. Frames and tables may be reused
//! only after the flush is finished: it requests a shoot-down of those blocks, and waits until
//! every vCPU that may hold translations of them has passed a quiescent point.
//!
//! ```text
//! Flush --start--> Waiting --wait--> done: frames may be reused, its tables are free
//!   \---------------finish-------------^
//!   \--retire--> done, if only tables are in it: not waited for, a later reap frees them
//! ```

use crate::format::block_numbers;
use crate::{Stage2, TableFormat};
use lacuna_addr::GfnRange;
use lacuna_sync::shim::{spin_loop, yield_now};
use lacuna_sync::{Blocks, GracePeriod, Qsbr, assert_may_wait};
use lacuna_tables::{Arena, Detached};

/// Makes the vCPUs flush their TLBs. Called without any lock held.
pub trait Shootdown {
    /// Asks every vCPU to flush its TLB, after the entries are gone. Does not wait.
    fn request(&self) -> GracePeriod;

    /// Requests a flush only from the vCPUs that may hold translations of `blocks`. The default
    /// requests it from all, which is always right.
    fn request_for(&self, blocks: &Blocks) -> GracePeriod {
        let _ = blocks;
        self.request()
    }

    /// Whether, since the request of `grace`, every vCPU of `grace` has flushed or has run no guest
    /// code.
    fn passed(&self, grace: GracePeriod) -> bool;

    /// Waits for [`Shootdown::passed`]. A vCPU's own thread must go offline first: otherwise it
    /// waits for itself for ever.
    fn wait(&self, grace: GracePeriod) {
        assert_may_wait();
        let mut spins = 0u32;
        while !self.passed(grace) {
            // A vCPU passes at the end of its basic block. If it has not, its thread may be
            // preempted: yield the core.
            spins += 1;
            if spins < 64 { spin_loop() } else { yield_now() }
        }
    }
}

impl Shootdown for Qsbr {
    fn request(&self) -> GracePeriod {
        Self::request(self)
    }

    fn request_for(&self, blocks: &Blocks) -> GracePeriod {
        Self::request_for(self, blocks)
    }

    fn passed(&self, grace: GracePeriod) -> bool {
        Self::passed(self, grace)
    }
}

/// Changes of the tables that a vCPU may still miss: its TLB may hold a translation that the tables
/// no longer have, or its walk may be inside an unlinked table.
#[must_use = "frames and tables may be reused only after the flush is finished"]
pub struct Flush<'s> {
    /// The arena that owns `tables`.
    arena: &'s Arena,
    /// The blocks in which a leaf or a table was changed; empty if there is nothing to flush.
    blocks: Blocks,
    /// The most harmful thing that a vCPU may still use.
    stale: Stale,
    /// The unlinked tables. They are freed when the shoot-down has passed.
    tables: Vec<Detached>,
}

/// The things that a vCPU may still use after the change, in order of growing harm.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stale {
    /// An unlinked table, by a walk that entered it earlier. Every TLB entry is valid, so only the
    /// table's reuse must wait.
    Tables,
    /// A TLB entry that the tables no longer allow. The reuse of frames must wait, too.
    Translations,
}

/// A requested shoot-down.
#[must_use = "frames may be reused only after the wait"]
pub struct Waiting<'s> {
    arena: &'s Arena,
    /// The grace period to wait for; `None` if the flush was empty.
    grace: Option<GracePeriod>,
}

impl<'s> Flush<'s> {
    /// An empty flush, with which a batch begins.
    pub fn none<F: TableFormat>(stage2: &'s Stage2<F>) -> Self {
        Self {
            arena: &stage2.arena,
            blocks: Blocks::none(),
            stale: Stale::Tables,
            tables: Vec::new(),
        }
    }

    /// Whether there is nothing to flush.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether a TLB may hold a translation that the tables no longer have. If so, the caller must
    /// wait for the flush. If not, [`Flush::retire`] is enough.
    #[inline]
    pub fn must_wait(&self) -> bool {
        self.stale == Stale::Translations
    }

    /// The blocks to be flushed.
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Merges another flush of the same VM into this flush, so that one shoot-down serves both.
    #[inline]
    pub fn join(&mut self, mut other: Self) {
        assert!(core::ptr::eq(self.arena, other.arena), "flushes of two VMs");
        self.stale = self.stale.max(other.stale);
        self.blocks.join(core::mem::take(&mut other.blocks));
        self.tables.append(&mut other.tables);
    }

    /// Requests the shoot-down, unless the flush is empty.
    #[inline]
    pub fn start(mut self, shootdown: &impl Shootdown) -> Waiting<'s> {
        let blocks = core::mem::take(&mut self.blocks);
        let grace = (!blocks.is_empty()).then(|| {
            let grace = shootdown.request_for(&blocks);
            self.arena.retire(self.tables.drain(..), grace);
            grace
        });
        Waiting {
            arena: self.arena,
            grace,
        }
    }

    /// Requests the shoot-down and waits for it. No cursor may be held.
    #[inline]
    pub fn finish(self, shootdown: &impl Shootdown) {
        self.start(shootdown).wait(shootdown);
    }

    /// Requests the shoot-down without waiting: a later flush, or [`Stage2::reap`], frees the
    /// tables. Only for a flush of tables; a vCPU's own thread may call it online.
    ///
    /// # Panics
    /// If a TLB may hold a translation that the tables no longer have: its frame would be reused
    /// without a wait.
    pub fn retire(self, shootdown: &impl Shootdown) {
        assert!(!self.must_wait(), "stale translations must be waited for");
        let arena = self.arena;
        let _ = self.start(shootdown);
        reap(arena, shootdown);
    }

    /// Adds a change of `span`'s mapping; a TLB may still hold the old translation.
    #[inline]
    pub(crate) fn add_stale(&mut self, span: GfnRange) {
        self.stale = Stale::Translations;
        self.blocks.add(block_numbers(span));
    }

    /// Adds the unlinked `table`, which translated `span`.
    #[inline]
    pub(crate) fn add_table(&mut self, table: Detached, span: GfnRange) {
        self.blocks.add(block_numbers(span));
        self.tables.push(table);
    }
}

impl Drop for Flush<'_> {
    fn drop(&mut self) {
        debug_assert!(
            self.blocks.is_empty() || std::thread::panicking(),
            "a flush was dropped unfinished"
        );
    }
}

impl Waiting<'_> {
    /// Whether the shoot-down has passed, so that [`Waiting::wait`] need not wait.
    pub fn has_passed(&self, shootdown: &impl Shootdown) -> bool {
        self.grace.is_none_or(|grace| shootdown.passed(grace))
    }

    /// Waits until the shoot-down has passed, then frees the unlinked tables.
    pub fn wait(self, shootdown: &impl Shootdown) {
        if let Some(grace) = self.grace {
            shootdown.wait(grace);
            reap(self.arena, shootdown);
        }
    }
}

impl<F: TableFormat> Stage2<F> {
    /// Frees the unlinked tables whose shoot-down has passed, and returns their number. Useful when
    /// tables are exhausted and some are in limbo.
    pub fn reap(&self, shootdown: &impl Shootdown) -> u32 {
        reap(&self.arena, shootdown)
    }
}

fn reap(arena: &Arena, shootdown: &impl Shootdown) -> u32 {
    arena.reap(|grace| shootdown.passed(grace))
}
