//! When to reclaim: in the background between the watermarks, directly when a fault found nothing.

use crate::error::HostError;
use crate::host::{Core, Host, lock};
use crate::reclaim::Mercy;
use crate::stats::Counters;
use crate::writeback::CLUSTER;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Pages in flight to swap beyond which the background waits for completions.
const MAX_WRITING: usize = 16 * CLUSTER;
/// Batches of direct reclaim that spare accessed pages, before it takes what there is.
const GENTLE: usize = 8;
/// Milliseconds without any progress after which direct reclaim gives up.
const PATIENCE: usize = 2000;

/// What a step of reclaim has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct Progress {
    /// Frames looked at; 0 means that there was nothing to do.
    pub scanned: usize,
    /// Frames freed.
    pub freed: usize,
    /// Pages on their way to swap, whose frames are freed when they arrive.
    pub writing: usize,
}

impl Host {
    /// Whether free frames are so few that [`Host::balance`] should run until it has nothing to do.
    pub fn wants_balance(&self) -> bool {
        self.core.is_low()
    }

    /// One step of background reclaim: a batch, if free frames (those on their way included) are below
    /// the high watermark and not too much is in flight. It calls listeners and the swap device, so no
    /// lock may be held.
    pub fn balance(&self) -> Progress {
        let core = &self.core;
        let writing = core.writing.load(Ordering::Relaxed);
        if core.frames.free_now() + writing >= core.frames.high || writing >= MAX_WRITING {
            return Progress {
                writing,
                ..Progress::default()
            };
        }
        let batch = self.reclaim_batch(Mercy::SecondChance);
        if let Some(error) = batch.error {
            *lock(&core.failure) = Some(error);
        }
        let writing = core.writing.load(Ordering::Relaxed);
        Progress {
            scanned: batch.scanned,
            freed: batch.freed,
            writing,
        }
    }

    /// After [`crate::Resolution::NoMemory`]: reclaims until some frame is free, waiting for listeners
    /// and write-outs. The caller holds no lock, and its vCPU is offline.
    ///
    /// Under a virtual executor it does not wait for write-outs: when [`Progress::freed`] is 0 and
    /// [`Progress::writing`] is not, the scheduler lets time pass to [`Host::next_completion`] first.
    ///
    /// `Err` when nothing can be freed: the swap device is full or failing, or everything is held.
    pub fn reclaim_direct(&self) -> Result<Progress, HostError> {
        let core = &self.core;
        Counters::add(&core.stats.direct_reclaims, 1);
        let (mut idle, mut passed, mut rounds) = (0, 0, 0);
        let mut error = None;
        loop {
            let seen = core.settled.generation();
            let available = core.frames.available();
            let writing = core.writing.load(Ordering::Relaxed);
            if available > 0 {
                return Ok(Progress {
                    scanned: passed,
                    freed: available,
                    writing,
                });
            }
            let pending = writing + lock(&core.tickets).len();
            if writing >= MAX_WRITING && !self.io.may_wait() {
                return Ok(Progress {
                    scanned: passed,
                    freed: 0,
                    writing: pending,
                });
            }
            let mercy = if rounds < GENTLE {
                Mercy::SecondChance
            } else {
                Mercy::None
            };
            let batch = self.reclaim_batch(mercy);
            (rounds, passed) = (rounds + 1, passed + batch.scanned);
            if batch.error.is_some() {
                error = batch.error;
            }
            if batch.freed > 0 || passed < 2 * core.frames.len() + GENTLE * 1024 {
                continue;
            }
            // Two turns of the hand for nothing: what is in flight is the only hope.
            let pending = core.writing.load(Ordering::Relaxed) + lock(&core.tickets).len();
            if pending > 0 && !self.io.may_wait() {
                return Ok(Progress {
                    scanned: passed,
                    freed: 0,
                    writing: pending,
                });
            }
            error = error.or_else(|| self.failure());
            idle += 1;
            if !self.io.may_wait() || idle > PATIENCE || (error.is_some() && pending == 0) {
                return Err(error.unwrap_or_else(|| core.exhausted()));
            }
            self.io.help(core, seen);
        }
    }

    /// Starts the thread that keeps free frames between the watermarks. It ends when the guard is
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
                std::thread::park();
                continue;
            }
            loop {
                let seen = self.core.settled.generation();
                let progress = self.balance();
                if stop.load(Ordering::Acquire) || progress.scanned == 0 && progress.writing == 0 {
                    break;
                }
                if progress.scanned == 0 {
                    self.io.help(&self.core, seen);
                } else if self.failure().is_some() {
                    // The device refuses: do not keep a core busy asking it.
                    std::thread::park_timeout(Duration::from_millis(10));
                }
            }
        }
    }
}

impl Core {
    pub fn is_low(&self) -> bool {
        self.frames.free_now() < self.frames.low
    }

    /// Called when a magazine is refilled, which is often enough.
    pub fn wake_background_if_low(&self) {
        if self.is_low()
            && let Some(thread) = &*lock(&self.background)
        {
            thread.unpark();
        }
    }

    fn exhausted(&self) -> HostError {
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
