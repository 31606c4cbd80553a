//! What an operator sees of a VM.

use crate::vmm::{Bed, Manual, Vmm, content, removals, with_features, word};
use lacuna_metrics::Metrics;
use lacuna_pager::UnitCounts;
use lacuna_skip::test;
use rustix::thread::gettid;
use std::sync::Arc;
use std::thread;

/// `UFFD_FEATURE_EVENT_REMOVE` and `UFFD_FEATURE_THREAD_ID`.
const REMOVALS: u64 = 1 << 3;
const THREAD_ID: u64 = 1 << 8;

/// The wait of a thread begins with its fault, and ends when its page is in place.
#[test]
fn the_waits_of_each_thread_are_counted() {
    let (uffd, unnamed) = (with_features(REMOVALS | THREAD_ID), with_features(REMOVALS));
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 3);
    let vmm = Vmm::connect(&bed, uffd, 0, 3);
    let memory = vmm.memory;
    let thread = thread::spawn(move || (gettid(), memory.read_whole(1)));
    let request = source.next();
    bed.wait("a thread", |pager| !pager.vms()[0].threads.is_empty());
    let waits = bed.pager.vms()[0].threads[0];
    bed.wait("a longer wait", |pager| {
        pager.vms()[0].threads[0].stalled > waits.stalled
    });
    let _ = request.provide(&content(1));
    drop(request);
    let (number, read) = thread.join().unwrap();
    assert_eq!(read, word(1));
    bed.wait("the placed page", |pager| pager.stats().counts.placed == 1);
    let [first, second] = [(); 2].map(|()| bed.pager.vms().remove(0));
    let stalls = first.threads[0];
    assert_eq!(
        (stalls.thread, stalls.faults),
        (number.as_raw_nonzero().get() as u32, 1)
    );
    assert_eq!(
        stalls.stalled, second.threads[0].stalled,
        "the wait is over"
    );
    let counts = first.counts;
    assert_eq!(
        (counts.faults, counts.first, counts.joined, counts.late),
        (1, 1, 0, 0)
    );
    let units = UnitCounts {
        missing: 2,
        settled: 1,
        ..UnitCounts::default()
    };
    assert_eq!(first.units, units);
    let mut metrics = Metrics::default();
    first.fill(&mut metrics);
    let (text, pid) = (metrics.to_string(), std::process::id());
    for line in [
        format!("lacuna_pager_vm_units{{vm=\"0\",pid=\"{pid}\",state=\"settled\"}} 1\n"),
        format!("lacuna_pager_vm_faults_total{{vm=\"0\",pid=\"{pid}\"}} 1\n"),
        format!("lacuna_pager_vm_fetch_seconds{{vm=\"0\",pid=\"{pid}\",quantile=\"0.999\"}} "),
        format!(
            "vm_stall_seconds_total{{vm=\"0\",pid=\"{pid}\",thread=\"{}\"}} ",
            stalls.thread
        ),
    ] {
        assert!(text.contains(&line), "{line}: {text}");
    }
    // The kernel does not name the threads of this VM.
    let other = Vmm::connect(&bed, unnamed, 0, 1);
    let reader = thread::spawn(move || other.memory.read_whole(0));
    let request = source.next();
    let _ = request.provide(&content(0));
    assert_eq!(reader.join().unwrap(), word(0));
    assert_eq!(bed.pager.vms()[1].threads, []);
}

/// Content that arrives after a removal was sent in vain.
#[test]
fn late_pages_are_counted() {
    let uffd = removals();
    let source = Arc::new(Manual::default());
    let bed = Bed::new(source.clone(), 1);
    let vmm = Vmm::connect(&bed, uffd, 0, 1);
    let memory = vmm.memory;
    let reader = thread::spawn(move || memory.read_whole(0));
    let request = source.next();
    memory.discard(0, 1);
    assert_eq!(reader.join().unwrap(), 0);
    let _ = request.provide(&content(0));
    assert_eq!(bed.pager.stats().counts.late, 1);
}
