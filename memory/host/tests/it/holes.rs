//! Other code removes pages from a memory file in use as guest memory. The pages are lost; no
//! thread sleeps for them, and none reads zeros.

use crate::common;

use common::Vm;
use common::linux::BLOCK;
use common::source::TestSource;
use lacuna_addr::{BackingRange, PAGE_SIZE, PageCount};
use lacuna_host::{Host, HostError, LinuxBacking, SharedFill, SharedMemory};
use lacuna_skip::test;
use rustix::fs::{FallocateFlags, fallocate, ftruncate};
use std::sync::Arc;

const PAGES: u64 = 64;
const FILLS: [SharedFill; 2] = [SharedFill::CopiedIn, SharedFill::InFile];

/// A host with room for two VMs.
fn host() -> Arc<Host> {
    common::linux::host(2 * BLOCK)
}

/// A VM in `memory`.
fn missing(host: &Arc<Host>, memory: &SharedMemory) -> Vm {
    let backing = LinuxBacking::Shared(memory.clone());
    common::linux::vm(host, backing, PAGES, Some(&TestSource::new()))
}

/// A VM in `memory`, with all pages provided by its source.
fn vm(host: &Arc<Host>, memory: &SharedMemory) -> Vm {
    let mut vm = missing(host, memory);
    vm.check_all();
    vm
}

fn read(vm: &Vm, page: u64) -> Result<u64, HostError> {
    common::linux::read(&vm.host, vm.addr(page))
}

/// The pages `lost` are lost, and the others keep their content.
fn check(vm: &Vm, lost: std::ops::Range<u64>) {
    for page in 0..PAGES {
        match read(vm, page) {
            Ok(word) => {
                assert!(!lost.contains(&page), "page {page}");
                assert_eq!(word, vm.expected(vm.addr(page)));
            }
            Err(HostError::Lost(_)) => assert!(lost.contains(&page), "page {page}"),
            Err(error) => panic!("{error}"),
        }
    }
    vm.host.verify();
}

#[test]
fn a_hole_in_the_file() {
    for fill in FILLS {
        let (host, memory) = (
            host(),
            SharedMemory::new(PageCount::new(PAGES), fill).unwrap(),
        );
        let vm = vm(&host, &memory);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let page = PAGE_SIZE as u64;
        fallocate(memory.file(), flags, 7 * page, 3 * page).unwrap();
        check(&vm, 7..10);
        assert_eq!(host.losses(), 3);
        host.remove_region(vm.range).unwrap();
    }
}

/// The file grows again before any access, so its length does not show the truncation.
#[test]
fn a_file_that_is_cut_short_and_grows_again() {
    for fill in FILLS {
        let (host, memory) = (
            host(),
            SharedMemory::new(PageCount::new(PAGES), fill).unwrap(),
        );
        let vm = vm(&host, &memory);
        ftruncate(memory.file(), 20 * PAGE_SIZE as u64).unwrap();
        ftruncate(memory.file(), PAGES * PAGE_SIZE as u64).unwrap();
        check(&vm, 20..PAGES);
        host.remove_region(vm.range).unwrap();
    }
}

/// Two regions have the same part of a file, and one of them discards pages.
#[test]
fn a_discard_in_another_region_of_the_file() {
    for fill in FILLS {
        let (host, memory) = (
            host(),
            SharedMemory::new(PageCount::new(PAGES), fill).unwrap(),
        );
        let one = vm(&host, &memory);
        let mut two = missing(&host, &memory);
        for page in 0..PAGES {
            let (addr, word) = (two.addr(page), one.expected(one.addr(page)));
            // The page is in the file already: the content of the first region counts.
            let _ = host.provide(addr, &[1; PAGE_SIZE]).unwrap();
            two.model.insert(addr.get(), word);
        }
        check(&two, 0..0);
        host.discard(BackingRange::new(one.addr(5), 4).unwrap())
            .unwrap();
        check(&two, 5..9);
        (5..9).for_each(|page| assert_eq!(read(&one, page), Ok(0)));
        host.verify();
        host.remove_region(one.range).unwrap();
        check(&two, 5..9);
    }
}
