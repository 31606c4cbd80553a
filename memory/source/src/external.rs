//! Memory that is filled from outside: by another process with Firecracker's handshake, or by
//! threads of the VMM that read the userfaultfd.
//!
//! ```text
//! the memory manager registers its region with the descriptor of each part
//! a thread needs a missing page: it touches the page, and sleeps in the kernel's queue
//! handler: reads the fault, UFFDIO_COPY ─► the thread wakes up
//! ```
//! The memory manager sends no request: the fault reports the needed page to the handler. This side
//! keeps a descriptor, so that the handler's death does not close the userfaultfd. If the last
//! descriptor were closed, missing pages would become zeros.

use crate::handler::{Handler, HandlerError, HandlerRegion};
use crate::measured::Counts;
use crate::policy::{Policy, WhenGone};
use crate::{PageRequest, PageSource, SourcePage, SourceStats};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use lacuna_sys::{Errno, Userfaultfd};
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Fills the memory of one VM from outside. It is a [`PageSource`] for Linux memory alone.
pub struct External {
    parts: Vec<Part>,
    shared: Arc<ExternalShared>,
    counts: Counts,
    socket: Option<PathBuf>,
    is_for_kernel: bool,
    /// The connection to another process, once it exists.
    handler: Mutex<Option<Handler>, lock_order::SourceHandler>,
}

/// A run of pages with a userfaultfd of its own: up to the next part, or to the end.
struct Part {
    first: SourcePage,
    uffd: Userfaultfd,
}

type Listener = Arc<dyn Fn() + Send + Sync>;

struct ExternalShared {
    policy: Policy,
    killed: Once,
    gone: OnceLock<Arc<str>>,
    /// Why the handler fills no page any more, under [`WhenGone::Hold`]; the waits continue.
    dead: Mutex<Option<Arc<str>>, lock_order::SourceDeath>,
    /// Another process has the descriptor, and keeps its connection open.
    connected: AtomicBool,
    /// The memory is no longer used, so the end of the connection is no loss.
    finished: AtomicBool,
    listeners: Mutex<Vec<Listener>, lock_order::SourceListeners>,
}

impl External {
    /// Memory that another process fills. The process listens at `path` and speaks Firecracker's
    /// handshake. If it dies, `policy` decides about the missing pages.
    ///
    /// # Errors
    /// A userfaultfd cannot be made.
    pub fn process(path: &Path, policy: Policy) -> Result<Self, Errno> {
        let mut external = Self::threads(&[], policy)?;
        external.socket = Some(path.to_owned());
        Ok(external)
    }

    /// Memory that threads of this process fill: they read [`External::userfaultfds`]. Parts begin
    /// at page 0 and at each of `parts`, which ascend.
    ///
    /// # Errors
    /// A userfaultfd cannot be made.
    pub fn threads(parts: &[SourcePage], policy: Policy) -> Result<Self, Errno> {
        let firsts = std::iter::once(SourcePage(0)).chain(parts.iter().copied());
        let part = |first| {
            let uffd = Userfaultfd::open_user()?;
            Ok(Part { first, uffd })
        };
        Ok(Self {
            parts: firsts.map(part).collect::<Result<_, Errno>>()?,
            shared: Arc::new(ExternalShared {
                policy,
                killed: Once::new(),
                gone: OnceLock::new(),
                dead: Mutex::default(),
                connected: AtomicBool::new(false),
                finished: AtomicBool::new(false),
                listeners: Mutex::default(),
            }),
            counts: Counts::default(),
            socket: None,
            is_for_kernel: false,
            handler: Mutex::default(),
        })
    }

    /// The same for memory that the kernel accesses for a guest, as KVM does: those accesses wait
    /// for the handler too. For memory that is not registered yet.
    ///
    /// # Errors
    /// As [`Userfaultfd::open_for_guest`]: it needs more rights.
    pub fn for_kernel(mut self) -> Result<Self, Errno> {
        for part in &mut self.parts {
            part.uffd = Userfaultfd::open_for_guest()?;
        }
        self.is_for_kernel = true;
        Ok(self)
    }

    /// Whether accesses of the kernel wait for the handler ([`External::for_kernel`]). Otherwise
    /// they fail.
    pub const fn is_for_kernel(&self) -> bool {
        self.is_for_kernel
    }

    /// The descriptors, in the order of the parts.
    pub fn userfaultfds(&self) -> impl Iterator<Item = &Userfaultfd> {
        self.parts.iter().map(|part| &part.uffd)
    }

    /// The descriptor of `page`.
    pub fn userfaultfd_of(&self, page: SourcePage) -> &Userfaultfd {
        let after = self.parts.partition_point(|part| part.first <= page);
        &self.parts[after.saturating_sub(1)].uffd
    }

    /// The range `pages`, cut where parts begin.
    pub fn parts_of(&self, pages: Range<u64>) -> impl Iterator<Item = (Range<u64>, &Userfaultfd)> {
        let ends = self.parts.iter().skip(1).map(|part| part.first.0);
        let ends = ends.chain([u64::MAX]);
        let cut =
            move |(part, end): (&Part, u64)| part.first.0.max(pages.start)..end.min(pages.end);
        let all = self.parts.iter().zip(ends);
        all.map(move |(part, end)| (cut((part, end)), &part.uffd))
            .filter(|(pages, _)| !pages.is_empty())
    }

    /// Its counters. A page counts as requested when a thread touches it. Pages that the handler
    /// fills unasked do not count.
    pub fn stats(&self) -> SourceStats {
        self.counts.stats()
    }

    /// Counts that a thread is about to touch a possibly missing page.
    pub fn asked(&self) -> AskedOutside<'_> {
        self.counts.asked();
        AskedOutside {
            counts: &self.counts,
            since: Instant::now(),
            is_counted: false,
        }
    }

    /// Why pages can no longer arrive; `None` while they can.
    pub fn gone(&self) -> Option<Arc<str>> {
        self.shared.gone.get().cloned()
    }

    /// How long a thread waits for a page before the handler is gone; `None`: without a limit.
    pub fn patience(&self) -> Option<Duration> {
        let policy = &self.shared.policy;
        match policy.when_gone {
            WhenGone::Hold => None,
            WhenGone::Kill(_) | WhenGone::Poison => Some(policy.patience),
        }
    }

    /// Reports the end of the handler's fills: the policy decides.
    pub fn end(&self, reason: &str) {
        self.shared.end(reason);
    }

    /// Ends every wait for a page, whatever the policy says: no thread needs a page any more.
    pub fn give_up(&self, reason: &str) {
        // The first reason is kept.
        let _ = self.shared.gone.set(reason.into());
        self.shared.notify();
    }

    /// Calls `listener` when the source is gone. The call holds no lock and does not wait.
    pub fn on_gone(&self, listener: impl Fn() + Send + Sync + 'static) {
        self.shared.listeners().push(Arc::new(listener));
        if self.gone().is_some() {
            self.shared.notify();
        }
    }

    /// Sends the addresses of the registered memory to the process that fills it.
    ///
    /// # Errors
    /// The process does not take the message, or fills the memory of another VM.
    pub fn begin(&self, regions: &[HandlerRegion]) -> Result<(), HandlerError> {
        let Some(path) = &self.socket else {
            return Ok(());
        };
        let shared = Arc::downgrade(&self.shared);
        let on_death = move |reason: &str| {
            if let Some(shared) = shared.upgrade() {
                shared.connected.store(false, Ordering::Release);
                if !shared.finished.load(Ordering::Acquire) {
                    shared.end(reason);
                }
            }
        };
        let uffd = self.parts[0].uffd.as_fd();
        if self.shared.connected.swap(true, Ordering::AcqRel) {
            return Err(HandlerError::InUse(path.clone()));
        }
        self.shared.finished.store(false, Ordering::Release);
        let handler = Handler::connect(path, regions, uffd, on_death).inspect_err(|_| {
            self.shared.connected.store(false, Ordering::Release);
        })?;
        *self.shared.dead() = None;
        let before = self.handler().replace(handler);
        // Dropped without the lock: the drop waits for the handler's thread.
        drop(before);
        Ok(())
    }

    /// Reports that the memory is no longer used: the other process sees the connection end.
    pub fn finish(&self) {
        self.shared.finished.store(true, Ordering::Release);
        self.handler().iter().for_each(Handler::finish);
    }

    /// Whether another process may still fill the memory: it has neither closed the connection nor
    /// died.
    pub fn is_connected(&self) -> bool {
        self.shared.connected.load(Ordering::Acquire)
    }

    fn handler(&self) -> MutexGuard<'_, Option<Handler>> {
        self.handler.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A page that a thread waits for. Dropping it means that the page arrived in another way.
pub struct AskedOutside<'a> {
    counts: &'a Counts,
    since: Instant,
    is_counted: bool,
}

impl AskedOutside<'_> {
    /// The handler has put the page in place.
    pub fn provided(mut self) {
        self.is_counted = true;
        self.counts.provided(self.since.elapsed());
    }

    /// The page is lost.
    pub fn failed(mut self) {
        self.is_counted = true;
        self.counts.failed();
    }
}

impl Drop for AskedOutside<'_> {
    fn drop(&mut self) {
        if !self.is_counted {
            self.counts.late();
        }
    }
}

impl ExternalShared {
    fn listeners(&self) -> MutexGuard<'_, Vec<Listener>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn dead(&self) -> MutexGuard<'_, Option<Arc<str>>> {
        self.dead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, reason: &str) {
        match &self.policy.when_gone {
            // The pages stay missing, and a kick ends each wait.
            WhenGone::Hold => {
                *self.dead() = Some(reason.into());
                return;
            }
            // Other threads wait until the function has returned.
            WhenGone::Kill(end) => self.killed.call_once(|| end(reason)),
            WhenGone::Poison => {}
        }
        // The first reason is kept.
        let _ = self.gone.set(reason.into());
        self.notify();
    }

    fn notify(&self) {
        let listeners = self.listeners().clone();
        for listener in listeners {
            listener();
        }
    }
}

impl PageSource for External {
    fn describe(&self) -> String {
        match &self.socket {
            Some(path) => format!("the page-fault handler at {}", path.display()),
            None => "the VMM's page-fault handler".into(),
        }
    }

    fn outage(&self) -> Option<String> {
        let reason = self.shared.dead().clone()?;
        Some(format!(
            "{reason}; no other process can fill this guest's memory: end the run"
        ))
    }

    /// Called only for memory that is not Linux memory, which no handler can fill.
    fn fetch(&self, request: PageRequest) {
        // Late: the page was provided in another way.
        let _ = request.fail("it fills Linux memory only");
    }

    fn external(&self) -> Option<&External> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of a range, as pairs of numbers.
    fn cut(external: &External, pages: Range<u64>) -> Vec<(u64, u64)> {
        let parts = external.parts_of(pages);
        parts.map(|(part, _)| (part.start, part.end)).collect()
    }

    #[test]
    fn a_range_is_cut_where_parts_begin() {
        let parts = [SourcePage(10), SourcePage(20)];
        let Ok(external) = External::threads(&parts, Policy::default()) else {
            return lacuna_skip::skip("no userfaultfd");
        };
        assert_eq!(cut(&external, 0..30), [(0, 10), (10, 20), (20, 30)]);
        assert_eq!(cut(&external, 12..20), [(12, 20)]);
        assert_eq!(cut(&external, 5..11), [(5, 10), (10, 11)]);
        assert_eq!(cut(&external, 25..26), [(25, 26)]);
        let all: Vec<_> = external.userfaultfds().collect();
        for (page, part) in [(0, 0), (9, 0), (10, 1), (19, 1), (20, 2), (99, 2)] {
            let of = external.userfaultfd_of(SourcePage(page));
            assert!(std::ptr::eq(of, all[part]), "page {page}");
        }
    }

    /// The first reason is kept, and a listener that is added later is called at once.
    #[test]
    fn the_policy_decides_whether_a_source_is_gone() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        let with = |when_gone| {
            let policy = Policy {
                when_gone,
                ..Policy::default()
            };
            External::threads(&[], policy)
        };
        let Ok(poison) = with(WhenGone::Poison) else {
            return lacuna_skip::skip("no userfaultfd");
        };
        let called = Arc::new(AtomicUsize::new(0));
        let count = || {
            let called = Arc::clone(&called);
            move || _ = called.fetch_add(1, Ordering::Relaxed)
        };
        poison.on_gone(count());
        assert_eq!((poison.gone(), called.load(Ordering::Relaxed)), (None, 0));
        poison.end("first");
        poison.end("second");
        assert_eq!(poison.gone().as_deref(), Some("first"));
        let before = called.load(Ordering::Relaxed);
        poison.on_gone(count());
        assert!(called.load(Ordering::Relaxed) > before);
        let hold = with(WhenGone::Hold).unwrap();
        hold.end("dead");
        assert_eq!(hold.gone(), None);
        let killed = Arc::new(AtomicUsize::new(0));
        let killed_by = Arc::clone(&killed);
        let kill = with(WhenGone::Kill(Arc::new(move |_| {
            killed_by.fetch_add(1, Ordering::Relaxed);
        })));
        let kill = kill.unwrap();
        kill.end("dead");
        kill.end("late");
        assert_eq!(kill.gone().as_deref(), Some("dead"));
        assert_eq!(killed.load(Ordering::Relaxed), 1);
    }
}
