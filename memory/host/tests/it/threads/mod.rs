//! Real threads and a real file: vCPUs, background reclaim and readers at once.

mod huge;
mod removal;
mod stage2;
mod vcpu;

use lacuna_addr::PageCount;
use lacuna_host::{
    FileStore, HostConfig, HugePages, Io, Latency, LatencySetting, MemoryStore, SwapStore,
};
use lacuna_sync::HostClock;
use std::sync::Arc;
use std::time::Duration;
use vcpu::{Fixture, Polls};

const THREADS: Io = Io::Threads { readers: 2 };
const RING: Io = Io::Ring { readers: 2 };

fn file(dir: &tempfile::TempDir) -> FileStore {
    FileStore::create(dir.path(), PageCount::new(4096)).unwrap()
}

fn slow<S: SwapStore>(store: S) -> Latency<S> {
    Latency::new(store, LatencySetting::new(Duration::from_micros(300)))
}

fn stress(swap: Box<dyn SwapStore>, io: Io, polls: Polls, accesses: usize) {
    let config = |clock: Arc<HostClock>| HostConfig {
        budget: PageCount::new(512),
        huge: HugePages::Never,
        swap,
        io,
        clock,
    };
    let fixture = Fixture::new(config, 2048, polls);
    let background = fixture.host.spawn_background().unwrap();
    std::thread::scope(|scope| {
        for first in 0..3 {
            let vcpu = fixture.vcpu(first);
            scope.spawn(move || vcpu.run(accesses));
        }
    });
    drop(background);
    fixture.finish();
}

#[test]
fn three_vcpus_on_a_file() {
    let dir = tempfile::tempdir().unwrap();
    stress(Box::new(file(&dir)), THREADS, Polls::Never, 8_000);
}

#[test]
fn three_vcpus_on_a_ring() {
    let dir = tempfile::tempdir().unwrap();
    stress(Box::new(file(&dir)), RING, Polls::Never, 8_000);
}

#[test]
fn three_vcpus_that_poll_a_ring_at_times() {
    let dir = tempfile::tempdir().unwrap();
    stress(Box::new(file(&dir)), RING, Polls::Sometimes, 8_000);
}

#[test]
fn three_vcpus_that_poll_a_slow_ring_at_times() {
    let dir = tempfile::tempdir().unwrap();
    stress(Box::new(slow(file(&dir))), RING, Polls::Sometimes, 8_000);
}

#[test]
fn three_vcpus_on_compressed_memory() {
    stress(Box::new(MemoryStore::new()), THREADS, Polls::Never, 60_000);
}

#[test]
fn three_vcpus_on_a_slow_device() {
    stress(
        Box::new(slow(MemoryStore::new())),
        THREADS,
        Polls::Never,
        10_000,
    );
}
