//! Settings that change while guests run.

use crate::common;

use common::source::TestSource;
use common::{Use, Vm, huge_host, virtual_host};
use lacuna_addr::{Access, Level, PageCount, PageStates};
use lacuna_host::{
    Answer, Collapse, Fault, FaultyStore, Host, HostError, HugePages, MemoryStore, Resolution,
};
use std::sync::Arc;
use std::time::Duration;

/// Room for every page of a test.
const STORE: PageCount = PageCount::new(20_000);

/// Background reclaim, until it has nothing to do.
fn settle(vm: &Vm) {
    for _ in 0..10_000 {
        if !vm.host.wants_balance() {
            return;
        }
        if vm.host.balance().scanned == 0 {
            assert!(vm.step_time(), "a write is in flight");
        }
    }
    panic!(
        "background reclaim does not reach the budget: {:?}",
        vm.host.stats()
    );
}

fn set(host: &Arc<Host>, pages: u64) {
    host.set_budget(PageCount::new(pages)).unwrap();
}

#[test]
fn a_budget_shrinks_and_grows() {
    let (host, clock) = virtual_host(2048, Box::new(FaultyStore::new(STORE)));
    let mut vm = Vm::new(&host, &clock, 3000);
    (0..3000).for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    for budget in [512, 1024, 300, 2048] {
        set(&host, budget);
        assert_eq!(host.budget().get(), budget);
        settle(&vm);
        let stats = host.stats();
        assert!(stats.resident + stats.store <= budget, "{stats:?}");
        vm.check_all();
        host.verify();
    }
    assert!(host.stats().resident > 300, "it is used again");
}

/// Faults get frames while the budget shrinks, before the background has reached it.
#[test]
fn a_guest_runs_while_its_budget_shrinks() {
    let (host, clock) = virtual_host(4096, Box::new(FaultyStore::new(STORE)));
    let mut vm = Vm::new(&host, &clock, 6000);
    (0..4000).for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    set(&host, 512);
    let mut page = 4000;
    while host.wants_balance() {
        assert!(page < 6000, "{:?}", host.stats());
        vm.touch(page, Use::Write(page + 1)).unwrap();
        page += 1;
        if host.balance().scanned == 0 {
            vm.step_time();
        }
    }
    assert!(page > 4000);
    vm.check_all();
    host.verify();
}

#[test]
fn an_impossible_budget_is_refused() {
    let (host, clock) = virtual_host(1024, Box::new(MemoryStore::new()));
    let vms = [0; 3].map(|_| Vm::new(&host, &clock, 100));
    let minimum = Host::minimum_budget(vms.len());
    let refused = host.set_budget(PageCount::new(minimum.get() - 1));
    assert!(matches!(refused, Err(HostError::BudgetTooSmall { minimum: of, .. }) if of == minimum));
    let refused = host.set_budget(PageCount::new(1025));
    assert!(matches!(refused, Err(HostError::AbovePool { pool, .. }) if pool.get() == 1024));
    assert_eq!(host.budget().get(), 1024);
    set(&host, minimum.get());
    assert!(matches!(
        host.per_cpu_pages(),
        Err(HostError::BudgetTooSmall { .. })
    ));
}

/// No page can leave, because the device fails: a vCPU gets no error, as with the larger budget.
#[test]
fn a_budget_that_cannot_be_met_grows_again() {
    let store = FaultyStore::new(STORE);
    let (host, clock) = virtual_host(2048, Box::new(store.clone()));
    let mut vm = Vm::new(&host, &clock, 1800);
    (0..1400).for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    store.set_fault(Some(Fault::WriteAfter(0)));
    set(&host, 1024);
    (1400..1800).for_each(|page| vm.touch(page, Use::Write(page + 1)).unwrap());
    assert!(host.budget().get() >= 1400, "{}", host.budget());
    vm.check_all();
    host.verify();
}

#[test]
fn huge_pages_are_switched() {
    let (host, clock) = huge_host(8 * 512, Box::new(MemoryStore::new()), HugePages::Never);
    let mut vm = Vm::new(&host, &clock, 4 * 512);
    host.advise_huge(vm.range).unwrap();
    let states = |vm: &Vm| vm.host.page_states(vm.range);
    vm.touch(0, Use::Write(1)).unwrap();
    assert_eq!(states(&vm).huge, 0);
    host.make_huge_pages(true);
    vm.touch(512, Use::Write(2)).unwrap();
    assert_eq!((states(&vm).huge, vm.mapped_huge()), (512, 1));
    host.make_huge_pages(false);
    assert_eq!(host.collapse_step(), Collapse::Idle);
    vm.touch(1024, Use::Write(3)).unwrap();
    // The compound page stays whole and usable.
    vm.touch(513, Use::Write(4)).unwrap();
    let expected = PageStates {
        resident: 514,
        huge: 512,
        untouched: 4 * 512 - 514,
        ..PageStates::default()
    };
    assert_eq!(states(&vm), expected);
    vm.check_all();
    host.verify();
}

#[test]
fn a_source_gets_a_delayed_request_later() {
    let (host, clock) = virtual_host(1024, Box::new(MemoryStore::new()));
    let source = TestSource::new();
    let mut vm = Vm::with_source(&host, &clock, 100, &source);
    host.set_delay(Duration::from_millis(5));
    let mut missing = |page| {
        let addr = vm.addr(page);
        match host.resolve(addr, Access::Read, Level::L4K, &mut vm.cache) {
            Resolution::Missing(ticket) => (addr, ticket),
            other => panic!("{other:?}"),
        }
    };
    let (addr, ticket) = missing(1);
    host.start(&ticket);
    assert!(source.request(addr).is_none());
    // The VMM may provide it meanwhile; then the source gets no request.
    let (early, provided) = missing(2);
    host.start(&provided);
    assert_eq!(host.provide(early, &[7; 4096]).unwrap(), Answer::Taken);
    assert!(vm.host.next_completion().unwrap().0 >= 5_000_000);
    while vm.step_time() {}
    assert!(source.request(addr).is_some() && source.request(early).is_none());
    assert_eq!(source.answer(addr), Answer::Taken);
    assert!(ticket.is_done());
    let states = host.page_states(vm.range);
    assert_eq!((states.resident, states.missing), (2, 98));
    host.verify();
}
