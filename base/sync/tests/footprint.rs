//! Which vCPUs a shoot-down requests.
#![cfg(not(loom))]

use lacuna_sync::{Blocks, Epoch, Quiescence, VcpuSlot};
use std::collections::BTreeSet;
use std::ops::Range;

/// One vCPU, online, whose TLB residency filter is in use and has noted `blocks`.
fn noted(blocks: &[u64]) -> Quiescence {
    let quiescence = Quiescence::new(1);
    quiescence.online(0);
    quiescence.vcpu(0).flushed();
    blocks.iter().for_each(|b| quiescence.vcpu(0).note(*b));
    quiescence
}

fn is_addressed(quiescence: &Quiescence, blocks: &Blocks) -> bool {
    let epoch = quiescence.request_for(blocks);
    let requested = quiescence.vcpu(0).take() & VcpuSlot::FLUSH != 0;
    assert_eq!(
        requested,
        !quiescence.passed(epoch),
        "requested but not waited for, or the reverse"
    );
    quiescence.online(0);
    assert!(quiescence.passed(epoch), "it has flushed");
    requested
}

#[test]
fn a_vcpu_that_keeps_no_footprint_is_always_addressed() {
    let quiescence = Quiescence::new(1);
    quiescence.online(0);
    assert!(is_addressed(&quiescence, &Blocks::one(77)));
    quiescence.vcpu(0).note(5);
    assert!(
        is_addressed(&quiescence, &Blocks::one(77)),
        "it has never said that it flushed"
    );
}

#[test]
fn a_vcpu_is_addressed_for_what_it_has_noted_until_it_flushes() {
    let quiescence = noted(&[1, 4096]);
    assert!(is_addressed(&quiescence, &Blocks::one(1)));
    assert!(
        is_addressed(&quiescence, &Blocks::one(0)),
        "0 and 4096 look the same"
    );
    assert!(!is_addressed(&quiescence, &Blocks::one(2)));
    assert!(!is_addressed(&quiescence, &Blocks::none()));
    quiescence.vcpu(0).flushed();
    assert!(!is_addressed(&quiescence, &Blocks::one(1)));
}

#[test]
fn nobody_else_is_disturbed() {
    let quiescence = Quiescence::new(3);
    for index in 0..3 {
        quiescence.online(index);
        quiescence.vcpu(index).flushed();
        quiescence.vcpu(index).note(index as u64);
    }
    let epoch = quiescence.request_for(&Blocks::one(1));
    let requested = [0, 1, 2].map(|index| quiescence.vcpu(index).has_request());
    assert_eq!(requested, [false, true, false]);
    assert!(!quiescence.passed(epoch));
    assert_eq!(quiescence.online(0), Epoch::default(), "nothing to flush");
    assert_eq!(quiescence.online(1), epoch);
    assert!(quiescence.passed(epoch));
}

#[test]
fn a_vcpu_that_is_offline_is_not_waited_for_but_must_flush() {
    let quiescence = noted(&[9]);
    quiescence.offline(0);
    let epoch = quiescence.request_for(&Blocks::one(9));
    assert!(quiescence.passed(epoch));
    assert_eq!(quiescence.online(0), epoch);
    quiescence.offline(0);
    let everybody = quiescence.request();
    assert!(everybody > epoch);
    assert_eq!(quiescence.online(0), everybody);
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
fn blocks_are_a_set_of_numbers_modulo_the_footprint() {
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
