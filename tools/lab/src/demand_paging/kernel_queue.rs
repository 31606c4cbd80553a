//! The kernel's queue: memory that threads fill through userfaultfds, as other VMMs do. The thread
//! of a vCPU that needs a missing page sleeps in the kernel, and a reader copies the page there.

use super::lists::Queues;
use super::{DemandPaging, PAGES};
use crate::experiment::{LabError, LabResult};
use lacuna::source::{External, PageSource, Policy, SourcePage};
use lacuna::{Backend, Gpa, PAGE_SIZE};
use lacuna_addr::Hva;
use lacuna_sys::{Errno, Userfaultfd, Waiters};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
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
    options: DemandPaging,
    /// The first pages of the provided runs.
    runs: Mutex<HashSet<Hva>>,
    is_over: AtomicBool,
}

impl KernelQueues {
    /// A descriptor for the pages from 0 on, and one from each of `parts` on.
    pub fn new(options: &DemandPaging, parts: &[SourcePage]) -> LabResult<Self> {
        let external = External::threads(parts, Policy::default());
        let external = external.and_then(|external| match options.guest.backend {
            Backend::Kvm => external.for_kernel(),
            Backend::Soft => Ok(external),
        });
        Ok(Self {
            external: Arc::new(external.map_err(LabError::io("userfaultfd"))?),
            options: options.clone(),
            runs: Mutex::default(),
            is_over: AtomicBool::new(false),
        })
    }

    /// Fills the aligned run around `page`, or only the page if the run was filled before. Present
    /// pages stay as they are. The kernel lists a sleeping thread with the address of its page or
    /// huge page, and the copy of that wakes it.
    fn fill(&self, uffd: &Userfaultfd, page: Hva) -> LabResult {
        let (run, unit) = (self.options.at_once(), self.options.guest.unit());
        let runs = || self.runs.lock().expect("no panic under this lock");
        let is_new = run > unit && runs().insert(aligned(page, run));
        let pages = if is_new { run } else { unit };
        let first = aligned(page, pages);
        let mut at = 0;
        while at < pages {
            let to = Hva::new(first.get() + (at * PAGE_SIZE) as u64);
            match uffd.place(&PAGES[at..pages], to, Waiters::Wake) {
                Ok(()) => break,
                // The address space is changing.
                Err(partial) if partial.errno == Errno::AGAIN => {
                    at += partial.done;
                    thread::yield_now();
                }
                Err(partial) if partial.errno == Errno::EXIST => {
                    at += partial.done + unit;
                    // Two threads may have faulted on the page, and the second fault was read
                    // later.
                    uffd.wake(aligned(page, unit))
                        .map_err(LabError::io("UFFDIO_WAKE"))?;
                }
                Err(partial) => return Err(LabError::io("UFFDIO_COPY")(partial.errno)),
            }
        }
        Ok(())
    }
}

impl Queues for KernelQueues {
    fn source(&self) -> Arc<dyn PageSource> {
        Arc::clone(&self.external) as Arc<dyn PageSource>
    }

    fn count(&self) -> usize {
        self.external.userfaultfds().count()
    }

    /// A fault wakes one of the readers of its descriptor (`EPOLLEXCLUSIVE`), as in the kernel's
    /// own test.
    fn read(&self, queue: usize, _: &dyn Fn(Gpa) -> LabResult) -> LabResult<u64> {
        let uffd = self.external.userfaultfds().nth(queue);
        let uffd = uffd.expect("a reader for a descriptor");
        let waiting = epoll::create(CreateFlags::CLOEXEC).map_err(LabError::io("epoll_create"))?;
        let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
        let added = epoll::add(&waiting, uffd, EventData::new_u64(0), flags);
        added.map_err(LabError::io("epoll_ctl"))?;
        let (mut count, mut faults, mut events) = (0, Vec::new(), Vec::with_capacity(1));
        while !self.is_over.load(Ordering::Relaxed) {
            events.clear();
            let room = rustix::buffer::spare_capacity(&mut events);
            // After an error the thread reads, and finds no fault.
            let _ = epoll::wait(&waiting, room, Some(&LOOK));
            let read = uffd.faults(&mut faults);
            read.map_err(LabError::io("read a userfaultfd"))?;
            for fault in faults.drain(..) {
                self.options.pause();
                self.fill(uffd, fault.page)?;
                count += 1;
            }
        }
        Ok(count)
    }

    fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// The first page of the aligned run of `pages` pages around `page`.
fn aligned(page: Hva, pages: usize) -> Hva {
    let bytes = (pages * PAGE_SIZE) as u64;
    Hva::new(page.get() / bytes * bytes)
}
