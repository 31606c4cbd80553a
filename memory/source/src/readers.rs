//! Threads that read pages and wait: where io_uring is refused, and for further tries of a read.

use crate::policy::{Asked, Outage};
use lacuna_addr::PAGE_SIZE;
use lacuna_sync::{Condvar, Mutex, MutexGuard, join, lock_order};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most threads of one source.
const THREADS: usize = 8;
/// The time between two tries.
const PAUSE: Duration = Duration::from_millis(10);

/// Why a page could not be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ReadError {
    /// Another try may succeed.
    Again(String),
    /// No other try can succeed.
    Never(String),
}

/// The origin of the pages that the threads read.
pub(crate) trait ReadPages: Send + Sync + 'static {
    /// A thread's memory between two reads.
    type Memo: Default;

    /// Reads page `page`. May wait.
    fn read(
        &self,
        page: u64,
        memo: &mut Self::Memo,
        into: &mut [u8; PAGE_SIZE],
    ) -> Result<(), ReadError>;

    /// The policy of the source.
    fn outage(&self) -> &Outage;
}

pub(crate) struct Readers<R> {
    shared: Arc<ReadersShared<R>>,
    threads: Mutex<Vec<JoinHandle<()>>, lock_order::SourceThreads>,
}

struct ReadersShared<R> {
    pages: Arc<R>,
    queue: Mutex<Queue, lock_order::SourceReaders>,
    arrived: Condvar,
    stop: AtomicBool,
}

#[derive(Default)]
struct Queue {
    asked: VecDeque<Asked>,
    /// Pages to try again, each at its time: all pauses are the same, so they are in order.
    again: VecDeque<(Instant, Asked)>,
    /// Threads waiting for a request.
    idle: usize,
}

impl<R: ReadPages> Readers<R> {
    /// Starts the first thread.
    pub fn new(pages: Arc<R>) -> io::Result<Self> {
        let shared = Arc::new(ReadersShared {
            pages,
            queue: Mutex::default(),
            arrived: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let first = shared.clone().spawn()?;
        Ok(Self {
            shared,
            threads: Mutex::new(vec![first]),
        })
    }

    /// Reads a page and answers the request, on another thread.
    pub fn read(&self, asked: Asked) {
        let mut queue = self.shared.queue();
        queue.asked.push_back(asked);
        let short = queue.asked.len() > queue.idle;
        drop(queue);
        self.shared.arrived.notify_one();
        if short {
            let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
            if threads.len() < THREADS {
                // If no thread can be started, the running threads do all the work.
                threads.extend(self.shared.clone().spawn());
            }
        }
    }
}

impl<R> Drop for Readers<R> {
    /// Ends the threads. Their unanswered requests fail.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // Under the lock, so that a thread that is about to wait sees the flag.
        let mut queue = self.shared.queue();
        let rest = (
            std::mem::take(&mut queue.asked),
            std::mem::take(&mut queue.again),
        );
        drop(queue);
        self.shared.arrived.notify_all();
        drop(rest);
        let threads = self.threads.get_mut();
        let threads = threads.unwrap_or_else(PoisonError::into_inner);
        threads.drain(..).for_each(join);
    }
}

impl<R> ReadersShared<R> {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The page to read next; waits for it. `None` at the end.
    fn next(&self) -> Option<Asked> {
        let mut queue = self.queue();
        loop {
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            let pause = queue
                .again
                .front()
                .map(|(at, _)| at.saturating_duration_since(Instant::now()));
            if pause == Some(Duration::ZERO) {
                return queue.again.pop_front().map(|(_, asked)| asked);
            }
            if let Some(asked) = queue.asked.pop_front() {
                return Some(asked);
            }
            queue.idle += 1;
            queue = match pause {
                Some(pause) => self.arrived.wait_timeout(queue, pause),
                None => self.arrived.wait(queue),
            }
            .unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
    }

    fn again(&self, asked: Asked) {
        self.queue()
            .again
            .push_back((Instant::now() + PAUSE, asked));
        self.arrived.notify_one();
    }
}

impl<R: ReadPages> ReadersShared<R> {
    fn spawn(self: Arc<Self>) -> io::Result<JoinHandle<()>> {
        let named = std::thread::Builder::new().name("lacuna-source".into());
        named.spawn(move || {
            let (mut memo, mut page) = (R::Memo::default(), [0; PAGE_SIZE]);
            while let Some(asked) = self.next() {
                self.serve(asked, &mut memo, &mut page);
            }
        })
    }

    /// Reads the page, and answers unless another try is worth it.
    fn serve(&self, asked: Asked, memo: &mut R::Memo, into: &mut [u8; PAGE_SIZE]) {
        let outage = self.pages.outage();
        let read = self.pages.read(asked.request.page().0, memo, into);
        // A late answer changes nothing.
        let _ = match read {
            Ok(()) => {
                outage.provided();
                asked.request.provide(into)
            }
            Err(ReadError::Never(reason)) => asked.request.fail(&reason),
            Err(ReadError::Again(reason)) => {
                outage.failed(&reason);
                match outage.deadline_after_failure(asked.at) {
                    Some(deadline) if deadline <= Instant::now() => {
                        return outage.give_up(&asked.request, &reason);
                    }
                    _ => return self.again(asked),
                }
            }
        };
    }
}

#[cfg(test)]
mod tests;
