//! How long the threads of a VM wait for pages, where the kernel names them.
//!
//! A fault has its thread's number if the VMM has enabled `UFFD_FEATURE_THREAD_ID` at
//! `UFFDIO_API`. The pager gets the descriptor after that call, so it cannot enable the feature
//! itself. Firecracker does not enable it: its VMs have no stalls here.

use lacuna_sync::{Mutex, lock, lock_order};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The most threads of one VM. A VMM with more has the stalls of its first ones.
const THREADS_MAX: usize = 256;

/// The waits of one thread for missing pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ThreadStalls {
    /// Its number in the VMM's PID namespace: one of a vCPU's thread, or of another one.
    pub thread: u32,
    /// Its faults.
    pub faults: u64,
    /// How long it has waited, from the read of a fault until the page was placed.
    pub stalled: Duration,
}

#[derive(Default)]
struct Thread {
    faults: u64,
    ended: Duration,
    /// The unit that it waits for.
    waits: Option<(u64, Instant)>,
}

/// The waits of a VM's threads.
#[derive(Default)]
pub struct Stalls(Mutex<BTreeMap<u32, Thread>, lock_order::PagerStalls>);

impl Stalls {
    /// `thread` waits for `unit`. It is 0 without the feature.
    pub fn begin(&self, thread: u32, unit: u64) {
        let mut threads = lock(&self.0);
        if thread == 0 || (threads.len() >= THREADS_MAX && !threads.contains_key(&thread)) {
            return;
        }
        let thread = threads.entry(thread).or_default();
        thread.faults += 1;
        // A thread that was woken in vain still waits for the same unit.
        if thread.waits.is_none_or(|(other, _)| other != unit) {
            thread.waits = Some((unit, Instant::now()));
        }
    }

    /// The unit is in place: its threads run.
    pub fn end(&self, unit: u64) {
        for thread in lock(&self.0).values_mut() {
            if let Some((_, since)) = thread.waits.take_if(|(waits, _)| *waits == unit) {
                thread.ended += since.elapsed();
            }
        }
    }

    /// All threads, the waits until now included.
    pub fn read(&self) -> Vec<ThreadStalls> {
        let threads = lock(&self.0);
        let of = |(thread, one): (&u32, &Thread)| {
            let now = one
                .waits
                .map_or(Duration::ZERO, |(_, since)| since.elapsed());
            ThreadStalls {
                thread: *thread,
                faults: one.faults,
                stalled: one.ended + now,
            }
        };
        threads.iter().map(of).collect()
    }
}
