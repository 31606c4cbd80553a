//! When to reclaim. The background thread reclaims while few frames are free, up to the high
//! watermark. If a fault finds no free frame, its thread reclaims by itself (direct reclaim) and
//! waits in a queue for a frame.

use crate::core::Core;
use crate::counters::Counters;
use crate::error::HostError;
use crate::host::Host;
use crate::linux::limit::{LinuxHand, Trimmed};
use crate::per_cpu_pages::PerCpuPages;
use crate::reclaim::collapse::Collapse;
use crate::reclaim::patience::{Outlook, Patience};
use crate::reclaim::round::{CLUSTER, ScanPriority};
use crate::region::HugePages;
use crate::settled::NEVER;
use crate::settled::TICK;
use crate::ticket::Ticket;
use lacuna_frames::{Frames, Turn};
use lacuna_sync::{join, lock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Pages being written to swap at which background reclaim starts no further write and waits for
/// completions.
const MAX_WRITING: usize = 16 * CLUSTER;
/// First batches of a direct sweep, which spare accessed pages.
const GENTLE: usize = 8;
/// Turns of the clock hand, within one sweep of direct reclaim, after which it takes accessed
/// pages.
const TURNS_SPARING_ACCESSED: usize = 2;
/// Turns after which it takes compound pages.
const TURNS_SPARING_COMPOUND: usize = 3;
/// Turns after which it gives up: the last turn has looked at every frame and spared none.
const MAX_TURNS: usize = 4;
/// Failed swap writes after which a sweep of direct reclaim stops. A virtual executor cannot wait
/// for the device to recover. There direct reclaim returns the device's error after so many
/// failures in a row.
const MAX_FAILURES: usize = 4;

/// How many windows of Linux memory the hand looks at before a pause, unless pages leave.
const LINUX_WINDOWS: usize = 16;
/// Pause of the background thread between two steps of collapse, and after a reclaim in vain. A
/// collapse by copy takes about 1/50 of this.
const PACE: Duration = Duration::from_millis(10);
/// Pause after a step of collapse that reached the last block or lacked free memory.
const REST: Duration = Duration::from_secs(1);

/// The result of one step of reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct Progress {
    /// Frames scanned; 0 means that there was nothing to do.
    pub scanned: usize,
    /// From [`Host::balance`]: frames that any thread freed during the step. From direct reclaim:
    /// frames in the caller's cache, or under a virtual executor, free frames in the pool.
    pub freed: usize,
    /// Pages being written to swap. From direct reclaim, reads in flight are counted too.
    pub writing: usize,
}

/// The result of one sweep: several batches of direct reclaim.
#[derive(Default)]
struct Sweep {
    progress: Progress,
    error: Option<HostError>,
}

impl Host {
    /// Whether free frames are so few that [`Host::balance`] should run until it has nothing to do.
    pub fn wants_balance(&self) -> bool {
        self.core.is_low()
    }

    /// One step of background reclaim. It reclaims one batch if the free frames, together with
    /// those that writes in flight will free, are below the high watermark and the frames that a
    /// smaller budget has still to withhold, and if few enough writes are in flight. It calls MMU
    /// notifiers and the swap device, so the caller holds no lock.
    pub fn balance(&self) -> Progress {
        let core = &self.core;
        let writing = core.pages_writing();
        if core.frames.left_to_withhold() > 0 {
            core.frames.withhold(0);
        }
        let enough = core.frames.high() + core.frames.left_to_withhold();
        if core.frames.available() + writing >= enough || writing >= MAX_WRITING {
            return Progress {
                writing,
                ..Progress::default()
            };
        }
        let before = core.freed();
        let batch = self.reclaim_batch(ScanPriority::SpareAccessed);
        if let Some(error) = batch.error {
            core.note_reason(error);
        }
        let freed = (core.freed() - before) as usize;
        if core.frames.left_to_withhold() > 0 {
            core.frames.withhold(freed);
        }
        Progress {
            scanned: batch.scanned,
            freed,
            writing: core.pages_writing(),
        }
    }

    /// Reclaims until `cache` has a frame; called after [`crate::Resolution::NoMemory`]. Waits for
    /// MMU notifiers and for writes to swap. The caller holds no lock, and its vCPU is offline in
    /// the VM's QSBR. Waiting threads get free frames in the order of their calls.
    ///
    /// It waits for a slow swap device without a limit.
    ///
    /// Under a virtual executor this never waits for a write and leaves `cache` unchanged. If it
    /// returns [`Progress::freed`] of 0 and a positive [`Progress::writing`], the scheduler
    /// advances time to [`Host::next_completion`] before it calls again.
    ///
    /// # Errors
    /// No frame can be freed: the swap device is full or keeps failing, or every page is pinned.
    pub fn reclaim_direct(&self, cache: &mut PerCpuPages) -> Result<Progress, HostError> {
        self.reclaim_direct_until(cache, &NEVER)
    }

    /// As [`Host::reclaim_direct`], but it returns soon after `stop` is set, perhaps with an empty
    /// `cache`. A vCPU uses it, because its VM may be stopped meanwhile.
    pub fn reclaim_direct_until(
        &self,
        cache: &mut PerCpuPages,
        stop: &AtomicBool,
    ) -> Result<Progress, HostError> {
        Counters::add(&self.core.stats.direct_reclaims, 1);
        self.spare_caches.drain();
        if self.io.may_wait() {
            self.wait_for_frame(cache, stop)
        } else {
            self.reclaim_at_once()
        }
    }

    /// Direct reclaim under a virtual executor. A wait would never end, because only the scheduler
    /// advances time.
    fn reclaim_at_once(&self) -> Result<Progress, HostError> {
        let core = &self.core;
        let sweep = self.sweep(&NEVER);
        let available = core.frames.available();
        if available > 0 {
            return Ok(Progress {
                freed: available,
                ..sweep.progress
            });
        }
        if let Some(error) = core.take_failure() {
            return core.or_extend(sweep.progress, error);
        }
        if sweep.progress.writing > 0 {
            return Ok(sweep.progress);
        }
        let error = sweep.error.unwrap_or_else(|| core.exhausted());
        core.or_extend(sweep.progress, error)
    }

    fn wait_for_frame(
        &self,
        cache: &mut PerCpuPages,
        stop: &AtomicBool,
    ) -> Result<Progress, HostError> {
        let core = &self.core;
        let place = QueuePlace::new(&core.frames);
        let mut patience = Patience::default();
        let mut progress = Progress::default();
        loop {
            let (seen, freed) = (core.settled.generation(), core.freed());
            progress.freed = cache.refill_in_turn(place.turn);
            if progress.freed > 0 || stop.load(Ordering::Acquire) {
                return Ok(progress);
            }
            let sweep = self.sweep(stop);
            progress = sweep.progress;
            if core.freed() != freed {
                // A frame was freed, for this thread or for a longer waiting one.
                patience = Patience::default();
                continue;
            }
            let (outlook, seen) = self.outlook(seen);
            let Some(pause) = patience.after(outlook, Instant::now()) else {
                let error = sweep.error.unwrap_or_else(|| core.exhausted());
                progress = core.or_extend(progress, error)?;
                continue;
            };
            self.io.help(core, seen, pause);
        }
    }

    /// What to expect after a sweep that freed nothing, and the generation of [`Core::settled`]
    /// that the wait must pass. `seen` is the generation before the sweep.
    fn outlook(&self, seen: u64) -> (Outlook, u64) {
        let core = &self.core;
        let now = core.settled.generation();
        if core.is_failing() && core.pages_writing() == 0 {
            // A refused write also moves the generation. Without this arm each refusal would count
            // as progress, and the thread would never give up. A page that is being read may be
            // dropped after its arrival.
            match core.is_reading() {
                true => (Outlook::Pending, now),
                false => (Outlook::Quiet, now),
            }
        } else if now != seen {
            (Outlook::Moving, now)
        } else if core.is_quiet() {
            (Outlook::Quiet, seen)
        } else {
            (Outlook::Pending, seen)
        }
    }

    /// Reclaims batches until there is a frame for every waiting thread, free or freed by a write
    /// in flight. Gives up after four turns of the clock hand or [`MAX_FAILURES`] failed writes.
    fn sweep(&self, stop: &AtomicBool) -> Sweep {
        let core = &self.core;
        let mut sweep = Sweep::default();
        let mut rounds = 0;
        let failures = || core.stats.write_failures.load(Ordering::Relaxed);
        let enough = failures() + MAX_FAILURES as u64;
        while core.frames.available() + core.pages_writing() < core.frames.queued().max(1)
            && sweep.progress.scanned < MAX_TURNS * core.frames.total()
            && failures() < enough
            && !stop.load(Ordering::Acquire)
        {
            let turn = sweep.progress.scanned / core.frames.total();
            let gentle = rounds < GENTLE && turn < TURNS_SPARING_ACCESSED;
            let priority = if gentle {
                ScanPriority::SpareAccessed
            } else if turn < TURNS_SPARING_COMPOUND {
                ScanPriority::SpareCompound
            } else {
                ScanPriority::TakeAll
            };
            let batch = self.reclaim_batch(priority);
            rounds += 1;
            sweep.progress.scanned += batch.scanned;
            sweep.error = batch.error.or(sweep.error);
        }
        sweep.progress.writing = core.pages_writing() + lock(&core.tickets).len();
        sweep
    }

    /// Starts the background thread. It keeps the free frames between the watermarks, and collapses
    /// blocks when there is nothing to reclaim. It ends when the returned guard is dropped.
    pub fn spawn_background(self: &Arc<Self>) -> Result<Background, HostError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (host, stopped) = (self.clone(), stop.clone());
        let spawned = std::thread::Builder::new()
            .name("lacuna-reclaim".into())
            .spawn(move || host.run_background(&stopped));
        let thread = spawned.map_err(|error| HostError::Thread(error.to_string()))?;
        *lock(&self.core.background) = Some(thread.thread().clone());
        Ok(Background {
            thread: Some(thread),
            stop,
        })
    }

    fn run_background(&self, stop: &AtomicBool) {
        let mut hand = LinuxHand::default();
        while !stop.load(Ordering::Acquire) {
            if !self.core.is_low() {
                self.idle(&mut hand);
                continue;
            }
            let mut barren = 0;
            loop {
                let seen = self.core.settled.generation();
                let progress = self.balance();
                barren = if progress.freed > 0 {
                    0
                } else {
                    barren + progress.scanned
                };
                if stop.load(Ordering::Acquire) || progress.scanned == 0 && progress.writing == 0 {
                    break;
                }
                if progress.scanned == 0 {
                    self.io.help(&self.core, seen, TICK);
                } else if self.failure().is_some() || barren > MAX_TURNS * self.core.frames.total()
                {
                    // The swap device fails or is full, or no page may be taken. Do not spin.
                    std::thread::park_timeout(PACE);
                    barren = 0;
                }
            }
        }
    }

    /// Some steps towards the limit of Linux memory, and one step of collapse, because there is
    /// nothing to reclaim. Unless pages leave, a pause follows. It bounds the thread's load, and
    /// ends early when [`Core::wake_background_if_low`] unparks the thread.
    fn idle(&self, hand: &mut LinuxHand) {
        let mut trimmed = self.core.trim_linux(hand);
        for _ in 1..LINUX_WINDOWS {
            if trimmed == Trimmed::Left(0) {
                trimmed = self.core.trim_linux(hand);
            }
        }
        let collapse = (self.core.huge() != HugePages::Never).then(|| self.collapse_step());
        let is_idle = matches!(collapse, None | Some(Collapse::Idle));
        let pause = match trimmed {
            Trimmed::Left(1..) => return,
            Trimmed::Unlimited if collapse.is_none() => {
                std::thread::park();
                return;
            }
            Trimmed::Unlimited if is_idle => REST,
            Trimmed::Left(0) if is_idle && hand.is_stuck() => REST,
            _ => PACE,
        };
        std::thread::park_timeout(pause);
    }
}

impl Core {
    pub fn pages_writing(&self) -> usize {
        self.writing.load(Ordering::Relaxed)
    }

    pub fn is_low(&self) -> bool {
        self.frames.available() < self.frames.low() || self.frames.left_to_withhold() > 0
    }

    /// Wakes the background thread when free frames are below the low watermark. A fault calls
    /// this only when it refills its per-CPU page cache.
    pub fn wake_background_if_low(&self) {
        if self.is_low() {
            self.wake_background();
        }
    }

    /// Wakes the background thread, if there is one.
    pub fn wake_background(&self) {
        if let Some(thread) = &*lock(&self.background) {
            thread.unpark();
        }
    }

    /// Frames that reclaim has freed so far.
    fn freed(&self) -> u64 {
        self.stats.freed.load(Ordering::Relaxed)
    }

    /// Whether the last write to swap failed, or found no room on the device.
    fn is_failing(&self) -> bool {
        lock(&self.failure).is_some()
    }

    /// Takes the device's error once [`MAX_FAILURES`] writes in a row have failed. The count starts
    /// again at 0, so a later call of direct reclaim tries the device again.
    fn take_failure(&self) -> Option<HostError> {
        let mut failure = lock(&self.failure);
        let failed = failure.take_if(|failure| failure.count >= MAX_FAILURES);
        failed.map(|failure| failure.error)
    }

    /// Whether nothing in progress can free a frame: no read or write is in flight, no thread has
    /// isolated a frame, and no frame is free.
    fn is_quiet(&self) -> bool {
        self.pages_writing() == 0
            && !self.is_reading()
            && self.frames.available() == 0
            && !self.frames.any_isolated()
    }

    /// Whether a thread or a ring carries out a read. An unstarted ticket does not count: its read
    /// may never begin.
    fn is_reading(&self) -> bool {
        lock(&self.tickets).values().any(Ticket::is_started)
    }

    /// Extends a budget below the pool's size, because reclaim has failed with `error`: a smaller
    /// budget ends no guest. Otherwise returns the error.
    fn or_extend(&self, progress: Progress, error: HostError) -> Result<Progress, HostError> {
        if !self.frames.extend_budget() {
            return Err(error);
        }
        let freed = self.frames.available();
        Ok(Progress { freed, ..progress })
    }

    /// Why no frame is free: the swap device's last error, or else that every page is pinned.
    fn exhausted(&self) -> HostError {
        if let Some(failure) = &*lock(&self.failure) {
            return failure.error.clone();
        }
        let budget = self.frames.budget();
        HostError::Exhausted {
            in_use: self.frames.total() - self.frames.free_now(),
            budget,
        }
    }
}

/// A place in the queue for frames; dropping it leaves the queue.
struct QueuePlace<'a> {
    frames: &'a Frames,
    turn: Turn,
}

impl<'a> QueuePlace<'a> {
    fn new(frames: &'a Frames) -> Self {
        let turn = frames.join_queue();
        Self { frames, turn }
    }
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        self.frames.leave_queue(self.turn);
    }
}

/// The background reclaim thread; dropping the guard ends it.
pub struct Background {
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            join(thread);
        }
    }
}
