//! A kernel that refuses io_uring: threads read instead. The test takes away file descriptors that
//! every other test needs.

use crate::common;

use common::FakeMmu;
use lacuna_addr::{Access, Level, PAGE_SIZE, PageCount};
use lacuna_host::{FileStore, Host, HostConfig, HugePages, Io, Resolution};
use lacuna_sync::HostClock;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;

#[test]
fn threads_read_if_the_kernel_refuses_a_ring() {
    if !lacuna_skip::alone() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::create(dir.path(), PageCount::new(4096)).unwrap();
    // With no file descriptor left, any kernel refuses.
    let before = getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(0),
        ..before
    };
    setrlimit(Resource::Nofile, none).unwrap();
    let host = Host::new(HostConfig {
        budget: PageCount::new(256),
        huge: HugePages::Never,
        swap: Box::new(store),
        io: Io::Ring { readers: 2 },
        clock: Arc::new(HostClock::default()),
    });
    setrlimit(Resource::Nofile, before).unwrap();
    let host = host.unwrap();
    let name = host.describe_io();
    assert!(name.starts_with("reader threads (io_uring: "), "{name}");
    let mmu = FakeMmu::of(&host);
    let range = host.add_region(PageCount::new(600), mmu).unwrap();
    let mut cache = host.per_cpu_pages().unwrap();
    let at = |page: u64| range.start().checked_add_pages(page).unwrap();
    for page in 0..600u64 {
        let bytes = (page + 1).to_le_bytes().repeat(PAGE_SIZE / 8);
        host.copy_in(at(page), &bytes).unwrap();
    }
    let Resolution::Pending(ticket) = host.resolve(at(0), Access::Read, Level::L4K, &mut cache)
    else {
        panic!("the first page left long ago");
    };
    host.start(&ticket);
    host.wait(&ticket).unwrap();
    let mut bytes = [0; PAGE_SIZE];
    host.copy_out(at(0), &mut bytes).unwrap();
    assert!(bytes.chunks(8).all(|word| word == 1u64.to_le_bytes()));
}
