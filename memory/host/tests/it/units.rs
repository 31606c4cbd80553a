//! Memory in huge pages of hugetlbfs with a page source: 512 pages are filled together.

use crate::common;

use common::linux::{host, origin, read};
use common::source::{TestSource, page_of, page_with, word_of};
use common::{FakeMmu, Use, Vm};
use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount};
use lacuna_host::{
    Answer, Host, HostError, LinuxBacking, LinuxError, Resolution, SharedMemory, Ticket, Toucher,
};
use lacuna_skip::HugePages;
use lacuna_source::{External, Policy};
use lacuna_sys::Waiters;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Pages of a unit.
const UNIT: u64 = 512;

fn add(
    host: &Arc<Host>,
    memory: &SharedMemory,
    pages: u64,
    source: Option<&Arc<TestSource>>,
) -> Result<Vm, HostError> {
    let backing = LinuxBacking::Shared(memory.clone());
    common::linux::add(host, backing, pages, source)
}

/// A VM of `units` units, and the reserve of its huge pages. Ends the test where there is no
/// reserve, or no userfaultfd.
fn vm(units: u64) -> (HugePages, Arc<Host>, Arc<TestSource>, Vm) {
    let reserved = HugePages::reserve(units);
    let (host, source) = (host(units * UNIT), TestSource::new());
    let memory = SharedMemory::huge(PageCount::new(units * UNIT), Level::L2M).unwrap();
    let backing = LinuxBacking::Shared(memory);
    let vm = common::linux::vm(&host, backing, units * UNIT, Some(&source));
    (reserved, host, source, vm)
}

fn part(vm: &Vm, page: u64, pages: u64) -> BackingRange {
    BackingRange::new(vm.addr(page), pages).unwrap()
}

fn missing(vm: &mut Vm, page: u64) -> Ticket {
    let addr = vm.addr(page);
    let found = vm
        .host
        .resolve(addr, Access::Read, Level::L4K, &mut vm.cache);
    vm.cache.unpin_all();
    let Resolution::Missing(ticket) = found else {
        panic!("page {page} is {found:?}");
    };
    ticket
}

/// The source's content for `pages` pages from `addr` on.
fn contents(addr: BackingAddr, pages: u64) -> Vec<[u8; PAGE_SIZE]> {
    let pages = (0..pages).map(|page| page_of(addr.checked_add_pages(page).unwrap()).0);
    pages.collect()
}

/// A fault on any page requests all pages of its unit once. They are all in place when the last
/// page has arrived, in any order, and other units are still missing.
#[lacuna_skip::test]
fn the_pages_of_a_unit_come_together() {
    let (_reserved, host, source, mut vm) = vm(3);
    let ticket = missing(&mut vm, UNIT + 188);
    host.start(&ticket);
    assert_eq!(source.asked(), 512);
    for page in [UNIT, UNIT + 1, UNIT + 188, 2 * UNIT - 1] {
        assert!(missing(&mut vm, page).is_same(&ticket), "page {page}");
        assert!(host.fetch(vm.addr(page)).unwrap().unwrap().is_same(&ticket));
    }
    let mut pick = 7;
    for left in (0..512).rev() {
        assert!(!ticket.is_done());
        assert_eq!(host.linux_pages(), PageCount::new(0));
        assert!(host.is_missing(vm.addr(UNIT + left), &mut vm.cache));
        pick = (pick * 31 + 11) % 9973;
        assert!(source.answer_one(pick));
    }
    assert!(ticket.is_done());
    assert_eq!(host.linux_pages(), PageCount::new(UNIT));
    assert_eq!(host.stats().provided, UNIT);
    host.verify();
    for page in UNIT..2 * UNIT {
        assert!(!host.is_missing(vm.addr(page), &mut vm.cache));
        vm.touch(page, Use::Read).unwrap();
    }
    assert_eq!(source.asked(), 512);
    assert!(host.is_missing(vm.addr(UNIT - 1), &mut vm.cache));
    assert!(host.is_missing(vm.addr(2 * UNIT), &mut vm.cache));
    vm.touch(UNIT + 3, Use::Write(77)).unwrap();
    vm.check_all();
    assert_eq!(source.asked(), 3 * 512);
    host.verify();
    host.remove_region(vm.range).unwrap();
    host.verify();
}

/// A unit is in place when its last part has arrived, from the VMM or from the source. The source
/// gets no request for a part that the VMM has provided.
#[lacuna_skip::test]
fn a_unit_is_provided_in_parts() {
    let (_reserved, host, source, mut vm) = vm(4);
    let provide = |from: BackingAddr, pages| host.provide_pages(from, &contents(from, pages));
    assert_eq!(provide(vm.addr(100), 300), Ok(300));
    assert_eq!(provide(vm.addr(99), 2), Ok(1));
    assert_eq!(host.linux_pages(), PageCount::new(0));
    assert_eq!(provide(vm.addr(400), 2 * UNIT), Ok(1024));
    assert_eq!(host.linux_pages(), PageCount::new(UNIT));
    host.verify();
    let ticket = missing(&mut vm, 7);
    host.start(&ticket);
    assert_eq!(source.asked(), 99, "the others are there");
    for page in 0..99 {
        assert!(!ticket.is_done());
        assert_eq!(source.answer(vm.addr(page)), Answer::Taken);
    }
    assert!(ticket.is_done());
    assert_eq!(host.stats().provided, 2 * UNIT);
    assert_eq!(
        host.provide(vm.addr(2 * UNIT + 5), &[1; PAGE_SIZE]),
        Ok(Answer::Late)
    );
    let last = vm.addr(3 * UNIT - 1);
    assert_eq!(host.provide(last, &page_of(last).0), Ok(Answer::Taken));
    vm.check_all();
    host.verify();
    // A region ends with a part of a unit in this process.
    host.discard(vm.range).unwrap();
    host.remove_region(vm.range).unwrap();
    host.verify();
}

/// The VMM provides whole units. Late answers change nothing.
#[lacuna_skip::test]
fn a_vmm_provides_whole_units() {
    let (_reserved, host, source, mut vm) = vm(4);
    assert_eq!(host.linux_pages(), PageCount::new(0));
    assert_eq!(host.provided_with(vm.addr(700)), part(&vm, UNIT, UNIT));

    let two = contents(vm.addr(0), 2 * UNIT);
    assert_eq!(host.provide_pages(vm.addr(0), &two), Ok(1024));
    let others = vec![[9; PAGE_SIZE]; 1024];
    assert_eq!(host.provide_pages(vm.addr(UNIT), &others[..512]), Ok(0));
    assert_eq!(host.linux_pages(), PageCount::new(2 * UNIT));

    // The third unit is provided while the source answers, the fourth by a wait without a source.
    let ticket = missing(&mut vm, 2 * UNIT + 9);
    host.start(&ticket);
    let request = source.request(vm.addr(2 * UNIT + 100)).unwrap();
    for page in 0..300 {
        assert_eq!(source.answer(vm.addr(2 * UNIT + page)), Answer::Taken);
    }
    assert_eq!(request.provide(&[7; PAGE_SIZE]), Answer::Late, "twice");
    let waiting = missing(&mut vm, 3 * UNIT + 9);
    let third = contents(vm.addr(2 * UNIT), 2 * UNIT);
    assert_eq!(host.provide_pages(vm.addr(2 * UNIT), &third), Ok(212 + 512));
    assert!(ticket.is_done() && waiting.is_done());
    assert_eq!(source.answer(vm.addr(2 * UNIT + 400)), Answer::Late);
    assert_eq!(source.asked(), 512);
    host.verify();
    vm.check_all();
    assert_eq!(host.stats().provided, 4 * UNIT);
    host.verify();
}

/// One request of 512 fails, or is dropped: exactly its unit is lost, as a whole.
#[lacuna_skip::test]
fn a_unit_is_lost_as_a_whole() {
    for fails in [true, false] {
        let (_reserved, host, source, mut vm) = vm(2);
        let ticket = missing(&mut vm, 40);
        host.start(&ticket);
        for page in 100..400 {
            assert_eq!(source.answer(vm.addr(page)), Answer::Taken);
        }
        let request = source.request(vm.addr(7)).unwrap();
        match fails {
            true => assert_eq!(request.fail("it has burnt"), Answer::Taken),
            false => source.forget(vm.addr(7)),
        }
        drop(request);
        assert!(ticket.is_done());
        let reason = if fails { "burnt" } else { "dropped" };
        for page in [0, 7, 40, 200, 511] {
            let error = read(&host, vm.addr(page)).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
            let name = vm.addr(7).to_string();
            assert!(error.contains(&name), "{error} names the page");
            let found = host.resolve(vm.addr(page), Access::Read, Level::L4K, &mut vm.cache);
            assert!(matches!(found, Resolution::Lost(_)), "{found:?}");
        }
        assert_eq!(source.answer(vm.addr(9)), Answer::Late);
        let content = contents(vm.addr(0), UNIT);
        let refused = host.provide_pages(vm.addr(0), &content).unwrap_err();
        assert!(matches!(refused, HostError::Lost(_)), "{refused}");
        (UNIT..2 * UNIT).for_each(|page| vm.touch(page, Use::Read).unwrap());
        host.verify();
        host.discard(vm.range).unwrap();
        assert!(read(&host, vm.addr(3)).is_err(), "it stays lost");
        assert_eq!(read(&host, vm.addr(UNIT + 1)), Ok(0));
        host.verify();
        host.remove_region(vm.range).unwrap();
        host.verify();
    }
}

/// Units are discarded in place, in flight and never provided: they are zeros afterwards. If
/// another process has taken the huge page meanwhile, the error says what to do.
#[lacuna_skip::test]
fn units_are_discarded() {
    let (reserved, host, source, mut vm) = vm(3);
    let content = contents(vm.addr(0), UNIT);
    assert_eq!(host.provide_pages(vm.addr(0), &content), Ok(512));
    let ticket = missing(&mut vm, UNIT + 5);
    host.start(&ticket);
    assert_eq!(source.answer(vm.addr(UNIT + 6)), Answer::Taken);
    for (page, pages) in [(0, 1), (5, 512), (0, 700)] {
        let refused = host.discard(part(&vm, page, pages)).unwrap_err();
        assert!(refused.to_string().contains("huge"), "{refused}");
    }
    assert_eq!(read(&host, vm.addr(1)), Ok(word_of(vm.addr(1))));
    host.discard(vm.range).unwrap();
    assert!(ticket.is_done());
    assert_eq!(source.answer(vm.addr(UNIT + 7)), Answer::Late);
    assert_eq!(host.linux_pages(), PageCount::new(0));
    host.verify();
    assert_eq!(host.provide_pages(vm.addr(0), &content), Ok(0));

    // The kernel keeps a huge page for the third unit, which never had one; the others are free.
    reserved.change(2).unwrap();
    for page in [0, 2 * UNIT] {
        let frame = vm.fault(page + 3, Access::Write).unwrap();
        let mut bytes = [1; PAGE_SIZE];
        host.frame(frame.pfn).read(0, &mut bytes);
        assert_eq!(bytes, [0; PAGE_SIZE]);
    }
    let lost = vm.fault(UNIT + 3, Access::Write).unwrap_err();
    assert!(lost.to_string().contains("nr_hugepages"), "{lost}");
    assert_eq!(host.linux_pages(), PageCount::new(2 * UNIT));
    reserved.change(3).unwrap();
    vm.fault(UNIT + 3, Access::Write).unwrap();
    vm.source = None;
    for page in 0..3 * UNIT {
        vm.touch(page, Use::Read).unwrap();
    }
    (0..3 * UNIT)
        .step_by(5)
        .for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    vm.check_all();
    assert_eq!(host.losses(), 0);
    host.verify();
    host.remove_region(vm.range).unwrap();
    host.verify();
}

/// A region that needs more huge pages than are free is refused, with and without a source.
#[lacuna_skip::test]
fn a_reserve_that_is_too_small() {
    let reserved = HugePages::reserve(2);
    let host = host(4 * UNIT);
    let memory = SharedMemory::huge(PageCount::new(4 * UNIT), Level::L2M).unwrap();
    let source = TestSource::new();
    // Other processes may have reserved some.
    reserved.change(0).unwrap();
    for source in [Some(&source), None] {
        let refused = match add(&host, &memory, 4 * UNIT, source) {
            Err(refused) => refused.to_string(),
            Ok(_) => return lacuna_skip::skip("this machine has free huge pages"),
        };
        assert!(refused.contains("no 4 huge pages of 2 MiB"), "{refused}");
        assert!(refused.contains("nr_hugepages"), "{refused}");
    }
    host.verify();
    reserved.change(4).unwrap();
    let mut vm = match add(&host, &memory, 4 * UNIT, Some(&source)) {
        Err(refused @ HostError::Linux(LinuxError::Userfaultfd(_))) => {
            lacuna_skip::skip_test(refused)
        }
        added => added.unwrap(),
    };
    vm.check_all();
    host.verify();
}

/// The file becomes shorter. A unit is lost together with its untouched pages, and so is a unit
/// that is filled later.
#[lacuna_skip::test]
fn a_file_that_becomes_shorter() {
    let _reserved = HugePages::reserve(3);
    for with_source in [true, false] {
        let (host, source) = (host(3 * UNIT), TestSource::new());
        let memory = SharedMemory::huge(PageCount::new(3 * UNIT), Level::L2M).unwrap();
        let source = Some(&source).filter(|_| with_source);
        let mut vm = match add(&host, &memory, 3 * UNIT, source) {
            Err(refused @ HostError::Linux(LinuxError::Userfaultfd(_))) => {
                lacuna_skip::skip_test(refused)
            }
            added => added.unwrap(),
        };
        vm.touch(0, Use::Read).unwrap();
        vm.touch(UNIT + 9, Use::Read).unwrap();
        rustix::fs::ftruncate(memory.file(), UNIT * PAGE_SIZE as u64).unwrap();
        for page in [UNIT + 9, UNIT + 10, UNIT, 2 * UNIT - 1] {
            let error = read(&host, vm.addr(page)).unwrap_err();
            assert!(matches!(error, HostError::Lost(_)), "{page}: {error}");
        }
        let lost = vm.fault(2 * UNIT + 1, Access::Read);
        let lost = lost.and_then(|_| read(&host, vm.addr(2 * UNIT + 1)));
        assert!(matches!(lost, Err(HostError::Lost(_))), "{lost:?}");
        (0..UNIT).for_each(|page| vm.touch(page, Use::Read).unwrap());
        host.verify();
        host.remove_region(vm.range).unwrap();
        host.verify();
    }
}

/// The region is removed while units are in flight.
#[lacuna_skip::test]
fn a_region_is_removed_under_its_source() {
    let (_reserved, host, source, mut vm) = vm(2);
    let ticket = missing(&mut vm, 3);
    host.start(&ticket);
    assert_eq!(source.answer(vm.addr(0)), Answer::Taken);
    let never_asked = missing(&mut vm, UNIT + 3);
    host.remove_region(vm.range).unwrap();
    assert!(ticket.is_done() && never_asked.is_done());
    assert_eq!(source.answer(vm.addr(1)), Answer::Late);
    let content = vec![[1; PAGE_SIZE]; 512];
    assert!(host.provide_pages(vm.addr(0), &content).is_err());
    host.verify();
}

/// Threads fault, answer, provide whole units and discard them. Each unit has one content.
#[lacuna_skip::test]
fn many_threads_fill_units() {
    const UNITS: u64 = 4;
    let reserved = HugePages::reserve(UNITS);
    for round in 0..12 {
        let (host, source) = (host(UNITS * UNIT), TestSource::new());
        let memory = SharedMemory::huge(PageCount::new(UNITS * UNIT), Level::L2M).unwrap();
        let vm = match add(&host, &memory, UNITS * UNIT, Some(&source)) {
            Err(refused @ HostError::Linux(LinuxError::Userfaultfd(_))) => {
                lacuna_skip::skip_test(refused)
            }
            added => added.unwrap(),
        };
        let range = vm.range;
        let at = |page: u64| range.start().checked_add_pages(page).unwrap();
        let taken = AtomicUsize::new(0);
        let discards = round % 2 == 1;
        thread::scope(|scope| {
            let readers: Vec<_> = (0..3)
                .map(|seed| {
                    let host = &host;
                    scope.spawn(move || {
                        for turn in 0..UNITS * UNIT {
                            let page = (turn * 389 + seed * 701) % (UNITS * UNIT);
                            let mut bytes = [0; PAGE_SIZE];
                            host.copy_out(at(page), &mut bytes).unwrap();
                            let is_zero = discards && bytes == [0; PAGE_SIZE];
                            assert!(is_zero || bytes == page_of(at(page)).0, "page {page}");
                        }
                    })
                })
                .collect();
            for first in [0, 1] {
                let (host, taken) = (&host, &taken);
                scope.spawn(move || {
                    for unit in (first..UNITS).step_by(2) {
                        let content = contents(at(unit * UNIT), UNIT);
                        let filled = host.provide_pages(at(unit * UNIT), &content).unwrap();
                        taken.fetch_add(filled, Ordering::Relaxed);
                    }
                });
            }
            let _ = host.fetch(at(UNIT)).unwrap();
            for unit in (0..UNITS).rev().filter(|_| discards) {
                host.discard(BackingRange::new(at(unit * UNIT), UNIT).unwrap())
                    .unwrap();
            }
            let mut pick = round;
            while readers.iter().any(|reader| !reader.is_finished()) {
                pick += 13;
                if !source.answer_one(pick) {
                    thread::yield_now();
                }
            }
        });
        while source.answer_one(0) {}
        assert!(taken.into_inner() as u64 <= UNITS * UNIT);
        if !discards {
            assert_eq!(host.linux_pages(), PageCount::new(UNITS * UNIT));
        }
        host.verify();
        host.remove_region(range).unwrap();
        host.verify();
    }
    drop(reserved);
}

/// A handler outside reads the userfaultfd, and fills units. So does the VMM at the same time.
#[lacuna_skip::test]
fn a_handler_outside_fills_units() {
    let _reserved = HugePages::reserve(3);
    let external = match External::threads(&[], Policy::default()) {
        Ok(external) => Arc::new(external),
        Err(errno) => lacuna_skip::skip_test(errno),
    };
    if let Err(errno) = Toucher::check() {
        lacuna_skip::skip_test(errno);
    }
    let host = host(3 * UNIT);
    let memory = SharedMemory::huge(PageCount::new(3 * UNIT), Level::L2M).unwrap();
    let (backing, mmu) = (LinuxBacking::Shared(memory), FakeMmu::of(&host));
    let pages = PageCount::new(3 * UNIT);
    let range = host.add_linux_region_in(backing, origin(&external), pages, mmu);
    let range = range.unwrap();
    let at = |page: u64| range.start().checked_add_pages(page).unwrap();
    let start = host.addresses(range).unwrap().start();
    let uffd = external.userfaultfds().next().unwrap();
    let next_fault = || {
        let mut faults = Vec::new();
        while faults.is_empty() {
            uffd.faults(&mut faults).unwrap();
            thread::yield_now();
        }
        (faults[0].page.get() - start.get()) >> 12
    };
    thread::scope(|scope| {
        let reader = |page: u64| {
            let (host, addr) = (&host, at(page));
            scope.spawn(move || assert_eq!(read(host, addr), Ok(word_of(addr))))
        };
        let readers = [UNIT + 3, UNIT + 500, UNIT].map(reader);
        assert_eq!(next_fault(), UNIT, "the kernel names the huge page");
        let to = start.checked_add_pages(UNIT).unwrap();
        let content = contents(at(UNIT), UNIT);
        assert_eq!(uffd.place(&content, to, Waiters::Wake), Ok(()));
        readers
            .into_iter()
            .for_each(|reader| reader.join().unwrap());
        assert_eq!(host.linux_pages(), PageCount::new(UNIT));

        let waiting = reader(2 * UNIT + 77);
        assert_eq!(next_fault(), 2 * UNIT);
        let content = contents(at(2 * UNIT), UNIT);
        assert_eq!(host.provide_pages(at(2 * UNIT), &content), Ok(512));
        waiting.join().unwrap();
    });
    assert_eq!(host.linux_pages(), PageCount::new(2 * UNIT));
    host.discard(range).unwrap();
    let mut cache = host.per_cpu_pages().unwrap();
    for page in [5, UNIT + 5] {
        let found = host.resolve(at(page), Access::Write, Level::L4K, &mut cache);
        let Resolution::Ready(frame) = found else {
            panic!("{found:?}");
        };
        let mut bytes = [1; PAGE_SIZE];
        host.frame(frame.pfn).read(0, &mut bytes);
        assert_eq!(bytes, [0; PAGE_SIZE]);
    }
    host.verify();
    host.remove_region(range).unwrap();
    host.verify();
}

/// A page with other content than the source's is the VMM's own.
#[lacuna_skip::test]
fn the_first_content_counts() {
    let (_reserved, host, source, mut vm) = vm(1);
    let ticket = missing(&mut vm, 0);
    host.start(&ticket);
    for page in 0..511 {
        assert_eq!(source.answer(vm.addr(page)), Answer::Taken);
    }
    let own = vec![page_with(5).0; 512];
    assert_eq!(host.provide_pages(vm.addr(0), &own), Ok(1));
    assert_eq!(source.answer(vm.addr(511)), Answer::Late);
    for page in [0, 300] {
        assert_eq!(read(&host, vm.addr(page)), Ok(word_of(vm.addr(page))));
    }
    assert_eq!(read(&host, vm.addr(511)), Ok(5));
    host.verify();
}

/// A discarded huge page of 1 GiB ends where the next one begins.
#[lacuna_skip::test]
fn a_discard_of_1_gib_leaves_the_next_page() {
    const GIB: u64 = Level::L1G.pages();
    let _reserved = HugePages::reserve_1g(2);
    let host = host(2 * GIB);
    let memory = SharedMemory::huge(PageCount::new(2 * GIB), Level::L1G).unwrap();
    let vm = common::linux::vm(&host, LinuxBacking::Shared(memory), 2 * GIB, None);
    for page in [5, GIB + 5] {
        host.copy_in(vm.addr(page), &[7; 8]).unwrap();
    }
    host.discard(part(&vm, 0, GIB)).unwrap();
    assert_eq!(read(&host, vm.addr(5)), Ok(0));
    assert_eq!(read(&host, vm.addr(GIB + 5)), Ok(0x0707_0707_0707_0707));
    host.verify();
}
