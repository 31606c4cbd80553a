//! The kernel's queue: memory that threads fill through userfaultfds, as other VMMs do. The thread
//! of a vCPU that needs a missing page sleeps in the kernel, and a reader copies the page there.

use super::PAGES;
use super::queue::Queues;
use crate::experiment::{LabError, LabResult};
use lacuna::source::{External, PageSource, Policy, SourcePage};
use lacuna::{Backend, MissingMemory, PAGE_SIZE};
use lacuna_addr::Hva;
use lacuna_sys::{Errno, Userfaultfd, Waiters};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// How long a reader sleeps before it checks whether it is to end.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};

/// One userfaultfd for all vCPUs, or one for each.
pub struct KernelQueues {
    external: Arc<External>,
    /// Faults that the readers of each descriptor have answered.
    filled: Vec<AtomicU64>,
    fill: Fill,
    runs: Runs,
    is_over: AtomicBool,
}

/// The memory that a reader fills for a fault.
pub enum Fill {
    /// The aligned run of this number of pages around the page.
    Run(usize),
    /// The huge page of 2 MiB around the page.
    Huge,
}

/// The first pages of the provided runs.
type Runs = Mutex<HashSet<Hva>>;

impl KernelQueues {
    /// For memory of `backend`: a descriptor for the pages from 0 on, and one from each of `parts`
    /// on.
    pub fn new(backend: Backend, parts: &[SourcePage], fill: Fill) -> LabResult<Self> {
        let external = External::threads(parts, Policy::default());
        let external = external.and_then(|external| match backend {
            Backend::Kvm => external.for_kernel(),
            Backend::Soft => Ok(external),
        });
        let external = external.map_err(LabError::io("userfaultfd"))?;
        Ok(Self {
            filled: external.userfaultfds().map(|_| AtomicU64::new(0)).collect(),
            external: Arc::new(external),
            fill,
            runs: Runs::default(),
            is_over: AtomicBool::new(false),
        })
    }

    fn answer(&self, uffd: &Userfaultfd, page: Hva) -> LabResult {
        let is_new = |run| {
            self.runs
                .lock()
                .expect("no panic under this lock")
                .insert(run)
        };
        match self.fill {
            Fill::Huge => fill(uffd, aligned(page, PAGES.len()), &PAGES),
            Fill::Run(pages @ 2..) if is_new(aligned(page, pages)) => {
                fill_run(uffd, aligned(page, pages), &PAGES[..pages])
            }
            Fill::Run(_) => fill(uffd, page, &PAGES[..1]),
        }
    }
}

impl Queues for KernelQueues {
    fn source(&self) -> Arc<dyn PageSource> {
        Arc::clone(&self.external) as Arc<dyn PageSource>
    }

    fn count(&self) -> usize {
        self.filled.len()
    }

    /// A fault wakes one of the readers of its descriptor (`EPOLLEXCLUSIVE`), as in the kernel's
    /// own test.
    fn read(&self, queue: usize, _: Option<&dyn MissingMemory>) -> LabResult {
        let uffd = self.external.userfaultfds().nth(queue);
        let uffd = uffd.expect("a reader for a descriptor");
        let waiting = epoll::create(CreateFlags::CLOEXEC).map_err(LabError::io("epoll_create"))?;
        let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
        let added = epoll::add(&waiting, uffd, EventData::new_u64(0), flags);
        added.map_err(LabError::io("epoll_ctl"))?;
        let (mut faults, mut events) = (Vec::new(), Vec::with_capacity(1));
        while !self.is_over.load(Ordering::Relaxed) {
            events.clear();
            let room = rustix::buffer::spare_capacity(&mut events);
            // After an error the thread reads, and finds no fault.
            let _ = epoll::wait(&waiting, room, Some(&LOOK));
            let read = uffd.faults(&mut faults);
            read.map_err(LabError::io("read a userfaultfd"))?;
            for fault in faults.drain(..) {
                self.answer(uffd, fault.page)?;
                self.filled[queue].fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    fn filled(&self) -> Option<Vec<u64>> {
        let filled = self.filled.iter();
        Some(filled.map(|count| count.load(Ordering::Relaxed)).collect())
    }
}

/// The first page of the aligned run of `pages` pages around `page`.
fn aligned(page: Hva, pages: usize) -> Hva {
    let bytes = (pages * PAGE_SIZE) as u64;
    Hva::new(page.get() / bytes * bytes)
}

/// Puts one page or one huge page in place, and wakes the threads that sleep for it: the kernel
/// lists them with the address of its first byte.
fn fill(uffd: &Userfaultfd, page: Hva, content: &[[u8; PAGE_SIZE]]) -> LabResult {
    loop {
        match uffd.place(content, page, Waiters::Wake) {
            // The address space is changing.
            Err(partial) if partial.errno == Errno::AGAIN => thread::yield_now(),
            // Two threads have faulted on the page, and the second fault was read later.
            Err(partial) if partial.errno == Errno::EXIST => {
                return uffd.wake(page).map_err(LabError::io("UFFDIO_WAKE"));
            }
            done => return done.map_err(|partial| LabError::io("UFFDIO_COPY")(partial.errno)),
        }
    }
}

/// Puts the pages from `first` on in place, and wakes the threads that sleep for one of them.
/// Present pages stay as they are.
fn fill_run(uffd: &Userfaultfd, first: Hva, content: &[[u8; PAGE_SIZE]]) -> LabResult {
    let mut at = 0;
    while at < content.len() {
        let to = Hva::new(first.get() + (at * PAGE_SIZE) as u64);
        match uffd.place(&content[at..], to, Waiters::Wake) {
            Ok(()) => break,
            Err(partial) if partial.errno == Errno::AGAIN => at += partial.done,
            Err(partial) if partial.errno == Errno::EXIST => at += partial.done + 1,
            Err(partial) => return Err(LabError::io("UFFDIO_COPY")(partial.errno)),
        }
    }
    Ok(())
}
