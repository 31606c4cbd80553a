//! The counters of a vCPU that other threads read while it runs.

mod times;

pub(crate) use times::VcpuState;

use crate::stall::FaultTimes;
use lacuna_apf::Stats as ApfStats;
use lacuna_host::Toucher;
use lacuna_machine::ExitCounters;
use lacuna_sync::{Mutex, lock_order};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use times::Times;

/// The counters that a running vCPU publishes, and its pending kick. Each vCPU's value has cache
/// lines of its own.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Meter {
    pub(crate) retired: AtomicU64,
    pub(crate) exits: ExitCounters,
    /// Pages that Linux has read inside of guest code.
    pub(crate) major_faults: AtomicU64,
    /// A kick that no run has taken yet.
    pub(crate) kicked: AtomicBool,
    /// Ends the vCPU's wait for a page that is filled from outside.
    pub(crate) toucher: Arc<Toucher>,
    pub(crate) times: Times,
    pub(crate) faults: Mutex<FaultTimes, lock_order::SoftStalls>,
    pub(crate) apf: Mutex<ApfStats, lock_order::SoftApfStats>,
}

impl Meter {
    /// Publishes the vCPU's asynchronous page faults so far.
    pub(crate) fn publish(&self, apf: ApfStats) {
        *self.apf.lock().expect("no panic under this lock") = apf;
    }
}
