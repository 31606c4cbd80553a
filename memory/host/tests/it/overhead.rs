//! The manager's own memory: resident memory beyond the budget, for a guest of four times its size.

use crate::common;

use common::{Use, Vm, virtual_host};
use lacuna_addr::PageCount;
use lacuna_host::FaultyStore;

/// Resident memory of this process in bytes: anonymous pages only.
fn resident() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("RssAnon:"))
        .unwrap();
    let kib = line.split_whitespace().nth(1).unwrap();
    kib.parse::<i64>().unwrap() * 1024
}

#[test]
fn a_guest_of_four_budgets_costs_little_more_than_one() {
    if !lacuna_skip::alone() {
        return;
    }
    let before = resident();
    let budget = 64 << 20;
    // The pages are all zero, so the device stays empty: it is outside the budget here.
    let (host, clock) = virtual_host(
        budget >> 12,
        Box::new(FaultyStore::new(PageCount::new(1 << 20))),
    );
    let mut vm = Vm::new(&host, &clock, (4 * budget) >> 12);
    for page in 0..(4 * budget) >> 12 {
        if vm.fault(page, lacuna_addr::Access::Write).is_ok() {
            vm.cache.unpin_all();
        }
    }
    let over = resident() - before - budget as i64;
    assert!(
        over < budget as i64 / 20,
        "{over} bytes beyond a budget of {budget}"
    );
    vm.touch(0, Use::Read).unwrap();
}
