//! What this backend alone has: pages that are late from the first touch on, and its refusals. The
//! behaviours that it shares with other backends are in `check/conformance`.

mod common;

use common::{builder, can_run, image, pass};
use lacuna_kvm::{FirstTouch, KvmError, VmBuilder};
use lacuna_machine::Builder as _;
use lacuna_skip::test;
use std::time::Duration;

/// With `Delayed` even the boot data arrive late: nothing may depend on the time.
#[test]
fn all_pages_may_be_missing_at_first() {
    if !can_run() {
        return;
    }
    let builder = VmBuilder {
        first_touch: FirstTouch::Delayed,
        ..builder(16, 16, 1, "")
    };
    builder.latency.set(Duration::from_millis(1));
    let (end, _) = pass(&builder, "hello");
    let stats = end.vm.source_stats();
    assert_eq!(stats.fetched, stats.first_touches, "{stats:?}");
    assert!(stats.delay_ns >= stats.fetched * 1_000_000, "{stats:?}");
}

#[test]
fn bad_input_is_refused_with_a_reason() {
    if !can_run() {
        return;
    }
    let fails = |builder: VmBuilder| {
        let run = builder.run_with_console(&image("hello"), |_: &str| (), &mut |_| ());
        run.map(drop).unwrap_err()
    };
    let few = fails(builder(16, 16, 0, ""));
    assert!(matches!(few, KvmError::Vcpus { asked: 0, .. }), "{few}");
    let many = fails(builder(16, 16, 5000, ""));
    assert!(many.to_string().contains("5000 vCPUs: give 1 to"), "{many}");
    let resident = fails(builder(16, 1, 1, ""));
    assert!(matches!(resident, KvmError::Resident { .. }), "{resident}");
    let size = fails(builder(0, 16, 1, ""));
    assert!(matches!(size, KvmError::Resident { .. }), "{size}");
    let line = fails(builder(16, 16, 1, &"x".repeat(5000)));
    assert!(matches!(line, KvmError::Boot(_)), "{line}");
}
