//! Budgets at their edges: progress at the minimum, fairness, what the books themselves cost.

mod common;

use common::{Use, Vm, virtual_host};
use lacuna_addr::{Access, PageCount};
use lacuna_host::{FaultyStore, Host, MAX_HOLDS};

fn store() -> Box<FaultyStore> {
    Box::new(FaultyStore::new(PageCount::new(10_000)))
}

/// An instruction that touches as many pages as can be held keeps them all, while everything else is
/// being taken.
#[test]
fn the_largest_instruction_completes_at_the_minimum_budget() {
    let budget = Host::minimum_budget(2).get();
    let (host, clock) = virtual_host(budget, store());
    let (mut one, mut two) = (Vm::new(&host, &clock, 1000), Vm::new(&host, &clock, 1000));
    for vm in [&mut one, &mut two] {
        (0..1000).for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    }
    // Both instructions at once, page by page; then again, as they are retried.
    let mut both = || {
        let mut frames = Vec::new();
        for page in 0..MAX_HOLDS as u64 {
            for vm in [&mut one, &mut two] {
                frames.push(vm.fault(page * 13, Access::Write).unwrap());
            }
        }
        frames
    };
    assert_eq!(both(), both());
    host.verify();
}

#[test]
fn a_busy_vm_does_not_starve_a_quiet_one() {
    let (host, clock) = virtual_host(1024, store());
    let (mut quiet, mut busy) = (Vm::new(&host, &clock, 2000), Vm::new(&host, &clock, 4000));
    (0..500).for_each(|page| quiet.touch(page, Use::Write(1)).unwrap());
    for round in 0..3 {
        (0..4000).for_each(|page| busy.touch(page, Use::Write(round + 1)).unwrap());
    }
    let left = quiet.mapped();
    assert!(
        left >= 1024 / 4 - 64,
        "{left} pages left of the quarter that is its own"
    );
    host.verify();
}

/// A page only read is dropped without a write, and what was swapped in and not written keeps its slot.
#[test]
fn clean_and_zero_pages_are_never_written() {
    let (host, clock) = virtual_host(256, store());
    let mut vm = Vm::new(&host, &clock, 1000);
    (0..1000).for_each(|page| vm.touch(page, Use::Read).unwrap());
    (0..1000).for_each(|page| vm.touch(page, Use::Write(0)).unwrap());
    assert_eq!(host.stats().swapped_out, 0);
    assert!(host.stats().zero_dropped > 0 && host.stats().clean_dropped > 0);
    (0..1000).for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    vm.check_all();
    while vm.step_time() {}
    let written = host.stats().swapped_out;
    vm.check_all();
    vm.check_all();
    assert!(
        host.stats().swapped_out - written <= 256,
        "only what was dirty then"
    );
}

#[test]
fn background_reclaim_keeps_frames_free() {
    let (host, clock) = virtual_host(1024, store());
    let mut vm = Vm::new(&host, &clock, 4000);
    for page in 0..4000 {
        vm.touch(page, Use::Write(page + 1)).unwrap();
        while host.wants_balance() && host.balance().scanned > 0 {}
        if host.wants_balance() {
            vm.step_time();
        }
    }
    assert_eq!(host.stats().direct_reclaims, 0);
    vm.check_all();
    host.verify();
}

#[test]
fn pages_are_peeked_at_only_where_they_are() {
    let (host, clock) = virtual_host(256, store());
    let mut vm = Vm::new(&host, &clock, 1000);
    let mut word = [0; 8];
    assert_eq!(host.peek(vm.hva(0), &mut word), None, "empty");
    vm.touch(0, Use::Write(42)).unwrap();
    assert_eq!(host.peek(vm.hva(0), &mut word), Some(()));
    assert_eq!(u64::from_le_bytes(word), 42);
    (1..1000).for_each(|page| vm.touch(page, Use::Write(page)).unwrap());
    while vm.step_time() {}
    let resident = host.stats().resident;
    assert_eq!(host.peek(vm.hva(1), &mut word), None, "swapped");
    assert_eq!(host.stats().resident, resident);
    let mut across = [0; 16];
    let start = lacuna_addr::Hva::new(vm.hva(1).get() + 4096 - 8);
    host.copy_out(start, &mut across).unwrap();
    assert_eq!(across[..8], 1u64.to_le_bytes());
    assert_eq!(across[8..], 2u64.to_le_bytes());
}
