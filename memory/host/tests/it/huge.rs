//! Huge pages: when they are made, what survives memory pressure, which blocks are collapsed again.

use crate::common;

use common::{FakeMmu, Use, Vm, huge_host};
use lacuna_addr::{Access, BackingRange, Level, PageCount, Pfn};
use lacuna_host::{
    Collapse, FaultyStore, Frame, Host, HostError, HugePages, MmuNotifier, Resolution,
};
use lacuna_sync::VirtualClock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

const BLOCK: u64 = 512;

fn host(budget: u64, huge: HugePages) -> (Arc<Host>, Arc<VirtualClock>) {
    let store = Box::new(FaultyStore::new(PageCount::new(100_000)));
    huge_host(budget, store, huge)
}

fn write_all(vm: &mut Vm, pages: impl Iterator<Item = u64>) {
    pages.for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
}

#[test]
fn one_fault_makes_a_block() {
    let (host, clock) = host(4096, HugePages::Always);
    let mut vm = Vm::new(&host, &clock, 2 * BLOCK + 100);
    let first = vm.fault(3, Access::Read).unwrap();
    let other = vm.fault(500, Access::Write).unwrap();
    assert_eq!((first.level, other.level), (Level::L2M, Level::L2M));
    assert_eq!(first.pfn.get() + 497, other.pfn.get());
    assert_eq!(first.pfn.get() % BLOCK, 3);
    let stats = host.stats();
    assert_eq!((stats.huge_pages, stats.huge_faults), (1, 1));
    assert_eq!((stats.resident, stats.faults_zero_fill), (BLOCK, 0));
    write_all(&mut vm, 0..2 * BLOCK + 100);
    assert_eq!(host.stats().huge_pages, 2, "the tail is no whole block");
    assert_eq!(vm.mapped_huge(), 2);
    host.verify();
    vm.check_all();
    let mut word = [0; 8];
    host.peek(vm.addr(700), &mut word).unwrap();
    assert_eq!(u64::from_le_bytes(word), 701);
    host.copy_in(vm.addr(700), &7u64.to_le_bytes()).unwrap();
    host.copy_out(vm.addr(700), &mut word).unwrap();
    assert_eq!(u64::from_le_bytes(word), 7);
    host.verify();
    host.remove_region(vm.range).unwrap();
    assert_eq!((host.stats().resident, host.stats().huge_pages), (0, 0));
    host.verify();
}

#[test]
fn the_policy_and_what_can_be_mapped_decide() {
    for (huge, max_level) in [
        (HugePages::Never, Level::L2M),
        (HugePages::Madvise, Level::L2M),
        (HugePages::Always, Level::L4K),
    ] {
        let (host, clock) = host(4096, huge);
        let mut vm = Vm::new(&host, &clock, 2 * BLOCK);
        vm.max_level = max_level;
        write_all(&mut vm, 0..2 * BLOCK);
        let stats = host.stats();
        assert_eq!((stats.huge_pages, stats.huge_fallbacks), (0, 0), "{huge:?}");
        host.verify();
    }
}

#[test]
fn advice_is_for_the_blocks_that_lie_inside() {
    let (host, clock) = host(4096, HugePages::Madvise);
    let mut vm = Vm::new(&host, &clock, 4 * BLOCK);
    let advised = BackingRange::new(vm.addr(1), 2 * BLOCK).unwrap();
    host.advise_huge(advised).unwrap();
    let beyond = BackingRange::new(vm.addr(1), 4 * BLOCK).unwrap();
    let refused = host.advise_huge(beyond);
    assert!(matches!(refused, Err(HostError::NoSuchRegion(_))));
    for block in 0..4 {
        let level = vm.fault(block * BLOCK, Access::Write).unwrap().level;
        let inside = block == 1;
        assert_eq!(level == Level::L2M, inside, "block {block}");
    }
    host.verify();
}

/// A huge page is made only while many frames are free: the last frames are for single pages.
#[test]
fn with_few_free_frames_pages_are_small() {
    for budget in [400, 512 + 31, 3 * BLOCK + 10] {
        let (host, clock) = host(budget, HugePages::Always);
        let mut vm = Vm::new(&host, &clock, 8 * BLOCK);
        write_all(&mut vm, 0..8 * BLOCK);
        let stats = host.stats();
        let most = (budget / BLOCK).saturating_sub(1);
        assert!(stats.huge_faults <= most, "{budget}: {stats:?}");
        assert_eq!(stats.huge_faults + stats.huge_fallbacks, 8);
        vm.check_all();
        host.verify();
    }
}

/// A first touch by a read gives zeros, which are never written to the device.
#[test]
fn a_block_only_read_is_never_written() {
    let (host, clock) = host(3 * BLOCK, HugePages::Always);
    let mut vm = Vm::new(&host, &clock, 8 * BLOCK);
    (0..8 * BLOCK).for_each(|page| vm.touch(page, Use::Read).unwrap());
    let stats = host.stats();
    assert!(stats.splits > 0 && stats.clean_dropped > 0, "{stats:?}");
    assert_eq!((stats.swapped_out, stats.zero_dropped), (0, 0));
}

/// Cold blocks are evicted, in the end completely. A block in use stays whole.
#[test]
fn cold_blocks_are_split_and_hot_blocks_stay_whole() {
    let (host, clock) = host(8 * BLOCK, HugePages::Always);
    let mut vm = Vm::new(&host, &clock, 20 * BLOCK);
    write_all(&mut vm, 0..6 * BLOCK);
    assert_eq!(host.stats().huge_pages, 6);
    for page in 6 * BLOCK..20 * BLOCK {
        // All pages of block 2 are in use, and none of the others.
        vm.touch(2 * BLOCK + page % BLOCK, Use::Read).unwrap();
        vm.touch(page, Use::Write(page)).unwrap();
    }
    host.verify();
    let stats = host.stats();
    assert!(stats.splits >= 5, "{stats:?}");
    assert_eq!(vm.fault(2 * BLOCK, Access::Read).unwrap().level, Level::L2M);
    vm.check_all();
}

/// A block with a few pages in use looks as young as any other. If such blocks were always spared,
/// small pages would be thrashed in the remaining memory. A sampled split lets reclaim evict the
/// blocks' cold pages.
#[test]
fn mostly_cold_blocks_are_split() {
    let (host, clock) = host(8 * BLOCK, HugePages::Always);
    let mut vm = Vm::new(&host, &clock, 12 * BLOCK);
    write_all(&mut vm, 0..7 * BLOCK);
    assert!(host.stats().huge_pages >= 6);
    // In use: 3 blocks' worth of small pages, and 20 pages of each whole block.
    let mut reads = 0;
    for round in 0..30 {
        if round == 20 {
            reads = host.stats().swapped_in;
        }
        for page in 8 * BLOCK..11 * BLOCK {
            vm.touch(page, Use::Write(page)).unwrap();
            vm.touch(page % 7 * BLOCK + page % 20, Use::Read).unwrap();
        }
    }
    let stats = host.stats();
    assert!(stats.splits > 0, "{stats:?}");
    let late = stats.swapped_in - reads;
    assert!(late < 100, "{late} pages thrashed: {stats:?}");
    host.verify();
    vm.check_all();
}

/// A sampled split that finds all pages in use ends with the old block: no page has moved.
#[test]
fn a_block_in_use_everywhere_survives_its_trials() {
    let (host, clock) = host(8 * BLOCK, HugePages::Always);
    let mut vm = Vm::new(&host, &clock, 20 * BLOCK);
    write_all(&mut vm, 0..3 * BLOCK);
    // More small pages than fit, again and again, so that they are always read back.
    let small = 4 * BLOCK..14 * BLOCK;
    for round in 0..12 {
        for page in small.clone() {
            (0..3).for_each(|block| {
                let page = block * BLOCK + page % BLOCK;
                vm.touch(page, Use::Write(page + round)).unwrap();
            });
            vm.touch(page, Use::Write(page)).unwrap();
        }
    }
    let stats = host.stats();
    assert!(stats.collapses > 0, "{stats:?}");
    let whole = |block: u64, vm: &mut Vm| {
        let frame = vm.fault(block * BLOCK, Access::Read).unwrap();
        u32::from(frame.level == Level::L2M)
    };
    let kept: u32 = (0..3).map(|block| whole(block, &mut vm)).sum();
    assert!(kept >= 2, "{kept} of 3: {stats:?}");
    host.verify();
    vm.check_all();
}

#[test]
fn pages_in_use_become_a_block() {
    let (host, clock) = host(8 * BLOCK, HugePages::Always);
    let mut vm = Vm::new(&host, &clock, 3 * BLOCK);
    vm.max_level = Level::L4K;
    // Block 0 is full and in use, block 1 lacks a few pages, block 2 has few pages.
    write_all(&mut vm, 0..2 * BLOCK - 20);
    write_all(&mut vm, 2 * BLOCK..2 * BLOCK + 50);
    vm.cache.flush();
    assert_eq!(host.collapse_step(), Collapse::Made);
    assert_eq!(host.collapse_step(), Collapse::Made);
    assert_eq!(host.collapse_step(), Collapse::Idle);
    host.verify();
    let stats = host.stats();
    assert_eq!((stats.collapses, stats.huge_pages), (2, 2));
    assert_eq!(stats.resident, 2 * BLOCK + 50);
    vm.check_all();
    for block in 0..3 {
        let level = vm.fault(block * BLOCK, Access::Read).unwrap().level;
        assert_eq!(level == Level::L2M, block < 2);
    }
    // A copied page is as dirty as before: under pressure it is written, and read back.
    let mut other = Vm::new(&host, &clock, 20 * BLOCK);
    write_all(&mut other, 0..20 * BLOCK);
    vm.check_all();
    host.verify();
}

#[test]
fn pages_not_in_use_are_left_alone() {
    let (host, clock) = host(8 * BLOCK, HugePages::Always);
    let mut vm = Vm::new(&host, &clock, BLOCK);
    vm.max_level = Level::L4K;
    write_all(&mut vm, 0..BLOCK);
    let all: Vec<_> = (0..BLOCK)
        .map(|page| BackingRange::new(vm.addr(page), 1).unwrap())
        .collect();
    vm.mmu.age(&all, &mut vec![false; BLOCK as usize]);
    assert_eq!(host.collapse_step(), Collapse::Looked);
    assert_eq!(host.stats().huge_pages, 0);
    host.verify();
}

/// A listener whose guest writes to a page during the block's unmapping.
#[derive(Default)]
struct Writer {
    mmu: FakeMmu,
    host: OnceLock<Weak<Host>>,
    armed: AtomicBool,
}

impl MmuNotifier for Writer {
    fn invalidate(&self, ranges: &[BackingRange]) {
        self.mmu.invalidate(ranges);
        if !self.armed.swap(false, Ordering::Relaxed) {
            return;
        }
        let host = self.host.get().and_then(Weak::upgrade).unwrap();
        let mut cache = host.per_cpu_pages().unwrap();
        let page = ranges[0].start().checked_add_pages(9).unwrap();
        let found = host.resolve(page, Access::Write, Level::L2M, &mut cache);
        let Resolution::Ready(Frame { pfn, level }) = found else {
            panic!("{found:?}");
        };
        assert_eq!(level, Level::L4K);
        host.frame(pfn).write(0, &99u64.to_le_bytes());
    }

    fn age(&self, _: &[BackingRange], young: &mut [bool]) {
        young.fill(true);
    }

    fn split_huge(&self, range: BackingRange) {
        self.mmu.split_huge(range);
    }

    fn end_of_aging(&self) {}
}

#[test]
fn a_page_taken_back_prevents_the_collapse() {
    let (host, _) = host(8 * BLOCK, HugePages::Always);
    let writer = Arc::new(Writer::default());
    writer.mmu.belongs_to(&host);
    writer.host.set(Arc::downgrade(&host)).unwrap();
    let count = PageCount::new(BLOCK);
    let range = host.add_region(count, writer.clone()).unwrap();
    let at = |page| range.start().checked_add_pages(page).unwrap();
    // In reverse order, so that the pages are not in their places.
    let pages = (0..BLOCK).rev();
    pages.for_each(|page| host.copy_in(at(page), &page.to_le_bytes()).unwrap());
    writer.armed.store(true, Ordering::Relaxed);
    assert_eq!(host.collapse_step(), Collapse::Looked);
    let stats = host.stats();
    assert_eq!((stats.collapse_failures, stats.faults_rescued), (1, 1));
    host.verify();
    assert_eq!(host.collapse_step(), Collapse::Idle);
    assert_eq!(host.collapse_step(), Collapse::Made);
    host.verify();
    for page in 0..BLOCK {
        let mut word = [0; 8];
        host.copy_out(at(page), &mut word).unwrap();
        let want = if page == 9 { 99 } else { page };
        assert_eq!(u64::from_le_bytes(word), want);
    }
}

/// A mark by a leaf that mapped the whole block counts for all of its pages, even if the block was
/// split long before.
#[test]
fn a_late_mark_on_a_block_counts_for_its_pages() {
    let (host, clock) = host(4 * BLOCK, HugePages::Always);
    let mut vm = Vm::new(&host, &clock, 10 * BLOCK);
    let frame = vm.fault(0, Access::Read).unwrap();
    vm.cache.unpin_all();
    (0..BLOCK).for_each(|i| {
        let pfn = Pfn::new((frame.pfn.get() + i) as u32);
        host.frame(pfn).write(0, &(i + 1).to_le_bytes());
    });
    // Nothing was mapped: only this call reports the writes.
    host.mark_dirty(frame.pfn, Level::L2M);
    write_all(&mut vm, BLOCK..10 * BLOCK);
    for page in 0..BLOCK {
        let mut word = [0; 8];
        host.copy_out(vm.addr(page), &mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), page + 1);
    }
    host.verify();
}

#[test]
fn the_kernel_says_how_much_of_the_pool_is_huge() {
    let (host, _) = host(4096, HugePages::Always);
    if let Some(bytes) = host.pool_huge_bytes() {
        assert!(bytes <= 4096 * 4096, "{bytes}");
    }
}
