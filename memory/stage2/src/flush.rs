//! A stale TLB is a value.
//!
//! Whatever can leave one returns a [`Flush`], which knows the blocks that it is about. Only
//! finishing it (request a shoot-down of those blocks, wait until every vCPU that may hold them has
//! passed) makes frames and tables reusable, and the tables it unlinked travel inside it.
//!
//! ```text
//! Flush --start--> Waiting --wait--> done: frames may be reused, its tables are free
//!   \---------------finish-------------^
//!   \--retire--> done, when only tables are in it: nobody waits, a later reap frees them
//! ```

use crate::format::blocks_of;
use crate::{Stage2, TableFormat};
use lacuna_addr::GfnRange;
use lacuna_sync::shim::{spin_loop, yield_now};
use lacuna_sync::{Blocks, GracePeriod, Qsbr};
use lacuna_tables::{Arena, Detached};

/// Who makes the vCPUs forget. Called without any lock held.
pub trait Shootdown {
    /// Asks every vCPU to flush its TLB, after the entries are gone. Does not wait.
    fn request(&self) -> GracePeriod;

    /// Asks those vCPUs only that may hold something of `blocks`. By default everybody: right for
    /// who does not know better.
    fn request_for(&self, blocks: &Blocks) -> GracePeriod {
        let _ = blocks;
        self.request()
    }

    /// Whether every vCPU that was asked has done so, or run no guest code, since `grace` was
    /// requested.
    fn passed(&self, grace: GracePeriod) -> bool;

    /// Waits for [`Shootdown::passed`]. A vCPU's own thread must have gone offline first, or it
    /// waits for itself.
    fn wait(&self, grace: GracePeriod) {
        let mut spins = 0u32;
        while !self.passed(grace) {
            // A vCPU passes within a basic block, unless its thread was preempted: then let it run.
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

/// TLBs may hold what the tables no longer say, or walks be inside of tables that are unlinked.
#[must_use = "frames and tables may be reused only after the flush is finished"]
pub struct Flush<'s> {
    arena: &'s Arena,
    /// Where something has changed; empty when there is nothing to do.
    blocks: Blocks,
    stale: Stale,
    tables: Vec<Detached>,
}

/// What may be wrong in somebody's hands.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stale {
    /// A walk may be inside of an unlinked table; every TLB entry is right.
    Tables,
    /// A TLB may allow what the tables do not: frames wait.
    Translations,
}

/// A shoot-down that was requested.
#[must_use = "frames may be reused only after the wait"]
pub struct Waiting<'s> {
    arena: &'s Arena,
    grace: Option<GracePeriod>,
}

impl<'s> Flush<'s> {
    /// Nothing is stale: where a batch begins.
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

    /// Whether a TLB may hold what the tables do not say: then somebody must wait. Else
    /// [`Flush::retire`] will do.
    #[inline]
    pub fn must_wait(&self) -> bool {
        self.stale == Stale::Translations
    }

    /// The blocks it is about (gfn >> 9).
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Takes over another flush of the same VM, so that one shoot-down serves both.
    #[inline]
    pub fn join(&mut self, mut other: Self) {
        assert!(core::ptr::eq(self.arena, other.arena), "flushes of two VMs");
        self.stale = self.stale.max(other.stale);
        self.blocks.join(core::mem::take(&mut other.blocks));
        self.tables.append(&mut other.tables);
    }

    /// Requests the shoot-down, if anything is stale.
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

    /// Requests the shoot-down and waits for it. Call with no cursor held.
    #[inline]
    pub fn finish(self, shootdown: &impl Shootdown) {
        self.start(shootdown).wait(shootdown);
    }

    /// Requests the shoot-down, and waits for nothing: the tables are freed by a later flush, or by
    /// [`Stage2::reap`]. For a flush of tables alone; a vCPU's own thread may call it online.
    ///
    /// # Panics
    /// When a TLB may hold what the tables do not say: nobody would wait for the frames.
    pub fn retire(self, shootdown: &impl Shootdown) {
        assert!(!self.must_wait(), "stale translations must be waited for");
        let arena = self.arena;
        let _ = self.start(shootdown);
        reap(arena, shootdown);
    }

    /// Something in `span` maps no longer what a TLB may hold.
    #[inline]
    pub(crate) fn add_stale(&mut self, span: GfnRange) {
        self.stale = Stale::Translations;
        self.blocks.add(blocks_of(span));
    }

    /// `table`, which translated `span`, is unlinked.
    #[inline]
    pub(crate) fn add_table(&mut self, table: Detached, span: GfnRange) {
        self.blocks.add(blocks_of(span));
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
    /// Waits until every vCPU has passed, then frees the tables that were waiting for it.
    pub fn wait(self, shootdown: &impl Shootdown) {
        if let Some(grace) = self.grace {
            shootdown.wait(grace);
            reap(self.arena, shootdown);
        }
    }
}

impl<F: TableFormat> Stage2<F> {
    /// Frees the unlinked tables whose shoot-down has passed, and returns how many: worth a try
    /// when tables are exhausted and some are in limbo.
    pub fn reap(&self, shootdown: &impl Shootdown) -> u32 {
        reap(&self.arena, shootdown)
    }
}

fn reap(arena: &Arena, shootdown: &impl Shootdown) -> u32 {
    arena.reap(|grace| shootdown.passed(grace))
}
