//! The cost of an invalidation for every rmap walk strategy: the reverse map's work alone, and the
//! whole invalidation with the shoot-down of an idle vCPU: `cargo bench -p lacuna-mmu --bench
//! invalidate --features comparisons`.
//!
//! The strategies take turns. `thp.range_vs_page.*` is the work page by page over Lacuna's, and
//! `thp.slots_growth_512` is Lacuna's work among 512 slots over that with 1 slot. `null` is
//! Lacuna's strategy once more. Tests assert the counted steps (`src/tests/rmap_walks.rs`).

use lacuna_addr::{Access, BackingAddr, BackingRange, Gfn, Level, PAGE_SIZE, PageCount};
use lacuna_host::{Host, HostConfig, HugePages, Io, MemoryStore, MmuNotifier};
use lacuna_mmu::{Mmu, Outcome, RmapWalk, SlotSpec, VcpuMmu};
use lacuna_slots::{SlotFlags, SlotId};
use lacuna_sync::{HostClock, Qsbr};
use std::sync::Arc;
use std::time::Instant;

const BLOCK: u64 = 512;
const ARMS: [(&str, RmapWalk); 5] = [
    ("per level", RmapWalk::PerLevel),
    ("null", RmapWalk::PerLevel),
    ("page loop", RmapWalk::PageLoop),
    ("range, then pages", RmapWalk::RangeThenPages),
    ("walk", RmapWalk::Walk),
];
const OURS: usize = 0;
const PAGE_LOOP: usize = 2;

/// The invalidated range: the end of an id, its blocks, its leaves, and the rounds.
const WORKS: [(&str, u64, Level, usize); 4] = [
    ("", 1, Level::L2M, 301),
    (".small", 1, Level::L4K, 31),
    (".64m", 32, Level::L2M, 31),
    (".64m_small", 32, Level::L4K, 5),
];

fn main() {
    let mut one_slot = 0.0;
    for (slots, works) in [(1, WORKS.len()), (8, 1), (64, WORKS.len()), (512, 1)] {
        for (suffix, blocks, level, rounds) in &WORKS[..works] {
            let work = measure(slots, *blocks, *level, *rounds);
            let plural = if slots == 1 { "" } else { "s" };
            let ratio = work[PAGE_LOOP] / work[OURS];
            println!("thp.range_vs_page.{slots}slot{plural}{suffix}: {ratio:.1} x\n");
            match (slots, *suffix) {
                (1, "") => one_slot = work[OURS],
                (512, _) => println!("thp.slots_growth_512: {:.2} x", work[OURS] / one_slot),
                _ => {}
            }
        }
    }
}

/// The medians of the work of each arm, in nanoseconds.
fn measure(slots: u16, blocks: u64, level: Level, rounds: usize) -> [f64; ARMS.len()] {
    let (mmu, mut vcpu, backing) = world(slots, blocks, level);
    let range = BackingRange::new(backing, blocks * BLOCK).expect("in the first slot");
    let mut times = [const { [Vec::new(), Vec::new()] }; ARMS.len()];
    for _ in 0..rounds {
        for ((_, walk), [work, whole]) in ARMS.iter().zip(&mut times) {
            map(&mmu, &mut vcpu, blocks, level);
            let start = Instant::now();
            let begun = mmu.begin_invalidation_as(*walk, &[range]);
            work.push(start.elapsed().as_nanos());
            assert_eq!(begun.steps().leaves, blocks * BLOCK / level.pages());
            begun.finish();
            whole.push(start.elapsed().as_nanos());
        }
    }
    let medians = times.map(|times| times.map(median));
    for ((name, _), [work, whole]) in ARMS.iter().zip(medians) {
        println!(
            "{slots:3} slots, {blocks:2} blocks by {level:?}, {name:17} work {work:9} ns, whole \
             {whole:9} ns"
        );
    }
    medians.map(|[work, _]| work as f64)
}

fn median(mut times: Vec<u128>) -> u128 {
    times.sort_unstable();
    times[times.len() / 2]
}

/// `count` slots side by side in the guest and in the backing. Only `blocks` blocks are mapped.
fn world(count: u16, blocks: u64, level: Level) -> (Arc<Mmu>, VcpuMmu, BackingAddr) {
    let huge = match level {
        Level::L4K => HugePages::Never,
        _ => HugePages::Always,
    };
    let host = Host::new(HostConfig {
        budget: PageCount::new((blocks + 32) * BLOCK),
        huge,
        swap: Box::new(MemoryStore::new()),
        io: Io::Threads { readers: 1 },
        clock: Arc::new(HostClock::default()),
    })
    .expect("a small host");
    let mmu = Mmu::new(Arc::clone(&host), Arc::new(Qsbr::new(1)), 4096).expect("an MMU");
    let each = (blocks + 1) * BLOCK;
    let notifier = Arc::clone(&mmu) as Arc<dyn MmuNotifier>;
    let backing = host.add_region(PageCount::new(u64::from(count) * each), notifier);
    let backing = backing.expect("a region");
    for id in 0..count {
        let first = u64::from(id) * each;
        let spec = SlotSpec {
            id: SlotId(id),
            guest: first * PAGE_SIZE as u64,
            backing: backing.start().checked_add_pages(first).expect("inside"),
            bytes: each * PAGE_SIZE as u64,
            flags: SlotFlags::empty(),
        };
        mmu.add_slot(spec).expect("room");
    }
    let vcpu = mmu.vcpu_mmu().expect("the budget is large enough");
    (mmu, vcpu, backing.start())
}

/// Maps the first `blocks` blocks: one fault for each leaf.
fn map(mmu: &Mmu, vcpu: &mut VcpuMmu, blocks: u64, level: Level) {
    for page in (0..blocks * BLOCK).step_by(level.pages() as usize) {
        let gfn = Gfn::new(page).expect("a small address");
        let Outcome::Mapped(page) = mmu.fault(vcpu, gfn, Access::Write) else {
            panic!("no other thread is here");
        };
        assert_eq!(page.level, level, "as the host backs it");
        vcpu.retired();
    }
}
