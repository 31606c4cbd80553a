//! From a running VM to a [`RunSample`].

use crate::pages::GuestPages;
use crate::sample::{Apf, Dirty, DirtyCounts, Faults, GuestApf, Huge, RunSample, Thread};
use lacuna::dirty::{Delivery, DetectionChoice, DirtyStats};
use lacuna::memory::{HostError, HostStats};
use lacuna::metrics::{self, Metrics, Value};
use lacuna::soft::ApfStats;
use lacuna::{DirtyTracking, ExitKind, Gpa, Nanos, PageCount, PlatformDevices, RunEnd, VmStats};
use lacuna_guest::status::{self, Kind, Status};
use lacuna_lab::host_info::kib;
use lacuna_lab::stalls::VcpuStalls;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Takes samples of a run.
pub struct Observer {
    last: RunSample,
    pages: Option<Arc<GuestPages>>,
    /// Whether the guest has run before this run: it is restored, or has moved here.
    has_run: bool,
    counting: Rarely,
}

impl Observer {
    /// An observer before the run. `last` has the optional parts that this run will have.
    pub fn new(last: RunSample, pages: Option<Arc<GuestPages>>, has_run: bool) -> Self {
        Self {
            last,
            pages,
            has_run,
            counting: Rarely::new(),
        }
    }

    /// Takes a sample now.
    pub fn look<V: Watched>(&mut self, vm: &V, devices: &PlatformDevices, now: Nanos) {
        let elapsed = Duration::from_nanos(now.0);
        if let Some(status) = read_status(vm, devices) {
            self.read(&status, elapsed);
        }
        self.count_pages(elapsed.saturating_sub(self.last.elapsed));
        self.last.elapsed = elapsed;
        self.counting.call(|| vm.count(&mut self.last));
    }

    /// Takes a sample at the end of the run, with the guest's status page.
    pub fn last<V: Watched>(&self, end: &RunEnd<V>, status: Option<&[u8]>) -> RunSample {
        let mut last = Self {
            last: self.last.clone(),
            pages: self.pages.clone(),
            has_run: self.has_run,
            counting: Rarely::new(),
        };
        let elapsed = Duration::from_nanos(end.end.0);
        if let Some(status) = status.and_then(|page| Status::parse(page).ok()) {
            last.read(&status, elapsed);
        }
        if let Some(pages) = &mut last.last.pages {
            pages.present = 0;
        }
        last.count_pages(elapsed);
        last.last.elapsed = elapsed;
        end.vm.count(&mut last.last);
        last.last
    }

    fn count_pages(&mut self, elapsed: Duration) {
        if let (Some(last), Some(pages)) = (&mut self.last.pages, &self.pages) {
            *last = pages.count(last, elapsed);
        }
    }

    fn read(&mut self, status: &Status, elapsed: Duration) {
        let first = self.has_run && self.last.threads.is_empty();
        self.last.threads = threads(status, &self.last, elapsed);
        if first {
            for thread in &mut self.last.threads {
                (thread.before, thread.rate) = (thread.counter, 0.0);
            }
        }
        if let Some(apf) = &mut self.last.apf {
            apf.guest = GuestApf {
                not_present: status.apf.not_present,
                ready: status.apf.ready,
                ready_before_wait: status.apf.dummies,
                wake_all: status.apf.wake_all,
                lost: status.apf.lost,
            };
        }
    }
}

/// Work that takes at most 1 % of a thread's time, or is done every two seconds. On kvm, a count
/// of the resident pages walks the page table of all of the guest's memory, 2.7 ms a GiB.
struct Rarely {
    next: Instant,
}

/// The longest time between two counts of a running guest.
const RARELY_MAX: Duration = Duration::from_secs(2);

impl Rarely {
    fn new() -> Self {
        Self {
            next: Instant::now(),
        }
    }

    /// Calls `work`, unless the last call is too recent.
    fn call(&mut self, work: impl FnOnce()) {
        let began = Instant::now();
        if began >= self.next {
            work();
            self.next = began + (began.elapsed() * 100).min(RARELY_MAX);
        }
    }
}

/// A VM whose counters `lacuna run` shows.
pub trait Watched: lacuna::Vm {
    /// Puts its counters into `last`.
    fn count(&self, last: &mut RunSample);

    /// Backs all of its budget with memory, as long as `each` says `Continue`.
    ///
    /// # Errors
    /// The kernel has less memory.
    fn prefault(&self, each: &mut dyn FnMut() -> ControlFlow<()>) -> Result<(), HostError>;

    /// Its run is over: pages arrive without simulated latency from now on.
    fn end_latency(&self);
}

impl Watched for lacuna::soft::Vm {
    fn count(&self, last: &mut RunSample) {
        count_host(last, &self.host().stats(), &self.stalls());
        count_exits(last, &lacuna::Vm::stats(self));
        last.resident_bytes += self.host().linux_pages().bytes();
        let vcpus = lacuna::Vm::stats(self).vcpus.into_iter();
        last.major_faults = vcpus.map(|vcpu| vcpu.major_faults).sum();
        count_apf(last, &self.apf_stats());
        count_dirty(last, self);
    }

    fn prefault(&self, each: &mut dyn FnMut() -> ControlFlow<()>) -> Result<(), HostError> {
        self.host().prefault(each)
    }

    fn end_latency(&self) {
        self.host().end_latency();
    }
}

impl Watched for lacuna::kvm::Vm {
    fn count(&self, last: &mut RunSample) {
        let stats = lacuna::Vm::stats(self);
        last.resident_bytes = stats.resident.bytes();
        last.peak_bytes = last.peak_bytes.max(peak_resident());
        last.swap_in = stats.pages_in;
        last.swap_out = stats.pages_out;
        last.faults = vec![
            fault("zero-fill", stats.first_touches),
            fault("swap-in", stats.pages_in),
        ];
        count_exits(last, &stats);
        count_dirty(last, self);
    }

    /// Linux backs the memory at first touch.
    fn prefault(&self, _: &mut dyn FnMut() -> ControlFlow<()>) -> Result<(), HostError> {
        Ok(())
    }

    fn end_latency(&self) {
        Self::end_latency(self);
    }
}

fn fault(kind: &str, count: u64) -> Faults {
    Faults {
        kind: kind.into(),
        count,
    }
}

fn count_exits(last: &mut RunSample, stats: &VmStats) {
    let exits = stats.vcpus.iter().map(|vcpu| {
        let count = |kind: ExitKind| (kind.name(), vcpu.exits.of(kind));
        ExitKind::ALL.map(count).into()
    });
    last.exits = exits.collect();
}

fn count_apf(last: &mut RunSample, vcpus: &[ApfStats]) {
    let Some(apf) = &mut last.apf else {
        return;
    };
    let mut all = ApfStats::default();
    vcpus.iter().for_each(|one| all.merge(one));
    *apf = Apf {
        taken: all.taken,
        halted: all.halted,
        repeated: all.repeated,
        swap_in_min_ns: all.swap_in.min_ns,
        swap_in_mean_ns: all.swap_in.mean_ns(),
        swap_in_max_ns: all.swap_in.max_ns,
        guest: apf.guest,
    };
}

fn count_dirty(last: &mut RunSample, vm: &impl DirtyTracking) {
    let sum = |choice: &dyn DetectionChoice| {
        let mut all = DirtyStats::default();
        choice.dirty_stats().iter().for_each(|one| all.merge(one));
        DirtyCounts {
            logged: all.logged,
            log_full: all.log_full,
            faults: all.faults + all.fast_page_faults,
        }
    };
    last.dirty = Dirty {
        detected_by: vm.detected_by().to_string(),
        delivery: match vm.delivery() {
            Delivery::Bitmap => "bitmap".into(),
            Delivery::Ring { .. } => "ring".into(),
        },
        vcpus: vm.detection().map(sum),
    };
}

fn count_host(last: &mut RunSample, host: &HostStats, stalls: &[lacuna::soft::Stalls]) {
    last.resident_bytes = PageCount::new(host.resident + host.store).bytes();
    let page_cache = PageCount::new(host.page_cache).bytes();
    last.peak_bytes = last.peak_bytes.max(peak_resident() + page_cache);
    last.swap_in = host.swapped_in + host.linux_paged_in;
    last.swap_out = host.swapped_out + host.linux_paged_out;
    if let Some(huge) = &mut last.huge {
        *huge = Huge {
            pages: host.huge_pages,
            faults: host.huge_faults,
            fallbacks: host.huge_fallbacks,
            splits: host.splits,
            collapses: host.collapses,
        };
    }
    last.faults = vec![
        fault("zero-fill", host.faults_zero_fill),
        fault("resident", host.faults_resident),
        fault("swap-in", host.faults_swap_in),
        fault("shared", host.faults_shared_ticket),
        fault("rescued", host.faults_rescued),
    ];
    last.stalls = VcpuStalls::of_all(stalls);
}

/// A copy of the guest's status pages by `read`, if the guest announced them.
pub fn copy_status(
    devices: &PlatformDevices,
    read: impl Fn(Gpa, &mut [u8]) -> bool,
) -> Option<Vec<u8>> {
    let first = devices.status_page()?.gpa();
    status::copy(|at, pages| {
        first
            .checked_add(at as u64)
            .is_some_and(|gpa| read(gpa, pages))
    })
}

/// The status pages, if they are resident: a look at a run causes no swap-in.
fn read_status<V: Watched>(vm: &V, devices: &PlatformDevices) -> Option<Status> {
    let pages = copy_status(devices, |gpa, pages| vm.peek(gpa, pages))?;
    Status::parse(&pages).ok()
}

/// Adds the progress of the guest's threads, if its status page is resident. Two threads may have
/// the same name, so the label begins with the thread's number.
pub(crate) fn count_threads<V: Watched>(vm: &V, devices: &PlatformDevices, to: &mut Metrics) {
    let steps = (
        "lacuna_guest_thread_steps_total",
        "Steps that the guest's thread has done.",
        metrics::Kind::Counter,
    );
    let goal = (
        "lacuna_guest_thread_goal",
        "Steps that the guest's thread will do.",
        metrics::Kind::Gauge,
    );
    let threads = read_status(vm, devices).map_or_else(Vec::new, |status| status.threads);
    for (number, thread) in threads.iter().enumerate() {
        let name = format!("{number} {}", thread.name);
        let labels = [("thread", &*name), ("kind", kind(thread.kind))];
        to.add(steps, &labels, Value::Whole(thread.counter));
        if let Some(steps) = thread.goal {
            to.add(goal, &labels[..1], Value::Whole(steps));
        }
    }
}

fn threads(status: &Status, last: &RunSample, elapsed: Duration) -> Vec<Thread> {
    let seconds = elapsed.saturating_sub(last.elapsed).as_secs_f64();
    let thread = |(index, now): (usize, &lacuna_guest::status::Thread)| {
        let last = last.threads.get(index);
        let counter = last.map_or(0, |thread| thread.counter);
        let steps = now.counter.saturating_sub(counter) as f64;
        Thread {
            name: now.name.clone(),
            kind: kind(now.kind).into(),
            counter: now.counter,
            goal: now.goal.unwrap_or(0),
            before: last.map_or(0, |thread| thread.before),
            rate: if seconds > 0.0 { steps / seconds } else { 0.0 },
        }
    };
    status.threads.iter().enumerate().map(thread).collect()
}

const fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Worker => "work",
        Kind::Faulter => "fault",
        Kind::Other => "other",
    }
}

/// This process's highest resident memory in bytes (`VmHWM`, proc(5)): frames, tables and program.
fn peak_resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    kib(&status, "VmHWM").unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn costly_work_is_rare_and_cheap_work_is_not() {
        let calls = |cost| {
            let (mut rarely, mut calls) = (Rarely::new(), 0);
            for _ in 0..5 {
                rarely.call(|| {
                    thread::sleep(cost);
                    calls += 1;
                });
                thread::sleep(Duration::from_millis(20));
            }
            calls
        };
        // 5 s pass before the next call.
        assert_eq!(calls(Duration::from_millis(50)), 1);
        assert!(calls(Duration::ZERO) > 1);
    }
}
