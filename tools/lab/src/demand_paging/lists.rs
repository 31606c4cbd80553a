//! Queues in which vCPUs that need a page sleep until a reader has provided it. [`Lists`] serve
//! memory without a userfaultfd that reports faults, as the kernel's queues (`kernel_queue`) serve
//! other memory.

use super::PAGES;
use crate::experiment::LabResult;
use crate::fixture::gpa_of;
use lacuna::source::{PageRequest, PageSource, SourcePage};
use lacuna::{Arch, Gpa};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Queues, and the work of their readers.
pub trait Queues: Send + Sync {
    /// The source of the memory, for one VM.
    fn source(&self) -> Arc<dyn PageSource>;

    /// The number of queues.
    fn count(&self) -> usize;

    /// From now on, requests wait for a reader.
    fn open(&self) {}

    /// The work of one reader of queue number `queue` until the end. Returns the number of its
    /// faults. `provide` is what a vCPU's thread does after an exit; the kernel's queues have a
    /// call of their own.
    fn read(&self, queue: usize, provide: &dyn Fn(Gpa) -> LabResult) -> LabResult<u64>;

    /// Ends all readers.
    fn end(&self);
}

thread_local! {
    /// The queue of this thread's requests.
    static QUEUE: Cell<usize> = const { Cell::new(0) };
}

/// From now on the requests of this thread go into queue number `queue` of its source, modulo the
/// number of queues.
pub fn use_queue(queue: usize) {
    QUEUE.set(queue);
}

/// A source that puts its requests into lists. All pages have the same content.
pub struct Lists {
    arch: Arch,
    lists: Vec<List>,
    /// Until it is open, each asking thread gets its page at once: the guest is being loaded.
    is_open: AtomicBool,
}

#[derive(Default)]
struct List {
    inside: Mutex<Inside>,
    changed: Condvar,
}

/// The data under the lock of a list.
#[derive(Default)]
struct Inside {
    requests: VecDeque<PageRequest>,
    is_over: bool,
}

impl Lists {
    /// A source with this number of lists, for a guest of `arch`.
    pub fn new(lists: usize, arch: Arch) -> Self {
        Self {
            arch,
            lists: (0..lists).map(|_| List::default()).collect(),
            is_open: AtomicBool::new(false),
        }
    }
}

impl Queues for Arc<Lists> {
    fn source(&self) -> Arc<dyn PageSource> {
        Self::clone(self)
    }

    fn count(&self) -> usize {
        self.lists.len()
    }

    fn open(&self) {
        self.is_open.store(true, Ordering::Release);
    }

    fn read(&self, queue: usize, provide: &dyn Fn(Gpa) -> LabResult) -> LabResult<u64> {
        let mut faults = 0;
        while let Some(request) = self.lists[queue].next() {
            let SourcePage(page) = request.page();
            provide(gpa_of(self.arch, page))?;
            faults += 1;
        }
        Ok(faults)
    }

    fn end(&self) {
        for list in &self.lists {
            list.lock().is_over = true;
            list.changed.notify_all();
        }
    }
}

impl List {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().expect("no panic under this lock")
    }

    fn next(&self) -> Option<PageRequest> {
        let waits = |inside: &mut Inside| inside.requests.is_empty() && !inside.is_over;
        let inside = self.changed.wait_while(self.lock(), waits);
        let mut inside = inside.expect("no panic under this lock");
        inside.requests.pop_front()
    }
}

impl PageSource for Lists {
    fn describe(&self) -> String {
        "the lab's page source".into()
    }

    fn fetch(&self, request: PageRequest) {
        if !self.is_open.load(Ordering::Acquire) {
            // Late: another thread has provided the page.
            let _ = request.provide(&PAGES[0]);
            return;
        }
        let list = &self.lists[QUEUE.get() % self.lists.len()];
        list.lock().requests.push_back(request);
        list.changed.notify_one();
    }
}
