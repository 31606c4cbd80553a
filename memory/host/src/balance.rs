//! When to reclaim: in the background between the watermarks, directly when a fault found nothing.

use crate::collapse::Collapse;
use crate::error::HostError;
use crate::host::{Core, Host, HugePages, lock};
use crate::reclaim::Mercy;
use crate::stats::Counters;
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
/// Writes in a row that fail, before direct reclaim believes it.
const MAX_FAILURES: usize = 4;
/// Milliseconds, about, without any progress after which direct reclaim gives up.
const PATIENCE: usize = 2000;

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
            core.note_failure(error);
        }
        let writing = core.writing.load(Ordering::Relaxed);
        let freed = core.stats.freed.load(Ordering::Relaxed) - before;
        Progress {
            scanned: batch.scanned,
            freed: freed as usize,
            writing,
        }
    }

    /// After [`crate::Resolution::NoMemory`]: reclaims until some frame is free, waiting for
    /// listeners and write-outs. The caller holds no lock, and its vCPU is offline.
    ///
    /// Under a virtual executor it does not wait for write-outs: when [`Progress::freed`] is 0 and
    /// [`Progress::writing`] is not, the scheduler lets time pass to [`Host::next_completion`]
    /// first.
    ///
    /// `Err` when nothing can be freed: the swap device is full or failing, or everything is held.
    pub fn reclaim_direct(&self) -> Result<Progress, HostError> {
        let core = &self.core;
        Counters::add(&core.stats.direct_reclaims, 1);
        for _ in 0..PATIENCE {
            let seen = core.settled.generation();
            let sweep = self.sweep();
            let available = core.frames.available();
            if available > 0 {
                return Ok(Progress {
                    freed: available,
                    ..sweep.progress
                });
            }
            if let Some(error) = sweep.error.or_else(|| core.take_failure()) {
                return Err(error);
            }
            if !self.io.may_wait() {
                let waits = sweep.progress.writing > 0;
                return if waits {
                    Ok(sweep.progress)
                } else {
                    Err(core.exhausted())
                };
            }
            self.io.help(core, seen);
        }
        Err(core.exhausted())
    }

    /// Batches until a frame is free, a write is in flight, or whole turns of the hand were in
    /// vain.
    fn sweep(&self) -> Sweep {
        let core = &self.core;
        let mut sweep = Sweep::default();
        let mut rounds = 0;
        while core.frames.available() == 0
            && core.pages_writing() == 0
            && sweep.progress.scanned < 4 * core.frames.len()
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
                    self.io.help(&self.core, seen);
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

    /// The device's failure, once it has failed often enough. The next caller asks it anew.
    fn take_failure(&self) -> Option<HostError> {
        let mut failure = lock(&self.failure);
        let failed = failure.take_if(|failure| failure.count >= MAX_FAILURES);
        failed.map(|failure| failure.error)
    }

    /// Why nothing is free: what the device said last, or that everything is held.
    fn exhausted(&self) -> HostError {
        if let Some(failure) = lock(&self.failure).take() {
            return failure.error;
        }
        let budget = self.frames.len();
        HostError::Exhausted {
            in_use: budget - self.frames.free_now(),
            budget,
        }
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
