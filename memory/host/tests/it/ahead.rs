//! Reads from swap that bring neighbours of their page.

use crate::common;

use common::{Use, Vm, virtual_host};
use lacuna_addr::PageCount;
use lacuna_host::{FaultyStore, Host, HostStats};
use std::sync::Arc;

const BUDGET: u64 = 4096;
const PAGES: u64 = 2 * BUDGET;

/// A guest that has written to all of its pages: most of its first half is swapped out.
fn written(most: u64) -> (Arc<Host>, Vm, FaultyStore) {
    let store = FaultyStore::new(PageCount::new(4 * PAGES));
    let (host, clock) = virtual_host(BUDGET, Box::new(store.clone()));
    host.set_read_ahead(PageCount::new(most));
    let mut vm = Vm::new(&host, &clock, PAGES);
    for page in 0..PAGES {
        touch(&host, &mut vm, page, Use::Write(page + 1));
    }
    while vm.step_time() {}
    (host, vm, store)
}

/// A touch beside a thread that reclaims in the background.
fn touch(host: &Host, vm: &mut Vm, page: u64, how: Use) {
    vm.touch(page, how).unwrap();
    while host.balance().scanned > 0 {}
}

/// The counters after reads of `pages`.
fn reads(most: u64, pages: impl Iterator<Item = u64>) -> HostStats {
    let (host, mut vm, _store) = written(most);
    let before = host.stats();
    for page in pages {
        touch(&host, &mut vm, page, Use::Read);
    }
    while vm.step_time() {}
    host.verify();
    let mut stats = host.stats();
    stats.faults_swap_in -= before.faults_swap_in;
    stats.read_ahead -= before.read_ahead;
    stats.read_ahead_used -= before.read_ahead_used;
    stats
}

#[test]
fn ascending_and_descending_reads_begin_few_reads() {
    let pages = BUDGET / 2;
    let faults = |most| reads(most, 0..pages).faults_swap_in;
    assert!(faults(1) > pages * 9 / 10);
    assert!(faults(8) * 6 < faults(1));
    let stats = reads(32, (0..pages).rev());
    assert!(stats.faults_swap_in * 20 < pages, "{stats:?}");
    assert!(
        stats.read_ahead_used * 10 > stats.read_ahead * 9,
        "{stats:?}"
    );
}

#[test]
fn random_reads_read_nearly_nothing_ahead() {
    let mut rng = fastrand::Rng::with_seed(1);
    let stats = reads(32, (0..1000).map(|_| rng.u64(0..PAGES)));
    assert!(stats.faults_swap_in > 300, "{stats:?}");
    assert!(stats.read_ahead * 10 < stats.faults_swap_in, "{stats:?}");
}

#[test]
fn one_page_and_no_other_by_choice() {
    let stats = reads(1, 0..BUDGET);
    assert_eq!((stats.read_ahead, stats.read_ahead_used), (0, 0));
}

/// A page that no fault asked for is not lost when its read fails: a later fault reads it again.
#[test]
fn a_failed_read_ahead_loses_nothing() {
    let (host, mut vm, store) = written(16);
    for page in 0..64 {
        touch(&host, &mut vm, page, Use::Read);
    }
    // Only pages that faults ask for are on the device: those with an even number, an odd word.
    let mut missing = Vec::new();
    store.tamper(|pages| missing.extend(pages.extract_if(.., |_, page| page.0[0] % 2 == 0)));
    for page in (64..96).step_by(2) {
        touch(&host, &mut vm, page, Use::Read);
    }
    while vm.step_time() {}
    host.verify();
    store.tamper(|pages| {
        for (entry, page) in missing {
            pages.entry(entry).or_insert(page);
        }
    });
    vm.check_all();
    host.verify();
}
