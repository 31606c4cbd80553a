//! What a VMM may change while guests run: the budget, huge pages, and an added delay.
//!
//! | setting | from when on |
//! |---|---|
//! | budget | faults at once; a smaller one is reached by reclaim in the background |
//! | huge pages | the next fault in a new block, and the next step of collapse |
//! | delay | the next read, write or request; those in flight keep their time |
//!
//! Any thread may call these functions at any time, in any order.

use crate::core::Core;
use crate::error::HostError;
use crate::host::{Host, check_budget};
use crate::region::HugePages;
use lacuna_addr::PageCount;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Host {
    /// The frames that regions, the swap device and vCPUs' caches may use at present.
    pub fn budget(&self) -> PageCount {
        PageCount::new(self.core.frames.budget() as u64)
    }

    /// Sets the budget, at most the one with which the host was made: that is the size of its
    /// pool. A smaller budget is reached step by step: the background thread
    /// ([`Host::spawn_background`]) reclaims pages, and faults get at most half of the frames. The
    /// kernel keeps the memory of free frames.
    ///
    /// If no page can be reclaimed, for example because the swap device is full, the budget grows
    /// again, step by step, instead of an error for a vCPU.
    ///
    /// # Errors
    /// [`HostError::BudgetTooSmall`] for the vCPUs that exist, [`HostError::AbovePool`]. The budget
    /// is unchanged then.
    pub fn set_budget(&self, budget: PageCount) -> Result<(), HostError> {
        let core = &self.core;
        let pool = PageCount::new(core.frames.total() as u64);
        if budget > pool {
            return Err(HostError::AbovePool { budget, pool });
        }
        // These caches belong to no vCPU.
        self.spare_caches.drain();
        // Under the lock of the caches: a vCPU that is made meanwhile is counted, or sees the new
        // budget.
        core.with_caches(|caches| {
            check_budget(budget, caches.len())?;
            core.frames.set_budget(budget.get() as usize);
            Ok::<_, HostError>(())
        })?;
        core.frames.withhold(0);
        core.wake_background();
        Ok(())
    }

    /// Whether faults and collapse may make compound pages at present.
    pub fn makes_huge_pages(&self) -> bool {
        self.core.huge() != HugePages::Never
    }

    /// Sets whether faults and collapse make compound pages from now on: where the host's policy
    /// says, and under [`HugePages::Never`] where [`Host::advise_huge`] was called. Compound pages
    /// that exist stay until reclaim splits them.
    pub fn make_huge_pages(&self, on: bool) {
        self.core.settings.huge_on.store(on, Ordering::Relaxed);
        self.core.wake_background();
    }

    /// The added delay: see [`Host::set_delay`].
    pub fn delay(&self) -> Duration {
        Duration::from_nanos(self.core.delay_ns())
    }

    /// Adds `delay` to each transfer of the swap device and to each request to a page source that
    /// begins after this call. It is for tests and demonstrations of slow devices. Linux's own
    /// paging and handlers that fill memory from outside have no added delay.
    pub fn set_delay(&self, delay: Duration) {
        let ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        self.core.settings.delay_ns.store(ns, Ordering::Relaxed);
    }
}

impl Core {
    /// The policy of huge pages at present.
    #[inline]
    pub fn huge(&self) -> HugePages {
        self.settings.huge_now()
    }

    /// The added delay in nanoseconds.
    #[inline]
    pub fn delay_ns(&self) -> u64 {
        self.settings.delay_ns.load(Ordering::Relaxed)
    }
}
