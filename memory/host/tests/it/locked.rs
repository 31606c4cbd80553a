//! A process that locks all of its memory (`mlockall(2)`, as real-time programs do). The kernel
//! then fills each new mapping with zeros. A page that a source has not provided is still missing.

use crate::common;

use common::FakeMmu;
use common::source::page_with;
use lacuna_addr::{BackingRange, Level, PageCount};
use lacuna_host::{
    Answer, Host, HostError, LinuxBacking, PageSource, SharedFill, SharedMemory, SourcePage,
};
use lacuna_skip::test;
use lacuna_source::{External, Policy};
use rustix::mm::{MlockAllFlags, mlockall, munlockall};
use std::hint::black_box;
use std::sync::Arc;

const PAGES: PageCount = PageCount::new(16);
/// Bytes, more than the test ever maps.
const ROOM: usize = 256 << 20;

/// Locks each new mapping from now on. If this process may not lock [`ROOM`], the calling test ends
/// as skipped: under a small `RLIMIT_MEMLOCK`, `mlockall` succeeds and later mappings fail.
fn lock_new_mappings() {
    // With ONFAULT the trial takes no memory.
    if let Err(errno) = mlockall(MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT) {
        lacuna_skip::skip_test(format!("mlockall: {errno}"));
    }
    let mut trial = Vec::<u8>::new();
    let reserved = trial.try_reserve_exact(ROOM);
    // The compiler must not leave the allocation out.
    drop(black_box(trial));
    if reserved.is_err() {
        munlockall().unwrap();
        let mib = ROOM >> 20;
        lacuna_skip::skip_test(format!(
            "cannot lock {mib} MiB: RLIMIT_MEMLOCK is too small"
        ));
    }
    mlockall(MlockAllFlags::FUTURE).unwrap();
}

#[test]
fn a_locked_process_has_missing_pages() {
    if !lacuna_skip::alone() {
        return;
    }
    lock_new_mappings();
    let host = common::linux::host(4096);
    let source = || common::source::TestSource::new() as Arc<dyn PageSource>;
    let outside = || Arc::new(External::threads(&[], Policy::default()).unwrap()) as Arc<_>;
    let mut sources: Vec<Arc<dyn PageSource>> = vec![source()];
    if lacuna_host::Toucher::check().is_ok() {
        sources.push(outside());
    }
    for source in &sources {
        // Twice: the second region uses the mapping that the first removal has made.
        for _ in 0..2 {
            let mmu = FakeMmu::of(&host);
            let origin = Some((Arc::clone(source), SourcePage(0)));
            let range = match host.add_linux_region(origin, PAGES, mmu) {
                Ok(range) => range,
                Err(refused) => lacuna_skip::skip_test(refused),
            };
            provide_and_discard(&host, range);
            host.remove_region(range).unwrap();
            host.verify();
        }
    }
    let is_refused = |memory: &SharedMemory, pages| {
        for source in &sources {
            let mmu = Arc::new(FakeMmu::default());
            let origin = Some((Arc::clone(source), SourcePage(0)));
            let backing = LinuxBacking::Shared(memory.clone());
            let refused = host.add_linux_region_in(backing, origin, pages, mmu);
            let refused = refused.unwrap_err().to_string();
            // A handler does not fill small pages of a file in any process.
            let reasons = ["locks its memory", "fills private memory"];
            assert!(
                reasons.iter().any(|reason| refused.contains(reason)),
                "{refused}"
            );
        }
    };
    is_refused(
        &SharedMemory::new(PAGES, SharedFill::CopiedIn).unwrap(),
        PAGES,
    );
    let huge = PageCount::new(512);
    let _reserved = lacuna_skip::HugePages::reserve(1);
    is_refused(&SharedMemory::huge(huge, Level::L2M).unwrap(), huge);
}

fn provide_and_discard(host: &Host, range: BackingRange) {
    let at = |page| range.start().checked_add_pages(page).unwrap();
    let read = |page| {
        let mut word = [0; 8];
        host.copy_out(at(page), &mut word)
            .map(|()| u64::from_le_bytes(word))
    };
    for page in 0..PAGES.get() {
        let provided = host.provide(at(page), &page_with(page + 1).0);
        assert_eq!(provided, Ok(Answer::Taken), "page {page} was missing");
        assert_eq!(read(page), Ok(page + 1));
    }
    host.discard(BackingRange::new(at(3), 2).unwrap()).unwrap();
    assert_eq!((read(2), read(3), read(4)), (Ok(3), Ok(0), Ok(0)));
    assert!(!matches!(read(5), Err(HostError::Lost(_))));
}
