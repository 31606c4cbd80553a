//! Slow, stalling or briefly failing devices: the guest waits, and no thread starves.

use crate::common;

use common::FakeMmu;
use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount};
use lacuna_host::{
    Fault, FaultyStore, FileStore, Host, HostConfig, HostError, HugePages, Io, Latency,
    LatencySetting, PerCpuPages, Resolution, SwapStore, Ticket,
};
use lacuna_sync::HostClock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

/// Threads that fill memory, as vCPUs do, in the smallest budget for them.
const WRITERS: u64 = 4;
const PAGES: u64 = 400;

/// Longer than any wait that only other threads end may take.
const A_WHILE: Duration = Duration::from_millis(3500);

struct Fixture {
    host: Arc<Host>,
    range: BackingRange,
}

impl Fixture {
    fn new(swap: Box<dyn SwapStore>) -> Self {
        let host = Host::new(HostConfig {
            budget: Host::minimum_budget(WRITERS as usize),
            huge: HugePages::Never,
            swap,
            io: Io::Threads { readers: 2 },
            clock: Arc::new(HostClock::default()),
        })
        .unwrap();
        let mmu = FakeMmu::of(&host);
        let range = host
            .add_region(PageCount::new(WRITERS * PAGES), mmu)
            .unwrap();
        Self { host, range }
    }

    fn at(&self, page: u64) -> BackingAddr {
        self.range.start().checked_add_pages(page).unwrap()
    }

    /// Writes one writer's pages, each with its own content.
    fn fill(&self, writer: u64) -> Result<(), HostError> {
        (writer * PAGES..(writer + 1) * PAGES).try_for_each(|page| {
            let bytes = (page + 1).to_le_bytes().repeat(PAGE_SIZE / 8);
            self.host.copy_in(self.at(page), &bytes)
        })
    }

    /// Runs all writers at once, beside `meanwhile`, which changes the device.
    fn fill_all(&self, meanwhile: impl FnOnce()) -> Result<(), HostError> {
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..WRITERS)
                .map(|writer| scope.spawn(move || self.fill(writer)))
                .collect();
            meanwhile();
            writers.into_iter().try_for_each(|w| w.join().unwrap())
        })
    }

    /// Frees some frames, by removing their region.
    fn make_room(&self) {
        let mmu = FakeMmu::of(&self.host);
        let room = self.host.add_region(PageCount::new(200), mmu).unwrap();
        for page in 0..200 {
            let addr = room.start().checked_add_pages(page).unwrap();
            self.host.copy_in(addr, &[1]).unwrap();
        }
        self.host.remove_region(room).unwrap();
    }

    /// A region whose pages stay resident, because an instruction pins them.
    fn hold_room(&self) -> (BackingRange, PerCpuPages) {
        let mmu = FakeMmu::of(&self.host);
        let room = self.host.add_region(PageCount::new(64), mmu).unwrap();
        let mut holder = self.host.per_cpu_pages().unwrap();
        for page in 0..64 {
            let addr = room.start().checked_add_pages(page).unwrap();
            let found = self
                .host
                .resolve(addr, Access::Write, Level::L4K, &mut holder);
            assert!(matches!(found, Resolution::Ready(_)));
        }
        (room, holder)
    }

    /// Fills memory and swap to the last page. Returns the number of pages.
    fn fill_until_full(&self) -> u64 {
        let bytes = 1u64.to_le_bytes().repeat(PAGE_SIZE / 8);
        let fits = |page: &u64| self.host.copy_in(self.at(*page), &bytes).is_ok();
        (0..WRITERS * PAGES).take_while(fits).count() as u64
    }

    fn resolve(&self, page: u64, cache: &mut PerCpuPages) -> Resolution {
        let addr = self.at(page);
        let resolution = self.host.resolve(addr, Access::Read, Level::L4K, cache);
        cache.unpin_all();
        resolution
    }

    fn check(&self) {
        let mut bytes = [0; PAGE_SIZE];
        for page in 0..WRITERS * PAGES {
            self.host.copy_out(self.at(page), &mut bytes).unwrap();
            let want = (page + 1).to_le_bytes();
            assert!(bytes.chunks(8).all(|word| word == want), "page {page}");
        }
        self.host.verify();
    }
}

fn faulty() -> FaultyStore {
    FaultyStore::new(PageCount::new(10_000))
}

#[test]
fn a_stalled_device_is_waited_for() {
    let store = faulty();
    store.set_fault(Some(Fault::Stall));
    let fixture = Fixture::new(Box::new(store.clone()));
    let filled = fixture.fill_all(|| {
        while store.stalled() == 0 {
            sleep(Duration::from_millis(1));
        }
        sleep(A_WHILE);
        store.set_fault(None);
    });
    assert_eq!(filled, Ok(()));
    fixture.check();
}

/// A thread that stops a VM does not wait for the VM's device, only for the one thread inside it.
#[test]
fn a_wait_for_a_frame_ends_on_request() {
    let store = faulty();
    let fixture = Fixture::new(Box::new(store.clone()));
    store.set_fault(Some(Fault::Stall));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| fixture.fill(0).and_then(|()| fixture.fill(1)));
        while store.stalled() == 0 {
            sleep(Duration::from_millis(1));
        }
        let waits = scope.spawn(|| {
            let mut cache = fixture.host.per_cpu_pages().unwrap();
            fixture
                .host
                .reclaim_direct_until(&mut cache, &stop)
                .unwrap()
        });
        // By now the thread has a place in the queue, or is about to take one.
        sleep(Duration::from_millis(20));
        assert!(!waits.is_finished());
        stop.store(true, Ordering::Release);
        assert_eq!(waits.join().unwrap().freed, 0);
        assert_eq!(store.stalled(), 1, "the device still stalls");
        store.set_fault(None);
        assert_eq!(writer.join().unwrap(), Ok(()));
    });
}

/// All swap entries are in use, and the background thread has noticed it. A stalled device delays
/// reads, which hold all free frames. Once the reads complete, their pages can be evicted.
#[test]
fn reads_are_waited_for_though_swap_is_full() {
    let store = FaultyStore::new(PageCount::new(400));
    let fixture = Fixture::new(Box::new(store.clone()));
    let host = &fixture.host;
    let _background = host.spawn_background().unwrap();
    let (room, held) = fixture.hold_room();
    let swapped = fixture.fill_until_full();
    while host.failure().is_none() {
        sleep(Duration::from_millis(1));
    }
    store.set_fault(Some(Fault::Stall));
    drop(held);
    host.remove_region(room).unwrap();
    let mut cache = host.per_cpu_pages().unwrap();
    for page in 0..swapped {
        match fixture.resolve(page, &mut cache) {
            Resolution::Pending(ticket) => host.start(&ticket),
            Resolution::NoMemory => break,
            _ => {}
        }
    }
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| host.reclaim_direct(&mut cache));
        sleep(A_WHILE);
        assert!(!waits.is_finished());
        store.set_fault(None);
        assert!(waits.join().unwrap().unwrap().freed > 0);
    });
}

/// A page whose read is never started will never arrive.
#[test]
fn reclaim_does_not_wait_for_a_ticket_that_no_thread_starts() {
    let fixture = Fixture::new(Box::new(FaultyStore::new(PageCount::new(400))));
    let (room, held) = fixture.hold_room();
    let swapped = fixture.fill_until_full();
    drop(held);
    fixture.host.remove_region(room).unwrap();
    let mut cache = fixture.host.per_cpu_pages().unwrap();
    let mut pending = |page| match fixture.resolve(page, &mut cache) {
        Resolution::Pending(ticket) => Some(ticket),
        _ => None,
    };
    assert!((0..swapped).find_map(&mut pending).is_some());
    assert!(
        fixture.fill_all(|| ()).is_err(),
        "and no thread waits for ever"
    );
}

/// The latency is longer than a thread's wait without any progress.
#[test]
fn a_device_slower_than_every_timeout_is_waited_for() {
    let slow = Latency::new(faulty(), LatencySetting::new(A_WHILE));
    let fixture = Fixture::new(Box::new(slow));
    let budget = Host::minimum_budget(WRITERS as usize).get();
    // One round of write-outs: the memory and a few more pages.
    let bytes = 1u64.to_le_bytes().repeat(PAGE_SIZE / 8);
    for page in 0..budget + 8 {
        fixture.host.copy_in(fixture.at(page), &bytes).unwrap();
    }
}

#[test]
fn one_failed_write_is_no_failure() {
    let store = faulty();
    let fixture = Fixture::new(Box::new(store.clone()));
    let filled = fixture.fill_all(|| {
        for _ in 0..20 {
            store.set_fault(Some(Fault::OneWrite));
            sleep(Duration::from_millis(1));
        }
        store.set_fault(None);
    });
    assert_eq!(filled, Ok(()));
    fixture.check();
}

/// A read is not repeated, because the device has repeated it. Exactly one page is lost.
#[test]
fn one_failed_read_loses_one_page() {
    let store = faulty();
    let fixture = Fixture::new(Box::new(store.clone()));
    fixture.fill_all(|| ()).unwrap();
    store.set_fault(Some(Fault::OneRead));
    let read = |page| fixture.host.copy_out(fixture.at(page), &mut [0; 8]);
    let lost = |page: &u64| matches!(read(*page), Err(HostError::Lost(_)));
    let first: Vec<_> = (0..WRITERS * PAGES).filter(lost).collect();
    assert_eq!(first.len(), 1);
    assert_eq!((0..WRITERS * PAGES).filter(lost).collect::<Vec<_>>(), first);
    fixture.host.verify();
}

/// Consecutive writes fail, for a short time.
#[test]
fn a_device_that_fails_for_a_moment_is_tried_again() {
    let store = faulty();
    store.set_fault(Some(Fault::WriteAfter(0)));
    let fixture = Fixture::new(Box::new(store.clone()));
    let filled = fixture.fill_all(|| {
        while fixture.host.stats().write_failures < 8 {
            sleep(Duration::from_millis(1));
        }
        store.set_fault(None);
    });
    assert_eq!(filled, Ok(()));
    fixture.check();
}

#[test]
fn a_device_that_keeps_failing_is_reported() {
    let store = faulty();
    store.set_fault(Some(Fault::WriteAfter(0)));
    let fixture = Fixture::new(Box::new(store));
    let error = fixture.fill_all(|| ()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot write to swap: faulty device: Input/output error (os error 5)"
    );
}

/// The device fills up, and later has room again: the entries beyond are used again.
#[test]
fn swap_grows_back_after_the_device_was_full() {
    let store = faulty();
    store.set_fault(Some(Fault::EndsAt(100)));
    let fixture = Fixture::new(Box::new(store.clone()));
    let filled = fixture.fill_all(|| {
        while fixture.host.stats().write_failures == 0 {
            sleep(Duration::from_millis(1));
        }
        store.set_fault(None);
    });
    assert_eq!(filled, Ok(()));
    assert!(store.stored() > 100, "{} pages stored", store.stored());
    fixture.check();
}

/// The device has room again only after the guest's write failed for lack of room.
#[test]
fn swap_grows_back_after_the_guest_has_failed() {
    let store = faulty();
    store.set_fault(Some(Fault::EndsAt(100)));
    let fixture = Fixture::new(Box::new(store.clone()));
    let error = fixture.fill_all(|| ()).unwrap_err().to_string();
    assert_eq!(
        error,
        "swap device full: faulty device: No space left on device (os error 28); \
         give it more space, or the guest a larger budget"
    );
    store.set_fault(None);
    assert_eq!(fixture.fill_all(|| ()), Ok(()));
    fixture.check();
}

/// A host with swapped-out pages that would not arrive within an hour.
fn slow_world(swap: impl SwapStore + 'static) -> Fixture {
    let latency = LatencySetting::new(Duration::ZERO);
    let fixture = Fixture::new(Box::new(Latency::new(swap, latency.clone())));
    fixture.fill_all(|| ()).unwrap();
    fixture.make_room();
    latency.set(Duration::from_secs(3600));
    fixture
}

/// The same, with reads in flight.
fn hour_away(swap: impl SwapStore + 'static) -> (Fixture, Vec<Ticket>) {
    let fixture = slow_world(swap);
    let mut cache = fixture.host.per_cpu_pages().unwrap();
    let mut start = |page| match fixture.resolve(page, &mut cache) {
        Resolution::Pending(ticket) => {
            fixture.host.start(&ticket);
            Some(ticket)
        }
        _ => None,
    };
    let tickets: Vec<_> = (0..WRITERS * PAGES).filter_map(&mut start).collect();
    assert!(!tickets.is_empty());
    (fixture, tickets)
}

#[test]
fn the_removal_of_a_region_does_not_wait_for_a_simulated_latency() {
    let (fixture, tickets) = hour_away(faulty());
    fixture.host.remove_region(fixture.range).unwrap();
    assert!(tickets.iter().all(Ticket::is_done));
    fixture.host.verify();
}

#[test]
fn the_removal_of_a_region_does_not_wait_for_a_thread_in_a_simulated_latency() {
    let fixture = slow_world(faulty());
    let mut cache = fixture.host.per_cpu_pages().unwrap();
    let mut pending = |page| match fixture.resolve(page, &mut cache) {
        Resolution::Pending(ticket) => Some(ticket),
        _ => None,
    };
    let ticket = (0..WRITERS * PAGES).find_map(&mut pending);
    let ticket = ticket.expect("a page in swap");
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| fixture.host.wait(&ticket));
        while !ticket.is_started() {
            sleep(Duration::from_millis(1));
        }
        fixture.host.remove_region(fixture.range).unwrap();
        reader.join().unwrap().unwrap();
    });
}

#[test]
fn the_drop_of_a_host_does_not_wait_for_a_simulated_latency() {
    let dir = tempfile::tempdir().unwrap();
    let file = FileStore::create(dir.path(), PageCount::new(10_000)).unwrap();
    let (fixture, tickets) = hour_away(file);
    drop(fixture);
    assert!(
        tickets.iter().all(Ticket::is_done),
        "nothing is left behind"
    );
}

/// A vCPU polls for a page as long as a notification of its guest would cost.
#[test]
fn a_poll_ends_with_the_page_or_when_its_time_is_over() {
    const HOUR: u64 = 3_600_000_000_000;
    let fixture = slow_world(faulty());
    let host = &fixture.host;
    let mut cache = host.per_cpu_pages().unwrap();
    let mut pages = 0..WRITERS * PAGES;
    let mut pending = || {
        let found = pages.find_map(|page| match fixture.resolve(page, &mut cache) {
            Resolution::Pending(ticket) => Some(ticket),
            _ => None,
        });
        found.expect("a page in swap")
    };
    let slow = pending();
    assert!(!host.arrives_within(&slow, 1_000_000));
    assert!(slow.is_started(), "the poll starts the read");
    host.end_latency();
    assert!(host.arrives_within(&slow, HOUR));
    let fast = pending();
    assert!(host.arrives_within(&fast, HOUR));
    assert!(fast.is_done());
}
