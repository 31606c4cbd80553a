//! Puts a snapshot into a VM: whole, or its state first and its pages while the guest runs.

use super::{Job, Refusal, Start};
use crate::args::{Backend, RunArgs};
use crate::exit::Exit;
use crate::output::complain;
use crate::pages::Restoring;
use crate::sample::{LazyPages, Restored};
use crate::snapshot::refusal;
use lacuna::memory::{HugePages, LinuxBacking, MemoryKind, PrivateFile};
use lacuna::migrate::{MigrateError, Recorder, Snapshot, Touches};
use lacuna::source::Policy;
use lacuna::{PlatformDevices, Vm};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// The memory file of a guest that has its pages there: those that it does not write are in memory
/// once for all guests of the snapshot. Such a guest has memory of Linux, and an unpacked snapshot.
pub(super) fn in_place(
    args: &RunArgs,
    start: Start<'_>,
    backend: Backend,
) -> Result<Option<LinuxBacking>, Refusal> {
    let Start::Snapshot(snapshot) = start else {
        return Ok(None);
    };
    let is_linux = match args.kind() {
        MemoryKind::Linux => true,
        // A budget of all the guest's memory is memory of Linux there.
        MemoryKind::Budget => {
            let is_huge = args.on.thp.is_some_and(|thp| thp != HugePages::Never);
            backend == Backend::Kvm && args.budget() >= args.memory && !is_huge
        }
        MemoryKind::Shared | MemoryKind::Hugetlbfs | MemoryKind::Hugetlbfs1G => false,
    };
    let file = snapshot.memory_file().filter(|_| is_linux);
    let file = file.map(|file| PrivateFile::of_file(file, 0)).transpose();
    let file = file.map_err(|error| (Exit::Host, error.to_string()))?;
    Ok(file.map(LinuxBacking::Private))
}

/// Reads all of `snapshot` into `vm` and `devices`. A signal ends it.
pub(super) fn restore<V: Vm>(
    job: &Job<'_>,
    snapshot: &Snapshot,
    vm: &Arc<V>,
    devices: &PlatformDevices,
) -> Result<(Vec<V::Vcpu>, Restored), Refusal> {
    let began = Instant::now();
    let mut each = |_| match job.signals.caught() {
        None => ControlFlow::Continue(()),
        Some(_) => ControlFlow::Break(()),
    };
    let restored = match job.backing {
        None => snapshot.restore(vm, devices, &mut each),
        Some(_) => snapshot.restore_in_place(vm, devices, &mut each),
    };
    let vcpus = restored.map_err(|error| match (error, job.signals.caught()) {
        // The restore was cancelled, or its wait for an object store was interrupted.
        (_, Some(signal)) => {
            let text = format!("interrupted by {signal} before the guest was restored");
            (Exit::Interrupted(signal), text)
        }
        (error, _) => refusal(&error),
    })?;
    Ok((vcpus, done(job, snapshot.pages(), began)))
}

/// Puts the state of `snapshot` into `vm` and `devices`. Its pages arrive later.
pub(super) fn restore_lazily<V: Vm>(
    job: &Job<'_>,
    snapshot: &Snapshot,
    vm: &Arc<V>,
    devices: &PlatformDevices,
) -> Result<(Vec<V::Vcpu>, Restored), Refusal> {
    let began = Instant::now();
    let restored = snapshot.restore_lazily(vm, devices);
    let vcpus = restored.map_err(|error| refusal(&error))?;
    Ok((vcpus, done(job, 0, began)))
}

fn done(job: &Job<'_>, pages: u64, began: Instant) -> Restored {
    Restored {
        from: job.args.image.clone(),
        pages,
        seconds: began.elapsed().as_secs_f64(),
        in_place: job.backing.is_some(),
        lazy: None,
    }
}

/// A snapshot whose pages arrive while its guest runs.
pub struct Lazy<'a> {
    /// The snapshot.
    pub snapshot: &'a Snapshot,
    /// The policy for a page that cannot be read at present.
    pub policy: Policy,
    /// The counts of present pages.
    pub counts: Arc<Restoring>,
    /// When set, it ends the wait of a thread for an object store.
    pub interrupt: &'a Arc<AtomicBool>,
    /// First touches to record.
    pub record: Option<Record<'a>>,
    /// First touches to replay.
    pub replay: Option<Touches>,
}

/// A record of first touches in progress.
pub struct Record<'a> {
    /// Its file.
    pub path: &'a Path,
    /// How long it takes, unless the run ends before.
    pub time: Duration,
    /// Notes the guest's requests.
    pub recorder: Recorder,
}

/// The time between two looks whether a run has ended.
const LOOK: Duration = Duration::from_millis(100);

impl Record<'_> {
    /// Waits until the record is complete, and writes it. Returns the number of first touches.
    fn make(&self, devices: &PlatformDevices) -> Result<u64, MigrateError> {
        let began = Instant::now();
        while devices.ending().is_none() && began.elapsed() < self.time {
            thread::park_timeout(LOOK.min(self.time.saturating_sub(began.elapsed())));
        }
        let touches = self.recorder.touches();
        touches.save(self.path)?;
        Ok(touches.pages().len() as u64)
    }
}

/// Provides the pages that the guest has not needed yet, until the run ends. Drops `waits` when the
/// guest may run: at once, or after the head start of a replay.
pub(super) fn prefetch<V: Vm>(
    job: &Job<'_>,
    lazy: &Lazy<'_>,
    vm: &V,
    devices: &PlatformDevices,
    waits: mpsc::Sender<()>,
) -> LazyPages {
    let mut came = LazyPages::default();
    let waits = lazy.replay.is_some().then_some(waits);
    if let Some(record) = &lazy.record {
        match record.make(devices) {
            Ok(touches) => came.recorded = Some(touches),
            Err(error) => {
                let error = format!("{error}; the first touches are not recorded");
                complain(&error);
                came.record_error = Some(error);
            }
        }
    }
    if devices.ending().is_some() {
        return came;
    }
    let progress = |pages, of: &mut u64| {
        *of += pages;
        lazy.counts.prefetched.fetch_add(pages, Ordering::Relaxed);
        // A signal ends the run as soon as the guest may run.
        match devices.ending().is_some() || job.signals.caught().is_some() {
            false => ControlFlow::Continue(()),
            true => ControlFlow::Break(()),
        }
    };
    let done = match &lazy.replay {
        None => lazy
            .snapshot
            .prefetch(vm, &mut |pages| progress(pages, &mut came.prefetched)),
        Some(touches) => {
            let (first, others) = touches.split_at(Touches::HEAD_START);
            let replayed = came.replayed.insert(0);
            let mut replay = |touches| {
                let each = &mut |pages| progress(pages, replayed);
                lazy.snapshot.replay(vm, touches, each)
            };
            let done = replay(&first);
            drop(waits);
            done.and_then(|()| replay(&others)).and_then(|()| {
                let each = &mut |pages| progress(pages, &mut came.prefetched);
                lazy.snapshot.prefetch_rest(vm, touches, each)
            })
        }
    };
    let is_over = devices.ending().is_some() || job.signals.caught().is_some();
    match done {
        Ok(()) => lazy.counts.is_whole.store(true, Ordering::Relaxed),
        Err(MigrateError::Cancelled) => {}
        // The wait for the store was interrupted, if there was one.
        Err(_) if is_over => {}
        Err(error) => complain(&format!(
            "{error}; the guest keeps running, and its run ends when it needs a lost page"
        )),
    }
    came
}

/// Counts the demanded pages of a finished run.
pub(super) fn count_demands(job: &Job<'_>, restored: &mut Option<Restored>) {
    let lazy = restored
        .as_mut()
        .and_then(|restored| restored.lazy.as_mut());
    if let (Some(lazy), Some(pages)) = (lazy, &job.pages) {
        lazy.demand_faults = pages.source().stats().asked;
    }
}
