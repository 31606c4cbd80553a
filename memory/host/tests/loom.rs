//! The races of one page, every interleaving. The page word and the frame descriptor are the real
//! ones; there are one or two frames; the other steps are the manager's, in the same order.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p lacuna-host --test loom --release`
#![cfg(loom)]
#![allow(dead_code, reason = "the modules are whole, each model uses its part")]

#[path = "../src/flight.rs"]
mod flight;
#[path = "../src/io/watch.rs"]
mod watch;

use flight::Flight;
use lacuna_addr::Pfn;
use lacuna_frames::{Desc, Dirt, FrameState, PageNo, PageState, PageWord};
use lacuna_swap::SwapEntry;
use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

const PAGE: PageNo = PageNo::new(77);

/// One page, and two frames for two faulting threads.
struct Fixture {
    word: PageWord,
    descs: [Desc; 2],
    /// The content of the first frame, and of the swap entry.
    frame: AtomicU64,
    entry: AtomicU64,
    /// How often a frame was given back to the free list.
    freed: AtomicU64,
}

fn frame(index: u32) -> Pfn {
    Pfn::new(index)
}

impl Fixture {
    fn new() -> Self {
        let descs = [Desc::default(), Desc::default()];
        descs
            .iter()
            .for_each(|desc| desc.set_state(FrameState::Cached));
        let (content, entry) = (AtomicU64::new(1), AtomicU64::new(0));
        Self {
            word: PageWord::new(),
            descs,
            frame: content,
            entry,
            freed: AtomicU64::new(0),
        }
    }

    /// The page is resident in frame 0.
    fn resident(dirt: Dirt, entry: Option<SwapEntry>) -> Arc<Self> {
        let fixture = Self::new();
        fixture.descs[0].prepare(PAGE, dirt);
        let state = PageState::Resident {
            frame: frame(0),
            entry,
        };
        fixture.word.change(PageState::Empty, state).unwrap();
        fixture.descs[0].publish();
        if entry.is_some() {
            fixture.entry.store(1, Ordering::Relaxed);
        }
        Arc::new(fixture)
    }

    fn free(&self) {
        self.descs[0].set_state(FrameState::Free);
        self.freed.fetch_add(1, Ordering::Relaxed);
    }

    /// `Core::resolve` for a write. Returns true if the caller may use the page's frame.
    fn take_back(&self) -> bool {
        loop {
            let state = self.word.load();
            match state.rescued() {
                Some(rescued) if self.word.change(state, rescued).is_ok() => {
                    self.descs[0].mark_dirty();
                    return true;
                }
                Some(_) => {}
                None => return false,
            }
        }
    }

    fn assert_at_rest_in_frame(&self) {
        assert!(matches!(self.word.load(), PageState::Resident { .. }));
        assert_eq!(self.descs[0].state(), FrameState::Used);
        assert_eq!(self.freed.load(Ordering::Relaxed), 0);
    }

    /// `Core::evict` and `Core::sort_out`, then the write-out of a dirty page, which fails if
    /// `works` says so.
    fn reclaim(&self, works: Device) {
        let desc = &self.descs[0];
        let Some(page) = desc.isolate() else { return };
        assert_eq!(page, PAGE);
        self.word
            .advance(PageState::evicted)
            .expect("an isolated page is resident");
        if desc.take_dirty() == Dirt::Clean {
            match self.word.advance(PageState::dropped) {
                Ok(_) => self.free(),
                Err(_) => desc.publish(),
            }
            return;
        }
        let copy = self.frame.load(Ordering::Relaxed);
        let to = SwapEntry::new(9);
        if self.word.advance(|state| state.write_started(to)).is_err() {
            desc.mark_dirty();
            desc.publish();
            return;
        }
        if works == Device::Fails {
            desc.mark_dirty();
            self.word
                .advance(PageState::without_entry)
                .expect("no other thread moves it");
            desc.publish();
            return;
        }
        self.entry.store(copy, Ordering::Relaxed);
        match self.word.advance(PageState::written) {
            Ok(_) => self.free(),
            Err(_) => desc.publish(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Device {
    Works,
    Fails,
}

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

/// Either a fault takes the page back, or the page leaves its frame. Never both, and the dirty mark
/// is never lost.
fn fault_against_eviction(dirt: Dirt, entry: Option<SwapEntry>, device: Device) {
    model(move || {
        let fixture = Fixture::resident(dirt, entry);
        let reclaimer = {
            let fixture = fixture.clone();
            thread::spawn(move || fixture.reclaim(device))
        };
        let taken = fixture.take_back();
        if taken {
            fixture.frame.store(2, Ordering::Relaxed);
        }
        reclaimer.join().unwrap();
        if taken {
            fixture.assert_at_rest_in_frame();
            assert_eq!(fixture.frame.load(Ordering::Relaxed), 2);
            assert_eq!(
                fixture.descs[0].take_dirty(),
                Dirt::Dirty,
                "the write is not forgotten"
            );
        } else if let PageState::Resident { entry, .. } = fixture.word.load() {
            fixture.assert_at_rest_in_frame();
            assert_eq!((fixture.descs[0].take_dirty(), entry), (Dirt::Dirty, None));
        } else {
            assert_eq!(fixture.freed.load(Ordering::Relaxed), 1);
            assert_eq!(
                fixture.entry.load(Ordering::Relaxed),
                1,
                "the entry has what the page had"
            );
        }
    });
}

#[test]
fn a_clean_page_is_dropped_or_taken_back() {
    fault_against_eviction(Dirt::Clean, Some(SwapEntry::new(5)), Device::Works);
}

#[test]
fn a_dirty_page_is_written_or_taken_back() {
    fault_against_eviction(Dirt::Dirty, None, Device::Works);
}

#[test]
fn a_page_whose_write_fails_stays_dirty() {
    fault_against_eviction(Dirt::Dirty, None, Device::Fails);
}

#[test]
fn two_reclaimers_never_have_one_page() {
    model(|| {
        let fixture = Fixture::resident(Dirt::Clean, Some(SwapEntry::new(5)));
        let reclaimers = [(); 2].map(|()| {
            let fixture = fixture.clone();
            thread::spawn(move || fixture.reclaim(Device::Works))
        });
        let taken = fixture.take_back();
        reclaimers
            .into_iter()
            .for_each(|reclaimer| reclaimer.join().unwrap());
        // The fault takes it back from the first reclaimer; the second may then evict it, dirty.
        let freed = fixture.freed.load(Ordering::Relaxed);
        match fixture.word.load() {
            PageState::Resident { .. } => assert!(taken && freed == 0),
            PageState::Swapped { .. } => assert_eq!(freed, 1),
            other => panic!("{other:?} is not a state at rest"),
        }
    });
}

#[test]
fn two_first_touches_share_one_frame() {
    model(|| {
        let fixture = Arc::new(Fixture::new());
        let fill = |fixture: &Fixture, index: u32| {
            let desc = &fixture.descs[index as usize];
            desc.prepare(PAGE, Dirt::Dirty);
            let resident = PageState::Resident {
                frame: frame(index),
                entry: None,
            };
            match fixture.word.change(PageState::Empty, resident) {
                Ok(()) => {
                    desc.publish();
                    frame(index)
                }
                Err(state) => state.frame().expect("the other's frame"),
            }
        };
        let other = {
            let fixture = fixture.clone();
            thread::spawn(move || fill(&fixture, 1))
        };
        let isolated = {
            let fixture = fixture.clone();
            let seen = Arc::new(AtomicBool::new(false));
            thread::spawn(move || {
                for (index, desc) in fixture.descs.iter().enumerate() {
                    if let Some(page) = desc.isolate() {
                        assert_eq!(page, PAGE);
                        assert_eq!(fixture.word.load().frame(), Some(frame(index as u32)));
                        assert!(!seen.swap(true, Ordering::Relaxed), "one frame is in use");
                        desc.publish();
                    }
                }
            })
        };
        let mine = fill(&fixture, 0);
        assert_eq!(other.join().unwrap(), mine);
        isolated.join().unwrap();
        let used = fixture
            .descs
            .iter()
            .filter(|desc| desc.state() == FrameState::Used);
        assert_eq!(used.count(), 1);
    });
}

/// An operation that is started while the last poller stops polling does not wait for ever: if the
/// device's thread parks, one of the two wakes it.
#[test]
fn no_operation_in_flight_is_left_without_a_poller() {
    loom::model(|| {
        let watched = Arc::new((watch::Watch::default(), AtomicUsize::new(0)));
        watched.0.join();
        let seen = watched.clone();
        let device = thread::spawn(move || {
            let (watch, pending) = &*seen;
            while pending.load(Ordering::Acquire) == 0 || watch.is_polled() {
                thread::park();
            }
        });
        let woken = device.thread().clone();
        let leaving = watched.clone();
        let poller = thread::spawn(move || {
            let (watch, pending) = &*leaving;
            if watch.leave() && pending.load(Ordering::Relaxed) > 0 {
                woken.unpark();
            }
        });
        let (watch, pending) = &*watched;
        pending.fetch_add(1, Ordering::Relaxed);
        if !watch.is_polled() {
            device.thread().unpark();
        }
        poller.join().unwrap();
        device.join().unwrap();
    });
}

/// A page that its source has not provided, with its ticket.
struct Missing {
    fixture: Fixture,
    flight: Flight,
    /// `Core::tickets` has it.
    ticket: Mutex<bool>,
    /// The frame, in two halves: no answer may write while another does, or after a fault reads.
    halves: [AtomicU64; 2],
}

impl Missing {
    fn new() -> Arc<Self> {
        let fixture = Fixture::new();
        fixture.descs[0].prepare(PAGE, Dirt::Dirty);
        Arc::new(Self {
            fixture,
            flight: Flight::new(),
            ticket: Mutex::new(false),
            halves: [AtomicU64::new(0), AtomicU64::new(0)],
        })
    }

    /// `Core::resolve`: true if the page is resident, false if it is missing or lost.
    fn fault(&self) -> bool {
        loop {
            match self.fixture.word.load() {
                PageState::Empty => {
                    let mut ticket = self.ticket.lock().unwrap();
                    let fetching = PageState::Empty.fetch_started(frame(0)).unwrap();
                    if self.fixture.word.change(PageState::Empty, fetching).is_ok() {
                        *ticket = true;
                        return false;
                    }
                }
                PageState::Fetching { .. } if *self.ticket.lock().unwrap() => return false,
                // The page has arrived since.
                PageState::Fetching { .. } => {}
                PageState::Resident { .. } => {
                    let [first, second] = self.halves.each_ref();
                    let (first, second) = (
                        first.load(Ordering::Relaxed),
                        second.load(Ordering::Relaxed),
                    );
                    assert!(first != 0 && first == second, "{first} and {second}");
                    return true;
                }
                PageState::Lost => return false,
                other => panic!("{other:?}"),
            }
        }
    }

    /// `Core::answer`, with a page of `content` or an error: true if it counts.
    fn answer(&self, content: Option<u64>) -> bool {
        let ticket = *self.ticket.lock().unwrap();
        let missing = matches!(self.fixture.word.load(), PageState::Fetching { .. });
        if !ticket || !missing || !self.flight.answer() {
            return false;
        }
        let step = match content {
            Some(content) => {
                let halves = self.halves.iter();
                halves.for_each(|half| half.store(content, Ordering::Relaxed));
                PageState::arrived
            }
            None => PageState::arrival_failed,
        };
        self.fixture.word.advance(step).expect("one answer counts");
        *self.ticket.lock().unwrap() = false;
        match content {
            Some(_) => self.fixture.descs[0].publish(),
            None => self.fixture.free(),
        }
        self.flight.finish();
        true
    }
}

/// Two answers while a vCPU faults: one counts, and the vCPU sees only its bytes.
#[test]
fn one_of_two_answers_counts() {
    model(|| {
        let page = Missing::new();
        assert!(!page.fault());
        let answers = [1, 2].map(|content| {
            let page = page.clone();
            thread::spawn(move || page.answer(Some(content)))
        });
        page.fault();
        let [first, second] = answers.map(|answer| answer.join().unwrap());
        assert!(first != second && page.flight.is_done() && page.fault());
        let content = if first { 1 } else { 2 };
        assert_eq!(page.halves[0].load(Ordering::Relaxed), content);
        page.fixture.assert_at_rest_in_frame();
        assert_eq!(page.fixture.descs[0].take_dirty(), Dirt::Dirty);
    });
}

/// An answer, the removal of the region, and a thread that starts the ticket: the page is resident
/// or lost, its frame is free if it is lost, and the source gets at most one request.
#[test]
fn an_answer_while_the_region_is_removed() {
    model(|| {
        let page = Missing::new();
        assert!(!page.fault());
        let removal = {
            let page = page.clone();
            thread::spawn(move || page.answer(None))
        };
        let starter = {
            let page = page.clone();
            thread::spawn(move || page.flight.start())
        };
        let provided = page.answer(Some(1));
        let removed = removal.join().unwrap();
        assert!(provided != removed && page.flight.is_done());
        let _ = starter.join().unwrap();
        assert!(!page.flight.start(), "a ticket that is done is not started");
        assert!(page.flight.is_done());
        assert_eq!(page.fault(), provided);
        let freed = page.fixture.freed.load(Ordering::Relaxed);
        assert_eq!(freed, u64::from(removed));
    });
}

/// Two first faults share one ticket, and a fault never misses the ticket of a page in flight.
#[test]
fn two_faults_on_a_missing_page_share_its_ticket() {
    model(|| {
        let page = Missing::new();
        let other = {
            let page = page.clone();
            thread::spawn(move || {
                let resident = page.fault();
                resident || page.answer(Some(7))
            })
        };
        page.fault();
        assert!(other.join().unwrap(), "one frame, one ticket, one answer");
        assert!(page.fault() && page.flight.is_done());
    });
}
