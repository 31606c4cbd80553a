//! Linux memory that is filled from outside: a handler reads the userfaultfd, and threads of this
//! host touch missing pages.

use crate::common;

use common::linux::{host, origin, read};
use common::source::page_with;
use common::{FakeMmu, Use, Vm};
use lacuna_addr::{Access, BackingAddr, BackingRange, Hva, HvaRange, Level, PageCount};
use lacuna_host::{Answer, Host, HostError, Resolution, SourcePage, Ticket, Toucher};
use lacuna_skip::test;
use lacuna_source::{External, Policy, WhenGone};
use lacuna_sync::VirtualClock;
use lacuna_sys::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const PAGES: u64 = 600;

/// A region of `PAGES` pages, and its handler. Ends the test if there can be none.
struct Fixture {
    host: Arc<Host>,
    external: Arc<External>,
    mmu: Arc<FakeMmu>,
    range: BackingRange,
}

impl Fixture {
    fn new() -> Self {
        Self::with(&[], WhenGone::Poison)
    }

    fn with(parts: &[SourcePage], when_gone: WhenGone) -> Self {
        Self::patient(parts, when_gone, Policy::default().patience)
    }

    fn patient(parts: &[SourcePage], when_gone: WhenGone, patience: Duration) -> Self {
        let policy = Policy {
            patience,
            when_gone,
        };
        let external = match External::threads(parts, policy) {
            Ok(external) => Arc::new(external),
            Err(errno) => lacuna_skip::skip_test(errno),
        };
        if let Err(errno) = Toucher::check() {
            lacuna_skip::skip_test(errno);
        }
        let host = host(2 * 1024);
        let mmu = FakeMmu::of(&host);
        let range = host.add_linux_region(origin(&external), PageCount::new(PAGES), mmu.clone());
        Self {
            range: range.unwrap(),
            host,
            external,
            mmu,
        }
    }

    fn at(&self, page: u64) -> BackingAddr {
        self.range.start().checked_add_pages(page).unwrap()
    }

    fn hva(&self, page: u64) -> Hva {
        let addresses = self.host.addresses(self.range).unwrap();
        addresses.start().checked_add_pages(page).unwrap()
    }

    fn page_at(&self, hva: Hva) -> u64 {
        (hva.get() - self.hva(0).get()) >> 12
    }

    /// The handler's fill of one page.
    fn fill(&self, page: u64, word: u64) -> Result<(), Errno> {
        let uffd = self.external.userfaultfd_of(SourcePage(page));
        uffd.copy(&page_with(word).0, self.hva(page))
    }

    /// The pages whose faults can be read now, each once for each waiting thread.
    fn faults(&self) -> Vec<u64> {
        let mut faults = Vec::new();
        for uffd in self.external.userfaultfds() {
            uffd.faults(&mut faults).unwrap();
        }
        faults
            .iter()
            .map(|fault| self.page_at(fault.page))
            .collect()
    }

    /// Waits until `count` threads sleep, and returns their pages.
    fn wait_for_faults(&self, count: usize) -> Vec<u64> {
        let mut pages = Vec::new();
        while pages.len() < count {
            pages.extend(self.faults());
            thread::yield_now();
        }
        pages
    }

    fn missing(&self, page: u64) -> Ticket {
        let mut cache = self.host.per_cpu_pages().unwrap();
        let found = self
            .host
            .resolve(self.at(page), Access::Read, Level::L4K, &mut cache);
        match found {
            Resolution::Missing(ticket) => ticket,
            other => panic!("{other:?}"),
        }
    }

    fn word(&self, page: u64) -> Result<u64, HostError> {
        read(&self.host, self.at(page))
    }

    fn end(self) {
        self.host.verify();
        self.host.remove_region(self.range).unwrap();
        assert_eq!(self.host.linux_pages(), PageCount::new(0));
        self.host.verify();
    }
}

/// A thread that waits for pages as a vCPU's thread does.
#[derive(Default)]
struct Waiter {
    stop: AtomicBool,
    toucher: Arc<Toucher>,
}

impl Waiter {
    fn wait(&self, host: &Host, ticket: &Ticket) -> Result<(), HostError> {
        host.wait_touching(ticket, &self.stop, &self.toucher)
    }

    fn kick(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.toucher.interrupt();
    }
}

/// Threads that wait as vCPUs do, devices, a population and a running vCPU: one handler answers
/// all, out of order.
#[test]
fn a_handler_fills_what_threads_touch() {
    let f = Fixture::new();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut held = Vec::new();
            while !over.load(Ordering::Relaxed) {
                held.extend(f.faults());
                // Answer the last fault first.
                if let Some(page) = held.pop() {
                    // A second fault on the page finds it in place.
                    let filled = f.fill(page, page + 1);
                    assert!(matches!(filled, Ok(()) | Err(Errno::EXIST)), "{filled:?}");
                    let uffd = f.external.userfaultfd_of(SourcePage(page));
                    uffd.wake(f.hva(page)).unwrap();
                }
                thread::yield_now();
            }
        });
        let end = End(&over);
        let vcpus: Vec<_> = (0..3)
            .map(|i| {
                let f = &f;
                scope.spawn(move || {
                    let waiter = Waiter::default();
                    for page in (i..200).step_by(3) {
                        waiter.wait(&f.host, &f.missing(page)).unwrap();
                        assert_eq!(f.word(page).unwrap(), page + 1);
                    }
                })
            })
            .collect();
        vcpus.into_iter().for_each(|vcpu| vcpu.join().unwrap());
        // A device has no toucher.
        assert_eq!(f.word(200).unwrap(), 201);
        f.host.copy_in(f.at(201), &[9; 8]).unwrap();
        let rest = BackingRange::new(f.at(202), 300).unwrap();
        f.host.populate(rest).unwrap();
        let coming = f.host.fetch(f.at(510)).unwrap().unwrap();
        while !coming.is_done() {
            thread::yield_now();
        }
        drop(end);
    });
    for page in [202, 300, 501, 510] {
        assert_eq!(f.word(page).unwrap(), page + 1);
    }
    assert_eq!(f.word(201).unwrap(), u64::from_le_bytes([9; 8]));
    assert_eq!(f.host.stats().provided, 503);
    f.end();
}

/// Sets a flag when it is dropped, also after a panic.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A page that the handler puts in place before any fault causes no fault.
#[test]
fn pages_may_come_before_they_are_touched() {
    let f = Fixture::new();
    f.fill(3, 33).unwrap();
    let waiter = Waiter::default();
    waiter.wait(&f.host, &f.missing(3)).unwrap();
    assert_eq!((f.word(3).unwrap(), f.faults().len()), (33, 0));
    // The VMM is late, and from then on the word records the page.
    f.fill(4, 44).unwrap();
    let late = f.host.provide(f.at(4), &page_with(1).0).unwrap();
    assert_eq!((late, f.word(4).unwrap()), (Answer::Late, 44));
    f.end();
}

#[test]
fn a_wait_ends_when_its_thread_has_to_stop() {
    let f = Fixture::new();
    let (ticket, waiter) = (f.missing(5), Waiter::default());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| waiter.wait(&f.host, &ticket));
        assert_eq!(f.wait_for_faults(1), [5]);
        waiter.kick();
        assert_eq!(waiting.join().unwrap(), Ok(()));
        assert!(!ticket.is_done());
        // It waits again, and another thread waits for the same page.
        waiter.stop.store(false, Ordering::SeqCst);
        let again = &waiter;
        let (host, ticket) = (&f.host, &ticket);
        let threads = [
            scope.spawn(move || again.wait(host, ticket)),
            scope.spawn(move || Waiter::default().wait(host, ticket)),
        ];
        assert_eq!(f.wait_for_faults(2), [5, 5]);
        f.fill(5, 55).unwrap();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), Ok(()));
        }
    });
    assert_eq!(f.word(5).unwrap(), 55);
    f.end();
}

/// The VMM provides a page by a fill that wakes no thread, and a run of them.
#[test]
fn a_page_that_the_vmm_provides_wakes_those_that_sleep() {
    let f = Fixture::new();
    thread::scope(|scope| {
        let wait = |page| {
            let f = &f;
            scope.spawn(move || Waiter::default().wait(&f.host, &f.missing(page)))
        };
        let one = wait(1);
        assert_eq!(f.wait_for_faults(1), [1]);
        let taken = f.host.provide(f.at(1), &page_with(11).0);
        assert_eq!(taken, Ok(Answer::Taken));
        assert_eq!(one.join().unwrap(), Ok(()));
        let many = [wait(20), wait(22)];
        f.wait_for_faults(2);
        let pages: Vec<_> = (0..4).map(|i| page_with(i + 20).0).collect();
        assert_eq!(f.host.provide_pages(f.at(20), &pages), Ok(4));
        for thread in many {
            assert_eq!(thread.join().unwrap(), Ok(()));
        }
        // The handler has filled the page and woken no thread; the VMM is second.
        let two = wait(2);
        assert_eq!(f.wait_for_faults(1), [2]);
        let uffd = f.external.userfaultfd_of(SourcePage(2));
        let content = [page_with(22).0];
        uffd.place(&content, f.hva(2), lacuna_sys::Waiters::LeaveAsleep)
            .unwrap();
        let late = f.host.provide(f.at(2), &page_with(1).0);
        assert_eq!(two.join().unwrap(), Ok(()));
        assert!(late.is_ok(), "{late:?}");
    });
    assert_eq!(f.word(1).unwrap(), 11);
    assert_eq!(f.word(22).unwrap(), 22);
    assert_eq!(f.word(2).unwrap(), 22);
    f.end();
}

/// Each thread gets an error, and none reads zeros or continues.
#[test]
fn a_removal_ends_all_waits() {
    for _ in 0..20 {
        let f = Fixture::new();
        thread::scope(|scope| {
            let waits: Vec<_> = (0..4)
                .map(|page| {
                    let f = &f;
                    scope.spawn(move || Waiter::default().wait(&f.host, &f.missing(page)))
                })
                .collect();
            f.host.start(&f.missing(9));
            f.wait_for_faults(5);
            f.host.remove_region(f.range).unwrap();
            for wait in waits {
                let error = wait.join().unwrap().unwrap_err();
                assert!(error.to_string().contains("removed"), "{error}");
            }
        });
        f.host.verify();
        // The same addresses serve the next region.
        let again = f
            .host
            .add_linux_region(None, PageCount::new(PAGES), f.mmu.clone());
        f.host.remove_region(again.unwrap()).unwrap();
    }
}

/// Pages in place stay, whether this side knew of them or not. The others are lost.
#[test]
fn when_the_handler_is_gone_missing_pages_are_lost() {
    let f = Fixture::new();
    thread::scope(|scope| {
        let wait = scope.spawn(|| Waiter::default().wait(&f.host, &f.missing(0)));
        f.host.start(&f.missing(1));
        f.wait_for_faults(2);
        f.fill(2, 22).unwrap();
        f.external.end("the handler has died");
        let error = wait.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("the handler has died"), "{error}");
    });
    assert_eq!(f.word(2).unwrap(), 22);
    for page in [0, 1, 3] {
        let error = f.word(page).unwrap_err().to_string();
        assert!(
            error.contains("does not provide it: the handler has died"),
            "{error}"
        );
    }
    f.end();
}

/// A handler that never answers is gone when its patience is over.
#[test]
fn a_handler_that_never_answers_is_gone() {
    let killed = Arc::new(AtomicBool::new(false));
    let note = Arc::clone(&killed);
    let kill = Arc::new(move |_: &str| note.store(true, Ordering::SeqCst));
    for when_gone in [WhenGone::Poison, WhenGone::Kill(kill)] {
        let f = Fixture::patient(&[], when_gone, Duration::from_millis(40));
        f.fill(1, 11).unwrap();
        let error = Waiter::default().wait(&f.host, &f.missing(0)).unwrap_err();
        let expected = "it has not filled a page within 40ms";
        assert!(error.to_string().contains(expected), "{error}");
        // A thread of the pool waits for this page.
        let error = f.word(2).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(f.word(1).unwrap(), 11);
        f.end();
    }
    assert!(killed.load(Ordering::SeqCst));
}

/// Under `Hold`, a dead handler leaves its pages missing, and only the thread's own stop ends the
/// wait.
#[test]
fn a_handler_that_is_held_leaves_pages_missing() {
    let f = Fixture::with(&[], WhenGone::Hold);
    let waiter = Waiter::default();
    thread::scope(|scope| {
        let wait = scope.spawn(|| waiter.wait(&f.host, &f.missing(0)));
        f.wait_for_faults(1);
        f.external.end("the handler has died");
        waiter.kick();
        assert_eq!(wait.join().unwrap(), Ok(()));
    });
    // Another handler has the same descriptor.
    f.fill(0, 5).unwrap();
    assert_eq!(f.word(0).unwrap(), 5);
    f.end();
}

/// A discarded page is zeros, and a later copy by the handler does not bring it back.
#[test]
fn a_discarded_page_leaves_the_userfaultfd() {
    let f = Fixture::new();
    for page in 0..4 {
        f.fill(page, page + 1).unwrap();
    }
    assert_eq!(f.word(1).unwrap(), 2);
    thread::scope(|scope| {
        let asleep = scope.spawn(|| Waiter::default().wait(&f.host, &f.missing(5)));
        assert_eq!(f.wait_for_faults(1), [5]);
        let range = BackingRange::new(f.at(1), 5).unwrap();
        f.host.discard(range).unwrap();
        assert_eq!(asleep.join().unwrap(), Ok(()));
    });
    for page in 1..6 {
        assert_eq!(f.fill(page, 77), Err(Errno::NOENT), "page {page}");
        assert_eq!(f.word(page).unwrap(), 0, "page {page}");
    }
    f.host.copy_in(f.at(2), &[1; 8]).unwrap();
    assert_eq!(f.fill(2, 77), Err(Errno::NOENT));
    assert_eq!(f.word(2).unwrap(), u64::from_le_bytes([1; 8]));
    assert_eq!((f.word(0).unwrap(), f.faults().len()), (1, 0));
    f.fill(6, 66).unwrap();
    assert_eq!(f.word(6).unwrap(), 66);
    f.end();
}

#[test]
fn each_part_has_a_queue_of_its_own() {
    let f = Fixture::with(&[SourcePage(100), SourcePage(513)], WhenGone::Poison);
    thread::scope(|scope| {
        for (queue, page) in [99, 100, 513].into_iter().enumerate() {
            let f = &f;
            let wait = scope.spawn(move || Waiter::default().wait(&f.host, &f.missing(page)));
            let mut faults = Vec::new();
            while faults.is_empty() {
                for (index, uffd) in f.external.userfaultfds().enumerate() {
                    let before = faults.len();
                    uffd.faults(&mut faults).unwrap();
                    assert!(faults.len() == before || index == queue, "page {page}");
                }
            }
            f.fill(page, page).unwrap();
            assert_eq!(wait.join().unwrap(), Ok(()));
        }
    });
    f.end();
}

/// vCPUs touch pages and are kicked, a handler fills, the VMM provides, and pages are discarded. No
/// thread waits for ever, and each page has a word that one of them wrote.
#[test]
fn kicks_fills_and_discards_at_once() {
    let f = Fixture::new();
    let over = AtomicBool::new(false);
    let kicks = AtomicU64::new(0);
    let waiters: Vec<_> = (0..3).map(|_| Waiter::default()).collect();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for page in f.faults() {
                    let filled = f.fill(page, page + 1);
                    let known = matches!(filled, Ok(()) | Err(Errno::EXIST | Errno::NOENT));
                    assert!(known, "{filled:?}");
                    let uffd = f.external.userfaultfd_of(SourcePage(page));
                    uffd.wake(f.hva(page)).unwrap();
                }
            }
        });
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for waiter in &waiters {
                    waiter.kick();
                    kicks.fetch_add(1, Ordering::Relaxed);
                }
                thread::yield_now();
            }
        });
        scope.spawn(|| {
            for page in (0..PAGES).rev().step_by(7) {
                let _ = f.host.provide(f.at(page), &page_with(page + 1).0).unwrap();
                let range = BackingRange::new(f.at(page - page % 3), 1).unwrap();
                f.host.discard(range).unwrap();
            }
        });
        let end = End(&over);
        let vcpus: Vec<_> = waiters
            .iter()
            .map(|waiter| {
                let f = &f;
                scope.spawn(move || touch_all(f, waiter))
            })
            .collect();
        vcpus.into_iter().for_each(|vcpu| vcpu.join().unwrap());
        drop(end);
    });
    assert!(kicks.load(Ordering::Relaxed) > 0);
    f.end();
}

fn touch_all(f: &Fixture, waiter: &Waiter) {
    let mut cache = f.host.per_cpu_pages().unwrap();
    for page in 0..PAGES {
        loop {
            waiter.stop.store(false, Ordering::SeqCst);
            let found = f
                .host
                .resolve(f.at(page), Access::Read, Level::L4K, &mut cache);
            cache.unpin_all();
            match found {
                Resolution::Ready(_) => break,
                Resolution::Missing(ticket) => waiter.wait(&f.host, &ticket).unwrap(),
                Resolution::Busy => thread::yield_now(),
                other => panic!("{other:?}"),
            }
        }
        let word = f.word(page).unwrap();
        assert!(word == page + 1 || word == 0, "page {page}: {word}");
    }
}

/// A vCPU of the model writes and reads all pages.
#[test]
fn a_vcpu_writes_to_pages_from_outside() {
    let f = Fixture::new();
    for page in 0..PAGES {
        f.fill(page, 0).unwrap();
    }
    f.host.populate(f.range).unwrap();
    let clock = Arc::new(VirtualClock::default());
    let mut vm = Vm::of(&f.host, &clock, f.mmu.clone(), f.range);
    for page in (0..PAGES).step_by(3) {
        vm.touch(page, Use::Write(page + 1)).unwrap();
    }
    vm.check_all();
    drop(vm);
    f.end();
}

/// The handler poisons an untouched page, and a page that a thread waits for. Both are lost; no
/// vCPU may have read them.
#[test]
fn a_page_that_the_handler_poisons_is_lost() {
    let fixture = Fixture::new();
    let mut seen = fixture.host.seen_losses();
    let poison = |page: u64| {
        let uffd = fixture.external.userfaultfd_of(SourcePage(page));
        uffd.poison(HvaRange::new(fixture.hva(page), 1).unwrap())
    };
    match poison(3) {
        Err(Errno::INVAL) => lacuna_skip::skip_test("UFFDIO_POISON needs Linux 6.6"),
        poisoned => poisoned.unwrap(),
    }
    let is_lost = |word: Result<u64, HostError>| {
        assert!(matches!(word, Err(HostError::Lost(_))), "{word:?}");
    };
    is_lost(fixture.word(3));
    thread::scope(|scope| {
        let reader = scope.spawn(|| fixture.word(4));
        fixture.wait_for_faults(1);
        poison(4).unwrap();
        is_lost(reader.join().unwrap());
    });
    is_lost(fixture.word(3));
    assert_eq!(fixture.host.losses(), 2);
    assert!(fixture.host.lost_since(&mut seen, &*fixture.mmu).is_none());
    fixture.host.verify();
}

/// This test's process has no room for another thread's stack, so no thread can wait for a device's
/// page. The page is lost, and its ticket says why.
#[test]
fn a_page_for_which_no_thread_can_wait_is_lost() {
    if !lacuna_skip::alone() {
        return;
    }
    let f = Fixture::new();
    let (lost, later) = (f.missing(7), f.missing(8));
    let limit = getrlimit(Resource::As);
    let small = Rlimit {
        current: Some(1 << 20),
        ..limit
    };
    setrlimit(Resource::As, small).unwrap();
    f.host.start(&lost);
    setrlimit(Resource::As, limit).unwrap();
    let reason = f.host.wait(&lost).unwrap_err().to_string();
    assert!(reason.contains("no thread can be started"), "{reason}");
    assert!(f.word(7).is_err());
    // The next page finds a thread.
    f.host.start(&later);
    assert_eq!(f.wait_for_faults(1), [8]);
    f.fill(8, 80).unwrap();
    f.host.wait(&later).unwrap();
    assert_eq!(f.word(8), Ok(80));
    f.end();
}
