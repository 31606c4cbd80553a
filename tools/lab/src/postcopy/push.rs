//! The thread that brings in all pages in order while the guest runs.

use super::peer::{Pages, Purpose, ask_for};
use crate::experiment::{LabError, LabResult};
use crate::fixture::gpa_of;
use lacuna::memory::MemoryError;
use lacuna::{Arch, MissingMemory};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// How fast pages are pushed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Speed {
    /// Pages a second.
    Rate(u64),
    /// As fast as they arrive.
    Full,
}

/// The pause between two groups of pages of a [`Speed::Rate`].
const PAUSE: Duration = Duration::from_millis(4);

/// Pushes the pages of one guest while it is on.
pub struct Push<'a> {
    pub memory: &'a dyn MissingMemory,
    pub arch: Arch,
    pub pages: &'a Pages,
    pub speed: Speed,
    pub is_on: AtomicBool,
}

impl Push<'_> {
    /// Carries out `experiment` while a thread pushes whenever the push is on.
    pub fn during<T>(&self, experiment: impl FnOnce() -> LabResult<T>) -> LabResult<T> {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let thread = scope.spawn(|| self.run(&is_over));
            let end = End(&is_over);
            let done = experiment();
            drop(end);
            let pushed = thread.join().expect("the push thread does not panic");
            let done = done?;
            match pushed? {
                true => Err(LabError::Guest(
                    "all pages were pushed before the end of a round: give the guest more memory"
                        .into(),
                )),
                false => Ok(done),
            }
        })
    }

    /// Pushes until the end. Returns whether all pages were pushed before.
    fn run(&self, is_over: &AtomicBool) -> Result<bool, MemoryError> {
        ask_for(Purpose::Push);
        let mut next = 0;
        while !is_over.load(Ordering::Relaxed) {
            if !self.is_on.load(Ordering::Relaxed) {
                thread::sleep(PAUSE);
                continue;
            }
            let room = self.pages.room();
            let count = match self.speed {
                Speed::Rate(rate) => {
                    thread::sleep(PAUSE);
                    room.min(rate * PAUSE.as_millis() as u64 / 1000)
                }
                Speed::Full => room,
            };
            // A present page is not requested, and does not count.
            let end = self.pages.asked_to_push() + count;
            while self.pages.asked_to_push() < end {
                if next == self.pages.count() {
                    return Ok(true);
                }
                self.memory.fetch(gpa_of(self.arch, next), None)?;
                next += 1;
            }
        }
        Ok(false)
    }
}

/// Ends the thread, also after an error or a panic.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
