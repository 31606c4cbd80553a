//! Linux memory that this process pages out, while vCPUs use it.

use crate::common;

use common::linux::{BLOCK, file, host, private, read, virtual_host, vm, vm_of_file};
use common::source::{TestSource, page_with};
use common::{FakeMmu, Use, Vm};
use lacuna_addr::{Access, BackingRange, Level, PageCount};
use lacuna_host::{
    FaultyStore, Host, HostError, LinuxBacking, Resolution, SeenLosses, SharedFill, SharedMemory,
    Ticket,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

const PAGES: u64 = 64;

/// A VM whose pages are a file's, and have their numbers.
fn file_vm(host: &Arc<Host>) -> Vm {
    vm_of_file(host, &Arc::default(), &file(PAGES), PAGES)
}

fn resolve(vm: &mut Vm, page: u64) -> Resolution {
    let addr = vm.addr(page);
    let resolution = vm
        .host
        .resolve(addr, Access::Read, Level::L4K, &mut vm.cache);
    vm.cache.unpin_all();
    resolution
}

/// Clean pages of a file leave, and their next access is a ticket, never a frame. A written page
/// has its content afterwards, wherever it was.
#[test]
fn a_paged_out_page_is_a_ticket() {
    let host = host(BLOCK);
    let mut vm = file_vm(&host);
    vm.check_all();
    vm.touch(9, Use::Write(99)).unwrap();
    let left = host.page_out(vm.range).unwrap().get();
    assert!(left >= PAGES - 1, "only the written page may stay: {left}");
    assert_eq!(host.linux_pages(), PageCount::new(PAGES - left));
    assert_eq!(vm.mapped(), 0);
    host.verify();

    let addr = vm.addr(3);
    assert!(host.is_nonresident(addr, &mut vm.cache) && !host.is_missing(addr, &mut vm.cache));
    assert_eq!(
        host.peek(addr, &mut [0; 8]),
        None,
        "a viewer brings nothing in"
    );
    let Resolution::Pending(ticket) = resolve(&mut vm, 3) else {
        panic!("its leaf was removed, and the page has left");
    };
    assert!(!host.reads_at_once(&ticket) && !ticket.is_started());
    let Resolution::Pending(again) = resolve(&mut vm, 3) else {
        panic!("it is in flight");
    };
    assert!(again.is_same(&ticket));
    host.verify();
    host.wait(&ticket).unwrap();
    assert!(matches!(resolve(&mut vm, 3), Resolution::Ready(_)));
    vm.check_all();
    host.verify();
    let stats = host.stats();
    assert_eq!((stats.linux_paged_out, stats.linux_paged_in), (left, left));
    assert_eq!(stats.faults_swap_in, left);
}

/// Pages that an instruction in progress needs stay, so that it completes.
#[test]
fn pinned_pages_stay() {
    let host = host(BLOCK);
    let mut vm = file_vm(&host);
    vm.check_all();
    vm.fault(5, Access::Read).unwrap();
    assert_eq!(host.page_out(vm.range), Ok(PageCount::new(PAGES - 1)));
    assert!(matches!(resolve(&mut vm, 5), Resolution::Ready(_)));
    assert_eq!(host.page_out(vm.range), Ok(PageCount::new(1)));
}

/// A paged-out page is discarded, and its region is removed, whether or not its read has begun.
#[test]
fn paged_out_pages_are_discarded_and_removed() {
    let host = host(BLOCK);
    let mut vm = file_vm(&host);
    vm.check_all();
    host.page_out(vm.range).unwrap();
    let tickets = [1, 2, 40, 41].map(|page| match resolve(&mut vm, page) {
        Resolution::Pending(ticket) => ticket,
        other => panic!("page {page} is {other:?}"),
    });
    host.start(&tickets[1]);
    host.discard(BackingRange::new(vm.addr(0), 10).unwrap())
        .unwrap();
    assert!(tickets[..2].iter().all(Ticket::is_done));
    assert_eq!(read(&host, vm.addr(1)), Ok(0));
    assert_eq!(read(&host, vm.addr(20)), Ok(20));
    host.verify();
    host.start(&tickets[3]);
    host.remove_region(vm.range).unwrap();
    assert!(tickets.iter().all(Ticket::is_done));
    host.verify();
}

/// In virtual time, the thread that discards a page on its way back is the only one that delivers
/// the page.
#[test]
fn a_page_on_its_way_back_is_discarded_in_virtual_time() {
    let store = Box::new(FaultyStore::new(PageCount::new(100)));
    let budget = Host::minimum_budget(8).get();
    let (host, clock) = virtual_host(budget, store, BLOCK);
    let mut vm = vm_of_file(&host, &clock, &file(PAGES), PAGES);
    vm.check_all();
    host.page_out(vm.range).unwrap();
    let Resolution::Pending(ticket) = resolve(&mut vm, 3) else {
        panic!("the page has left");
    };
    host.start(&ticket);
    host.discard(BackingRange::new(vm.addr(0), 10).unwrap())
        .unwrap();
    assert!(ticket.is_done());
    assert_eq!(read(&host, vm.addr(3)), Ok(0));
    host.verify();
}

/// The file becomes shorter while its pages are out: the page is lost, and never zeros.
#[lacuna_skip::test]
fn a_page_that_does_not_come_back_is_lost() {
    let host = host(BLOCK);
    let file = file(PAGES);
    let mut vm = vm(&host, private(&file, 0), PAGES, None);
    for page in 0..PAGES {
        assert_eq!(read(&host, vm.addr(page)), Ok(page));
    }
    host.page_out(vm.range).unwrap();
    file.set_len(0).unwrap();
    let Resolution::Pending(ticket) = resolve(&mut vm, 30) else {
        panic!("it has left");
    };
    let lost = host.wait(&ticket).unwrap_err();
    assert!(lost.to_string().contains("became shorter"), "{lost}");
    assert!(matches!(resolve(&mut vm, 30), Resolution::Lost(_)));
    let notifier: Arc<FakeMmu> = Arc::clone(&vm.mmu);
    let mut seen = SeenLosses::default();
    assert_eq!(
        host.lost_since(&mut seen, &*notifier),
        None,
        "no vCPU has read zeros"
    );
    host.verify();
}

/// Memory that a source has filled is paged out where Linux has a swap device, and is right in any
/// case. Missing pages stay missing.
#[lacuna_skip::test]
fn anonymous_memory_and_memory_files() {
    let host = host(4 * BLOCK);
    let shared = SharedMemory::new(PageCount::new(PAGES), SharedFill::CopiedIn).unwrap();
    for backing in [LinuxBacking::Anonymous, LinuxBacking::Shared(shared)] {
        let source = TestSource::new();
        let mut vm = vm(&host, backing, PAGES, Some(&source));
        for page in 0..PAGES / 2 {
            vm.touch(page, Use::Read).unwrap();
        }
        vm.touch(3, Use::Write(33)).unwrap();
        for _ in 0..3 {
            host.page_out(vm.range).unwrap();
            host.verify();
            vm.check_touched();
        }
        assert_eq!(source.asked() as u64, PAGES / 2);
        vm.check_all();
        assert_eq!(source.asked() as u64, PAGES);
        host.verify();
    }
}

#[test]
fn what_is_not_paged_out() {
    let host = host(2 * BLOCK);
    let vm = file_vm(&host);
    assert_eq!(host.page_out(vm.range), Ok(PageCount::new(0)), "untouched");
    let budget = host
        .add_region(PageCount::new(8), FakeMmu::of(&host))
        .unwrap();
    let refused = host.page_out(budget).unwrap_err().to_string();
    assert!(refused.contains("in the budget"), "{refused}");
    let long = BackingRange::new(vm.addr(0), PAGES + 1).unwrap();
    assert!(matches!(
        host.page_out(long),
        Err(HostError::NoSuchRegion(_))
    ));
}

/// One thread pages out all the time; another writes to some pages, discards and copies.
#[test]
fn pages_leave_while_they_are_used() {
    let host = host(BLOCK);
    let mut vm = file_vm(&host);
    let (range, over) = (vm.range, Arc::new(AtomicBool::new(false)));
    let left = Arc::new(AtomicU64::new(0));
    let pager = thread::spawn({
        let (host, over, left) = (Arc::clone(&host), Arc::clone(&over), Arc::clone(&left));
        move || {
            while !over.load(Ordering::Relaxed) {
                let gone = host.page_out(range).unwrap().get();
                left.fetch_add(gone, Ordering::Relaxed);
            }
        }
    });
    let mut round = 0;
    while round < 20 || left.load(Ordering::Relaxed) < PAGES {
        for page in 0..PAGES {
            let (addr, value) = (vm.addr(page), page << 32 | round);
            match (page + round) % 8 {
                // Written pages can leave only where there is a swap device.
                0 if page < PAGES / 2 => {
                    host.copy_in(addr, &page_with(value).0).unwrap();
                    vm.model.insert(addr.get(), value);
                }
                1 if page < PAGES / 2 => vm.touch(page, Use::Write(value)).unwrap(),
                2 if page == round % PAGES => {
                    host.discard(BackingRange::new(addr, 1).unwrap()).unwrap();
                    vm.model.insert(addr.get(), 0);
                }
                3 => assert_eq!(read(&host, addr), Ok(vm.expected(addr))),
                _ => vm.touch(page, Use::Read).unwrap(),
            }
            vm.cache.unpin_all();
        }
        round += 1;
    }
    over.store(true, Ordering::Relaxed);
    pager.join().unwrap();
    vm.check_all();
    host.verify();
}

/// The background thread brings the pages in place down to the limit, also if all are in use.
#[test]
fn a_limit_is_kept() {
    const LIMIT: u64 = 10;
    let host = host(BLOCK);
    let mut vm = file_vm(&host);
    host.limit_linux(PageCount::new(LIMIT));
    let background = host.spawn_background().unwrap();
    while host.stats().linux_paged_out < 4 * PAGES {
        vm.check_all();
    }
    while host.linux_pages().get() > LIMIT {
        thread::yield_now();
    }
    drop(background);
    host.verify();
    host.limit_linux(vm.host.linux_pages());
    vm.check_all();
    host.verify();
}
