//! Regions of Linux memory: pages are put in place, discarded and removed while other threads use
//! them.

use crate::common;

use common::linux::{BLOCK, host, read};
use common::source::{TestSource, page_of, page_with, word_of};
use common::{FakeMmu, Use, Vm};
use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount};
use lacuna_host::{Answer, Host, HostError, LinuxBacking, LinuxError, Resolution};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// A VM whose pages `source` provides.
fn vm(host: &Arc<Host>, source: Option<&Arc<TestSource>>, pages: u64) -> Vm {
    common::linux::vm(host, LinuxBacking::Anonymous, pages, source)
}

fn region(host: &Arc<Host>, source: &Arc<TestSource>, pages: u64) -> BackingRange {
    vm(host, Some(source), pages).range
}

fn at(range: BackingRange, page: u64) -> BackingAddr {
    range.start().checked_add_pages(page).unwrap()
}

fn word(host: &Host, addr: BackingAddr) -> u64 {
    read(host, addr).unwrap()
}

/// A vCPU writes and reads a region many times the budget; none of it is evicted or in a frame.
#[lacuna_skip::test]
fn pages_are_put_in_place_and_stay() {
    let host = host(4 * BLOCK);
    let source = TestSource::new();
    let mut vm = vm(&host, Some(&source), 3 * BLOCK + 5);
    let range = vm.range;
    vm.check_all();
    for page in (0..range.pages()).step_by(3) {
        vm.touch(page, Use::Write(page + 1)).unwrap();
    }
    vm.check_all();
    host.verify();
    let stats = host.stats();
    assert_eq!(source.asked() as u64, range.pages());
    assert_eq!((stats.provided, stats.resident), (range.pages(), 0));
    assert_eq!((stats.swapped_out, stats.huge_faults), (0, 0));
    assert_eq!(host.linux_pages(), PageCount::new(range.pages()));
    host.remove_region(range).unwrap();
    assert_eq!(host.linux_pages(), PageCount::new(0));
    host.verify();
}

/// By address: for a ticket that no thread has started, for a requested page, and too late.
#[lacuna_skip::test]
fn a_vmm_provides_pages_by_address() {
    let host = host(BLOCK);
    let source = TestSource::new();
    let range = region(&host, &source, 64);
    let mut cache = host.per_cpu_pages().unwrap();
    let mut missing = |page| {
        let found = host.resolve(at(range, page), Access::Read, Level::L2M, &mut cache);
        match found {
            Resolution::Missing(ticket) => ticket,
            other => panic!("{other:?}"),
        }
    };
    let (idle, started) = (missing(6), missing(7));
    host.start(&started);
    for page in 5..8 {
        let provide = |word| host.provide(at(range, page), &page_with(word).0);
        assert_eq!(provide(page), Ok(Answer::Taken));
        assert_eq!(provide(99), Ok(Answer::Late));
        assert_eq!(word(&host, at(range, page)), page);
    }
    assert!(idle.is_done() && started.is_done());
    assert_eq!(source.answer(at(range, 7)), Answer::Late);
    assert_eq!((word(&host, at(range, 7)), source.asked()), (7, 1));
    let mut bytes = [0; 8];
    assert_eq!(host.peek(at(range, 7), &mut bytes), Some(()));
    assert_eq!(u64::from_le_bytes(bytes), 7);
    assert_eq!(host.peek(at(range, 8), &mut bytes), None, "it is missing");
    host.copy_in(at(range, 6), &[1; 8]).unwrap();
    assert_eq!(word(&host, at(range, 6)), u64::from_le_bytes([1; 8]));
    host.verify();
    host.remove_region(range).unwrap();
    let late = host.provide(at(range, 9), &page_with(1).0).unwrap_err();
    assert!(matches!(late, HostError::Lost(_)), "{late}");
    host.verify();
}

/// Without a source Linux fills a page with zeros on first touch, and no userfaultfd is needed.
#[test]
fn a_region_without_a_source_is_zeros() {
    let host = host(BLOCK);
    let mut vm = vm(&host, None, 100);
    assert!(!host.has_source(vm.addr(1)));
    assert!(!host.is_missing(vm.addr(1), &mut vm.cache));
    assert_eq!(host.provide(vm.addr(1), &[1; PAGE_SIZE]), Ok(Answer::Late));
    vm.touch(1, Use::Read).unwrap();
    vm.touch(2, Use::Write(5)).unwrap();
    vm.check_all();
    host.discard(vm.range).unwrap();
    vm.model.clear();
    vm.check_all();
    host.verify();
    host.remove_region(vm.range).unwrap();
}

#[test]
fn requests_beyond_the_room_are_refused() {
    let host = host(2 * BLOCK);
    let add = |pages| host.add_linux_region(None, PageCount::new(pages), FakeMmu::of(&host));
    assert!(matches!(add(0), Err(HostError::BadRegion(_))));
    let refused = add(2 * BLOCK + 1).unwrap_err().to_string();
    assert!(refused.contains("1025 pages"), "{refused}");
    let (first, second) = (add(1).unwrap(), add(BLOCK).unwrap());
    assert!(matches!(
        add(1),
        Err(HostError::Linux(LinuxError::Room { .. }))
    ));
    host.remove_region(first).unwrap();
    let third = add(BLOCK).unwrap();
    let outside = BackingRange::new(third.start(), BLOCK + 1).unwrap();
    for range in [first, outside] {
        let refused = host.discard(range);
        assert!(matches!(refused, Err(HostError::NoSuchRegion(_))));
    }
    // No source would provide its pages.
    let refused = host.make_missing(second).unwrap_err().to_string();
    assert!(refused.contains("no page source"), "{refused}");
    host.remove_region(second).unwrap();
    host.remove_region(third).unwrap();
    assert!(add(2 * BLOCK).is_ok());
}

/// The next region at the same addresses sees nothing of the previous one.
#[lacuna_skip::test]
fn the_next_region_begins_with_missing_pages() {
    let host = host(BLOCK);
    for round in 0..3 {
        let source = TestSource::new();
        let mut vm = vm(&host, Some(&source), BLOCK);
        vm.check_all();
        assert_eq!(source.asked() as u64, BLOCK, "round {round}");
        (0..BLOCK).for_each(|page| vm.touch(page, Use::Write(!0)).unwrap());
        host.remove_region(vm.range).unwrap();
        assert_eq!(vm.mapped(), 0);
    }
}

/// A discarded page reads as zeros, whether it was in place, requested or never needed.
#[lacuna_skip::test]
fn discarded_pages_are_zeros() {
    let host = host(BLOCK);
    let source = TestSource::new();
    let range = region(&host, &source, 64);
    let mut cache = host.per_cpu_pages().unwrap();
    for page in 0..20 {
        let provided = host.provide(at(range, page), &page_with(7).0);
        assert_eq!(provided, Ok(Answer::Taken));
    }
    let found = host.resolve(at(range, 20), Access::Read, Level::L4K, &mut cache);
    let Resolution::Missing(ticket) = found else {
        panic!("{found:?}");
    };
    host.start(&ticket);
    let part = BackingRange::new(at(range, 10), 20).unwrap();
    host.discard(part).unwrap();
    host.verify();
    assert!(ticket.is_done(), "its vCPU continues");
    assert_eq!(host.linux_pages(), PageCount::new(10));
    assert_eq!(source.answer(at(range, 20)), Answer::Late);
    for page in 0..30 {
        let expected = if page < 10 { 7 } else { 0 };
        assert_eq!(word(&host, at(range, page)), expected, "page {page}");
        let late = host.provide(at(range, page), &page_with(8).0);
        assert_eq!(late, Ok(Answer::Late), "page {page}");
    }
    assert_eq!(source.asked(), 1);
    host.copy_in(at(range, 15), &9u64.to_le_bytes()).unwrap();
    assert_eq!(word(&host, at(range, 15)), 9);
    host.discard(part).unwrap();
    assert_eq!(word(&host, at(range, 15)), 0);
    host.verify();
}

/// A page that is missing again has the source's content, whether it was in place or discarded.
#[lacuna_skip::test]
fn discarded_pages_are_missing_again() {
    let host = host(BLOCK);
    let source = TestSource::new();
    let mut vm = vm(&host, Some(&source), 64);
    (0..20).for_each(|page| vm.touch(page, Use::Write(!0)).unwrap());
    let found = host.resolve(vm.addr(20), Access::Read, Level::L4K, &mut vm.cache);
    let Resolution::Missing(ticket) = found else {
        panic!("{found:?}");
    };
    let part = BackingRange::new(vm.addr(10), 20).unwrap();
    for _ in 0..2 {
        host.discard(BackingRange::new(vm.addr(5), 10).unwrap())
            .unwrap();
        host.make_missing(part).unwrap();
        source.lacks_again(part);
        host.verify();
        (5..10).for_each(|page| _ = vm.model.insert(vm.addr(page).get(), 0));
        (10..30).for_each(|page| _ = vm.model.remove(&vm.addr(page).get()));
        assert!(!ticket.is_done(), "its request stays");
        assert_eq!(host.linux_pages(), PageCount::new(5));
        assert!((10..30).all(|page| host.was_never_provided(vm.addr(page))));
    }
    vm.check_all();
    host.verify();
}

/// Runs of pages; some are in place, requested or beyond the region's end.
#[lacuna_skip::test]
fn runs_of_pages_are_provided() {
    let host = host(2 * BLOCK);
    let source = TestSource::new();
    let range = region(&host, &source, 600);
    let mut cache = host.per_cpu_pages().unwrap();
    let run: Vec<[u8; PAGE_SIZE]> = (0..601).map(|word| page_with(word).0).collect();
    assert_eq!(
        host.provide(at(range, 5), &page_with(5).0),
        Ok(Answer::Taken)
    );
    let found = host.resolve(at(range, 9), Access::Read, Level::L4K, &mut cache);
    let Resolution::Missing(ticket) = found else {
        panic!("{found:?}");
    };
    assert_eq!(host.provide_pages(at(range, 0), &run[..12]), Ok(11));
    assert!(ticket.is_done(), "its page was in the run");
    assert_eq!(host.provide_pages(at(range, 3), &run[3..20]), Ok(8));
    let late = host.provide_pages(at(range, 20), &run[20..]).unwrap_err();
    assert!(matches!(late, HostError::Lost(_)), "{late}");
    for page in 0..600 {
        assert_eq!(word(&host, at(range, page)), page);
    }
    assert_eq!((host.stats().provided, source.asked()), (600, 0));
    host.verify();
}

/// Two threads provide each page with different contents. One content counts, and is in place.
#[lacuna_skip::test]
fn one_of_two_providers_counts() {
    let host = host(8 * BLOCK);
    let source = TestSource::new();
    let pages = 8 * BLOCK;
    let range = region(&host, &source, pages);
    let provide = |content: u64| {
        let mut taken = Vec::new();
        for page in 0..pages {
            let answer = host.provide(at(range, page), &page_with(content).0);
            taken.extend((answer.unwrap() == Answer::Taken).then_some(page));
            // The page is in place, by this thread or by the other one.
            let word = word(&host, at(range, page));
            assert!(word == 1 || word == 2, "page {page} is {word}");
        }
        taken
    };
    let (one, two) = thread::scope(|scope| {
        let other = scope.spawn(|| provide(2));
        (provide(1), other.join().unwrap())
    });
    assert_eq!(one.len() + two.len(), pages as usize);
    for (content, taken) in [(1, one), (2, two)] {
        for page in taken {
            assert_eq!(word(&host, at(range, page)), content, "page {page}");
        }
    }
    assert_eq!(host.stats().provided, pages);
    host.verify();
}

/// Threads provide, fetch and read the same pages, and the region is removed in the middle of every
/// second round. Each call returns, and each page has one content.
#[lacuna_skip::test]
fn many_threads_provide() {
    let pages = 1500;
    let host = host(3 * BLOCK);
    for round in 0..10 {
        let source = TestSource::new();
        let range = region(&host, &source, pages);
        let taken = AtomicUsize::new(0);
        let gone = |error: HostError| assert!(matches!(error, HostError::Lost(_)), "{error}");
        thread::scope(|scope| {
            for seed in 0..2 {
                let (host, taken) = (&host, &taken);
                scope.spawn(move || {
                    for i in 0..pages {
                        let addr = at(range, (i + seed * 5) % pages);
                        match host.provide(addr, &page_of(addr).0) {
                            Ok(Answer::Taken) => _ = taken.fetch_add(1, Ordering::Relaxed),
                            Ok(Answer::Late) => {}
                            Err(error) => return gone(error),
                        }
                    }
                });
            }
            scope.spawn(|| {
                for page in (0..pages).rev() {
                    match host.fetch(at(range, page)) {
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
            assert_eq!(host.stats().in_flight, 0);
            host.verify();
            host.remove_region(range).unwrap();
        }
        host.verify();
    }
}

/// Reads every page, from a start of its own; true if the region was removed meanwhile.
fn read_all(host: &Host, range: BackingRange, seed: u64) -> bool {
    let mut bytes = [0; PAGE_SIZE];
    for i in 0..range.pages() {
        let addr = at(range, (i + seed * 7) % range.pages());
        match host.copy_out(addr, &mut bytes) {
            Ok(()) => assert_eq!(bytes, page_of(addr).0, "{addr}"),
            Err(HostError::Lost(_)) => return true,
            Err(error) => panic!("{error}"),
        }
    }
    false
}

/// Pages are discarded while threads write and read them. A write that begins after a discard is
/// never lost, and every page has its written content or zeros.
#[lacuna_skip::test]
fn writes_beside_discards() {
    let host = host(BLOCK);
    let source = TestSource::new();
    let range = region(&host, &source, 16);
    for page in 0..16 {
        let provided = host.provide(at(range, page), &page_with(0).0);
        assert_eq!(provided, Ok(Answer::Taken));
    }
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for half in 0..2 {
            let (host, over) = (&host, &over);
            scope.spawn(move || {
                // Each of the lower pages has its own thread, which writes and discards it.
                let own = BackingRange::new(at(range, half), 1).unwrap();
                for round in 1..3000u64 {
                    host.copy_in(own.start(), &round.to_le_bytes()).unwrap();
                    assert_eq!(word(host, own.start()), round);
                    host.discard(own).unwrap();
                    assert_eq!(word(host, own.start()), 0);
                }
                over.store(true, Ordering::Release);
            });
        }
        scope.spawn(|| {
            let upper = BackingRange::new(at(range, 4), 12).unwrap();
            while !over.load(Ordering::Acquire) {
                host.discard(upper).unwrap();
            }
        });
        while !over.load(Ordering::Acquire) {
            for page in 4..16 {
                let addr = at(range, page);
                host.copy_in(addr, &word_of(addr).to_le_bytes()).unwrap();
                let word = word(&host, addr);
                assert!(word == 0 || word == word_of(addr), "{word:#x}");
            }
        }
    });
    assert_eq!(source.asked(), 0);
    host.verify();
}

/// A region of more than 32 MiB has several userfaultfds. Runs of pages cross their borders.
#[lacuna_skip::test]
fn runs_of_pages_cross_the_parts_of_a_large_region() {
    const PAGES: u64 = 3 * 8192;
    let host = host(PAGES);
    let source = TestSource::new();
    let range = region(&host, &source, PAGES);
    let first = 8192 - 100;
    let content: Vec<_> = (0..200).map(|page| page_with(first + page).0).collect();
    assert_eq!(host.provide_pages(at(range, first), &content), Ok(200));
    for page in [0, 99, 100, 199] {
        assert_eq!(word(&host, at(range, first + page)), first + page);
    }
    let stats = host.stats();
    assert_eq!((stats.provided, source.asked()), (200, 0));
    host.remove_region(range).unwrap();
    assert_eq!(host.linux_pages(), PageCount::new(0));
}
