//! Asynchronous page faults with KVM as the host.

mod common;

use common::{builder, can_run, pass};
use lacuna_guest::status::Status;
use lacuna_kvm::{Apf, VmBuilder};
use std::time::Duration;

#[test]
fn every_token_comes_back_once() {
    if !can_run() {
        return;
    }
    let builder = VmBuilder {
        apf: Apf::On,
        ..builder(32, 8, 1, "faulters=8 workers=1 accesses=400")
    };
    builder.latency.set(Duration::from_millis(1));
    let (outcome, text) = pass(&builder, "bm");
    let status = Status::parse(&outcome.status.expect("it announced its status page")).unwrap();
    let apf = status.apf;
    println!("{apf:?} {:?}", outcome.stats);
    assert!(apf.not_present >= 1000, "{apf:?}\n{text}");
    // The guest ends when its processes have ended, so no thread waits for a page any more.
    assert_eq!(apf.not_present, apf.ready, "{apf:?}");
    assert_eq!(apf.lost, 0, "{apf:?}");
    assert_eq!(apf.wake_all, 1, "one when it is enabled: {apf:?}");
}

#[test]
fn a_guest_is_told_nothing_unless_it_is_offered() {
    if !can_run() {
        return;
    }
    let builder = builder(16, 4, 1, "faulters=2 workers=1 accesses=400");
    let (outcome, _) = pass(&builder, "bm");
    let status = Status::parse(&outcome.status.expect("it announced its status page")).unwrap();
    assert_eq!((status.apf.not_present, status.apf.wake_all), (0, 0));
}
