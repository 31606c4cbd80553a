//! Reads through io_uring: which ones it takes, which ones it passes on, and its end.
//!
//! If the kernel refuses io_uring, the same tests run on the threads that replace it.

use crate::common;

use common::FakeMmu;
use common::shared_file::SharedFile;
use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount};
use lacuna_host::{
    Arrivals, Fault, FaultyStore, FileStore, Host, HostConfig, HugePages, Io, Latency,
    LatencySetting, PerCpuPages, Resolution, SwapStore, Ticket,
};
use lacuna_sync::HostClock;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const PAGES: u64 = 600;

struct Guest {
    host: Arc<Host>,
    cache: PerCpuPages,
    range: BackingRange,
}

impl Guest {
    /// A guest whose pages are only on the device.
    fn swapped_out(swap: Box<dyn SwapStore>) -> Self {
        let host = Host::new(HostConfig {
            budget: PageCount::new(1024),
            huge: HugePages::Never,
            swap,
            io: Io::Ring { readers: 2 },
            clock: Arc::new(HostClock::default()),
        })
        .unwrap();
        let mmu = FakeMmu::of(&host);
        let range = host.add_region(PageCount::new(PAGES), mmu).unwrap();
        // Another region, whose pages evict the guest's.
        let other = FakeMmu::of(&host);
        let crowd = host.add_region(PageCount::new(2048), other).unwrap();
        for page in 0..PAGES {
            let bytes = (page + 1).to_le_bytes().repeat(PAGE_SIZE / 8);
            host.copy_in(at(range, page), &bytes).unwrap();
        }
        let bytes = 7u64.to_le_bytes().repeat(PAGE_SIZE / 8);
        for page in 0..2048 {
            host.copy_in(at(crowd, page), &bytes).unwrap();
        }
        host.remove_region(crowd).unwrap();
        let cache = host.per_cpu_pages().unwrap();
        Self { host, cache, range }
    }

    /// Starts a read for every missing page.
    fn start_all(&mut self) -> Vec<Ticket> {
        let mut tickets = Vec::new();
        for page in 0..PAGES {
            let addr = at(self.range, page);
            match self
                .host
                .resolve(addr, Access::Read, Level::L4K, &mut self.cache)
            {
                Resolution::Pending(ticket) => {
                    self.host.start(&ticket);
                    tickets.push(ticket);
                }
                Resolution::Ready(_) => {}
                other => panic!("{other:?}"),
            }
            self.cache.unpin_all();
        }
        assert!(tickets.len() > 256, "more than the ring takes at once");
        tickets
    }

    fn check(&self) {
        let mut bytes = [0; PAGE_SIZE];
        for page in 0..PAGES {
            self.host
                .copy_out(at(self.range, page), &mut bytes)
                .unwrap();
            let want = (page + 1).to_le_bytes();
            assert!(bytes.chunks(8).all(|word| word == want), "page {page}");
        }
    }
}

fn at(range: BackingRange, page: u64) -> BackingAddr {
    range.start().checked_add_pages(page).unwrap()
}

fn file(dir: &tempfile::TempDir) -> FileStore {
    FileStore::create(dir.path(), PageCount::new(4096)).unwrap()
}

#[test]
fn more_reads_than_the_ring_takes_all_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = Guest::swapped_out(Box::new(file(&dir)));
    let tickets = guest.start_all();
    assert_eq!(guest.host.stats().reads_started, tickets.len() as u64);
    tickets.iter().for_each(|t| guest.host.wait(t).unwrap());
    guest.check();
    guest.host.verify();
}

#[test]
fn the_drop_of_a_host_waits_for_all_completions() {
    for latency in [Duration::ZERO, Duration::from_millis(2)] {
        let dir = tempfile::tempdir().unwrap();
        let slow = Latency::new(file(&dir), LatencySetting::new(latency));
        let mut guest = Guest::swapped_out(Box::new(slow));
        let arrived = Arc::new(AtomicUsize::new(0));
        let tickets = guest.start_all();
        for ticket in &tickets {
            let arrived = arrived.clone();
            ticket.on_done(move || _ = arrived.fetch_add(1, Ordering::Relaxed));
        }
        drop(guest);
        assert_eq!(arrived.load(Ordering::Relaxed), tickets.len());
    }
}

#[test]
fn reads_that_the_last_poller_leaves_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = Guest::swapped_out(Box::new(file(&dir)));
    let host = guest.host.clone();
    let polling = host.polling();
    let tickets = guest.start_all();
    drop(polling);
    arrive_alone(&guest, &tickets);
}

#[test]
fn reads_of_a_thread_that_no_longer_sleeps_on_its_ring_arrive() {
    for sleeps_elsewhere in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = Guest::swapped_out(Box::new(file(&dir)));
        let mut arrivals = guest.host.arrivals();
        let tickets = guest.start_all();
        if !sleeps_elsewhere {
            arrivals = None;
        }
        let _aside = arrivals.as_ref().map(Arrivals::set_aside);
        arrive_alone(&guest, &tickets);
    }
}

/// Waits until the host's own threads have brought the pages.
fn arrive_alone(guest: &Guest, tickets: &[Ticket]) {
    while !tickets.iter().all(Ticket::is_done) {
        std::thread::yield_now();
    }
    guest.check();
}

/// The ring's own thread stays asleep.
#[test]
fn a_thread_takes_the_arrivals_of_its_own_reads() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = Guest::swapped_out(Box::new(file(&dir)));
    let host = guest.host.clone();
    let Some(arrivals) = host.arrivals() else {
        return;
    };
    let tickets = guest.start_all();
    let mut taken = 0;
    while !tickets.iter().all(Ticket::is_done) {
        taken += arrivals.take();
        std::thread::yield_now();
    }
    assert!(taken >= 256, "as many as the ring takes at once: {taken}");
    guest.check();
}

#[test]
fn a_poller_that_sleeps_in_the_host_does_not_hang() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = Guest::swapped_out(Box::new(file(&dir)));
    let host = guest.host.clone();
    let _polling = host.polling();
    let tickets = guest.start_all();
    tickets.iter().for_each(|t| guest.host.wait(t).unwrap());
    guest.check();
}

#[test]
fn a_device_that_injects_faults_is_not_bypassed() {
    let store = FaultyStore::new(PageCount::new(4096));
    let mut guest = Guest::swapped_out(Box::new(store.clone()));
    assert_eq!(guest.host.describe_io(), "reader threads");
    store.set_fault(Some(Fault::Read));
    for ticket in guest.start_all() {
        let error = guest.host.wait(&ticket).unwrap_err().to_string();
        assert!(error.contains("Input/output error"), "{error}");
    }
    guest.host.verify();
}

/// A read that brings only a part of a page, or nothing, is reported with the device's own error.
#[test]
fn a_short_read_is_an_error_as_on_a_thread() {
    let file = Arc::new(tempfile::tempfile().unwrap());
    let mut guest = Guest::swapped_out(Box::new(SharedFile(file.clone())));
    file.set_len(PAGE_SIZE as u64 / 2).unwrap();
    for ticket in guest.start_all() {
        let error = guest.host.wait(&ticket).unwrap_err().to_string();
        assert!(error.contains("failed to fill whole buffer"), "{error}");
    }
    guest.host.verify();
}
