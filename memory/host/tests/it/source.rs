//! Pages that a source provides: late, unordered, repeated, missing and failed answers, and regions
//! that are removed while their tickets exist.

use crate::common;

use common::source::{TestSource, page_of, page_with, word_of};
use common::{FakeMmu, Use, Vm, huge_host, virtual_host};
use lacuna_addr::{Access, BackingRange, Level, PAGE_SIZE, PageCount};
use lacuna_host::{
    Answer, Collapse, FaultyStore, Host, HostConfig, HostError, HugePages, Io, MmuNotifier,
    PageRequest, PageSource, Resolution, SourcePage, SwapStore, Ticket,
};
use lacuna_sync::{HostClock, VirtualClock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

fn store() -> Box<dyn SwapStore> {
    Box::new(FaultyStore::new(PageCount::new(4000)))
}

struct Fixture {
    host: Arc<Host>,
    clock: Arc<VirtualClock>,
    source: Arc<TestSource>,
    vm: Vm,
}

impl Fixture {
    fn new(budget: u64, pages: u64) -> Self {
        Self::on(virtual_host(budget, store()), pages)
    }

    fn on((host, clock): (Arc<Host>, Arc<VirtualClock>), pages: u64) -> Self {
        let source = TestSource::new();
        let vm = Vm::with_source(&host, &clock, pages, &source);
        Self {
            host,
            clock,
            source,
            vm,
        }
    }

    fn resolve(&mut self, page: u64) -> Resolution {
        let addr = self.vm.addr(page);
        let resolution = self
            .host
            .resolve(addr, Access::Read, Level::L2M, &mut self.vm.cache);
        self.vm.cache.unpin_all();
        resolution
    }

    fn is_missing(&mut self, page: u64) -> bool {
        let addr = self.vm.addr(page);
        self.host.is_missing(addr, &mut self.vm.cache)
    }

    fn missing(&mut self, page: u64) -> Ticket {
        match self.resolve(page) {
            Resolution::Missing(ticket) => ticket,
            other => panic!("page {page} is {other:?}"),
        }
    }

    /// A ticket whose page was requested from the source.
    fn started(&mut self, page: u64) -> Ticket {
        let ticket = self.missing(page);
        self.host.start(&ticket);
        ticket
    }

    fn read(&self, page: u64) -> u64 {
        let mut word = [0; 8];
        self.host.copy_out(self.vm.addr(page), &mut word).unwrap();
        u64::from_le_bytes(word)
    }
}

#[test]
fn a_missing_page_is_asked_for_when_its_ticket_is_started_and_once() {
    let mut fixture = Fixture::new(256, 64);
    let ticket = fixture.missing(5);
    assert!(!ticket.is_started() && fixture.source.asked() == 0);
    assert!(
        fixture.missing(5).is_same(&ticket),
        "a later fault shares it"
    );
    fixture.host.start(&ticket);
    fixture.host.start(&ticket);
    assert!(ticket.is_started() && fixture.source.asked() == 1);
    assert!(fixture.missing(5).is_same(&ticket));
    fixture.host.verify();
    assert_eq!(fixture.source.answer(fixture.vm.addr(5)), Answer::Taken);
    assert!(ticket.is_done());
    assert!(matches!(fixture.resolve(5), Resolution::Ready(_)));
    assert_eq!(fixture.read(5), word_of(fixture.vm.addr(5)));
    let stats = fixture.host.stats();
    assert_eq!((stats.faults_missing, stats.provided), (1, 1));
    fixture.host.verify();
}

#[test]
fn answers_come_out_of_order() {
    let mut fixture = Fixture::new(256, 64);
    let done = Arc::new(AtomicUsize::new(0));
    let tickets: Vec<Ticket> = (0..16).map(|page| fixture.started(page)).collect();
    for ticket in &tickets {
        let done = done.clone();
        ticket.on_done(move || _ = done.fetch_add(1, Ordering::Relaxed));
    }
    for (count, page) in [9, 2, 15, 0, 7].into_iter().enumerate() {
        assert_eq!(fixture.source.answer(fixture.vm.addr(page)), Answer::Taken);
        assert_eq!(done.load(Ordering::Relaxed), count + 1);
        assert!(tickets[page as usize].is_done());
        assert_eq!(fixture.read(page), word_of(fixture.vm.addr(page)));
    }
    assert!(fixture.missing(8).is_same(&tickets[8]), "still missing");
    fixture.host.verify();
}

#[test]
fn a_second_answer_changes_nothing() {
    let mut fixture = Fixture::new(256, 64);
    let ticket = fixture.started(3);
    let addr = fixture.vm.addr(3);
    let request = fixture.source.request(addr).unwrap();
    assert_eq!(request.provide(&page_of(addr).0), Answer::Taken);
    fixture.vm.touch(3, Use::Write(77)).unwrap();
    assert_eq!(request.provide(&page_with(666).0), Answer::Late);
    assert_eq!(request.fail("too late"), Answer::Late);
    fixture.source.forget(addr);
    drop(request);
    fixture.vm.touch(3, Use::Read).unwrap();
    assert!(ticket.is_done());
    assert_eq!(fixture.host.stats().provided, 1);
    fixture.host.verify();
}

#[test]
fn a_page_may_come_that_was_not_asked_for_yet() {
    let mut fixture = Fixture::new(256, 64);
    let first = fixture.started(1);
    let request = fixture.source.request(fixture.vm.addr(1)).unwrap();
    let idle = fixture.missing(2);
    assert_eq!(request.provide(&page_with(1).0), Answer::Taken);
    assert!(first.is_done() && !idle.is_done());
    assert!(matches!(fixture.resolve(1), Resolution::Ready(_)));
    fixture.host.verify();
}

#[test]
fn an_error_of_the_source_loses_the_page_and_says_why() {
    let mut fixture = Fixture::new(256, 64);
    let (failed, dropped) = (fixture.started(3), fixture.started(4));
    let addr = fixture.vm.addr(3);
    let request = fixture.source.request(addr).unwrap();
    assert_eq!(request.fail("the peer has gone"), Answer::Taken);
    assert_eq!(request.provide(&page_of(addr).0), Answer::Late);
    let text = format!("page {addr} is lost: test source does not provide it: the peer has gone");
    assert_eq!(fixture.host.wait(&failed).unwrap_err().to_string(), text);
    match fixture.resolve(3) {
        Resolution::Lost(lost) => assert_eq!(lost.to_string(), text),
        other => panic!("{other:?}"),
    }
    // If a source ends without an answer, the page is lost too, and no thread waits for ever.
    fixture.source.forget(fixture.vm.addr(4));
    let error = fixture.host.wait(&dropped).unwrap_err().to_string();
    assert!(error.ends_with("it dropped the request"), "{error}");
    fixture.host.verify();
    fixture.host.remove_region(fixture.vm.range).unwrap();
    assert_eq!(fixture.host.stats().resident, 0);
}

#[test]
fn a_region_is_removed_while_its_tickets_are_out() {
    let mut fixture = Fixture::new(256, 64);
    let idle = fixture.missing(1);
    let tickets: Vec<Ticket> = (2..6).map(|page| fixture.started(page)).collect();
    let (addr, answered) = (fixture.vm.addr(2), fixture.vm.addr(5));
    let request = fixture.source.request(addr).unwrap();
    assert_eq!(fixture.source.answer(answered), Answer::Taken);
    fixture.host.remove_region(fixture.vm.range).unwrap();
    assert!(idle.is_done() && tickets.iter().all(Ticket::is_done));
    for ticket in [&idle, &tickets[0]] {
        let error = fixture.host.wait(ticket).unwrap_err().to_string();
        assert!(error.ends_with("its region was removed"), "{error}");
    }
    assert_eq!(request.provide(&page_of(addr).0), Answer::Late);
    assert!(matches!(fixture.resolve(3), Resolution::Lost(_)));
    assert_eq!(fixture.host.stats().resident, 0);
    // The frames go to another region; a late answer does not reach it.
    let mut other = Vm::new(&fixture.host, &fixture.clock, 200);
    (0..200).for_each(|page| other.touch(page, Use::Write(9)).unwrap());
    while fixture.source.answer_one(0) {}
    other.check_all();
    fixture.host.verify();
}

#[test]
fn an_answer_after_the_host_is_late() {
    let mut fixture = Fixture::new(256, 64);
    let ticket = fixture.started(2);
    let request = fixture.source.request(fixture.vm.addr(2)).unwrap();
    let Fixture { host, vm, .. } = fixture;
    drop((ticket, vm));
    drop(host);
    assert_eq!(request.provide(&page_with(1).0), Answer::Late);
}

#[test]
fn a_wait_for_a_source_ends_when_it_is_stopped() {
    for io in [Io::Threads { readers: 1 }, virtual_io()] {
        let host = real_host(256, io);
        let source = TestSource::new();
        let range = region(&host, &source, 8);
        let mut cache = host.per_cpu_pages().unwrap();
        let resolution = host.resolve(range.start(), Access::Read, Level::L4K, &mut cache);
        let Resolution::Missing(ticket) = resolution else {
            panic!("{resolution:?}");
        };
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| host.wait_until(&ticket, &stop));
            source.wait();
            stop.store(true, Ordering::Release);
            waiter.join().unwrap().unwrap();
        });
        assert!(!ticket.is_done());
        host.verify();
        host.remove_region(range).unwrap();
        assert!(ticket.is_done());
    }
}

/// Provided pages are swapped out and read back from swap; dropped pages of zeros need no copy.
/// Neither is requested again.
#[test]
fn a_page_that_was_provided_is_not_asked_for_again() {
    let mut fixture = Fixture::new(160, 600);
    for round in 0..3 {
        fixture.vm.check_all();
        assert_eq!(fixture.source.asked(), 600, "round {round}");
        fixture.host.verify();
    }
    let stats = fixture.host.stats();
    assert!(stats.swapped_out > 300 && stats.swapped_in > 300 && stats.zero_dropped > 100);
    assert_eq!(stats.provided, 600);
}

#[test]
fn the_copies_of_a_loader_wait_for_the_source() {
    let host = real_host(256, Io::Threads { readers: 1 });
    let source = TestSource::new();
    let range = region(&host, &source, 8);
    let addr = range.start().checked_add_pages(1).unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut word = [0; 8];
            host.copy_out(addr, &mut word).map(|()| word)
        });
        source.wait();
        assert_eq!(source.answer(addr), Answer::Taken);
        let word = reader.join().unwrap().unwrap();
        assert_eq!(u64::from_le_bytes(word), word_of(addr));
    });
    assert_eq!(host.peek(range.start(), &mut [0; 8]), None, "not asked for");
    assert_eq!(source.asked(), 1);
}

/// A block of a region with a source is not filled with zeros at once, and a collapse does not take
/// a never provided page for zeros.
#[test]
fn no_compound_page_is_made_of_missing_pages() {
    let host = huge_host(4 * 512, store(), HugePages::Always);
    let mut fixture = Fixture::on(host, 512);
    (0..500).for_each(|page| fixture.vm.touch(page, Use::Read).unwrap());
    assert_eq!(fixture.host.stats().huge_faults, 0);
    while fixture.host.collapse_step() != Collapse::Idle {}
    assert_eq!(fixture.host.stats().collapses, 0, "12 pages are missing");
    (0..512).for_each(|page| fixture.vm.touch(page, Use::Read).unwrap());
    while fixture.host.collapse_step() != Collapse::Idle {}
    assert_eq!(fixture.host.stats().collapses, 1);
    fixture.vm.check_all();
    assert_eq!(fixture.source.asked(), 512);
    fixture.host.verify();
}

/// Pages that come in any order lie in blocks, and are collapsed although two blocks are free.
#[test]
fn pages_that_come_in_any_order_become_blocks() {
    let pages = 8 * 512;
    let host = huge_host(10 * 512, store(), HugePages::Always);
    let mut fixture = Fixture::on(host, pages);
    let in_any_order = || (0..pages).map(|turn| turn * 1_723 % pages);
    for page in in_any_order().filter(|page| page % 3 == 0) {
        let addr = fixture.vm.addr(page);
        let content = page_with(word_of(addr));
        let answer = fixture.host.provide(addr, &content.0).unwrap();
        assert_eq!(answer, Answer::Taken);
    }
    in_any_order().for_each(|page| fixture.vm.touch(page, Use::Read).unwrap());
    assert_eq!(fixture.host.stats().huge_faults, 0);
    while fixture.host.collapse_step() != Collapse::Idle {}
    let stats = fixture.host.stats();
    assert_eq!((stats.collapses, stats.huge_pages), (8, 8), "{stats:?}");
    fixture.vm.check_all();
    fixture.host.verify();
}

/// A VMM provides pages by address: before a fault, instead of the source's answer, and too late.
#[test]
fn a_vmm_provides_pages_by_address() {
    let mut fixture = Fixture::new(256, 64);
    let addr = fixture.vm.addr(5);
    let provide = |fixture: &Fixture, page: u64, word: u64| {
        let addr = fixture.vm.addr(page);
        fixture.host.provide(addr, &page_with(word).0).unwrap()
    };
    assert!(fixture.is_missing(5));
    assert_eq!(provide(&fixture, 5, 500), Answer::Taken);
    assert!(!fixture.is_missing(5));
    assert_eq!(provide(&fixture, 5, 501), Answer::Late);
    assert!(matches!(fixture.resolve(5), Resolution::Ready(_)));
    assert_eq!((fixture.read(5), fixture.source.asked()), (500, 0));
    // First a fault's ticket that no thread has started, then a requested page's.
    for (page, ticket) in [(6, fixture.missing(6)), (7, fixture.started(7))] {
        assert!(fixture.is_missing(page));
        assert_eq!(provide(&fixture, page, page), Answer::Taken);
        assert!(ticket.is_done() && !fixture.is_missing(page));
        assert_eq!(fixture.read(page), page);
    }
    assert_eq!(fixture.source.answer(fixture.vm.addr(7)), Answer::Late);
    assert_eq!(fixture.read(7), 7);
    assert!(fixture.host.fetch(addr).unwrap().is_none());
    let asked = fixture.host.fetch(fixture.vm.addr(8)).unwrap().unwrap();
    assert!(asked.is_started() && fixture.source.asked() == 2);
    assert_eq!(fixture.source.answer(fixture.vm.addr(8)), Answer::Taken);
    fixture.host.verify();
    assert_eq!(fixture.host.stats().provided, 4);
    fixture.host.remove_region(fixture.vm.range).unwrap();
    let error = fixture.host.provide(addr, &page_with(1).0).unwrap_err();
    assert!(matches!(error, HostError::Lost(_)), "{error}");
    assert_eq!(fixture.host.stats().resident, 0);
    fixture.host.verify();
}

/// A region without a source has no missing page, and a page from the VMM changes nothing.
#[test]
fn pages_of_zeros_are_not_provided() {
    let (host, clock) = virtual_host(256, store());
    let mut vm = Vm::new(&host, &clock, 64);
    assert!(!host.has_source(vm.addr(1)));
    assert!(!host.is_missing(vm.addr(1), &mut vm.cache));
    let answer = host.provide(vm.addr(1), &page_with(1).0);
    assert_eq!(answer, Ok(Answer::Late));
    vm.touch(1, Use::Read).unwrap();
    host.verify();
}

/// Far more pages than the budget: providing reclaims, and provided pages are read back from swap.
#[test]
fn providing_reclaims() {
    let host = real_host(Host::minimum_budget(2).get(), Io::Threads { readers: 1 });
    let source = TestSource::new();
    let range = region(&host, &source, 3000);
    let addr = |page| range.start().checked_add_pages(page).unwrap();
    for page in 0..3000 {
        let content = page_of(addr(page));
        assert_eq!(host.provide(addr(page), &content.0), Ok(Answer::Taken));
    }
    for page in (0..3000).rev() {
        let mut bytes = [0; PAGE_SIZE];
        host.copy_out(addr(page), &mut bytes).unwrap();
        assert_eq!(bytes, page_of(addr(page)).0);
    }
    assert!(host.stats().swapped_out > 2000 && source.asked() == 0);
    host.verify();
}

/// Threads provide and fetch the same pages while others read them, and the region is removed in
/// the middle. Each page has one content, and each call returns.
#[test]
fn many_threads_provide() {
    let host = real_host(
        Host::minimum_budget(8).get() + 32,
        Io::Threads { readers: 2 },
    );
    for round in 0..6 {
        let source = TestSource::new();
        let range = region(&host, &source, 1500);
        let addr = |page| range.start().checked_add_pages(page).unwrap();
        let taken = AtomicUsize::new(0);
        let gone = |error: HostError| assert!(matches!(error, HostError::Lost(_)), "{error}");
        thread::scope(|scope| {
            for seed in 0..3 {
                let (host, taken) = (&host, &taken);
                scope.spawn(move || {
                    for i in 0..1500 {
                        let addr = addr((i + seed * 5) % 1500);
                        match host.provide(addr, &page_of(addr).0) {
                            Ok(Answer::Taken) => _ = taken.fetch_add(1, Ordering::Relaxed),
                            Ok(Answer::Late) => {}
                            Err(error) => return gone(error),
                        }
                    }
                });
            }
            scope.spawn(|| {
                for page in (0..1500).rev() {
                    match host.fetch(addr(page)) {
                        Ok(_) => _ = source.answer_one(page),
                        Err(error) => return gone(error),
                    }
                }
                while source.answer_one(0) {}
            });
            let reader = scope.spawn(|| read_all(&host, range, 3));
            if round % 2 == 1 {
                while taken.load(Ordering::Relaxed) < 200 && !reader.is_finished() {
                    thread::yield_now();
                }
                host.remove_region(range).unwrap();
            }
            let lost = reader.join().unwrap();
            assert!(round % 2 == 1 || !lost);
        });
        if round % 2 == 0 {
            // Reads of evicted pages that `fetch` has begun continue by themselves.
            while host.stats().in_flight > 0 {
                thread::yield_now();
            }
            host.verify();
            host.remove_region(range).unwrap();
        }
        assert_eq!(host.stats().resident, 0);
        host.verify();
    }
}

fn virtual_io() -> Io {
    Io::Virtual {
        seed: 1,
        latency_ns: 1..2,
    }
}

fn real_host(budget: u64, io: Io) -> Arc<Host> {
    Host::new(HostConfig {
        budget: PageCount::new(budget),
        huge: HugePages::Never,
        swap: store(),
        io,
        clock: Arc::new(HostClock::default()),
    })
    .unwrap()
}

fn region(host: &Arc<Host>, source: &Arc<TestSource>, pages: u64) -> BackingRange {
    let mmu = FakeMmu::of(host);
    let mmu: Arc<dyn MmuNotifier> = mmu;
    let pages = PageCount::new(pages);
    let range = host.add_region_from(source.clone(), SourcePage(0), pages, mmu);
    let range = range.unwrap();
    source.provides(range);
    range
}

/// A source that hands each request to one of its threads, twice.
struct Threads(std::sync::mpsc::Sender<PageRequest>);

impl PageSource for Threads {
    fn describe(&self) -> String {
        "threads".into()
    }

    fn fetch(&self, request: PageRequest) {
        self.0.send(request.clone()).unwrap();
        self.0.send(request).unwrap();
    }
}

/// Four threads fault on the same pages under memory pressure, and three threads of the source
/// answer each page twice. The region is removed in the middle or at the end. The source is dropped
/// with its region, and that ends its threads.
#[test]
fn many_threads_fault_and_answer() {
    let host = real_host(
        Host::minimum_budget(4).get() + 32,
        Io::Threads { readers: 2 },
    );
    for round in 0..6 {
        let (sender, requests) = std::sync::mpsc::channel();
        let requests = std::sync::Mutex::new(requests);
        let taken = AtomicUsize::new(0);
        let mmu = FakeMmu::of(&host);
        let source = Arc::new(Threads(sender));
        let pages = PageCount::new(1500);
        let range = host
            .add_region_from(source, SourcePage(7), pages, mmu)
            .unwrap();
        let in_the_middle = round % 2 == 1;
        // No panic may come before the removal of the region: the source's threads would stay.
        let readers = thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while let Ok(request) = { requests.lock().unwrap().recv() } {
                        let request: PageRequest = request;
                        let page = request.page().0 - 7;
                        let addr = range.start().checked_add_pages(page).unwrap();
                        if request.provide(&page_of(addr).0) == Answer::Taken {
                            taken.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            let read_all = |seed| {
                let host = host.clone();
                scope.spawn(move || read_all(&host, range, seed))
            };
            let readers: Vec<_> = (0..4).map(read_all).collect();
            if in_the_middle {
                while host.stats().provided == 0 && !readers.iter().all(|r| r.is_finished()) {
                    thread::yield_now();
                }
                host.remove_region(range).unwrap();
            }
            let readers: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
            if !in_the_middle {
                host.remove_region(range).unwrap();
            }
            readers
        });
        let lost = readers.into_iter().map(Result::unwrap);
        let lost = lost.filter(|lost| *lost).count();
        if !in_the_middle {
            assert_eq!((lost, taken.into_inner()), (0, 1500));
        }
        assert_eq!(host.stats().resident, 0);
        host.verify();
    }
}

/// Reads every page, from a start of its own; true if the region was removed meanwhile.
fn read_all(host: &Host, range: BackingRange, seed: u64) -> bool {
    let mut bytes = [0; PAGE_SIZE];
    for i in 0..range.pages() {
        let page = (i + seed * 7) % range.pages();
        let addr = range.start().checked_add_pages(page).unwrap();
        match host.copy_out(addr, &mut bytes) {
            Ok(()) => assert_eq!(bytes, page_of(addr).0, "page {page}"),
            Err(HostError::Lost(_)) => return true,
            Err(error) => panic!("{error}"),
        }
    }
    false
}
