//! Budgets at their edges: progress at the minimum, fairness, the manager's own memory.

use crate::common;

use common::{Use, Vm, huge_host, virtual_host};
use lacuna_addr::{Access, Level, PageCount};
use lacuna_host::{FaultyStore, Host, HugePages, MAX_PINNED, MemoryStore, Resolution};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn store() -> Box<FaultyStore> {
    Box::new(FaultyStore::new(PageCount::new(10_000)))
}

/// An instruction that touches as many pages as can be pinned keeps them all, while another vCPU of
/// the same VM takes all frames it can get.
#[test]
fn the_largest_instruction_completes_at_the_minimum_budget() {
    let (host, clock) = virtual_host(Host::minimum_budget(2).get(), store());
    let mut vm = Vm::new(&host, &clock, 1000);
    let mut other = host.per_cpu_pages().unwrap();
    (0..1000).for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    let instruction = |vm: &mut Vm| -> Vec<_> {
        let pages = (0..MAX_PINNED as u64).map(|i| i * 13);
        pages
            .map(|page| vm.fault(page, Access::Read).unwrap())
            .collect()
    };
    let frames = instruction(&mut vm);
    std::mem::swap(&mut vm.cache, &mut other);
    for page in (0..1000).filter(|page| page % 13 != 0) {
        vm.touch(page, Use::Write(page + 2)).unwrap();
    }
    std::mem::swap(&mut vm.cache, &mut other);
    assert_eq!(
        instruction(&mut vm),
        frames,
        "retried, it finds every page where it was"
    );
    host.verify();
    vm.cache.unpin_all();
    vm.check_all();
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

/// A page that was only read is dropped without a write. A page that was swapped in and not written
/// keeps its swap entry.
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

/// A caller that does not wait is notified once: when the page has arrived, or at once if it is
/// resident.
#[test]
fn a_ticket_calls_back() {
    let (host, clock) = virtual_host(256, store());
    let mut vm = Vm::new(&host, &clock, 1000);
    (0..1000).for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    while vm.step_time() {}
    let addr = vm.addr(0);
    let mut pending = || match host.resolve(addr, Access::Read, Level::L4K, &mut vm.cache) {
        Resolution::Pending(ticket) => ticket,
        other => panic!("{other:?}"),
    };
    let (ticket, same) = (pending(), pending());
    assert!(ticket.is_same(&same) && !ticket.is_started());
    assert_eq!(ticket.page(), addr);
    let calls = Arc::new(AtomicUsize::new(0));
    let call = |calls: &Arc<AtomicUsize>| {
        let calls = calls.clone();
        move || _ = calls.fetch_add(1, Ordering::Relaxed)
    };
    ticket.on_done(call(&calls));
    host.start(&ticket);
    host.start(&same);
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    while vm.step_time() {}
    assert_eq!((calls.load(Ordering::Relaxed), same.is_done()), (1, true));
    same.on_done(call(&calls));
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    host.wait(&same).unwrap();
    vm.touch(0, Use::Read).unwrap();
    assert_eq!(host.stats().faults_shared_ticket, 1);
}

#[test]
fn only_resident_pages_can_be_peeked_at() {
    let (host, clock) = virtual_host(256, store());
    let mut vm = Vm::new(&host, &clock, 1000);
    let mut word = [0; 8];
    assert_eq!(host.peek(vm.addr(0), &mut word), None, "empty");
    vm.touch(0, Use::Write(42)).unwrap();
    assert_eq!(host.peek(vm.addr(0), &mut word), Some(()));
    assert_eq!(u64::from_le_bytes(word), 42);
    (1..1000).for_each(|page| vm.touch(page, Use::Write(page)).unwrap());
    while vm.step_time() {}
    let resident = host.stats().resident;
    assert_eq!(host.peek(vm.addr(1), &mut word), None, "swapped");
    assert_eq!(host.stats().resident, resident);
    let mut across = [0; 16];
    let start = lacuna_addr::BackingAddr::new(vm.addr(1).get() + 4096 - 8);
    host.copy_out(start, &mut across).unwrap();
    assert_eq!(across[..8], 1u64.to_le_bytes());
    assert_eq!(across[8..], 2u64.to_le_bytes());
}

/// Per-CPU page caches are larger while many frames are free, but the last vCPU still gets its
/// frames.
#[test]
fn many_idle_vcpus_leave_frames_for_the_last_one() {
    const VCPUS: usize = 256;
    let (host, clock) = virtual_host(Host::minimum_budget(VCPUS).get(), store());
    let mut vm = Vm::new(&host, &clock, 1000);
    let mut others: Vec<_> = (1..VCPUS).map(|_| host.per_cpu_pages().unwrap()).collect();
    for (other, page) in others.iter_mut().zip(0..) {
        std::mem::swap(&mut vm.cache, other);
        vm.touch(page, Use::Write(page + 1)).unwrap();
        std::mem::swap(&mut vm.cache, other);
    }
    for page in 0..MAX_PINNED as u64 {
        vm.fault(500 + page, Access::Write).unwrap();
    }
    host.verify();
}

/// Threads that have copied keep page caches, which do not count as vCPUs.
#[test]
fn threads_that_copy_are_no_vcpus() {
    const THREADS: u64 = 4;
    let (host, clock) = virtual_host(Host::minimum_budget(1).get(), store());
    let range = {
        let mmu = common::FakeMmu::of(&host);
        host.add_region(PageCount::new(THREADS), mmu).unwrap()
    };
    std::thread::scope(|scope| {
        for page in 0..THREADS {
            let (host, addr) = (&host, range.start().checked_add_pages(page).unwrap());
            scope.spawn(move || host.copy_in(addr, &[1]).unwrap());
        }
    });
    drop(host.per_cpu_pages().unwrap());
    drop(clock);
}

/// A long prefault can be ended early, when a command has to end.
#[test]
fn a_prefault_is_ended_between_two_steps() {
    use std::ops::ControlFlow;
    // Three steps of 16 MiB.
    let (host, _) = huge_host(3 * 4096, Box::new(MemoryStore::new()), HugePages::Never);
    let steps = |bound: u64| {
        let mut steps = 0;
        let done = host.prefault(&mut || {
            steps += 1;
            match steps < bound {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        });
        done.unwrap();
        steps
    };
    assert_eq!(steps(2), 2);
    assert_eq!(steps(u64::MAX), 3);
}
