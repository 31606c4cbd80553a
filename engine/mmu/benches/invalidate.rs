//! The cost of invalidating one huge page, in nanoseconds, for every rmap walk strategy: the
//! reverse map's work alone, and the whole invalidation with the shoot-down of an idle vCPU: `cargo
//! bench -p lacuna-mmu --features comparisons`.

use lacuna_addr::{Access, BackingAddr, BackingRange, Gfn, PAGE_SIZE, PageCount};
use lacuna_host::{Host, HostConfig, HugePages, Io, MemoryStore, MmuNotifier};
use lacuna_mmu::{Mmu, Outcome, RmapWalk, SlotSpec, VcpuMmu};
use lacuna_slots::{SlotFlags, SlotId};
use lacuna_sync::{HostClock, Qsbr};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: u64 = 512;

fn main() {
    for count in [1, 8, 64, 512] {
        let (mmu, mut vcpu, backing) = world(count);
        let block = BackingRange::new(backing, BLOCK).expect("a block");
        for walk in RmapWalk::ALL {
            let rounds = match walk {
                RmapWalk::PageLoop | RmapWalk::RangeThenPages => 300,
                RmapWalk::PerLevel | RmapWalk::Walk => 30_000,
            };
            let (mut work, mut whole) = (Vec::new(), Vec::new());
            let mut steps = None;
            for _ in 0..rounds {
                map(&mmu, &mut vcpu);
                let start = Instant::now();
                let begun = mmu.begin_invalidation_as(walk, &[block]);
                work.push(start.elapsed());
                steps = Some(begun.steps());
                begun.finish();
                whole.push(start.elapsed());
            }
            let steps = steps.expect("a round");
            println!(
                "{count:3} slots, {:15} work {:7} ns, whole {:7} ns: {} slots, {} words, \
                 {} entries, {} leaf",
                format!("{walk:?}:"),
                median(&mut work),
                median(&mut whole),
                steps.slots,
                steps.words,
                steps.entries,
                steps.leaves,
            );
        }
    }
    let mut clock: Vec<_> = (0..10_000).map(|_| Instant::now().elapsed()).collect();
    println!("of that, reading the clock: {} ns", median(&mut clock));
}

fn median(times: &mut [Duration]) -> u128 {
    times.sort_unstable();
    times[times.len() / 2].as_nanos()
}

/// `count` slots of two blocks, side by side in the guest and in the backing.
fn world(count: u16) -> (Arc<Mmu>, VcpuMmu, BackingAddr) {
    let host = Host::new(HostConfig {
        budget: PageCount::new(16 * BLOCK),
        huge: HugePages::Always,
        swap: Box::new(MemoryStore::new()),
        io: Io::Threads { readers: 1 },
        clock: Arc::new(HostClock::default()),
    })
    .expect("a small host");
    let mmu = Mmu::new(Arc::clone(&host), Arc::new(Qsbr::new(1)), 4096).expect("an MMU");
    let pages = PageCount::new(u64::from(count) * 2 * BLOCK);
    let notifier = Arc::clone(&mmu) as Arc<dyn MmuNotifier>;
    let backing = host.add_region(pages, notifier).expect("a region");
    for id in 0..count {
        let first = u64::from(id) * 2 * BLOCK;
        let spec = SlotSpec {
            id: SlotId(id),
            guest: first * PAGE_SIZE as u64,
            backing: backing.start().checked_add_pages(first).expect("inside"),
            bytes: 2 * BLOCK * PAGE_SIZE as u64,
            flags: SlotFlags::empty(),
        };
        mmu.add_slot(spec).expect("room");
    }
    let vcpu = mmu.vcpu_mmu().expect("the budget is large enough");
    (mmu, vcpu, backing.start())
}

fn map(mmu: &Mmu, vcpu: &mut VcpuMmu) {
    let first = Gfn::new(0).expect("zero is a frame");
    let Outcome::Mapped(page) = black_box(mmu.fault(vcpu, first, Access::Read)) else {
        panic!("no other thread is here");
    };
    assert_eq!(page.level.pages(), BLOCK, "the host has blocks");
    vcpu.retired();
}
