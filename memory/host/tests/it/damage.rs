//! Another program changes the content of a swap device. No guest reads data that it did not write.

use crate::common;

use common::FakeMmu;
use common::shared_file::SharedFile;
use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount};
use lacuna_host::{
    FaultyStore, FileStore, Host, HostConfig, HostError, HugePages, Io, Page, Reads, Resolution,
    SwapEntry, SwapError, SwapStore, WriteFailed,
};
use lacuna_sync::HostClock;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

const PAGES: u64 = 600;
const SLOTS: PageCount = PageCount::new(4096);

struct Guest {
    host: Arc<Host>,
    range: BackingRange,
    /// The content of each page, as one repeated word.
    words: Vec<u64>,
}

impl Guest {
    fn new(swap: Box<dyn SwapStore>, io: Io) -> Self {
        let host = Host::new(HostConfig {
            budget: PageCount::new(256),
            huge: HugePages::Never,
            swap,
            io,
            clock: Arc::new(HostClock::default()),
        })
        .unwrap();
        let mmu = FakeMmu::of(&host);
        let range = host.add_region(PageCount::new(PAGES), mmu).unwrap();
        let words = vec![0; PAGES as usize];
        let mut guest = Self { host, range, words };
        guest.write_all(1);
        guest
    }

    fn at(&self, page: u64) -> BackingAddr {
        self.range.start().checked_add_pages(page).unwrap()
    }

    fn write_all(&mut self, round: u64) {
        for page in 0..PAGES {
            let word = round << 32 | page;
            self.words[page as usize] = word;
            let bytes = word.to_le_bytes().repeat(PAGE_SIZE / 8);
            self.host.copy_in(self.at(page), &bytes).unwrap();
        }
    }

    /// Reads every page, after `bring` has fetched it. Returns the number of lost pages; all others
    /// must have their written content.
    fn read_all(&self, bring: fn(&Self, BackingAddr)) -> usize {
        let mut lost = 0;
        let mut bytes = [0; PAGE_SIZE];
        for page in 0..PAGES {
            bring(self, self.at(page));
            match self.host.copy_out(self.at(page), &mut bytes) {
                Ok(()) => {
                    let word = self.words[page as usize].to_le_bytes();
                    assert!(bytes.chunks(8).all(|w| w == word), "page {page} is wrong");
                }
                Err(HostError::Lost(page)) => {
                    let text = page.to_string();
                    assert!(
                        text.contains("swap entry ") && text.ends_with(DAMAGED),
                        "{text}"
                    );
                    lost += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        self.host.verify();
        lost
    }
}

const DAMAGED: &str = "it is not what was written there: the device, or another program that wrote \
                       to it, has damaged it; check the device, and start the guest anew";

/// The reading thread waits for the page, and reads it itself.
fn wait(_: &Guest, _: BackingAddr) {}

/// The executor reads it.
fn start(guest: &Guest, addr: BackingAddr) {
    let mut cache = guest.host.per_cpu_pages().unwrap();
    let level = Level::L4K;
    match guest.host.resolve(addr, Access::Read, level, &mut cache) {
        Resolution::Pending(ticket) => {
            guest.host.start(&ticket);
            // Damage is found when the page is read.
            let _ = guest.host.wait(&ticket);
        }
        Resolution::NoMemory => _ = guest.host.reclaim_direct(&mut cache).unwrap(),
        _ => {}
    }
}

const THREADS: Io = Io::Threads { readers: 2 };
const RING: Io = Io::Ring { readers: 2 };

fn flip(pages: &mut BTreeMap<SwapEntry, Page>) {
    for page in pages.values_mut().step_by(7) {
        page.0[1234] ^= 4;
    }
}

/// Reads return pages of each other's swap entries.
fn shuffle(pages: &mut BTreeMap<SwapEntry, Page>) {
    let last = pages.values().last().cloned().unwrap();
    let mut before = last;
    for page in pages.values_mut() {
        std::mem::swap(page, &mut before);
    }
}

#[test]
fn a_flipped_bit_is_found_by_waiters_and_readers() {
    for bring in [wait, start] {
        let store = FaultyStore::new(SLOTS);
        let guest = Guest::new(Box::new(store.clone()), THREADS);
        store.tamper(flip);
        assert!(guest.read_all(bring) > 10);
    }
}

#[test]
fn pages_in_each_others_swap_entries_are_found() {
    let store = FaultyStore::new(SLOTS);
    let guest = Guest::new(Box::new(store.clone()), THREADS);
    store.tamper(shuffle);
    assert!(guest.read_all(start) > 300);
}

/// The device acknowledges a write and never does it: the read returns the older content.
#[test]
fn an_older_content_of_the_swap_entry_is_found() {
    // So few entries that all of them are used again.
    let store = FaultyStore::new(PageCount::new(700));
    let mut guest = Guest::new(Box::new(store.clone()), THREADS);
    let mut old = BTreeMap::new();
    store.tamper(|pages| old = pages.clone());
    (2..6).for_each(|round| guest.write_all(round));
    store.tamper(|pages| {
        for (entry, page) in pages {
            if let Some(old) = old.get(entry) {
                *page = old.clone();
            }
        }
    });
    assert!(guest.read_all(wait) > 10);
}

/// A device that completes a read at once, on the starting thread.
struct Immediate(FaultyStore);

impl SwapStore for Immediate {
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn capacity(&self) -> PageCount {
        self.0.capacity()
    }

    fn read(&self, entry: SwapEntry, page: &mut Page) -> Result<(), SwapError> {
        self.0.read(entry, page)
    }

    fn reads(&self) -> Reads<'_> {
        Reads::Immediate
    }

    fn write(&self, first: SwapEntry, pages: &[Page]) -> Result<(), WriteFailed> {
        self.0.write(first, pages)
    }

    fn discard(&self, entry: SwapEntry) {
        self.0.discard(entry);
    }
}

#[test]
fn a_flipped_bit_is_found_where_reads_are_immediate() {
    let store = FaultyStore::new(SLOTS);
    let guest = Guest::new(Box::new(Immediate(store.clone())), THREADS);
    store.tamper(flip);
    assert!(guest.read_all(start) > 10);
}

#[test]
fn a_flipped_bit_is_found_in_virtual_time() {
    let store = FaultyStore::new(SLOTS);
    let io = Io::Virtual {
        seed: 1,
        latency_ns: 1..100,
    };
    let guest = Guest::new(Box::new(store.clone()), io);
    store.tamper(flip);
    assert!(guest.read_all(start) > 10);
}

#[test]
fn a_file_that_another_program_wrote_to() {
    for bring in [wait, start] {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let guest = Guest::new(Box::new(SharedFile(file.clone())), RING);
        let entries = file.metadata().unwrap().len() / PAGE_SIZE as u64;
        for entry in (0..entries).step_by(5) {
            file.write_all_at(b"mine", entry * PAGE_SIZE as u64 + 99)
                .unwrap();
        }
        assert!(guest.read_all(bring) > 10);
    }
}

/// Without damage no page is lost.
#[test]
fn an_untouched_device_is_trusted() {
    let dir = tempfile::tempdir().unwrap();
    let file = FileStore::create(dir.path(), SLOTS).unwrap();
    let mut guest = Guest::new(Box::new(file), RING);
    (2..6).for_each(|round| guest.write_all(round));
    assert_eq!(guest.read_all(start), 0);
}
