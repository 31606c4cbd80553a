//! Untouched memory costs nothing: in a region, and in a manager that has had many regions.

use crate::common;

use common::{Use, Vm, huge_host};
use lacuna_addr::{BackingRange, PageCount};
use lacuna_host::{HugePages, MemoryStore};

const GIB: u64 = 1 << 18;
const TIB: u64 = 1 << 28;

/// The peak of this process's memory, in MiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line
        .and_then(|line| line.split_whitespace().nth(1))
        .unwrap();
    kib.parse::<u64>().unwrap() / 1024
}

/// A page word for each page of the guest would be 1 GiB.
#[test]
fn a_guest_comes_and_goes_for_the_price_of_what_it_touches() {
    if !lacuna_skip::alone() {
        return;
    }
    for huge in [HugePages::Never, HugePages::Always] {
        let (host, clock) = huge_host(2048, Box::new(MemoryStore::new()), huge);
        let before = peak();
        let mut vm = Vm::new(&host, &clock, 512 * GIB + 5);
        // The last page is in no block.
        for page in (0..512).map(|gib| gib * GIB).chain([512 * GIB + 4]) {
            vm.touch(page, Use::Write(page + 1)).unwrap();
        }
        vm.check_touched();
        host.remove_region(vm.range).unwrap();
        let grown = peak() - before;
        assert!(grown < 64, "{huge:?}: {grown} MiB");
        assert_eq!(host.stats().resident, 0, "{huge:?}");
    }
}

/// Page numbers are never used again, because old ones may still be in use.
#[test]
fn regions_come_and_go_for_ever() {
    let (host, clock) = huge_host(256, Box::new(MemoryStore::new()), HugePages::Never);
    let mut last: Option<BackingRange> = None;
    for _ in 0..300 {
        let mut vm = Vm::new(&host, &clock, TIB);
        vm.touch(TIB - 1, Use::Write(1)).unwrap();
        assert!(last.is_none_or(|last| last.end() < vm.range.start()));
        last = Some(vm.range);
        host.remove_region(vm.range).unwrap();
    }
    let mmu = Vm::new(&host, &clock, 1).mmu;
    let refused = |pages| host.add_region(PageCount::new(pages), mmu.clone());
    assert_eq!(
        refused(1 << 60).unwrap_err().to_string(),
        "cannot add a region of 1152921504606846976 pages"
    );
    // More than a process can address.
    let text = refused(1 << 50).unwrap_err().to_string();
    let begin = "no room for 9007199254740992 bytes: ";
    assert!(text.starts_with(begin), "{text}");
}
