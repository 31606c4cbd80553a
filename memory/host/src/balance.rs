//! When to reclaim: in the background between the watermarks, directly when a fault found nothing.

use crate::cache::FrameCache;
use crate::collapse::Collapse;
use crate::error::HostError;
use crate::frames::Frames;
use crate::host::{Core, Host, HugePages, NEVER, lock};
use crate::patience::{Outlook, Patience};
use crate::reclaim::Mercy;
use crate::stats::Counters;
use crate::turns::Turn;
use crate::writeback::CLUSTER;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Pages in flight to swap beyond which the background waits for completions.
const MAX_WRITING: usize = 16 * CLUSTER;
/// Batches of direct reclaim that spare accessed pages, two turns of the hand at most, before it
/// takes what there is.
const GENTLE: usize = 8;
/// Writes that fail before direct reclaim pauses; and in virtual time, where it cannot, those in a
/// row before it believes the device.
const MAX_FAILURES: usize = 4;
/// How long to wait at a time for what may end without notice.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// Between two looks for pages that can be a whole block: moving one takes a fiftieth of that.
const PACE: Duration = Duration::from_millis(10);
/// After a look at all of them.
const REST: Duration = Duration::from_secs(1);

/// What a step of reclaim has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct Progress {
    /// Frames looked at; 0 means that there was nothing to do.
    pub scanned: usize,
    /// Frames freed, by whomever, during the step.
    pub freed: usize,
    /// Pages on their way to swap, whose frames are freed when they arrive.
    pub writing: usize,
}

/// What some batches of direct reclaim have come to.
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

    /// One step of background reclaim: a batch, if free frames (those on their way included) are
    /// below the high watermark and not too much is in flight. It calls listeners and the swap
    /// device, so no lock may be held.
    pub fn balance(&self) -> Progress {
        let core = &self.core;
        let writing = core.pages_writing();
        if core.frames.available() + writing >= core.frames.high || writing >= MAX_WRITING {
            return Progress {
                writing,
                ..Progress::default()
            };
        }
        let before = core.stats.freed.load(Ordering::Relaxed);
        let batch = self.reclaim_batch(Mercy::SecondChance);
        if let Some(error) = batch.error {
            core.note_reason(error);
        }
        let writing = core.writing.load(Ordering::Relaxed);
        let freed = core.stats.freed.load(Ordering::Relaxed) - before;
        Progress {
            scanned: batch.scanned,
            freed: freed as usize,
            writing,
        }
    }

    /// After [`crate::Resolution::NoMemory`]: reclaims until `cache` has a frame, waiting for
    /// listeners and write-outs. The caller holds no lock, and its vCPU is offline. What becomes
    /// free is given to those who wait in the order of their calls.
    ///
    /// A device may take as long as it likes. `Err` when nothing can be freed: the swap device is
    /// full or goes on failing, or everything is held.
    ///
    /// Under a virtual executor it does not wait for write-outs: when [`Progress::freed`] is 0 and
    /// [`Progress::writing`] is not, the scheduler lets time pass to [`Host::next_completion`]
    /// first.
    pub fn reclaim_direct(&self, cache: &mut FrameCache) -> Result<Progress, HostError> {
        self.reclaim_direct_until(cache, &NEVER)
    }

    /// As [`Host::reclaim_direct`], but returns soon after `stop` is set, then perhaps with no
    /// frame: for a vCPU whose VM is being stopped.
    pub fn reclaim_direct_until(
        &self,
        cache: &mut FrameCache,
        stop: &AtomicBool,
    ) -> Result<Progress, HostError> {
        Counters::add(&self.core.stats.direct_reclaims, 1);
        if self.io.may_wait() {
            self.wait_for_frame(cache, stop)
        } else {
            self.reclaim_at_once()
        }
    }

    /// Where time moves only when a scheduler says so.
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
            return Err(error);
        }
        if sweep.progress.writing > 0 {
            return Ok(sweep.progress);
        }
        Err(sweep.error.unwrap_or_else(|| core.exhausted()))
    }

    fn wait_for_frame(
        &self,
        cache: &mut FrameCache,
        stop: &AtomicBool,
    ) -> Result<Progress, HostError> {
        let core = &self.core;
        let place = Place::new(&core.frames);
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
                // For this thread, or for one that has waited longer.
                patience = Patience::default();
                continue;
            }
            let (outlook, seen) = self.outlook(seen);
            let Some(pause) = patience.after(outlook) else {
                return Err(sweep.error.unwrap_or_else(|| core.exhausted()));
            };
            self.io.help(core, seen, pause);
        }
    }

    /// What a thread can expect whose sweep freed nothing, and which generation it has seen then.
    fn outlook(&self, seen: u64) -> (Outlook, u64) {
        let core = &self.core;
        let now = core.settled.generation();
        if core.is_failing() && core.pages_writing() == 0 {
            // A device that refuses at once has moved the generation by that: no reason to ask it
            // again without a pause.
            (Outlook::Quiet, now)
        } else if now != seen {
            (Outlook::Moving, now)
        } else if core.is_quiet() {
            (Outlook::Quiet, seen)
        } else {
            (Outlook::Pending, seen)
        }
    }

    /// Batches until every thread that waits can have a frame that is free or on its way, or whole
    /// turns of the hand were in vain.
    fn sweep(&self, stop: &AtomicBool) -> Sweep {
        let core = &self.core;
        let mut sweep = Sweep::default();
        let mut rounds = 0;
        let failures = || core.stats.write_failures.load(Ordering::Relaxed);
        let enough = failures() + MAX_FAILURES as u64;
        while core.frames.available() + core.pages_writing() < core.frames.queued().max(1)
            && sweep.progress.scanned < 4 * core.frames.len()
            && failures() < enough
            && !stop.load(Ordering::Acquire)
        {
            let gentle = rounds < GENTLE && sweep.progress.scanned < 2 * core.frames.len();
            let mercy = if gentle {
                Mercy::SecondChance
            } else if sweep.progress.scanned < 3 * core.frames.len() {
                Mercy::Blocks
            } else {
                Mercy::None
            };
            let batch = self.reclaim_batch(mercy);
            rounds += 1;
            sweep.progress.scanned += batch.scanned;
            sweep.error = batch.error;
        }
        sweep.progress.writing = core.pages_writing() + lock(&core.tickets).len();
        sweep
    }

    /// Starts the thread that keeps free frames between the watermarks, and makes blocks whole when
    /// there is nothing to reclaim. It ends when the guard is
    /// dropped.
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
        while !stop.load(Ordering::Acquire) {
            if !self.core.is_low() {
                self.idle();
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
                } else if self.failure().is_some() || barren > 4 * self.core.frames.len() {
                    // The device refuses, or nothing may be taken: do not keep a core busy asking.
                    std::thread::park_timeout(Duration::from_millis(10));
                    barren = 0;
                }
            }
        }
    }
}

impl Host {
    /// Nothing to reclaim: makes blocks whole, at a pace that nobody notices, until somebody wakes
    /// the thread.
    fn idle(&self) {
        if self.core.huge == HugePages::Never {
            std::thread::park();
            return;
        }
        let pause = match self.collapse_step() {
            Collapse::Made | Collapse::Looked => PACE,
            Collapse::Idle => REST,
        };
        std::thread::park_timeout(pause);
    }
}

impl Core {
    fn pages_writing(&self) -> usize {
        self.writing.load(Ordering::Relaxed)
    }

    pub fn is_low(&self) -> bool {
        self.frames.available() < self.frames.low
    }

    /// Called when a magazine is refilled, which is often enough.
    pub fn wake_background_if_low(&self) {
        if self.is_low()
            && let Some(thread) = &*lock(&self.background)
        {
            thread.unpark();
        }
    }

    /// Frames that reclaim has freed so far.
    fn freed(&self) -> u64 {
        self.stats.freed.load(Ordering::Relaxed)
    }

    /// Whether the last write-out failed.
    fn is_failing(&self) -> bool {
        lock(&self.failure).is_some()
    }

    /// The device's failure, once it has failed often enough. The next caller asks it anew.
    fn take_failure(&self) -> Option<HostError> {
        let mut failure = lock(&self.failure);
        let failed = failure.take_if(|failure| failure.count >= MAX_FAILURES);
        failed.map(|failure| failure.error)
    }

    /// Whether nothing is on its way that could free a frame when it arrives: no read, no write, no
    /// frame that a thread has isolated or that only has to be taken.
    fn is_quiet(&self) -> bool {
        self.pages_writing() == 0
            && lock(&self.tickets).is_empty()
            && self.frames.available() == 0
            && !self.frames.any_isolated()
    }

    /// Why nothing is free: what the device said last, or that everything is held.
    fn exhausted(&self) -> HostError {
        if let Some(failure) = &*lock(&self.failure) {
            return failure.error.clone();
        }
        let budget = self.frames.len();
        HostError::Exhausted {
            in_use: budget - self.frames.free_now(),
            budget,
        }
    }
}

/// A place in the queue for frames, given up at the end.
struct Place<'a> {
    frames: &'a Frames,
    turn: Turn,
}

impl<'a> Place<'a> {
    fn new(frames: &'a Frames) -> Self {
        let turn = frames.join_queue();
        Self { frames, turn }
    }
}

impl Drop for Place<'_> {
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
            // A thread that panicked has reported it.
            let _ = thread.join();
        }
    }
}
