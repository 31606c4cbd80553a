//! The handler of a region, and the threads that touch pages for it: see `outside`.

use lacuna_frames::PageNo;
use lacuna_source::{External, PageSource, SourcePage};
use lacuna_sync::{Condvar, Mutex, join, lock, lock_order};
use lacuna_sys::{Errno, Toucher, Userfaultfd};
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

/// Waits for pages that a handler puts in place.
pub trait Touch: Send + Sync {
    /// Touches `page` until it is there, or until no thread needs it any more.
    fn touch(&self, page: PageNo, handler: &Arc<FillHandler>, toucher: &Arc<Toucher>);
}

/// A region's handler, and the threads that touch pages for it.
pub struct FillHandler {
    source: Arc<dyn PageSource>,
    /// The source's page that is the region's first page.
    first: SourcePage,
    /// Threads that touch a page, or are about to.
    inside: AtomicUsize,
    threads: Mutex<Vec<Touching>, lock_order::LinuxTouchers>,
    /// The region is being removed, or the host ends.
    pub over: AtomicBool,
    touch: Weak<dyn Touch>,
    pool: Mutex<Pool, lock_order::LinuxTouches>,
    more: Condvar,
    /// A thread checks deadlines.
    is_timed: AtomicBool,
    /// Wakes that thread at the end.
    ends: Condvar,
}

/// A thread that touches a page.
#[derive(Clone)]
pub struct Touching {
    /// Interrupts the thread.
    pub toucher: Arc<Toucher>,
    /// When the handler is too late; `None`: never.
    pub deadline: Option<Instant>,
}

/// Threads that touch pages for callers that do not wait, or cannot be interrupted.
#[derive(Default)]
struct Pool {
    waiting: VecDeque<PageNo>,
    handles: Vec<JoinHandle<()>>,
    threads: usize,
    idle: usize,
}

/// A thread that touches pages of the region; dropping it ends the count.
pub struct Inside<'a>(&'a FillHandler, Arc<Toucher>);

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
        touch: Weak<dyn Touch>,
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
            touch,
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

    /// The connection to the handler.
    pub fn external(&self) -> &External {
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

    /// Counts the calling thread, until the result is dropped: it is about to touch a page.
    pub fn enter(&self, touching: Touching) -> Inside<'_> {
        self.inside.fetch_add(1, Ordering::SeqCst);
        let toucher = Arc::clone(&touching.toucher);
        lock(&self.threads).push(touching);
        Inside(self, toucher)
    }

    /// Starts the thread that checks deadlines, if none runs. Without it a wait has no limit.
    pub fn time(self: &Arc<Self>, patience: Duration) {
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
    pub fn is_touched(&self) -> bool {
        fence(Ordering::SeqCst);
        self.inside.load(Ordering::SeqCst) != 0
    }

    /// Queues a page for a thread of the pool.
    ///
    /// # Errors
    /// The pool has no thread, and none can be started.
    pub fn start(self: &Arc<Self>, page: PageNo) -> io::Result<()> {
        let mut pool = lock(&self.pool);
        pool.waiting.push_back(page);
        if pool.idle < pool.waiting.len() && pool.threads < MOST_THREADS {
            let outside = Arc::clone(self);
            let named = std::thread::Builder::new().name("lacuna-touch".into());
            match named.spawn(move || outside.run()) {
                Ok(handle) => {
                    pool.handles.push(handle);
                    pool.threads += 1;
                }
                Err(error) if pool.threads == 0 => {
                    pool.waiting.pop_back();
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
        while let Some(page) = self.next() {
            let Some(touch) = self.touch.upgrade() else {
                return;
            };
            touch.touch(page, self, &toucher);
        }
    }

    fn next(&self) -> Option<PageNo> {
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

    /// Whether the region is being removed, or the host ends.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Ends all touches and the pool. Either no page of the region is in flight any more, or the
    /// host ends.
    pub fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.interrupt();
        let mut pool = lock(&self.pool);
        let handles = std::mem::take(&mut pool.handles);
        pool.waiting.clear();
        drop(pool);
        self.more.notify_all();
        self.ends.notify_all();
        handles.into_iter().for_each(join);
        while self.inside.load(Ordering::Acquire) != 0 {
            std::thread::yield_now();
        }
    }
}
