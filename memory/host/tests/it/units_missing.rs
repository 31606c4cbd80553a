//! Huge pages that are made missing again while their fetches end.

use crate::common;

use common::linux::{host, origin, read};
use common::source::{TestSource, page_of};
use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE, PageCount};
use lacuna_host::{
    HostError, LinuxBacking, LinuxError, MmuNotifier, PageRequest, Resolution, SharedMemory,
};
use lacuna_skip::HugePages;
use std::sync::{Arc, Mutex};

const UNIT: u64 = 512;

/// Ends a request when pages are unmapped.
#[derive(Default)]
struct EndsARequest(Mutex<Option<(PageRequest, bool)>>);

impl MmuNotifier for EndsARequest {
    fn invalidate(&self, _: &[BackingRange]) {
        if let Some((request, fails)) = self.0.lock().unwrap().take() {
            let _ = match fails {
                true => request.fail("it has burnt"),
                false => request.provide(&[1; PAGE_SIZE]),
            };
        }
    }
    fn age(&self, _: &[BackingRange], _: &mut [bool]) {}
    fn split_huge(&self, _: BackingRange) {}
    fn end_of_aging(&self) {}
}

/// The range has a unit in place, and one in flight whose fetch ends meanwhile. The first is
/// missing afterwards. The fetch counts for all pages of the other.
#[lacuna_skip::test]
fn a_fetch_ends_while_its_unit_is_made_missing() {
    for fails in [true, false] {
        let _reserved = HugePages::reserve(2);
        let (host, source) = (host(2 * UNIT), TestSource::new());
        let pages = PageCount::new(2 * UNIT);
        let backing = LinuxBacking::Shared(SharedMemory::huge(pages, Level::L2M).unwrap());
        let ends = Arc::new(EndsARequest::default());
        let range = match host.add_linux_region_in(backing, origin(&source), pages, ends.clone()) {
            Err(refused @ HostError::Linux(LinuxError::Userfaultfd(_))) => {
                lacuna_skip::skip_test(refused)
            }
            added => added.unwrap(),
        };
        source.provides(range);
        let addr = |page| range.start().checked_add_pages(page).unwrap();
        let content: Vec<_> = (0..UNIT).map(|page| page_of(addr(page)).0).collect();
        assert_eq!(host.provide_pages(addr(0), &content), Ok(512));
        let ticket = host.fetch(addr(UNIT)).unwrap().expect("it is missing");
        for page in UNIT + 1..2 * UNIT {
            let _ = source.answer(addr(page));
        }
        let last = source.request(addr(UNIT)).unwrap();
        source.forget(addr(UNIT));
        *ends.0.lock().unwrap() = Some((last, fails));

        host.make_missing(range).unwrap();
        assert!(ticket.is_done());
        assert!(host.was_never_provided(addr(0)) && host.was_never_provided(addr(UNIT - 1)));
        let is_lost = |addr: BackingAddr| {
            host.with_spare_cache(|cache| {
                let found = host.resolve(addr, Access::Read, Level::L4K, cache);
                cache.unpin_all();
                matches!(found, Resolution::Lost(_))
            })
        };
        for page in [UNIT, UNIT + 1, 2 * UNIT - 1] {
            assert_eq!(is_lost(addr(page)), fails, "page {page}");
            assert_eq!(read(&host, addr(page)).is_err(), fails, "page {page}");
        }
        host.verify();
        source.lacks_again(BackingRange::new(addr(0), UNIT).unwrap());
        assert!(host.fetch(addr(7)).unwrap().is_some());
        host.remove_region(range).unwrap();
        host.verify();
    }
}
