//! Which vCPUs a shoot-down requests.
#![cfg(not(loom))]

use lacuna_sync::{Blocks, GracePeriod, Qsbr, VcpuSlot};
use std::collections::BTreeSet;
use std::ops::Range;

/// One vCPU, online, whose TLB residency filter is in use and has noted `blocks`.
fn noted(blocks: &[u64]) -> Qsbr {
    let qsbr = Qsbr::new(1);
    qsbr.online(0);
    qsbr.vcpu(0).flushed();
    blocks.iter().for_each(|b| qsbr.vcpu(0).note(*b));
    qsbr
}

fn is_addressed(qsbr: &Qsbr, blocks: &Blocks) -> bool {
    let grace = qsbr.request_for(blocks);
    let requested = qsbr.vcpu(0).take() & VcpuSlot::FLUSH != 0;
    assert_eq!(
        requested,
        !qsbr.passed(grace),
        "requested but not waited for, or the reverse"
    );
    qsbr.online(0);
    assert!(qsbr.passed(grace), "it has flushed");
    requested
}

#[test]
fn a_vcpu_that_keeps_no_filter_is_always_addressed() {
    let qsbr = Qsbr::new(1);
    qsbr.online(0);
    assert!(is_addressed(&qsbr, &Blocks::one(77)));
    qsbr.vcpu(0).note(5);
    assert!(
        is_addressed(&qsbr, &Blocks::one(77)),
        "it has never said that it flushed"
    );
}

#[test]
fn a_vcpu_is_addressed_for_what_it_has_noted_until_it_flushes() {
    let qsbr = noted(&[1, 4096]);
    assert!(is_addressed(&qsbr, &Blocks::one(1)));
    assert!(
        is_addressed(&qsbr, &Blocks::one(0)),
        "0 and 4096 look the same"
    );
    assert!(!is_addressed(&qsbr, &Blocks::one(2)));
    assert!(!is_addressed(&qsbr, &Blocks::none()));
    qsbr.vcpu(0).flushed();
    assert!(!is_addressed(&qsbr, &Blocks::one(1)));
}

#[test]
fn nobody_else_is_disturbed() {
    let qsbr = Qsbr::new(3);
    for index in 0..3 {
        qsbr.online(index);
        qsbr.vcpu(index).flushed();
        qsbr.vcpu(index).note(index as u64);
    }
    let grace = qsbr.request_for(&Blocks::one(1));
    let requested = [0, 1, 2].map(|index| qsbr.vcpu(index).has_request());
    assert_eq!(requested, [false, true, false]);
    assert!(!qsbr.passed(grace));
    assert_eq!(qsbr.online(0), GracePeriod::default(), "nothing to flush");
    assert_eq!(qsbr.online(1), grace);
    assert!(qsbr.passed(grace));
}

#[test]
fn a_vcpu_that_is_offline_is_not_waited_for_but_must_flush() {
    let qsbr = noted(&[9]);
    qsbr.offline(0);
    let grace = qsbr.request_for(&Blocks::one(9));
    assert!(qsbr.passed(grace));
    assert_eq!(qsbr.online(0), grace);
    qsbr.offline(0);
    let everybody = qsbr.request();
    assert!(everybody > grace);
    assert_eq!(qsbr.online(0), everybody);
}

/// A small generator, with the same numbers in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }

    fn run(&mut self) -> Range<u64> {
        let start = self.below(3) * 4096 + self.below(8) * 64 + self.below(3);
        let longest = [1, 3, 64, 130, 5000][self.below(5) as usize];
        start..start + self.below(longest + 1)
    }
}

#[test]
fn blocks_are_a_set_of_numbers_modulo_the_filter() {
    let mut random = Random(7);
    for _ in 0..300 {
        let mut sets: [(Blocks, BTreeSet<u64>); 2] = Default::default();
        for (blocks, plain) in &mut sets {
            for _ in 0..random.below(4) {
                let run = random.run();
                blocks.add(run.clone());
                plain.extend(run.map(|b| b % 4096));
            }
            assert_eq!(blocks.is_empty(), plain.is_empty());
        }
        let [(mut blocks, mut plain), (other, more)] = sets;
        blocks.join(other);
        plain.extend(more);
        for _ in 0..40 {
            let block = random.run().start;
            let expected = plain.contains(&(block % 4096));
            assert_eq!(
                is_addressed(&noted(&[block]), &blocks),
                expected,
                "{block} in {blocks:?}"
            );
        }
    }
}
