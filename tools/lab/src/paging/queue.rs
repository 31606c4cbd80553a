//! A page source that puts its requests into queues, and the answering threads. They serve the pool
//! of frames, as a userfaultfd and its readers (`kernel_queue`) serve Linux memory.

use super::PAGES;
use crate::experiment::LabError;
use crate::fixture::gpa_of;
use lacuna_machine::{Arch, MissingMemory, PageRequest, PageSource, SourcePage};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};

thread_local! {
    /// The queue of this thread's requests.
    static QUEUE: Cell<usize> = const { Cell::new(0) };
}

/// From now on the requests of this thread go into queue number `queue` of its source, modulo the
/// number of queues.
pub fn use_queue(queue: usize) {
    QUEUE.set(queue);
}

/// A source whose pages all have the same content.
pub struct Queues {
    queues: Vec<Queue>,
    /// Until it is open, each asking thread gets its page at once: the guest is being loaded.
    is_open: AtomicBool,
}

#[derive(Default)]
struct Queue {
    inside: Mutex<Inside>,
    changed: Condvar,
}

/// The data under the lock of a queue.
#[derive(Default)]
struct Inside {
    requests: VecDeque<PageRequest>,
    is_over: bool,
}

impl Queues {
    /// A source with this number of queues, which answers at once until [`Queues::open`].
    pub fn new(queues: usize) -> Self {
        Self {
            queues: (0..queues).map(|_| Queue::default()).collect(),
            is_open: AtomicBool::new(false),
        }
    }

    /// From now on, requests wait in the queues for a reader.
    pub fn open(&self) {
        self.is_open.store(true, Ordering::Release);
    }

    /// The number of queues.
    pub fn count(&self) -> usize {
        self.queues.len()
    }

    /// Ends all readers.
    pub fn end(&self) {
        for queue in &self.queues {
            queue.lock().is_over = true;
            queue.changed.notify_all();
        }
    }

    /// The work of one reader of queue number `queue`, for a guest of `arch`: it provides each page
    /// by the call that a VMM uses after an exit, so that arms differ in nothing else.
    ///
    /// # Errors
    /// A page could not be provided.
    pub fn read(
        &self,
        queue: usize,
        arch: Arch,
        memory: &dyn MissingMemory,
    ) -> Result<(), LabError> {
        while let Some(request) = self.queues[queue].next() {
            let SourcePage(page) = request.page();
            memory.provide(gpa_of(arch, page), &PAGES[0])?;
        }
        Ok(())
    }
}

impl Queue {
    fn lock(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.inside.lock().expect("no panic under this lock")
    }

    fn next(&self) -> Option<PageRequest> {
        let waits = |inside: &mut Inside| inside.requests.is_empty() && !inside.is_over;
        let inside = self.changed.wait_while(self.lock(), waits);
        let mut inside = inside.expect("no panic under this lock");
        inside.requests.pop_front()
    }
}

impl PageSource for Queues {
    fn describe(&self) -> String {
        "the lab's page source".into()
    }

    fn fetch(&self, request: PageRequest) {
        if !self.is_open.load(Ordering::Acquire) {
            // Late: another thread has provided the page.
            let _ = request.provide(&PAGES[0]);
            return;
        }
        let queue = &self.queues[QUEUE.get() % self.queues.len()];
        queue.lock().requests.push_back(request);
        queue.changed.notify_one();
    }
}
