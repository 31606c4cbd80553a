//! Missing pages without KVM. Threads of the tests act as vCPUs. They are in user space, where a
//! signal does not end a fault, as in KVM's own accesses.

use super::*;
use crate::mapping::{copy_in, copy_out};
use crate::memory::{BUDGET_MIN, MemoryConfig};
use crate::slots::SlotSpec;
use crate::tracker::Tracker;
use io_uring::IoUring;
use lacuna_addr::{Access, BackingRange, Gpa, PAGE_SIZE, PageCount};
use lacuna_host::{HostError, HostStats, HugePages, MemoryKind, Swap};
use lacuna_machine::{Answer, PageSource};
use lacuna_slots::{SlotFlags, SlotId};
use lacuna_source::{PageRequest, SourcePage};
use lacuna_sync::LatencySetting;
use rustix::fs::FallocateFlags;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::sync::mpsc::{Receiver, Sender, channel};

const PAGES: u64 = 4096;
const SLOT: SlotId = SlotId(0);
/// Budgets: all pages are Linux memory; or a part of them is in the window.
const BUDGETS: [u64; 2] = [PAGES, BUDGET_MIN];

/// Keeps its requests.
struct Keeps(Sender<PageRequest>);

impl PageSource for Keeps {
    fn describe(&self) -> String {
        "keeps".into()
    }

    fn fetch(&self, request: PageRequest) {
        let _ = self.0.send(request);
    }
}

/// A VM without KVM.
struct Bench {
    faults: Faults,
    memory: Arc<Memory>,
    slots: Arc<SlotTable>,
    kicks: Arc<VcpuKicks>,
}

/// `None` if this host has no userfaultfd; the skip is recorded then.
fn bench(flags: SlotFlags, budget: u64) -> Option<(Bench, Receiver<PageRequest>)> {
    let (sender, requests) = channel();
    Some((
        bench_from(flags, budget, Some(Arc::new(Keeps(sender))))?,
        requests,
    ))
}

fn bench_from(flags: SlotFlags, budget: u64, from: Option<Arc<dyn PageSource>>) -> Option<Bench> {
    bench_in(MemoryKind::Budget, flags, budget, from)
}

fn bench_in(
    kind: MemoryKind,
    flags: SlotFlags,
    budget: u64,
    from: Option<Arc<dyn PageSource>>,
) -> Option<Bench> {
    let memory = Memory::new(MemoryConfig {
        backing: None,
        size: PageCount::new(PAGES),
        kind,
        huge: HugePages::Never,
        resident: PageCount::new(budget),
        swap: Swap::File(std::env::temp_dir()),
        latency: LatencySetting::default(),
        source: from,
        tracker: Tracker::Kvm,
    });
    let memory = match memory {
        Ok(memory) => Arc::new(memory),
        Err(why) => {
            lacuna_skip::skip(why);
            return None;
        }
    };
    let kicks = Arc::new(VcpuKicks::new(1));
    let slots = Arc::new(SlotTable::new());
    let spec = SlotSpec {
        id: SLOT,
        guest: 0,
        backing: memory.hva(0),
        bytes: PAGES * PAGE_SIZE as u64,
        flags,
    };
    slots.insert(spec, None).unwrap();
    let faults = Faults::start(Arc::clone(&memory), Arc::clone(&slots), Arc::clone(&kicks));
    Some(Bench {
        faults: faults.unwrap(),
        memory,
        slots,
        kicks,
    })
}

impl Bench {
    fn provider(&self) -> &Provider {
        self.faults.state.provider.as_ref().unwrap()
    }

    fn host(&self) -> HostStats {
        self.memory.host.stats()
    }

    /// As the VMM does. Returns how many pages were taken.
    fn provide(&self, page: Page, pages: &[[u8; PAGE_SIZE]]) -> Result<usize, HostError> {
        let first = self.memory.backing(page);
        let taken = self.memory.host.provide_pages(first, pages);
        self.faults.state.provided(page..page + pages.len() as Page);
        taken
    }

    fn read(&self, page: Page) -> u64 {
        let mut word = [0; 8];
        // SAFETY: 1. the page is in the guest's memory.
        unsafe { copy_out(self.memory.hva(page), &mut word) };
        u64::from_ne_bytes(word)
    }

    fn write(&self, page: Page, word: u64) {
        // SAFETY: 1. the page is in the guest's memory.
        unsafe { copy_in(self.memory.hva(page), &word.to_ne_bytes()) };
    }

    /// Reads as vCPU 0 does, while it is in the guest.
    fn read_in_guest(&self, page: Page) -> u64 {
        let immediate_exit = AtomicU8::new(0);
        let at = NonNull::new(immediate_exit.as_ptr()).unwrap();
        // SAFETY: 1. the byte outlives the entry.
        let _entry = unsafe { self.kicks.enter(0, at) };
        self.read(page)
    }
}

impl Bench {
    /// vCPU 0 reads `page` in the guest, and its VMM knows that it waits. Calls `act` when the page
    /// is held, and returns the word that the vCPU reads.
    fn read_while_held(&self, page: Page, act: impl FnOnce()) -> u64 {
        self.kicks.set_waits(0, Some(page));
        thread::scope(|scope| {
            let reads = scope.spawn(|| self.read_in_guest(page));
            while !self.provider().is_held(page) {
                thread::yield_now();
            }
            act();
            reads.join().unwrap()
        })
    }
}

fn content(word: u64) -> [u8; PAGE_SIZE] {
    let bytes = word.to_ne_bytes().repeat(PAGE_SIZE / 8);
    bytes.try_into().unwrap()
}

/// All pages are written in turn, several times; each write is found, and the budget holds.
#[test]
fn pages_beyond_the_budget_leave_and_come_back() {
    let Some(bench) = bench_from(SlotFlags::empty(), BUDGET_MIN, None) else {
        return;
    };
    for round in 1..4 {
        for page in 0..PAGES as Page {
            let before = match round {
                1 => 0,
                _ => u64::from(page) * (round - 1),
            };
            assert_eq!(bench.read(page), before, "page {page}, round {round}");
            bench.write(page, u64::from(page) * round);
        }
    }
    let host = bench.host();
    assert!(host.swapped_in > PAGES, "{host:?}");
    assert_eq!(host.budget, BUDGET_MIN);
    assert_eq!(bench.faults.state.failure(), None);
}

/// Threads write to pages while the pages leave and come back. No write is lost.
#[test]
fn no_write_is_lost_while_pages_move() {
    let Some(bench) = bench_from(SlotFlags::empty(), BUDGET_MIN, None) else {
        return;
    };
    const THREADS: u64 = 4;
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let bench = &bench;
            scope.spawn(move || {
                let mut random = thread + 1;
                let mut mine = vec![0; (PAGES / THREADS) as usize];
                for step in 1..20_000 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    // Mostly a small part, so that pages are touched again on their way out.
                    let own = match step % 4 {
                        0 => random >> 33,
                        _ => (random >> 33) % 150,
                    } as usize
                        % mine.len();
                    let page = own as Page * THREADS as Page + thread as Page;
                    assert_eq!(bench.read(page), mine[own], "page {page}, step {step}");
                    mine[own] = step;
                    bench.write(page, step);
                }
            });
        }
    });
    assert!(bench.host().swapped_out > PAGES);
    assert_eq!(bench.faults.state.failure(), None);
}

/// Pins a page where the guest sees it, as a device does. Linux does not move a pinned page.
fn pin(memory: &Memory, page: Page) -> Option<IoUring> {
    let ring = match IoUring::new(1) {
        Ok(ring) => ring,
        Err(error) => {
            lacuna_skip::skip(format!("io_uring: {error}"));
            return None;
        }
    };
    let pinned = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(memory.hva(page).get() as usize),
        iov_len: PAGE_SIZE,
    };
    // SAFETY: 1. the memory outlives the ring, which never uses the buffer.
    unsafe { ring.submitter().register_buffers(&[pinned]) }.unwrap();
    Some(ring)
}

/// A pinned page stays, and others leave. When it is not pinned any more, it leaves too.
#[test]
fn a_pinned_page_stays() {
    let Some(bench) = bench_from(SlotFlags::empty(), BUDGET_MIN, None) else {
        return;
    };
    let is_there = || crate::mapping::is_mapped(bench.memory.hva(7), PAGE_SIZE);
    bench.write(7, 77);
    let Some(ring) = pin(&bench.memory, 7) else {
        return;
    };
    let others = || (100..PAGES as Page).for_each(|page| bench.write(page, 1));
    (0..3).for_each(|_| others());
    assert!(is_there());
    ring.submitter().unregister_buffers().unwrap();
    others();
    while is_there() {
        others();
    }
    assert_eq!(bench.read(7), 77);
    assert_eq!(bench.faults.state.failure(), None);
}

/// A page is touched while it is made missing again, in a slot that exits. The VMM gets an exit,
/// and the source no request.
#[test]
fn a_page_is_touched_while_it_is_made_missing() {
    let Some((bench, requests)) = bench(SlotFlags::EXIT_ON_MISSING, BUDGET_MIN) else {
        return;
    };
    bench.provide(6, &[content(6), content(7)]).unwrap();
    assert_eq!((bench.read(6), bench.read(7)), (6, 7));
    let Some(ring) = pin(&bench.memory, 7) else {
        return;
    };
    let both = BackingRange::new(bench.memory.backing(6), 2).unwrap();
    thread::scope(|scope| {
        // It waits for the pinned page.
        let discards = scope.spawn(|| bench.memory.host.make_missing(both));
        while crate::mapping::is_mapped(bench.memory.hva(6), PAGE_SIZE) {
            thread::yield_now();
        }
        let faults = bench.faults.count();
        bench.kicks.set_waits(0, Some(6));
        let reads = scope.spawn(|| bench.read_in_guest(6));
        while bench.faults.count() == faults {
            thread::yield_now();
        }
        ring.submitter().unregister_buffers().unwrap();
        discards.join().unwrap().unwrap();
        while !bench.provider().is_held(6) {
            if let Ok(request) = requests.try_recv() {
                let _: Answer = request.provide(&content(6));
                break;
            }
            thread::yield_now();
        }
        let provided = bench.provide(6, &[content(66)]);
        assert_eq!((provided, reads.join().unwrap()), (Ok(1), 66));
    });
}

/// If several threads provide one page, one succeeds.
#[test]
fn each_page_is_provided_once() {
    for budget in BUDGETS {
        let Some((bench, _requests)) = bench(SlotFlags::empty(), budget) else {
            return;
        };
        let provide = |word: u64| {
            let pages = (0..PAGES as Page).step_by(64);
            let taken = pages.map(|page| bench.provide(page, &[content(word); 64]).unwrap());
            taken.sum::<usize>()
        };
        let taken = thread::scope(|scope| {
            let threads = [1, 2, 3].map(|word| scope.spawn(move || provide(word)));
            threads
                .map(|thread| thread.join().unwrap())
                .iter()
                .sum::<usize>()
        });
        assert_eq!(taken, PAGES as usize);
        assert!((0..PAGES as Page).all(|page| (1..=3).contains(&bench.read(page))));
    }
}

/// An evicted page is brought back with its content, without a request to the source.
#[test]
fn provided_pages_are_evicted_and_come_back() {
    let Some((bench, requests)) = bench(SlotFlags::empty(), BUDGET_MIN) else {
        return;
    };
    for page in 0..PAGES as Page {
        assert_eq!(bench.provide(page, &[content(page.into())]), Ok(1));
    }
    for page in 0..PAGES as Page {
        assert_eq!(bench.read(page), u64::from(page));
        assert_eq!(bench.provide(page, &[content(0)]), Ok(0));
    }
    assert_eq!(bench.host().provided, PAGES);
    assert!(requests.try_recv().is_err());
}

/// An access that no signal ends causes no exit: the source gets a request for its page.
#[test]
fn an_access_that_cannot_leave_waits_for_the_source() {
    for budget in BUDGETS {
        let Some((bench, requests)) = bench(SlotFlags::EXIT_ON_MISSING, budget) else {
            return;
        };
        thread::scope(|scope| {
            let reads = scope.spawn(|| bench.read_in_guest(5));
            let asked = requests.recv().unwrap();
            assert_eq!(asked.page(), SourcePage(5));
            assert_eq!(bench.kicks.take_missing(0), None);
            assert_eq!(asked.provide(&content(9)), Answer::Taken);
            assert_eq!(reads.join().unwrap(), 9);
        });
    }
}

/// A vCPU that sleeps on a page without an exit gets it from the source when the flag is cleared.
#[test]
fn a_held_page_is_asked_for_when_the_flag_is_cleared() {
    for budget in BUDGETS {
        let Some((bench, requests)) = bench(SlotFlags::EXIT_ON_MISSING, budget) else {
            return;
        };
        let read = bench.read_while_held(5, || {
            assert!(requests.try_recv().is_err());
            bench.slots.set_own_flags(SLOT, SlotFlags::empty()).unwrap();
            bench.faults.slots_changed();
            let asked = requests.recv().unwrap();
            assert_eq!(asked.provide(&content(9)), Answer::Taken);
        });
        assert_eq!(read, 9);
    }
}

/// A held page that the VMM provides reaches the thread that waits for it.
#[test]
fn a_held_page_comes_from_the_vmm() {
    for budget in BUDGETS {
        let Some((bench, requests)) = bench(SlotFlags::EXIT_ON_MISSING, budget) else {
            return;
        };
        let read = bench.read_while_held(5, || {
            assert_eq!(bench.provide(4, &[content(8); 3]), Ok(3));
        });
        assert_eq!(read, 8);
        assert!(!bench.provider().is_held(5));
        assert!(requests.try_recv().is_err());
    }
}

/// A worker of KVM has the number of a vCPU's thread. It gets its page when the VMM provides it,
/// although the vCPU exits and does not need the page.
#[test]
fn a_page_is_held_for_a_worker_that_seems_to_be_a_vcpu() {
    let Some((bench, _requests)) = bench(SlotFlags::EXIT_ON_MISSING, BUDGET_MIN) else {
        return;
    };
    let immediate_exit = AtomicU8::new(0);
    let at = NonNull::new(immediate_exit.as_ptr()).unwrap();
    // SAFETY: 1. the byte outlives the entry.
    let _entry = unsafe { bench.kicks.enter(0, at) };
    for (page, is_sure) in [(5, true), (6, false)] {
        let reader = Reader {
            state: Arc::clone(&bench.faults.state),
            uffds: Vec::new(),
            is_first: false,
            is_sure,
            arrivals: None,
            again: Vec::new(),
            short_since: None,
        };
        let fault = Fault {
            page: bench.memory.hva(page),
            access: Access::Read,
            thread: rustix::thread::gettid().as_raw_nonzero().get() as u32,
        };
        assert!(reader.exit(bench.provider(), page, fault).is_none());
        let exits = bench.kicks.take_missing(0).map(|missing| missing.page);
        assert_eq!(exits, Some(page));
        assert_eq!(bench.provider().is_held(page), !is_sure);
    }
}

/// A held page that the VMM discards is zeros for the thread that waits for it.
#[test]
fn a_held_page_is_discarded() {
    let Some((bench, requests)) = bench(SlotFlags::EXIT_ON_MISSING, PAGES) else {
        return;
    };
    let read = bench.read_while_held(5, || {
        let range = BackingRange::new(bench.memory.backing(4), 3).unwrap();
        bench.memory.host.discard(range).unwrap();
        bench.faults.state.discarded(4..7);
    });
    assert_eq!(read, 0);
    assert_eq!(bench.provide(4, &[content(8); 3]), Ok(0));
    assert!(requests.try_recv().is_err());
}

/// A held page is provided, and made missing again before its thread is woken: the thread faults
/// again.
#[test]
fn a_held_page_is_made_missing_again() {
    let Some((bench, requests)) = bench(SlotFlags::EXIT_ON_MISSING, BUDGET_MIN) else {
        return;
    };
    let range = BackingRange::new(bench.memory.backing(4), 3).unwrap();
    let read = bench.read_while_held(5, || {
        let provided = bench
            .memory
            .host
            .provide_pages(range.start(), &[content(8); 3]);
        assert_eq!(provided, Ok(3));
        bench.memory.host.make_missing(range).unwrap();
        let faults = bench.faults.count();
        bench.faults.state.discarded(4..7);
        while bench.faults.count() == faults || !bench.provider().is_held(5) {
            thread::yield_now();
        }
        assert_eq!(bench.provide(4, &[content(9); 3]), Ok(3));
    });
    assert_eq!(read, 9);
    assert!(requests.try_recv().is_err());
}

/// More pages are provided at once than fit, while a vCPU waits for the first of them.
#[test]
fn more_pages_are_provided_than_fit() {
    let Some((bench, requests)) = bench(SlotFlags::EXIT_ON_MISSING, BUDGET_MIN) else {
        return;
    };
    let read = bench.read_while_held(5, || {
        let all = vec![content(3); PAGES as usize];
        assert_eq!(bench.provide(0, &all), Ok(PAGES as usize));
    });
    assert_eq!(read, 3);
    assert!(
        bench.host().swapped_in <= 1,
        "the others stay where they are"
    );
    assert!(requests.try_recv().is_err());
}

/// A VMM may provide a page for which a vCPU sleeps, and the source's answer is late then.
#[test]
fn an_answer_after_the_vmms_page_is_late() {
    for budget in BUDGETS {
        let Some((bench, requests)) = bench(SlotFlags::empty(), budget) else {
            return;
        };
        thread::scope(|scope| {
            let reads = scope.spawn(|| bench.read(5));
            let asked = requests.recv().unwrap();
            assert_eq!(bench.provide(5, &[content(2)]), Ok(1));
            assert_eq!(asked.provide(&content(9)), Answer::Late);
            assert_eq!(asked.fail("late"), Answer::Late);
            assert_eq!(reads.join().unwrap(), 2);
        });
        assert_eq!(bench.faults.state.failure(), None);
    }
}

/// The end of a VM wakes waiting threads, and lets later touches continue.
#[test]
fn the_end_of_a_vm_waits_for_no_source() {
    for budget in BUDGETS {
        let Some((bench, requests)) = bench(SlotFlags::empty(), budget) else {
            return;
        };
        let asked = thread::scope(|scope| {
            let reads = scope.spawn(|| bench.read(5));
            let asked = requests.recv().unwrap();
            bench.faults.close();
            assert_eq!(reads.join().unwrap(), 0);
            assert_eq!(bench.read(6), 0);
            asked
        });
        drop(bench);
        assert_eq!(asked.provide(&content(9)), Answer::Late);
    }
}

/// If the source drops a request, the page is lost, and the run ends.
#[test]
fn a_dropped_request_ends_the_run() {
    for budget in BUDGETS {
        let Some((bench, requests)) = bench(SlotFlags::empty(), budget) else {
            return;
        };
        thread::scope(|scope| {
            scope.spawn(|| bench.read(5));
            drop(requests.recv().unwrap());
        });
        let failure = bench.faults.state.failure().unwrap();
        assert_eq!(failure.lost, Gpa::new(5 * PAGE_SIZE as u64));
        assert!(failure.cause.contains("keeps"), "{failure:?}");
        assert!(bench.kicks.is_stopping());
    }
}

/// A page that was asked for and is lost ends the run, although no thread has touched it: a thread
/// may wait for it without a further fault. The VMM cannot provide it any more.
#[test]
fn a_lost_page_ends_the_run_and_is_not_late() {
    for budget in BUDGETS {
        let Some((bench, requests)) = bench(SlotFlags::empty(), budget) else {
            return;
        };
        assert!(bench.faults.state.fetch(5).unwrap().is_some());
        let _ = requests.recv().unwrap().fail("no such disk");
        let failure = bench.faults.state.failure().unwrap();
        assert!(failure.cause.contains("no such disk"), "{failure:?}");
        let refused = bench.provide(5, &[content(2)]).unwrap_err();
        assert!(refused.to_string().contains("no such disk"), "{refused}");
    }
}

/// Another process removes a page from the memory file. The next touch ends the run.
#[test]
fn a_page_that_another_process_removes_ends_the_run() {
    let (sender, _requests) = channel();
    let source = Arc::new(Keeps(sender));
    let kind = MemoryKind::Shared;
    let Some(bench) = bench_in(kind, SlotFlags::empty(), PAGES, Some(source)) else {
        return;
    };
    bench.provide(4, &[content(4), content(5)]).unwrap();
    assert_eq!((bench.read(4), bench.read(5)), (4, 5));
    let file = bench.memory.backing.shared().unwrap().file();
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let page = PAGE_SIZE as u64;
    rustix::fs::fallocate(file, hole, 5 * page, page).unwrap();
    assert_eq!(bench.read(4), 4);
    assert_eq!(
        bench.read(5),
        0,
        "the thread continues when the run has ended"
    );
    let failure = bench.faults.state.failure().unwrap();
    assert_eq!(failure.lost, Gpa::new(5 * page));
    assert!(failure.cause.contains("removed"), "{}", failure.cause);
}

/// Linux takes a page away: a thread that touches it reads zeros, and the run ends.
#[test]
fn a_page_that_linux_takes_away_ends_the_run() {
    let Some(bench) = bench_from(SlotFlags::empty(), PAGES, None) else {
        return;
    };
    bench.write(5, 55);
    let page = BackingRange::new(bench.memory.backing(5), 1).unwrap();
    bench.memory.host.take_away(page).unwrap();
    let failure = || bench.faults.state.failure_or_loss();
    assert_eq!(failure(), None, "no thread has touched it");
    assert_eq!(bench.read(5), 0);
    let failure = failure().unwrap();
    assert!(failure.cause.contains("has taken a page"), "{failure:?}");
    assert!(bench.kicks.is_stopping());
}

/// A VM ends while its source keeps a request: its memory and its source go all the same.
#[test]
fn a_request_that_is_kept_keeps_no_memory() {
    for budget in BUDGETS {
        let Some((bench, requests)) = bench(SlotFlags::empty(), budget) else {
            return;
        };
        assert!(bench.faults.state.fetch(5).unwrap().is_some());
        let asked = requests.recv().unwrap();
        let memory = Arc::downgrade(&bench.memory);
        drop(bench);
        assert_eq!(memory.strong_count(), 0);
        assert_eq!(asked.provide(&content(1)), Answer::Late);
        // The source is gone with the memory that it provided.
        assert!(requests.recv().is_err());
    }
}

/// Drops or closes what it is given at its first request, and keeps the requests.
struct Ends {
    vm: std::sync::Mutex<Option<Arc<Faults>>>,
    at: SourcePage,
    kept: std::sync::Mutex<Vec<PageRequest>>,
    has_ended: AtomicBool,
}

impl PageSource for Ends {
    fn describe(&self) -> String {
        "ends".into()
    }

    fn fetch(&self, request: PageRequest) {
        if request.page() == self.at {
            let vm = self.vm.lock().unwrap().take().unwrap();
            vm.close();
            drop(vm);
            // The close of KVM's descriptor waits for KVM's workers in the same way.
            while !self.has_ended.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        }
        self.kept.lock().unwrap().push(request);
    }
}

/// A page source ends the VM during a request. Threads that wait for pages do not wait for the
/// requesting thread, which waits for them.
#[test]
fn a_source_may_end_the_vm_while_it_is_asked() {
    for budget in BUDGETS {
        let ends = Arc::new(Ends {
            vm: std::sync::Mutex::default(),
            at: SourcePage(6),
            kept: std::sync::Mutex::default(),
            has_ended: AtomicBool::new(false),
        });
        let source = Arc::clone(&ends) as Arc<dyn PageSource>;
        let Some(bench) = bench_from(SlotFlags::empty(), budget, Some(source)) else {
            return;
        };
        let Bench { faults, memory, .. } = bench;
        *ends.vm.lock().unwrap() = Some(Arc::new(faults));
        let read = |page| {
            let mut word = [0; 8];
            // SAFETY: 1. the page is in the guest's memory.
            unsafe { copy_out(memory.hva(page), &mut word) };
            word
        };
        thread::scope(|scope| {
            let waits = scope.spawn(|| read(5));
            while ends.kept.lock().unwrap().is_empty() {
                thread::yield_now();
            }
            let last = scope.spawn(|| read(6));
            assert_eq!([waits, last].map(|read| read.join().unwrap()), [[0; 8]; 2]);
            ends.has_ended.store(true, Ordering::SeqCst);
        });
    }
}
