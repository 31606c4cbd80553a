//! A thousand VMs of Linux memory, one after the other, leave no mapping, descriptor or thread.

use crate::common;

use common::FakeMmu;
use common::source::{TestSource, page_with};
use lacuna_addr::{BackingRange, PageCount};
use lacuna_host::{Host, LinuxBacking, PageSource, SharedFill, SharedMemory, SourcePage, Toucher};
use lacuna_skip::test;
use lacuna_source::{External, Policy};
use std::fs::{read_dir, read_to_string};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

const PAGES: PageCount = PageCount::new(24);

/// Descriptors, mappings and threads of this process.
fn owned() -> [usize; 3] {
    let entries = |path| read_dir(path).unwrap().count();
    let mappings = read_to_string("/proc/self/maps").unwrap().lines().count();
    [
        entries("/proc/self/fd"),
        mappings,
        entries("/proc/self/task"),
    ]
}

/// [`owned`], once it has no more descriptors and threads than `before`, or else after 10 s. The
/// kernel may list a thread for a moment after it was joined.
fn owned_again(before: [usize; 3]) -> [usize; 3] {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let now = owned();
        if now[0] <= before[0] && now[2] <= before[2] || Instant::now() > end {
            return now;
        }
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn nothing_is_left_of_a_thousand_vms() {
    if !lacuna_skip::alone() {
        return;
    }
    let host = common::linux::host(512);
    if let Err(errno) = Toucher::check() {
        lacuna_skip::skip_test(errno);
    }
    let round = |kind: usize| {
        let (source, backing): (Arc<dyn PageSource>, _) = match kind % 3 {
            0 => (TestSource::new(), LinuxBacking::Anonymous),
            1 => match External::threads(&[SourcePage(9)], Policy::default()) {
                Ok(external) => (Arc::new(external), LinuxBacking::Anonymous),
                Err(errno) => lacuna_skip::skip_test(errno),
            },
            _ => {
                let memory = SharedMemory::new(PAGES, SharedFill::InFile).unwrap();
                (TestSource::new(), LinuxBacking::Shared(memory))
            }
        };
        live(&host, source, backing, kind % 3 == 1);
    };
    (0..30).for_each(round);
    // Until the kernel no longer lists the threads of these rounds.
    sleep(Duration::from_millis(200));
    let before = owned();
    (0..1000).for_each(round);
    host.verify();
    let after = owned_again(before);
    // The allocator of this process may have some more mappings, but not one for each VM.
    assert!(
        after[0] <= before[0] && after[2] <= before[2] && after[1] < before[1] + 50,
        "{before:?} {after:?}"
    );
}

/// The life of one VM: pages are filled, some are discarded, one is taken away, and it ends while a
/// page is missing.
fn live(host: &Arc<Host>, source: Arc<dyn PageSource>, backing: LinuxBacking, is_outside: bool) {
    let mmu = FakeMmu::of(host);
    let origin = Some((source, SourcePage(0)));
    let range = match host.add_linux_region_in(backing, origin, PAGES, mmu) {
        Ok(range) => range,
        Err(refused) => lacuna_skip::skip_test(refused),
    };
    let at = |page| range.start().checked_add_pages(page).unwrap();
    for page in 0..20 {
        let _ = host.provide(at(page), &page_with(page).0).unwrap();
    }
    host.discard(BackingRange::new(at(3), 5).unwrap()).unwrap();
    host.take_away(BackingRange::new(at(12), 1).unwrap())
        .unwrap();
    assert!(host.copy_out(at(12), &mut [0; 8]).is_err());
    if is_outside {
        assert!(host.fetch(at(22)).unwrap().is_some(), "a thread touches it");
    }
    host.remove_region(range).unwrap();
}
