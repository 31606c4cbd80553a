//! Which faults an invalidation refuses, and which vCPUs it waits for.

use super::common::*;
use crate::Invalidation;

fn one_slot() -> Arc<Mmu> {
    let mmu = mmu(4096);
    add(&mmu, &SLOTS[..1]);
    mmu
}

const HOME: u64 = SLOTS[0].0;

/// Whether a fault is admitted that has read its sequence number before `meanwhile`.
fn admitted(mmu: &Mmu, at: u64, meanwhile: impl FnOnce()) -> bool {
    let seq = mmu.stage2.invalidate_seq(gfn(at));
    meanwhile();
    !mmu.stage2.fault_cursor(gfn(at)).invalidate_retry(seq)
}

#[test]
fn a_fault_is_refused_if_an_invalidation_began_after_its_sequence_was_read() {
    let mmu = one_slot();
    let begin = |page, pages| mmu.begin_invalidation(&[range(page, pages)]);
    let mut open = None;
    assert!(
        !admitted(&mmu, HOME + 5, || open = Some(begin(0, 512))),
        "it has begun"
    );
    assert!(!admitted(&mmu, HOME + 5, || {}), "it is under way");
    open.take().expect("begun above").finish();
    assert!(admitted(&mmu, HOME + 5, || {}), "it is over");
    assert!(
        !admitted(&mmu, HOME + 5, || begin(0, 512).finish()),
        "the invalidation has ended"
    );
    // A neighbour in the block retries once; another block does not retry.
    assert!(!admitted(&mmu, HOME + 5, || begin(100, 1).finish()));
    assert!(admitted(&mmu, HOME + 5, || {}));
    assert!(admitted(&mmu, HOME + 5, || begin(512, 512).finish()));
}

#[test]
fn nothing_unmapped_needs_no_shootdown_unless_somebody_is_at_work_there() {
    let mmu = one_slot();
    let _ = touch(&mmu, HOME, Access::Read, Level::L4K)
        .expect("a slot")
        .expect("tables");
    let begin = |page| mmu.begin_invalidation(&[range(page, 1)]);
    let first = begin(0);
    assert!(first.must_flush(), "a leaf is gone");
    let second = begin(0);
    assert!(second.must_flush(), "the first has not waited yet");
    let far = begin(1024);
    assert!(
        !far.must_flush(),
        "nothing was mapped, and no other invalidation is in progress"
    );
    [first, second, far]
        .into_iter()
        .for_each(Invalidation::finish);
    let again = begin(0);
    assert!(
        !again.must_flush(),
        "all that was there has been waited for"
    );
    again.finish();
}

#[test]
fn a_vcpu_that_holds_nothing_of_a_block_is_left_alone() {
    let mmu = one_slot();
    let qsbr = &mmu.qsbr;
    let vcpu = qsbr.vcpu(0);
    let _ = qsbr.online(0);
    vcpu.flushed();
    vcpu.note((HOME + 512) / 512);
    for at in [HOME, HOME + 512] {
        let _ = touch(&mmu, at, Access::Read, Level::L2M)
            .expect("a slot")
            .expect("tables");
    }
    // The vCPU is online and passes no quiescent point, so a waiting call would not return.
    let begin = |page| mmu.begin_invalidation_as(RmapWalk::PerLevel, &[range(page, 512)]);
    let begun = begin(0);
    assert_eq!(begun.steps().leaves, 1);
    assert!(!begun.finish_counted());
    assert!(!vcpu.has_request());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| begin(512).finish_counted());
        while !vcpu.has_request() {
            std::thread::yield_now();
        }
        assert!(!other.is_finished());
        qsbr.offline(0);
        // Whether it says that it waited depends on when it looks.
        other.join().expect("the vCPU has passed");
    });
}
