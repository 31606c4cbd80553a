//! A stale TLB is a value.
//!
//! Whatever can leave one returns a [`Flush`]. Only finishing it (request a shoot-down, wait until
//! every vCPU has passed) makes frames and tables reusable, and the tables it unlinked travel
//! inside it.
//!
//! ```text
//! Flush --start--> Waiting --wait--> done: frames may be reused, its tables are free
//!   \---------------finish-------------^
//! ```

use crate::Stage2;
use lacuna_sync::shim::{spin_loop, yield_now};
use lacuna_sync::{Epoch, Quiescence};
use lacuna_tables::Detached;

/// Who makes the vCPUs forget. Called without any lock held.
pub trait Shootdown {
    /// Asks every vCPU to flush its TLB, after the entries are gone. Does not wait.
    fn request(&self) -> Epoch;

    /// Whether every vCPU has done so, or run no guest code, since `epoch` was requested.
    fn passed(&self, epoch: Epoch) -> bool;

    /// Waits for [`Shootdown::passed`]. A vCPU's own thread must have gone offline first, or it
    /// waits for itself.
    fn wait(&self, epoch: Epoch) {
        let mut spins = 0u32;
        while !self.passed(epoch) {
            // A vCPU passes within a basic block, unless its thread was preempted: then let it run.
            spins += 1;
            if spins < 64 { spin_loop() } else { yield_now() }
        }
    }
}

impl Shootdown for Quiescence {
    fn request(&self) -> Epoch {
        Self::request(self)
    }

    fn passed(&self, epoch: Epoch) -> bool {
        Self::passed(self, epoch)
    }
}

/// TLBs may hold what the tables no longer say.
#[must_use = "frames and tables may be reused only after the flush is finished"]
pub struct Flush<'s> {
    stage2: &'s Stage2,
    stale: bool,
    tables: Vec<Detached>,
}

/// A shoot-down that was requested.
#[must_use = "frames may be reused only after the wait"]
pub struct Waiting<'s> {
    stage2: &'s Stage2,
    epoch: Option<Epoch>,
}

impl<'s> Flush<'s> {
    /// Nothing is stale: where a batch begins.
    pub fn none(stage2: &'s Stage2) -> Self {
        Self {
            stage2,
            stale: false,
            tables: Vec::new(),
        }
    }

    /// Whether there is nothing to flush.
    pub fn is_empty(&self) -> bool {
        !self.stale
    }

    /// Takes over another flush of the same VM, so that one shoot-down serves both.
    pub fn join(&mut self, mut other: Self) {
        assert!(
            core::ptr::eq(self.stage2, other.stage2),
            "flushes of two VMs"
        );
        self.stale |= core::mem::take(&mut other.stale);
        self.tables.append(&mut other.tables);
    }

    /// Requests the shoot-down, if anything is stale.
    pub fn start(mut self, shootdown: &impl Shootdown) -> Waiting<'s> {
        let epoch = core::mem::take(&mut self.stale).then(|| {
            let epoch = shootdown.request();
            self.stage2.arena.retire(self.tables.drain(..), epoch);
            epoch
        });
        Waiting {
            stage2: self.stage2,
            epoch,
        }
    }

    /// Requests the shoot-down and waits for it. Call with no cursor held.
    pub fn finish(self, shootdown: &impl Shootdown) {
        self.start(shootdown).wait(shootdown);
    }

    pub(crate) fn add_stale(&mut self) {
        self.stale = true;
    }

    pub(crate) fn add_table(&mut self, table: Detached) {
        self.stale = true;
        self.tables.push(table);
    }
}

impl Drop for Flush<'_> {
    fn drop(&mut self) {
        debug_assert!(
            !self.stale || std::thread::panicking(),
            "a flush was dropped unfinished"
        );
    }
}

impl Waiting<'_> {
    /// Waits until every vCPU has passed, then frees the tables that were waiting for it.
    pub fn wait(self, shootdown: &impl Shootdown) {
        if let Some(epoch) = self.epoch {
            shootdown.wait(epoch);
            self.stage2.arena.reap(|epoch| shootdown.passed(epoch));
        }
    }
}
