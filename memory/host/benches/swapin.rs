//! The CPU time that a swap-in takes from vCPUs that do not wait for it: `cargo bench -p
//! lacuna-host --bench swapin` (argument: a directory for the swap file).
//!
//! Two vCPU threads compute, in pieces of 20 us. Between pieces each takes in the arrived pages,
//! and faults on others until `n` are in flight. The pages are random, at 4 times overcommit; a
//! background thread reclaims. A page costs the CPU time of the whole process less the computing.
//! So the cost includes reading, reclaim, interrupts and wake-ups, on any thread.

use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount};
use lacuna_host::{
    FileStore, Frame, Host, HostConfig, HugePages, Io, Latency, MemoryStore, MmuNotifier,
    PerCpuPages, Resolution, SwapStore,
};
use lacuna_sync::{Clock, HostClock, LatencySetting};
use rustix::time::{ClockId, clock_gettime};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const BUDGET: u64 = 8192;
const PAGES: u64 = 4 * BUDGET;
const VCPUS: u64 = 2;

/// A listener for a host whose pages are mapped nowhere.
struct Unmapped;

impl MmuNotifier for Unmapped {
    fn invalidate(&self, _ranges: &[BackingRange]) {}
    fn age(&self, _ranges: &[BackingRange], _young: &mut [bool]) {}
    fn split_huge(&self, _range: BackingRange) {}
    fn end_of_aging(&self) {}
}

/// How an arrived page is reported to vCPUs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Notice {
    /// A device thread wakes up for it.
    Thread,
    /// The vCPUs poll.
    Poll,
}

/// Which pages are written to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Writes {
    None,
    Half,
}

/// About 20 us of computing.
fn compute(seed: u64) -> u64 {
    (0..28000u64).fold(seed, |x, i| std::hint::black_box(x.rotate_left(5) ^ i))
}

/// Seconds of CPU time that the process has used.
fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Seconds of CPU time of a piece of computing when both threads only compute.
fn alone(time: Duration) -> f64 {
    let pieces = AtomicU64::new(0);
    let (start, used) = (Instant::now(), cpu());
    std::thread::scope(|scope| {
        for _ in 0..VCPUS {
            scope.spawn(|| {
                while start.elapsed() < time {
                    compute(1);
                    pieces.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    (cpu() - used) / pieces.into_inner() as f64
}

/// The work of a vCPU.
struct Load {
    depth: usize,
    writes: Writes,
    notice: Notice,
}

struct Vcpu<'a> {
    host: &'a Host,
    range: BackingRange,
    cache: PerCpuPages,
    rng: fastrand::Rng,
    arrived: Arc<Mutex<Vec<(BackingAddr, Access)>>>,
    flying: usize,
    pages: u64,
}

impl<'a> Vcpu<'a> {
    fn new(host: &'a Host, range: BackingRange, seed: u64) -> Self {
        Self {
            host,
            range,
            cache: host.per_cpu_pages().expect("a cache"),
            rng: fastrand::Rng::with_seed(seed),
            arrived: Arc::default(),
            flying: 0,
            pages: 0,
        }
    }

    /// One fault: uses the page if it is resident, and starts its read if not.
    fn fault(&mut self, addr: BackingAddr, access: Access) {
        loop {
            match self.host.resolve(addr, access, Level::L4K, &mut self.cache) {
                Resolution::Ready(Frame { pfn, .. }) => {
                    if access == Access::Write {
                        let value = self.rng.u64(1..).to_le_bytes();
                        self.host.frame(pfn).write(0, &value.repeat(PAGE_SIZE / 8));
                    }
                    break;
                }
                Resolution::Pending(ticket) | Resolution::Missing(ticket) => {
                    let arrived = self.arrived.clone();
                    ticket.on_done(move || {
                        arrived.lock().expect("no panic").push((addr, access));
                    });
                    self.host.start(&ticket);
                    self.flying += 1;
                    self.pages += 1;
                    break;
                }
                Resolution::NoMemory => {
                    let _ = self.host.reclaim_direct(&mut self.cache).expect("reclaim");
                }
                Resolution::Busy => unreachable!("no page is discarded"),
                Resolution::Lost(lost) => panic!("{lost}"),
            }
        }
        self.cache.unpin_all();
    }

    fn random(&mut self, writes: Writes) {
        let page = self.rng.u64(0..PAGES);
        let addr = self.range.start().checked_add_pages(page).expect("inside");
        let access = match writes {
            Writes::Half if self.rng.bool() => Access::Write,
            _ => Access::Read,
        };
        self.fault(addr, access);
    }

    fn run(&mut self, load: &Load, clock: &dyn Clock, time: Duration) -> u64 {
        let start = Instant::now();
        let polling = (load.notice == Notice::Poll).then(|| self.host.polling());
        let mut pieces = 0;
        let mut faults = 0;
        while start.elapsed() < time {
            compute(1);
            pieces += 1;
            if polling.is_some() {
                self.host.poll(clock.now());
            }
            let arrived = std::mem::take(&mut *self.arrived.lock().expect("no panic"));
            self.flying -= arrived.len();
            for (addr, access) in arrived {
                self.fault(addr, access);
            }
            faults = 0;
            while self.flying < load.depth && faults < 4 * load.depth {
                self.random(load.writes);
                faults += 1;
            }
        }
        std::hint::black_box(faults);
        drop(polling);
        while self.arrived.lock().expect("no panic").len() < self.flying {
            std::thread::sleep(Duration::from_millis(1));
        }
        pieces
    }
}

struct Setup {
    name: &'static str,
    io: Io,
    notice: Notice,
}

fn measure(io: Io, store: Box<dyn SwapStore>, load: &Load, alone: f64) {
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let host = Host::new(HostConfig {
        budget: PageCount::new(BUDGET),
        huge: HugePages::Never,
        swap: store,
        io,
        clock: clock.clone(),
    })
    .expect("a host for the benchmark");
    let range = host
        .add_region(PageCount::new(PAGES), Arc::new(Unmapped))
        .expect("a region");
    let background = host.spawn_background().expect("a thread");
    let mut filler = Vcpu::new(&host, range, 1);
    for page in 0..PAGES {
        filler.fault(
            range.start().checked_add_pages(page).expect("inside"),
            Access::Write,
        );
    }
    drop(filler);
    let run = |time: Duration| -> u64 {
        let (host, load, clock) = (&*host, load, &*clock);
        let vcpu = move |seed| Vcpu::new(host, range, seed).run(load, clock, time);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..VCPUS)
                .map(|i| scope.spawn(move || vcpu(7 + i)))
                .collect();
            let pieces = threads.into_iter().map(|t| t.join().expect("no panic"));
            pieces.sum()
        })
    };
    // Runs until only the load's pages are dirty.
    run(Duration::from_secs(1));
    let (before, start, used) = (host.stats(), Instant::now(), cpu());
    let pieces = run(Duration::from_secs(2));
    let seconds = start.elapsed().as_secs_f64();
    let after = host.stats();
    let pages = (after.swapped_in - before.swapped_in) as f64;
    let lost = cpu() - used - pieces as f64 * alone;
    println!(
        "{:6.0} pages/s, {:5.1} us CPU a page, {:2.0} % computing, {:.2} written",
        pages / seconds,
        lost / pages * 1e6,
        100.0 * pieces as f64 * alone / seconds / VCPUS as f64,
        (after.swapped_out - before.swapped_out) as f64 / pages,
    );
    drop(background);
}

const SETUPS: [Setup; 3] = [
    Setup {
        name: "threads",
        io: Io::Threads { readers: 8 },
        notice: Notice::Thread,
    },
    Setup {
        name: "ring, reaper",
        io: Io::Ring { readers: 2 },
        notice: Notice::Thread,
    },
    Setup {
        name: "ring, polled",
        io: Io::Ring { readers: 2 },
        notice: Notice::Poll,
    },
];

/// Arguments: a directory for the swap file, and the lines to measure, by parts of their names.
fn main() {
    let mut args = std::env::args().skip(1).filter(|a| !a.starts_with("--"));
    let dir = args.next();
    let dir = dir.unwrap_or_else(|| std::env::temp_dir().display().to_string());
    let only: Vec<String> = args.collect();
    let alone = alone(Duration::from_secs(1));
    println!("a piece of computing: {:.1} us", alone * 1e6);
    let file = || FileStore::create(Path::new(&dir), PageCount::new(2 * PAGES)).expect("a file");
    let slow = || Latency::new(file(), LatencySetting::new(Duration::from_millis(1)));
    type Store<'a> = Box<dyn Fn() -> Box<dyn SwapStore> + 'a>;
    let media: [(&str, Writes, Store<'_>); 4] = [
        ("file, reads", Writes::None, Box::new(|| Box::new(file()))),
        ("file, writes", Writes::Half, Box::new(|| Box::new(file()))),
        ("1 ms, writes", Writes::Half, Box::new(|| Box::new(slow()))),
        (
            "memory, writes",
            Writes::Half,
            Box::new(|| Box::new(MemoryStore::new())),
        ),
    ];
    for (medium, writes, store) in &media {
        for setup in &SETUPS {
            for depth in [1, 4, 16, 32] {
                let name = format!("{medium:14} {:12} {:2}", setup.name, 2 * depth);
                if only.iter().all(|part| name.contains(part)) {
                    let load = Load {
                        depth,
                        writes: *writes,
                        notice: setup.notice,
                    };
                    print!("{name} in flight: ");
                    measure(setup.io.clone(), store(), &load, alone);
                }
            }
        }
    }
}
