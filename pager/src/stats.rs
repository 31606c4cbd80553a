//! What the pager counts.

use lacuna_metrics::{Kind, Metrics, Value, counters};
use lacuna_source::SourceStats;
use std::sync::atomic::{AtomicU64, Ordering};

counters! {
    /// The counters of one VM, or of all VMs together, at about one moment.
    pub struct PagerCounts as "lacuna_pager" {
        /// Faults read.
        counter faults,
        /// Units whose content was placed: pages of 4 KiB, 2 MiB or 1 GiB.
        counter placed,
        /// Units answered with a page that the clones of the VM share.
        counter shared,
        /// Faults answered with zeros, because the VM took the page away.
        counter zeros,
        /// Removals and unmappings read.
        counter removals,
        /// Placements that found a page.
        counter exists,
        /// Placements that waited for an unread event (EAGAIN).
        counter again,
        /// Placements that waited for memory (ENOMEM, ENOSPC).
        counter no_memory,
        /// Units whose content a fill provided first.
        counter filled,
        /// Those of them that the working set has.
        counter working_set,
        /// Units that a fill provided in vain, because they were in place or taken away.
        counter fill_late,
        /// Faults read after the end of the VM's fill.
        counter faults_after_fill,
        /// Units lost.
        counter lost,
        /// Faults at addresses that the VMM did not announce.
        counter outside,
    }
}

/// The name of a counter.
#[derive(Clone, Copy, Debug)]
pub enum Count {
    Faults,
    Placed,
    Shared,
    Zeros,
    Removals,
    Exists,
    Again,
    NoMemory,
    Filled,
    WorkingSet,
    FillLate,
    FaultsAfterFill,
    Lost,
    Outside,
}

/// The counters of one VM.
#[derive(Default)]
pub struct Counts([AtomicU64; Count::Outside as usize + 1]);

impl Counts {
    pub fn add(&self, count: Count) {
        self.0[count as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn read(&self) -> PagerCounts {
        let of = |count: Count| self.0[count as usize].load(Ordering::Relaxed);
        PagerCounts {
            faults: of(Count::Faults),
            placed: of(Count::Placed),
            shared: of(Count::Shared),
            zeros: of(Count::Zeros),
            removals: of(Count::Removals),
            exists: of(Count::Exists),
            again: of(Count::Again),
            no_memory: of(Count::NoMemory),
            filled: of(Count::Filled),
            working_set: of(Count::WorkingSet),
            fill_late: of(Count::FillLate),
            faults_after_fill: of(Count::FaultsAfterFill),
            lost: of(Count::Lost),
            outside: of(Count::Outside),
        }
    }
}

/// One VM, at about one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VmStats {
    /// The process that has connected; `None` if it is in another PID namespace.
    pub pid: Option<i32>,
    /// Bytes of its memory.
    pub bytes: u64,
    /// Whether all that its fill brings is in place. Without a fill it is never so.
    pub is_filled: bool,
    /// Its counters.
    pub counts: PagerCounts,
    /// The pages of 4 KiB that it has asked for. The times begin when a fault is read, and end when
    /// the page is in place. A placement that has to be repeated ends its page's time at the first
    /// try.
    pub pages: SourceStats,
}

/// A pager, at about one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PagerStats {
    /// VMs served now.
    pub vms: u64,
    /// VMs served so far.
    pub accepted: u64,
    /// Connections refused so far.
    pub refused: u64,
    /// The counters of all VMs, also of the ended ones.
    pub counts: PagerCounts,
}

impl PagerStats {
    /// Puts the counters into `to`.
    pub fn fill(&self, to: &mut Metrics) {
        let Self {
            vms,
            accepted,
            refused,
            counts,
        } = self;
        let help = "VMs that the pager serves.";
        to.add(
            ("lacuna_pager_vms", help, Kind::Gauge),
            &[],
            Value::Whole(*vms),
        );
        let help = "VMs that the pager has accepted.";
        let of = ("lacuna_pager_accepted_total", help, Kind::Counter);
        to.add(of, &[], Value::Whole(*accepted));
        let help = "Connections that the pager has refused.";
        let of = ("lacuna_pager_refused_total", help, Kind::Counter);
        to.add(of, &[], Value::Whole(*refused));
        counts.fill(to, &[]);
    }
}
