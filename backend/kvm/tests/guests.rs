//! Whole guests on `/dev/kvm`.

mod common;

use common::{builder, can_run, image, pass, run, within};
use lacuna_kvm::{Apf, FirstTouch, KvmError, VmBuilder};
use lacuna_machine::{Ending, GuestMemory};
use std::time::Duration;

#[test]
fn hello_prints_its_line() {
    if !can_run() {
        return;
    }
    let (outcome, text) = pass(&builder(32, 32, 1, ""), "hello");
    assert!(text.to_lowercase().contains("hello"), "{text}");
    assert!(outcome.status.is_some(), "it announced its status page");
    assert_eq!(outcome.stats.evicted, 0, "everything fits");
}

#[test]
fn every_page_is_as_the_guest_left_it_at_4x_overcommit() {
    if !can_run() {
        return;
    }
    for (vcpus, latency) in [(1, Duration::ZERO), (2, Duration::from_micros(200))] {
        let builder = builder(16, 4, vcpus, "rounds=1");
        builder.latency.set(latency);
        let (outcome, _) = pass(&builder, "verify");
        let stats = outcome.stats;
        assert!(stats.fetched > 1000, "{stats:?}");
        let least = u128::from(stats.fetched) * latency.as_nanos();
        assert!(u128::from(stats.delay_ns) >= least, "early: {stats:?}");
    }
}

#[test]
fn every_page_is_as_the_guest_left_it_with_async_faults() {
    if !can_run() {
        return;
    }
    let builder = VmBuilder {
        apf: Apf::On,
        ..builder(16, 4, 2, "rounds=1 threads=6")
    };
    builder.latency.set(Duration::from_millis(1));
    let (outcome, _) = pass(&builder, "verify");
    assert!(outcome.stats.fetched > 1000, "{:?}", outcome.stats);
}

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
    let (outcome, _) = pass(&builder, "hello");
    let stats = outcome.stats;
    assert_eq!(stats.fetched, stats.first_touches, "{stats:?}");
    assert!(stats.delay_ns >= stats.fetched * 1_000_000, "{stats:?}");
}

#[test]
fn a_triple_fault_ends_the_run() {
    if !can_run() {
        return;
    }
    let (outcome, text) = run(&builder(16, 16, 1, ""), "triple");
    let ending = format!("{:?}", outcome.ending);
    // Where KVM runs the guest's kernel in its emulator (kvm_pvm), the emulator gives up instead.
    let expected = ["triple fault", "KVM gave up"];
    assert!(
        expected.iter().any(|what| ending.contains(what)),
        "{ending}\n{text}"
    );
    assert!(ending.contains("rip 0x"), "it says where: {ending}");
}

/// The vCPUs compute, halt, or wait for pages that take an hour.
#[test]
fn a_kick_ends_an_endless_guest() {
    if !can_run() {
        return;
    }
    let builder = builder(16, 4, 2, "seconds=3600 workers=1");
    let latency = builder.latency.clone();
    let outcome = within(60, move || {
        let mut far_since = None;
        let watch = |observed: &lacuna_kvm::Observed<'_>| {
            if observed.vm.source_stats().evicted > 100 {
                latency.set(Duration::from_secs(3600));
                let since = *far_since.get_or_insert(observed.now);
                if observed.now.since(since) > 2_000_000_000 {
                    observed.devices.end(Ending::Stopped, observed.vm);
                }
            }
        };
        builder.run(&image("bm"), |_: &str| (), watch).unwrap()
    });
    assert!(matches!(outcome.ending, Ending::Stopped));
}

#[test]
fn the_watcher_reads_and_writes_guest_memory() {
    if !can_run() {
        return;
    }
    let builder = builder(16, 4, 1, "seconds=2");
    let seen = within(60, move || {
        let mut seen = 0;
        let watch = |observed: &lacuna_kvm::Observed<'_>| {
            let mut magic = [0; 8];
            let Some(gfn) = observed.devices.status_page() else {
                return;
            };
            observed.vm.read(gfn.gpa(), &mut magic).unwrap();
            seen += usize::from(u64::from_le_bytes(magic) == lacuna_guest::status::MAGIC);
            // The guest does not use the last bytes of the page.
            let at = gfn.gpa().checked_add(4080).unwrap();
            observed.vm.write(at, &[seen as u8; 16]).unwrap();
            let mut back = [0; 16];
            observed.vm.read(at, &mut back).unwrap();
            assert_eq!(back, [seen as u8; 16]);
        };
        builder.run(&image("bm"), |_: &str| (), watch).unwrap();
        seen
    });
    assert!(seen > 0);
}

#[test]
fn bad_input_is_refused_with_a_reason() {
    if !can_run() {
        return;
    }
    let fails = |builder: VmBuilder| {
        let run = builder.run(&image("hello"), |_: &str| (), |_| ());
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
