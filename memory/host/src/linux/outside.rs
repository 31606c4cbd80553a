//! Linux memory that is filled from outside ([`External`]): by another process, or by threads of
//! the VMM that read the userfaultfd.
//!
//! ```text
//! fault on an Empty page: Missing(ticket), as with any page source
//!   Host::wait_touching   a vCPU's thread, offline, touches the page and sleeps in the kernel
//!   Host::start, wait     a thread of the region's pool touches it
//!   the handler copies a page there ─► the load succeeds ─► word InPlace, the ticket is done
//! ```
//! The touch is outside of guest code and holds no lock. It ends early if its thread has to stop,
//! if the ticket is done, if the handler is gone, and if the region is removed ([`Toucher`]). If a
//! thread waits longer than the handler's patience, the handler is gone too.
//!
//! The handler may put a page in place before any fault, and no word records that. Then the touch
//! finds the page and does not sleep.
//!
//! The memory is private, or in huge pages of hugetlbfs. The handler fills a huge page as a whole
//! (`units`), and the first page of a unit is touched.
//!
//! # Fills of this side
//! The VMM may provide pages, and a discard fills zeros. Such a fill wakes no thread (DONTWAKE). It
//! then wakes the threads that sleep for its page, if any thread touches. A thread counts itself
//! before it touches; a fill reads the count afterwards. So the fill sees the thread, or the thread
//! sees the page.
//!
//! # Discard
//! A discarded page is removed from the userfaultfd: from then on it is zeros, by Linux alone. The
//! handler gets no event, and its own late copy fails (ENOENT). Otherwise that copy would bring the
//! old content back.

use super::LinuxMemory;
use crate::balance::TICK;
use crate::error::{HostError, LostPage};
use crate::host::{Core, Host, lock};
use crate::region::Region;
use crate::stats::Counters;
use crate::ticket::Ticket;
use lacuna_source::{Answer, External, PageSource, SourcePage};
use lacuna_sync::{Condvar, Mutex, lock_order};
use lacuna_sys::{Errno, Touched, Toucher, Userfaultfd};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most threads that touch pages for others. It bounds the handler's requests at a time, in
/// addition to the vCPUs' own threads.
const MOST_THREADS: usize = 16;

/// A region's handler, and the threads that touch pages for it.
pub(crate) struct FillHandler {
    source: Arc<dyn PageSource>,
    /// The source's page that is the region's first page.
    first: SourcePage,
    /// Threads that touch a page, or are about to.
    inside: AtomicUsize,
    threads: Mutex<Vec<Touching>, lock_order::LinuxTouchers>,
    /// The region is being removed, or the host ends.
    over: AtomicBool,
    core: Weak<Core>,
    pool: Mutex<Pool, lock_order::LinuxTouches>,
    more: Condvar,
    /// A thread checks deadlines.
    is_timed: AtomicBool,
    /// Wakes that thread at the end.
    ends: Condvar,
}

/// A thread that touches a page.
#[derive(Clone)]
struct Touching {
    toucher: Arc<Toucher>,
    deadline: Option<Instant>,
}

/// Threads that touch pages for callers that do not wait, or cannot be interrupted.
#[derive(Default)]
struct Pool {
    waiting: VecDeque<Ticket>,
    handles: Vec<JoinHandle<()>>,
    threads: usize,
    idle: usize,
}

/// A thread that touches pages of the region; dropping it ends the count.
struct Inside<'a>(&'a FillHandler, Arc<Toucher>);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut threads = lock(&self.0.threads);
        let own = threads
            .iter()
            .position(|other| Arc::ptr_eq(&other.toucher, &self.1));
        own.map(|own| threads.swap_remove(own));
        drop(threads);
        self.0.inside.fetch_sub(1, Ordering::Release);
    }
}

impl FillHandler {
    /// For a region whose first page is page `first` of `source`; `None` if `source` itself gets
    /// the requests for pages.
    ///
    /// # Errors
    /// Threads of this process cannot touch missing pages.
    pub fn of(
        core: &Arc<Core>,
        source: &Arc<dyn PageSource>,
        first: SourcePage,
    ) -> Result<Option<Arc<Self>>, Errno> {
        let Some(external) = source.external() else {
            return Ok(None);
        };
        Toucher::check()?;
        let outside = Arc::new(Self {
            source: Arc::clone(source),
            first,
            inside: AtomicUsize::new(0),
            threads: Mutex::default(),
            over: AtomicBool::new(false),
            core: Arc::downgrade(core),
            pool: Mutex::default(),
            more: Condvar::new(),
            is_timed: AtomicBool::new(false),
            ends: Condvar::new(),
        });
        let region = Arc::downgrade(&outside);
        external.on_gone(move || {
            if let Some(outside) = region.upgrade() {
                outside.interrupt();
            }
        });
        Ok(Some(outside))
    }

    fn external(&self) -> &External {
        self.source.external().expect("checked by `of`")
    }

    /// The source that fills the region.
    pub fn source(&self) -> Arc<dyn PageSource> {
        Arc::clone(&self.source)
    }

    /// The descriptor for the page at `index` of the region.
    pub fn userfaultfd(&self, index: u64) -> &Userfaultfd {
        self.external()
            .userfaultfd_of(SourcePage(self.first.0 + index))
    }

    /// The pages with the indices `pages`, cut where another descriptor begins.
    pub fn parts(&self, pages: Range<u64>) -> impl Iterator<Item = (Range<u64>, &Userfaultfd)> {
        let first = self.first.0;
        let parts = self
            .external()
            .parts_of(first + pages.start..first + pages.end);
        parts.map(move |(part, uffd)| (part.start - first..part.end - first, uffd))
    }

    fn enter(&self, touching: Touching) -> Inside<'_> {
        self.inside.fetch_add(1, Ordering::SeqCst);
        let toucher = Arc::clone(&touching.toucher);
        lock(&self.threads).push(touching);
        Inside(self, toucher)
    }

    /// Starts the thread that checks deadlines, if none runs. Without it a wait has no limit.
    fn time(self: &Arc<Self>, patience: Duration) {
        // The first test keeps the cache line shared.
        if self.is_timed.load(Ordering::Relaxed) {
            return;
        }
        let mut pool = lock(&self.pool);
        if self.is_over() || self.is_timed.swap(true, Ordering::Relaxed) {
            return;
        }
        let outside = Arc::clone(self);
        let named = std::thread::Builder::new().name("lacuna-patience".into());
        match named.spawn(move || outside.look_at_deadlines(patience)) {
            Ok(handle) => pool.handles.push(handle),
            // The next wait tries again.
            Err(_) => self.is_timed.store(false, Ordering::Relaxed),
        }
    }

    fn look_at_deadlines(&self, patience: Duration) {
        let pause = (patience / 8).clamp(Duration::from_millis(1), Duration::from_secs(1));
        let mut pool = lock(&self.pool);
        while !self.is_over() {
            let waited = self.ends.wait_timeout(pool, pause);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            let now = Instant::now();
            let threads = lock(&self.threads).clone();
            let late = |thread: &&Touching| thread.deadline.is_some_and(|at| at <= now);
            threads
                .iter()
                .filter(late)
                .for_each(|thread| thread.toucher.interrupt());
            pool = lock(&self.pool);
        }
    }

    /// Makes all touching threads check again whether they have a reason to stop. The caller has
    /// set the reason.
    pub fn interrupt(&self) {
        let threads = lock(&self.threads).clone();
        threads.iter().for_each(|thread| thread.toucher.interrupt());
    }

    /// Whether a thread may sleep for a page that the caller has filled.
    fn is_touched(&self) -> bool {
        fence(Ordering::SeqCst);
        self.inside.load(Ordering::SeqCst) != 0
    }

    /// Queues a page for a thread of the pool.
    ///
    /// # Errors
    /// The pool has no thread, and none can be started.
    fn start(self: &Arc<Self>, ticket: &Ticket) -> io::Result<()> {
        let mut pool = lock(&self.pool);
        pool.waiting.push_back(ticket.clone());
        if pool.idle < pool.waiting.len() && pool.threads < MOST_THREADS {
            let outside = Arc::clone(self);
            let named = std::thread::Builder::new().name("lacuna-touch".into());
            match named.spawn(move || outside.run()) {
                Ok(handle) => {
                    pool.handles.push(handle);
                    pool.threads += 1;
                }
                Err(error) if pool.threads == 0 => {
                    let unstarted = pool.waiting.pop_back();
                    drop(pool);
                    drop(unstarted);
                    return Err(error);
                }
                // The other threads take the page later.
                Err(_) => {}
            }
        }
        drop(pool);
        self.more.notify_one();
        Ok(())
    }

    fn run(self: &Arc<Self>) {
        let toucher = Arc::default();
        while let Some(ticket) = self.next() {
            let Some(core) = self.core.upgrade() else {
                return;
            };
            // A lost page is found when it is resolved again.
            let _ = core.touch_until(&ticket, self, &toucher, &self.over);
        }
    }

    fn next(&self) -> Option<Ticket> {
        let mut pool = lock(&self.pool);
        pool.idle += 1;
        let waits = |pool: &mut Pool| pool.waiting.is_empty() && !self.is_over();
        let waited = self.more.wait_while(pool, waits);
        pool = waited.unwrap_or_else(PoisonError::into_inner);
        pool.idle -= 1;
        match self.is_over() {
            true => None,
            false => pool.waiting.pop_front(),
        }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Ends all touches and the pool. Either no page of the region is in flight any more, or the
    /// host ends.
    pub fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.interrupt();
        let mut pool = lock(&self.pool);
        let handles = std::mem::take(&mut pool.handles);
        let waiting = std::mem::take(&mut pool.waiting);
        drop(pool);
        drop(waiting);
        self.more.notify_all();
        self.ends.notify_all();
        handles.into_iter().for_each(crate::io::join);
        while self.inside.load(Ordering::Acquire) != 0 {
            std::thread::yield_now();
        }
    }
}

impl LinuxMemory {
    /// Wakes the threads that sleep for one of `pages`, which the caller has filled.
    pub fn wake_touching(&self, pages: Range<u64>) {
        let Some(outside) = self.outside.as_ref().filter(|outside| outside.is_touched()) else {
            return;
        };
        // Threads touch a unit at its first page.
        for index in pages.step_by(self.unit() as usize) {
            // It fails only for an address outside of this process's memory.
            let woken = outside.userfaultfd(index).wake(self.hva(index));
            debug_assert!(woken.is_ok(), "{woken:?}");
        }
    }
}

impl Host {
    /// As [`Host::wait_until`], for a thread that other threads interrupt by `toucher` after they
    /// have set `stop`. If the page is missing and filled from outside ([`PageSource::external`]),
    /// the thread touches it and sleeps in the kernel's queue.
    ///
    /// # Panics
    /// As [`Host::start`].
    pub fn wait_touching(
        &self,
        ticket: &Ticket,
        stop: &AtomicBool,
        toucher: &Arc<Toucher>,
    ) -> Result<(), HostError> {
        let own = self.core.regions.owns(ticket.region());
        assert!(own, "another host's ticket");
        match ticket.region().outside() {
            Some(outside) => Ok(self.core.touch_until(ticket, outside, toucher, stop)?),
            None => self.wait_until(ticket, stop),
        }
    }
}

impl Region {
    /// The handler that fills the region from outside.
    pub fn outside(&self) -> Option<&Arc<FillHandler>> {
        self.linux.as_ref()?.outside.as_ref()
    }
}

impl Core {
    /// Requests the page of `ticket`, which the caller has started: a thread touches it. If no
    /// thread can, the page is lost.
    pub fn ask_outside(&self, ticket: &Ticket) -> bool {
        let Some(outside) = ticket.region().outside() else {
            return false;
        };
        if let Err(error) = outside.start(ticket) {
            let reason = format!(
                "no thread can be started that waits for the page: {error}; let this process have \
                 more threads (ulimit -u) or more memory"
            );
            if self.answer(ticket.number(), Err((&*reason).into())) == Answer::Taken {
                outside.external().asked().failed();
            }
        }
        true
    }

    /// Waits for the page of `ticket`, or until `stop` is set.
    fn touch_until(
        &self,
        ticket: &Ticket,
        outside: &Arc<FillHandler>,
        toucher: &Arc<Toucher>,
        stop: &AtomicBool,
    ) -> Result<(), LostPage> {
        let region = ticket.region();
        let index = region.index_of(ticket.number());
        let linux = region.linux.as_ref().expect("filled from outside");
        let asked = outside.external().asked();
        let patience = outside.external().patience();
        // A time beyond the clock's range is never reached.
        let deadline = patience.and_then(|patience| Instant::now().checked_add(patience));
        patience
            .into_iter()
            .for_each(|patience| outside.time(patience));
        let is_late = || deadline.is_some_and(|at| at <= Instant::now());
        loop {
            if let Some(result) = ticket.result() {
                return result;
            }
            if stop.load(Ordering::Acquire) {
                return Ok(());
            }
            if is_late() {
                let patience = patience.unwrap_or_default();
                let reason = format!("it has not filled a page within {patience:?}");
                outside.external().end(&reason);
            }
            if let Some(reason) = outside.external().gone() {
                if self.frames.pool.is_present(linux.pfn(index)) {
                    let _ = self.arrived(ticket);
                } else if self.answer(ticket.number(), Err((&*reason).into())) == Answer::Taken {
                    asked.failed();
                    return ticket.result().unwrap_or(Ok(()));
                }
                continue;
            }
            let is_over = || {
                ticket.is_done()
                    || stop.load(Ordering::Relaxed)
                    || outside.is_over()
                    || outside.external().gone().is_some()
                    || is_late()
            };
            let inside = outside.enter(Touching {
                toucher: Arc::clone(toucher),
                deadline,
            });
            // SAFETY: the address is in the pool's mapping, which lives as long as `self`. A
            // removal of the region gives it a new mapping, but first waits for this thread.
            let touched = unsafe { toucher.touch(linux.hva(index), is_over) };
            drop(inside);
            if touched == Touched::Present && self.arrived(ticket) {
                asked.provided();
                return Ok(());
            }
        }
    }

    /// Completes `ticket`, whose page is in place; true if this thread has completed it. If another
    /// thread is completing it, this thread waits a moment.
    fn arrived(&self, ticket: &Ticket) -> bool {
        // If the handler has poisoned the page, for example, there are zeros.
        if let Some(reason) = self.reason_of_new_loss(ticket.number()) {
            let _ = self.answer(ticket.number(), Err(reason.into()));
            return false;
        }
        if !ticket.answer() {
            let _ = ticket.sleep(TICK);
            return false;
        }
        // Counted before the ticket is removed: see `in_flight`.
        self.completing.fetch_add(1, Ordering::Relaxed);
        Counters::add(&self.stats.provided, ticket.region().unit());
        self.settle(ticket, Ok(()));
        self.completing.fetch_sub(1, Ordering::Release);
        true
    }
}
