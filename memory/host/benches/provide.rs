//! The cost of one provided page: in a frame of the budget, and in Linux memory, alone or in runs.
//!
//! `cargo bench -p lacuna-host --bench provide`

use lacuna_addr::{BackingRange, PAGE_SIZE, PageCount};
use lacuna_host::{
    Host, HostConfig, HostError, HugePages, Io, MemoryStore, MmuNotifier, PageRequest, PageSource,
    SourcePage,
};
use lacuna_sync::HostClock;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

/// Pages that each thread provides.
const PAGES: u64 = 8192;
const ROUNDS: usize = 15;

struct Unmapped;

impl MmuNotifier for Unmapped {
    fn invalidate(&self, _: &[BackingRange]) {}
    fn age(&self, _: &[BackingRange], young: &mut [bool]) {
        young.fill(false);
    }
    fn split_huge(&self, _: BackingRange) {}
    fn end_of_aging(&self) {}
}

#[derive(Debug)]
struct Silent;

impl PageSource for Silent {
    fn describe(&self) -> String {
        "silent".into()
    }
    fn fetch(&self, _: PageRequest) {}
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Budget,
    Linux,
}

fn region(host: &Host, kind: Kind, pages: u64) -> Result<BackingRange, HostError> {
    let (pages, first) = (PageCount::new(pages), SourcePage(0));
    let (source, mmu) = (Arc::new(Silent), Arc::new(Unmapped));
    match kind {
        Kind::Budget => host.add_region_from(source, first, pages, mmu),
        Kind::Linux => host.add_linux_region(Some((source, first)), pages, mmu),
    }
}

/// Nanoseconds a page for each of `threads` threads, in runs of `run` pages.
fn measure(host: &Host, kind: Kind, threads: u64, run: usize) -> Result<f64, HostError> {
    let range = region(host, kind, threads * PAGES)?;
    let content = vec![[7; PAGE_SIZE]; run];
    let begun = Instant::now();
    thread::scope(|scope| {
        for number in 0..threads {
            let content = &content;
            scope.spawn(move || {
                for at in (0..PAGES).step_by(content.len()) {
                    let addr = range.start().checked_add_pages(number * PAGES + at);
                    let taken = host.provide_pages(addr.expect("in the range"), content);
                    assert_eq!(taken, Ok(content.len()));
                }
            });
        }
    });
    let elapsed = begun.elapsed().as_nanos() as f64;
    host.remove_region(range)?;
    Ok(elapsed / PAGES as f64)
}

fn main() {
    let config = HostConfig {
        budget: PageCount::new(4 * PAGES),
        huge: HugePages::Never,
        swap: Box::new(MemoryStore::new()),
        io: Io::Threads { readers: 1 },
        clock: Arc::new(HostClock::default()),
    };
    let host = Host::with_linux_memory(config, PageCount::new(4 * PAGES)).expect("a host");
    let arms = [
        ("budget", Kind::Budget, 1),
        ("Linux", Kind::Linux, 1),
        ("Linux, runs of 16", Kind::Linux, 16),
        ("Linux, runs of 512", Kind::Linux, 512),
    ];
    for threads in [1, 2] {
        let mut times = arms.map(|_| Vec::new());
        for _ in 0..ROUNDS {
            for ((_, kind, run), times) in arms.iter().zip(&mut times) {
                match measure(&host, *kind, threads, *run) {
                    Ok(time) => times.push(time),
                    Err(error) => return println!("skipped: {error}"),
                }
            }
        }
        for ((name, ..), times) in arms.iter().zip(&mut times) {
            times.sort_by(f64::total_cmp);
            let (least, median) = (times[0], times[ROUNDS / 2]);
            println!("{threads} threads, {name:20} {median:7.0} ns a page, least {least:7.0}");
        }
    }
}
