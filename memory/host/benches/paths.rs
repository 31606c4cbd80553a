//! The cost of the main paths: `cargo bench -p lacuna-host` (argument: a directory for the swap
//! file).
//!
//! * resolve of an empty page, including the zeroing, compared with the zeroing alone on the same
//!   frames: warm (a few frames again and again) and cold (each frame once);
//! * resolve of a resident page;
//! * throughput of swap-out and swap-in on a file; the waiting thread reads, or readers do.

use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount, Pfn};
use lacuna_host::{
    FileStore, Frame, Host, HostConfig, HugePages, Io, MemoryStore, MmuNotifier, PerCpuPages,
    Resolution, SwapStore, Ticket,
};
use lacuna_sync::HostClock;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// A listener for a host whose pages are mapped nowhere.
struct Unmapped;

impl MmuNotifier for Unmapped {
    fn invalidate(&self, _ranges: &[BackingRange]) {}
    fn age(&self, _ranges: &[BackingRange], _young: &mut [bool]) {}
    fn split_huge(&self, _range: BackingRange) {}
    fn end_of_aging(&self) {}
}

fn host(budget: u64, swap: Box<dyn SwapStore>) -> Arc<Host> {
    host_with(budget, swap, HugePages::Never)
}

fn host_with(budget: u64, swap: Box<dyn SwapStore>, huge: HugePages) -> Arc<Host> {
    Host::new(HostConfig {
        budget: PageCount::new(budget),
        huge,
        swap,
        io: Io::Threads { readers: 8 },
        clock: Arc::new(HostClock::default()),
    })
    .expect("a host for the benchmark")
}

/// Nanoseconds for each of `count` operations.
fn per(count: u64, start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64 / count as f64
}

fn page(start: BackingAddr, index: u64) -> BackingAddr {
    start.checked_add_pages(index).expect("inside the region")
}

/// Makes a page resident, by any means.
fn touch(host: &Host, addr: BackingAddr, access: Access, cache: &mut PerCpuPages) -> Pfn {
    loop {
        match host.resolve(addr, access, Level::L4K, cache) {
            Resolution::Ready(Frame { pfn, .. }) => {
                cache.unpin_all();
                return pfn;
            }
            Resolution::Pending(ticket) | Resolution::Missing(ticket) => {
                host.wait(&ticket).expect("swap-in");
            }
            Resolution::NoMemory => _ = host.reclaim_direct(cache).expect("reclaim"),
            Resolution::Busy => unreachable!("no page is discarded"),
            Resolution::Lost(lost) => panic!("{lost}"),
        }
    }
}

fn resident_faults(pages: u64, rounds: u64, name: &str) {
    let host = host(pages + 4096, Box::new(MemoryStore::new()));
    let mut cache = host.per_cpu_pages().expect("a cache");
    let mut fault = f64::MAX;
    let mut again = f64::MAX;
    for _ in 0..rounds {
        let range = host
            .add_region(PageCount::new(pages), Arc::new(Unmapped))
            .expect("a region");
        let start = Instant::now();
        (0..pages)
            .for_each(|i| _ = touch(&host, page(range.start(), i), Access::Write, &mut cache));
        fault = fault.min(per(pages, start));
        let start = Instant::now();
        (0..pages)
            .for_each(|i| _ = touch(&host, page(range.start(), i), Access::Write, &mut cache));
        again = again.min(per(pages, start));
        host.remove_region(range).expect("removed");
    }
    println!("resolve, empty page, {name}: {fault:.0} ns; resident page: {again:.0} ns");
}

/// Each thread has its own vCPU and region; all share one budget.
fn scaling() {
    const PAGES: u64 = 32768;
    let run = |threads: u64| {
        let mut best = f64::MAX;
        for _ in 0..6 {
            let host = host(threads * PAGES + 4096, Box::new(MemoryStore::new()));
            let start = Instant::now();
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| {
                        let count = PageCount::new(PAGES);
                        let range = host
                            .add_region(count, Arc::new(Unmapped))
                            .expect("a region");
                        let mut cache = host.per_cpu_pages().expect("a cache");
                        for i in 0..PAGES {
                            touch(&host, page(range.start(), i), Access::Write, &mut cache);
                        }
                    });
                }
            });
            best = best.min(per(threads * PAGES, start));
        }
        best
    };
    println!(
        "resolve, empty page, cold: 2 vCPUs do {:.2} times what 1 does",
        run(1) / run(2)
    );
}

/// First touch of 1 GiB with `huge` pages, with a fault every `step` pages. Returns medians in
/// nanoseconds: of a fault, and of a fault without the zeroing of whole blocks.
fn first_touch(huge: HugePages, step: u64) -> (u64, u64) {
    const PAGES: u64 = 1 << 18;
    let host = host_with(PAGES + 16384, Box::new(MemoryStore::new()), huge);
    let real = host.pool_huge_bytes().map(|bytes| bytes >> 20);
    println!("pool: {real:?} MiB of it in huge pages");
    let mut cache = host.per_cpu_pages().expect("a cache");
    let (mut totals, mut faults) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let count = PageCount::new(PAGES);
        let range = host
            .add_region(count, Arc::new(Unmapped))
            .expect("a region");
        let mut zeroed = host.stats().zeroing_ns;
        for i in (0..PAGES).step_by(step as usize) {
            let addr = page(range.start(), i);
            let start = Instant::now();
            let found = host.resolve(addr, Access::Write, Level::L2M, &mut cache);
            let total = start.elapsed().as_nanos() as u64;
            assert!(matches!(found, Resolution::Ready(_)));
            cache.unpin_all();
            let zeroing = host.stats().zeroing_ns;
            totals.push(total);
            faults.push(total - (zeroing - zeroed));
            zeroed = zeroing;
        }
        host.remove_region(range).expect("removed");
    }
    (median(totals), median(faults))
}

fn median(mut all: Vec<u64>) -> u64 {
    let middle = all.len() / 2;
    *all.select_nth_unstable(middle).1
}

fn huge_faults() {
    let (total, fault) = first_touch(HugePages::Always, 512);
    let total = total / 1000;
    println!("first touch of a block: {total} us, {fault} ns of it without the zeroing");
    let (total, _) = first_touch(HugePages::Never, 1);
    let all = total * 512 / 1000;
    println!("first touch of its 512 pages: {all} us, {total} ns each, zeroing included");
}

fn zeroing(pages: usize, size: usize, name: &str) {
    let mut memory = vec![1u8; pages * PAGE_SIZE];
    let mut best = f64::MAX;
    for _ in 0..20 {
        let start = Instant::now();
        for page in memory.chunks_mut(size) {
            std::hint::black_box(page).fill(0);
        }
        best = best.min(per(pages as u64, start));
    }
    println!("zeroing alone, {name}: {best:.0} ns a page");
}

fn swap(name: &str, store: Box<dyn SwapStore>) {
    const BUDGET: u64 = 4096;
    const PAGES: u64 = 3 * BUDGET;
    let host = host(BUDGET, store);
    let range = host
        .add_region(PageCount::new(PAGES), Arc::new(Unmapped))
        .expect("a region");
    let mut cache = host.per_cpu_pages().expect("a cache");
    let start = Instant::now();
    for i in 0..PAGES {
        let pfn = touch(&host, page(range.start(), i), Access::Write, &mut cache);
        host.frame(pfn)
            .write(0, &(i + 1).to_le_bytes().repeat(PAGE_SIZE / 8));
    }
    let out = host.stats().swapped_out as f64 / start.elapsed().as_secs_f64();
    println!("{name}: swap-out, direct reclaim: {out:.0} pages/s");
    // In random order: the device has written neighbours one after the other.
    let mut rng = fastrand::Rng::with_seed(1);
    let before = host.stats().swapped_in;
    let start = Instant::now();
    for _ in 0..PAGES {
        touch(
            &host,
            page(range.start(), rng.u64(0..PAGES)),
            Access::Read,
            &mut cache,
        );
    }
    let each = per(host.stats().swapped_in - before, start) / 1000.0;
    println!("{name}: swap-in by the waiter, one at a time: {each:.1} us a page");
    let before = host.stats().swapped_in;
    let start = Instant::now();
    for _ in 0..PAGES / 16 {
        let tickets: Vec<Ticket> = (0..16)
            .filter_map(|_| {
                let addr = page(range.start(), rng.u64(0..PAGES));
                match host.resolve(addr, Access::Read, Level::L4K, &mut cache) {
                    Resolution::Pending(ticket) => Some(ticket),
                    Resolution::NoMemory => {
                        let _ = host.reclaim_direct(&mut cache).expect("reclaim");
                        None
                    }
                    _ => None,
                }
            })
            .collect();
        cache.unpin_all();
        tickets.iter().for_each(|ticket| host.start(ticket));
        tickets
            .iter()
            .for_each(|ticket| host.wait(ticket).expect("swap-in"));
    }
    let each = per(host.stats().swapped_in - before, start) / 1000.0;
    println!("{name}: swap-in by readers, 16 at a time: {each:.1} us a page");
}

fn main() {
    let dir = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let dir = dir.unwrap_or_else(|| std::env::temp_dir().display().to_string());
    zeroing(256, PAGE_SIZE, "warm");
    zeroing(65536, PAGE_SIZE, "cold");
    zeroing(65536, 512 * PAGE_SIZE, "cold, 2 MiB at once");
    resident_faults(256, 200, "warm");
    resident_faults(65536, 8, "cold");
    scaling();
    huge_faults();
    let capacity = PageCount::new(1 << 16);
    swap(
        "file",
        Box::new(FileStore::create(Path::new(&dir), capacity).expect("a swap file")),
    );
    swap("memory", Box::new(MemoryStore::new()));
}
