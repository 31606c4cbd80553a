//! Blocks of pages in use by vCPUs are made, split and collapsed.

use super::vcpu::{Fixture, Polls, add_region};
use super::{THREADS, slow};
use lacuna_addr::{Level, PageCount};
use lacuna_host::{HostConfig, HugePages, MemoryStore, SwapStore};
use lacuna_sync::HostClock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Blocks are made, split, and collapsed under the vCPUs that use them. Memory is short, but some
/// is free whenever another VM ends.
fn stress_huge(swap: Box<dyn SwapStore>, accesses: usize) {
    let config = |clock: Arc<HostClock>| HostConfig {
        budget: PageCount::new(6 * 512 + 100),
        huge: HugePages::Always,
        swap,
        io: THREADS,
        clock,
    };
    let fixture = Fixture::new(config, 8 * 512 + 10, Polls::Never);
    let background = fixture.host.spawn_background().unwrap();
    let running = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let vcpus: Vec<_> = (0..3)
            .map(|first| {
                let vcpu = fixture.vcpu(first);
                scope.spawn(move || vcpu.run(accesses))
            })
            .collect();
        scope.spawn(|| {
            while running.load(Ordering::Relaxed) {
                let _ = fixture.host.collapse_step();
            }
        });
        scope.spawn(|| {
            while running.load(Ordering::Relaxed) {
                let (stage2, range) = add_region(&fixture.host, 2 * 512);
                let mut vcpu = fixture.vcpu(0);
                (vcpu.stage2, vcpu.range, vcpu.step) = (stage2, range, 1);
                vcpu.run(3000);
                fixture.host.remove_region(range).unwrap();
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let ended: Vec<_> = vcpus.into_iter().map(|vcpu| vcpu.join()).collect();
        running.store(false, Ordering::Relaxed);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    drop(background);
    let stats = fixture.host.stats();
    assert!(stats.huge_faults > 0 && stats.splits > 0, "{stats:?}");
    fixture.finish();
}

/// Pages are collapsed to blocks under the vCPUs that write to them; there is memory for all.
#[test]
fn three_vcpus_while_their_pages_become_blocks() {
    const PAGES: u64 = 4 * 512;
    let config = |clock: Arc<HostClock>| HostConfig {
        budget: PageCount::new(16 * 512),
        huge: HugePages::Always,
        swap: Box::new(MemoryStore::new()),
        io: THREADS,
        clock,
    };
    let mut fixture = Fixture::new(config, PAGES, Polls::Never);
    // The number of collapsed blocks in a round depends on how the threads are scheduled.
    let end = Instant::now() + Duration::from_secs(60);
    let mut rounds = 0;
    while rounds < 12 || fixture.host.stats().collapses <= 12 && Instant::now() < end {
        rounds += 1;
        let running = AtomicBool::new(true);
        std::thread::scope(|scope| {
            let vcpus = [0, 1, 2].map(|first| {
                let mut vcpu = fixture.vcpu(first);
                vcpu.max_level = Level::L4K;
                scope.spawn(move || vcpu.run(8_000))
            });
            scope.spawn(|| {
                while running.load(Ordering::Relaxed) {
                    let _ = fixture.host.collapse_step();
                }
            });
            let ended = vcpus.map(|vcpu| vcpu.join());
            running.store(false, Ordering::Relaxed);
            ended.into_iter().for_each(|ended| ended.unwrap());
        });
        fixture.host.verify();
        fixture.host.remove_region(fixture.range).unwrap();
        (fixture.stage2, fixture.range) = add_region(&fixture.host, PAGES);
    }
    let stats = fixture.host.stats();
    assert!(stats.collapses > 12, "{stats:?}");
    assert_eq!(stats.huge_faults, 0, "{stats:?}");
}

#[test]
fn three_vcpus_in_huge_pages_on_compressed_memory() {
    stress_huge(Box::new(MemoryStore::new()), 60_000);
}

#[test]
fn three_vcpus_in_huge_pages_on_a_slow_device() {
    stress_huge(Box::new(slow(MemoryStore::new())), 10_000);
}
