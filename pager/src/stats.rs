//! What the pager counts.

use crate::stalls::ThreadStalls;
use lacuna_metrics::{Kind, Metrics, Value, counters};
use lacuna_source::SourceStats;
use std::sync::atomic::{AtomicU64, Ordering};

counters! {
    /// The counters of one VM, or of all VMs together, at about one moment.
    pub struct PagerCounts as "lacuna_pager" {
        /// Faults read.
        counter faults,
        /// Faults that were the first on their unit: they made requests to the source.
        counter first,
        /// Faults on units that had been requested already.
        counter joined,
        /// Units whose content was placed: pages of 4 KiB, 2 MiB or 1 GiB.
        counter placed,
        /// Units answered with a page that the clones of the VM share.
        counter shared,
        /// Bytes of idle VMs that went to swap.
        counter paged_out,
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
        /// Pages of 4 KiB that the source has sent in vain: they were removed, or there.
        counter late,
        /// Faults at addresses that the VMM did not announce.
        counter outside,
    }
}

/// The name of a counter.
#[derive(Clone, Copy, Debug)]
pub enum Count {
    Faults,
    First,
    Joined,
    Placed,
    Shared,
    PagedOut,
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
    Late,
    Outside,
}

/// The counters of one VM.
#[derive(Default)]
pub struct Counts([AtomicU64; Count::Outside as usize + 1]);

impl Counts {
    pub fn add(&self, count: Count) {
        self.add_many(count, 1);
    }

    pub fn add_many(&self, count: Count, number: u64) {
        self.0[count as usize].fetch_add(number, Ordering::Relaxed);
    }

    pub fn read(&self) -> PagerCounts {
        let of = |count: Count| self.0[count as usize].load(Ordering::Relaxed);
        PagerCounts {
            faults: of(Count::Faults),
            first: of(Count::First),
            joined: of(Count::Joined),
            placed: of(Count::Placed),
            shared: of(Count::Shared),
            paged_out: of(Count::PagedOut),
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
            late: of(Count::Late),
            outside: of(Count::Outside),
        }
    }
}

/// How many units of a VM are in each state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UnitCounts {
    /// No thread has needed them.
    pub missing: u64,
    /// They were requested, and are not in place.
    pub waiting: u64,
    /// In place, or taken away by the VM.
    pub settled: u64,
    /// The source has lost them.
    pub lost: u64,
}

/// One VM, at about one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VmStats {
    /// Its number: VMs are counted from 0, in the order of their messages.
    pub number: u64,
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
    /// Its units by state.
    pub units: UnitCounts,
    /// The waits of its threads; empty if the kernel does not name them.
    pub threads: Vec<ThreadStalls>,
}

impl VmStats {
    /// Puts the values into `to`, each with the labels `vm` and `pid`.
    pub fn fill(&self, to: &mut Metrics) {
        let (counts, pages, units) = (&self.counts, &self.pages, &self.units);
        let mut own = Metrics::default();
        let mut add = |name, help, kind, value| own.add((name, help, kind), &[], value);
        let help = "Bytes of the VM's memory.";
        add(
            "lacuna_pager_vm_bytes",
            help,
            Kind::Gauge,
            Value::Whole(self.bytes),
        );
        let help = "Faults of the VM.";
        let faults = Value::Whole(counts.faults);
        add("lacuna_pager_vm_faults_total", help, Kind::Counter, faults);
        let help = "Units placed in the VM.";
        let placed = Value::Whole(counts.placed);
        add("lacuna_pager_vm_placed_total", help, Kind::Counter, placed);
        let help = "Faults of the VM answered with zeros.";
        add(
            "lacuna_pager_vm_zeros_total",
            help,
            Kind::Counter,
            Value::Whole(counts.zeros),
        );
        let help = "Pages that the source has sent to the VM in vain.";
        add(
            "lacuna_pager_vm_late_total",
            help,
            Kind::Counter,
            Value::Whole(counts.late),
        );
        let help = "Requests of the VM in flight.";
        let in_flight = Value::Whole(pages.in_flight);
        add("lacuna_pager_vm_in_flight", help, Kind::Gauge, in_flight);
        let help = "From a fault of the VM until its page is in place.";
        let times = Value::Summary(pages.times());
        add("lacuna_pager_vm_fetch_seconds", help, Kind::Summary, times);
        let help = "Units of the VM, by state.";
        let of = ("lacuna_pager_vm_units", help, Kind::Gauge);
        let UnitCounts {
            missing,
            waiting,
            settled,
            lost,
        } = *units;
        let states = [
            ("missing", missing),
            ("waiting", waiting),
            ("settled", settled),
            ("lost", lost),
        ];
        for (state, count) in states {
            own.add(of, &[("state", state)], Value::Whole(count));
        }
        let help = "How long a thread of the VM has waited for pages.";
        let of = ("lacuna_pager_vm_stall_seconds_total", help, Kind::Counter);
        for one in &self.threads {
            let (thread, seconds) = (one.thread.to_string(), one.stalled.as_secs_f64());
            own.add(of, &[("thread", &thread)], Value::Real(seconds));
        }
        let pid = self.pid.map_or_else(String::new, |pid| pid.to_string());
        to.extend(&own, &[("vm", &self.number.to_string()), ("pid", &pid)]);
    }
}

/// A pager, at about one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PagerStats {
    /// VMs served now.
    pub vms: u64,
    /// VMs served so far.
    pub accepted: u64,
    /// Those of them that were an earlier pager's.
    pub taken_back: u64,
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
            taken_back,
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
        let help = "VMs that the pager has taken back from an earlier one.";
        let of = ("lacuna_pager_taken_back_total", help, Kind::Counter);
        to.add(of, &[], Value::Whole(*taken_back));
        let help = "Connections that the pager has refused.";
        let of = ("lacuna_pager_refused_total", help, Kind::Counter);
        to.add(of, &[], Value::Whole(*refused));
        counts.fill(to, &[]);
    }
}
