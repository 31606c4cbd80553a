//! The cost of a fault in each table format, in nanoseconds a page: `cargo bench -p lacuna-mmu
//! --bench fault`.
//!
//! The model vCPU walks, faults, and waits for a page from swap itself. It has no TLB and no guest.
//! The formats take turns, so that other load on the machine affects both. This tool compares two
//! commits, or the formats, on one machine. It is not a test.
//!
//! `thp.first_touch_ratio` is the time of a first touch by 4 KiB pages over the one by 2 MiB pages.
//! `thp.first_touch_fault_ratio` is the same without the zeroing. The host measures the zeroing of
//! 2 MiB pages itself. For 4 KiB pages, reading the clock would take as long as a fault: as many
//! pages are filled with zeros in the same way, and that time is subtracted.

use lacuna_addr::{Access, BackingRange, Gfn, Level, PAGE_SIZE, PageCount};
use lacuna_host::{Host, HostConfig, HugePages, Io, MemoryStore, MmuNotifier};
use lacuna_mmu::{Mmu, MmuFormat, Outcome, SlotSpec, VcpuMmu};
use lacuna_slots::{SlotFlags, SlotId};
use lacuna_stage2::{Arm64, Ept, Walk};
use lacuna_sync::{HostClock, Qsbr};
use memmap2::{Advice, MmapMut};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Pages of the slot: 64 MiB.
const PAGES: u64 = 1 << 14;
/// Frames for the watermarks and the per-CPU page cache, which no page of the slot can have.
const SPARE: u64 = 1 << 10;
const ROUNDS: usize = 41;
const SLOT: SlotId = SlotId(1);

fn main() {
    println!("ns a page                 EPT    arm64   arm64 / EPT: median, quartiles");
    compare("first touch", |bench| bench.touch_afresh(), PAGES);
    compare("fault on a resident page", |bench| bench.map_again(), PAGES);
    compare("swap in", |bench| bench.swap_in(), PAGES / 2);
    first_touch();
}

/// 4 KiB pages against 2 MiB pages, in nanoseconds a 4 KiB page. The host has free frames enough to
/// make huge pages.
fn first_touch() {
    let [mut small, mut huge] =
        [HugePages::Never, HugePages::Always].map(|huge| World::<Ept>::new(2 * PAGES, huge));
    // Mapped as the host's frames are: by huge pages where the kernel has them.
    let mut memory = MmapMut::map_anon(PAGES as usize * PAGE_SIZE).expect("memory");
    let _ = memory.advise(Advice::HugePage);
    memory.fill(1);
    let mut best = [f64::INFINITY; 4];
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for page in memory.chunks_exact_mut(PAGE_SIZE) {
            black_box(page).fill(0);
        }
        let zeroing = start.elapsed().as_nanos() as f64 / PAGES as f64;
        let before = huge.host.stats();
        let time = huge.touch_afresh();
        let after = huge.host.stats();
        let blocks = after.huge_faults - before.huge_faults;
        assert_eq!(blocks, PAGES / Level::L2M.pages());
        let huge_zeroing = (after.zeroing_ns - before.zeroing_ns) as f64 / PAGES as f64;
        let round = [small.touch_afresh(), zeroing, time, time - huge_zeroing];
        best = std::array::from_fn(|i| best[i].min(round[i]));
    }
    let [small, zeroing, huge, huge_faults] = best;
    println!("thp.first_touch_ratio: {:.2} x", small / huge);
    let faults = small - zeroing;
    println!("thp.first_touch_fault_ratio: {:.1} x", faults / huge_faults);
}

fn quartiles(mut ratios: Vec<f64>) -> [f64; 3] {
    ratios.sort_unstable_by(f64::total_cmp);
    [1, 2, 3].map(|part| ratios[ROUNDS * part / 4])
}

/// Runs `round` with `resident` frames for the slot's pages, in turns.
fn compare(what: &str, round: impl Fn(&mut dyn Bench) -> f64, resident: u64) {
    let small = HugePages::Never;
    let mut benches = (
        World::<Ept>::new(resident, small),
        World::<Arm64>::new(resident, small),
    );
    let mut ratios = Vec::new();
    let mut best = [f64::INFINITY; 2];
    for _ in 0..ROUNDS {
        // A B B A: a drift of the machine affects both alike.
        let (ept, arm64) = (&mut benches.0, &mut benches.1);
        let times = [round(ept), round(arm64), round(arm64), round(ept)];
        ratios.push((times[1] + times[2]) / (times[0] + times[3]));
        best[0] = best[0].min(times[0]).min(times[3]);
        best[1] = best[1].min(times[1]).min(times[2]);
    }
    let [low, median, high] = quartiles(ratios);
    let [ept, arm64] = best;
    println!("{what:24} {ept:6.1} {arm64:7.1}   {median:.3} [{low:.3} .. {high:.3}]");
}

trait Bench {
    /// Reads every page once, in order. No more than half of them are resident at a time.
    fn swap_in(&mut self) -> f64;
    /// Writes to every page of a new region in a new slot.
    fn touch_afresh(&mut self) -> f64;
    /// Reads every page after all leaves were removed. All pages are resident.
    fn map_again(&mut self) -> f64;
}

struct World<F> {
    host: Arc<Host>,
    mmu: Arc<Mmu<F>>,
    vcpu: VcpuMmu,
    region: BackingRange,
    /// From one touch to the next: a leaf.
    step: u64,
}

impl<F: MmuFormat> World<F> {
    /// A slot with written pages, and one vCPU, which is never online.
    fn new(resident: u64, huge: HugePages) -> Self {
        let host = Host::new(HostConfig {
            budget: PageCount::new(resident + SPARE),
            huge,
            swap: Box::new(MemoryStore::new()),
            io: Io::Threads { readers: 1 },
            clock: Arc::new(HostClock::default()),
        })
        .expect("a small host");
        let mmu = Mmu::new(Arc::clone(&host), Arc::new(Qsbr::new(1)), 4096).expect("an MMU");
        let vcpu = mmu.vcpu_mmu().expect("a large budget");
        let region = add_slot(&host, &mmu);
        let mut world = Self {
            host,
            mmu,
            vcpu,
            region,
            step: if huge == HugePages::Never {
                1
            } else {
                Level::L2M.pages()
            },
        };
        world.touch(Access::Write);
        // Reclaim would drop pages of zeros, and not write them to swap.
        for page in 0..PAGES {
            let at = world.region.start().checked_add_pages(page);
            let written = world.host.copy_in(at.expect("inside the region"), &[1; 64]);
            written.expect("a good device");
        }
        world
    }

    /// Accesses every page once, in order.
    fn touch(&mut self, access: Access) -> f64 {
        let start = Instant::now();
        for page in (0..PAGES).step_by(self.step as usize) {
            self.access(Gfn::new(page).expect("a small address"), access);
        }
        start.elapsed().as_nanos() as f64 / PAGES as f64
    }

    #[inline(never)]
    fn access(&mut self, gfn: Gfn, access: Access) {
        loop {
            if let Walk::Hit(hit) = self.mmu.walk(&mut self.vcpu, gfn, access) {
                black_box(hit);
                break;
            }
            match self.mmu.fault(&mut self.vcpu, gfn, access) {
                Outcome::Mapped(page) => {
                    black_box(page);
                    break;
                }
                Outcome::Pending(ticket) => self.host.wait(&ticket).expect("a good device"),
                Outcome::NoMemory => {
                    let progress = self.host.reclaim_direct(self.vcpu.frames());
                    let _ = progress.expect("swap has room");
                }
                _ => panic!("no page for {gfn}"),
            }
        }
        self.vcpu.retired();
    }
}

impl<F: MmuFormat> Bench for World<F> {
    fn swap_in(&mut self) -> f64 {
        let before = self.host.stats().swapped_in;
        let time = self.touch(Access::Read);
        let read = self.host.stats().swapped_in - before;
        assert!(read > PAGES * 9 / 10, "{read} pages were read");
        time
    }

    fn touch_afresh(&mut self) -> f64 {
        self.mmu.delete_slot(SLOT).expect("it is there");
        self.host.remove_region(self.region).expect("it is there");
        self.region = add_slot(&self.host, &self.mmu);
        self.touch(Access::Write)
    }

    fn map_again(&mut self) -> f64 {
        self.mmu.invalidate(&[self.region]);
        self.touch(Access::Read)
    }
}

impl<F> Drop for World<F> {
    /// The host's region holds the MMU, which holds the host.
    fn drop(&mut self) {
        self.host.remove_region(self.region).expect("it is there");
    }
}

fn add_slot<F: MmuFormat>(host: &Host, mmu: &Arc<Mmu<F>>) -> BackingRange {
    let notifier = Arc::clone(mmu) as Arc<dyn MmuNotifier>;
    let region = host.add_region(PageCount::new(PAGES), notifier);
    let region = region.expect("a region");
    mmu.add_slot(SlotSpec {
        id: SLOT,
        guest: 0,
        backing: region.start(),
        bytes: PAGES * PAGE_SIZE as u64,
        flags: SlotFlags::empty(),
    })
    .expect("room");
    region
}
