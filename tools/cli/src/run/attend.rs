//! Looks after the guest's page source, from the first access to a page to the last.
//!
//! A vCPU that waits for a missing page stops waiting when the run ends. Other waits do not look
//! for an end: the main thread's, when it loads an image, restores a vCPU or reads the status page,
//! and a vCPU's when it writes the words of async page faults. An absent source may keep them
//! waiting for ever. So a thread of its own ends these waits:
//!
//! ```text
//! a signal before the guest runs ─► at once     the run is refused: interrupted
//! an end of the run ──────────────► a moment later, unless the run is over by then
//! ```

use super::{Job, Refusal};
use crate::exit::Exit;
use crate::pages::{GuestPages, Outages};
use lacuna::PlatformDevices;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::{self, Scope, Thread};
use std::time::Duration;

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// The guest does not run yet, and a signal may still prevent that.
const BEGINS: u8 = 0;
/// The guest runs; a signal ends the run.
const RUNS: u8 = 1;
/// A signal has arrived before.
const INTERRUPTED: u8 = 2;
/// The run is over, and so is the thread.
const OVER: u8 = 3;

/// The state that the attending thread and the run share.
#[derive(Default)]
pub(super) struct Attended {
    phase: AtomicU8,
}

/// Ends the thread.
pub(super) struct Attending<'a>(&'a Attended, Thread);

impl Attended {
    /// Starts the thread, if the run has a page source.
    pub fn start<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        job: &'scope Job<'_>,
        devices: &'scope PlatformDevices,
    ) -> io::Result<Option<Attending<'scope>>> {
        let Some(pages) = &job.pages else {
            return Ok(None);
        };
        let named = thread::Builder::new().name("lacuna-attend".into());
        let started = named.spawn_scoped(scope, || self.attend(job, pages, devices))?;
        Ok(Some(Attending(self, started.thread().clone())))
    }

    fn attend(&self, job: &Job<'_>, pages: &GuestPages, devices: &PlatformDevices) {
        let (mut outages, mut has_ended) = (Outages::default(), false);
        // The source of an incoming guest ends its waits itself.
        let may_interrupt = job.start.arrival().is_none();
        while self.phase.load(Ordering::Acquire) != OVER {
            outages.look(pages);
            if may_interrupt && job.signals.caught().is_some() && self.leave(INTERRUPTED) {
                pages
                    .source()
                    .end("a signal has ended the run before it began");
            }
            let ended_before = std::mem::replace(&mut has_ended, devices.ending().is_some());
            if ended_before {
                return pages.source().end("the run has ended");
            }
            thread::park_timeout(LOOK);
        }
    }

    /// Leaves [`BEGINS`], once.
    fn leave(&self, next: u8) -> bool {
        let (left, found) = (Ordering::AcqRel, Ordering::Acquire);
        let left = self.phase.compare_exchange(BEGINS, next, left, found);
        left.is_ok()
    }

    /// The guest is about to run.
    ///
    /// # Errors
    /// A signal has arrived before, and the guest's pages no longer arrive.
    pub fn runs(&self, job: &Job<'_>) -> Result<(), Refusal> {
        match (self.leave(RUNS), job.signals.caught()) {
            (false, Some(signal)) => {
                let text = format!("interrupted by {signal} before the guest ran");
                Err((Exit::Interrupted(signal), text))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Attending<'_> {
    fn drop(&mut self) {
        self.0.phase.store(OVER, Ordering::Release);
        self.1.unpark();
    }
}
