//! AArch64 guests: the committed images, on this backend's processors.

use crate::common;

use common::{Lines, builder, start};
use lacuna_addr::Gpa;
use lacuna_machine::{
    Arch, Builder as _, CpuModel, Ending, GuestMemory as _, Image, PlatformDevices, Segment,
    Vm as _,
};
use lacuna_skip::test;
use lacuna_soft::{RunSummary, Vm, VmBuilder};
use std::sync::Arc;

fn image(name: &str) -> Image<'static> {
    let image = lacuna_guest::Arch::Arm64.image(name);
    let image = Image::parse(image.expect("it is committed").file).unwrap();
    assert_eq!(image.arch, Arch::Arm64);
    image
}

fn run(builder: &VmBuilder, name: &str) -> (RunSummary, String) {
    let lines = Lines::default();
    let builder = VmBuilder {
        arch: Arch::Arm64,
        ..builder.clone()
    };
    let done = builder.run_to_summary(&image(name), lines.sink());
    (done.unwrap(), lines.text())
}

/// Runs `name` until it ends, which must be a success.
fn pass(builder: &VmBuilder, name: &str) -> (RunSummary, String) {
    let (outcome, text) = run(builder, name);
    let ending = &outcome.ending;
    let good = matches!(ending, Ending::Exited(0));
    assert!(good, "{name}: {builder:?}: {ending:?}\n{text}");
    (outcome, text)
}

#[test]
fn hello_says_hello() {
    let (_, text) = pass(&builder(64, 64, 1, ""), "hello");
    assert!(text.contains("hello"), "{text}");
}

#[test]
fn its_other_vcpus_start_by_psci() {
    for vcpus in [2, 4] {
        let (outcome, _) = pass(&builder(64, 64, vcpus, ""), "touch");
        assert!(
            outcome.retired.iter().all(|n| *n > 0),
            "{:?}",
            outcome.retired
        );
    }
}

/// Half of the guest's memory is resident, so its pages are swapped out and read back.
#[test]
fn memory_keeps_what_was_written_under_pressure() {
    for vcpus in [1, 2, 4] {
        let (outcome, _) = pass(&builder(32, 16, vcpus, "rounds=1"), "verify");
        let host = outcome.host;
        assert!(host.swapped_in > 500 && host.swapped_out > 500, "{host:?}");
    }
}

#[test]
fn a_seeded_run_repeats() {
    let trace = |seed: u64, vcpus: usize| {
        let seeded = VmBuilder {
            seed: Some(seed),
            ..builder(16, 8, vcpus, "rounds=1")
        };
        pass(&seeded, "verify").0.trace.expect("a seeded run")
    };
    for vcpus in [1, 4] {
        let first = trace(7, vcpus);
        assert_eq!(trace(7, vcpus), first, "{vcpus} vCPUs");
        assert_ne!(trace(8, vcpus).hash, first.hash, "{vcpus} vCPUs");
    }
}

#[test]
fn the_workloads_succeed() {
    pass(&builder(64, 64, 2, "seconds=1"), "bm");
    pass(&builder(32, 16, 2, "rounds=1"), "membound");
    pass(&builder(32, 16, 2, "order=random"), "touch");
    pass(&builder(32, 32, 2, "iters=300"), "smc");
    pass(&builder(32, 32, 2, "iters=2000 adds=2000"), "litmus");
    pass(&builder(32, 32, 1, "rounds=1"), "msr");
    pass(&builder(32, 32, 2, "count=20"), "random");
}

#[test]
fn a_reset_by_the_guest_ends_the_run() {
    let (outcome, _) = run(&builder(32, 32, 1, ""), "reset");
    assert_eq!(outcome.ending, Ending::Reset);
}

#[test]
fn what_does_not_fit_its_architecture_is_refused() {
    let arm64 = VmBuilder {
        arch: Arch::Arm64,
        ..builder(32, 32, 1, "")
    };
    let refused = |builder: &VmBuilder, devices| {
        let done = builder.start(&image("hello"), devices);
        done.map(drop).expect_err("refused").to_string()
    };
    let x86 = PlatformDevices::new(|_: &str| ());
    let text = refused(&arm64, x86);
    assert!(text.contains("PlatformDevices::of"), "{text}");
    let tsc = VmBuilder {
        cpu: CpuModel::Common { tsc_khz: Some(1) },
        ..arm64.clone()
    };
    let text = refused(&tsc, PlatformDevices::of(Arch::Arm64, |_: &str| ()));
    assert!(text.contains("TSC"), "{text}");
    // A VM made without an image has the builder's architecture.
    let x86 = builder(32, 32, 1, "").build().unwrap();
    let text = x86.boot(&image("hello"), "").err().expect("refused");
    let text = text.to_string();
    assert!(text.contains("the image is for AArch64"), "{text}");
    let vcpus = arm64.build().unwrap().boot(&image("hello"), "").unwrap();
    assert!(vcpus[0].as_arm64().is_some() && vcpus[0].as_x86().is_none());
}

/// After a reset of the machine by its VMM, the vCPUs that the guest has started are off again.
#[test]
fn a_machine_is_reset_and_runs_again() {
    let builder = VmBuilder {
        arch: Arch::Arm64,
        ..builder(32, 32, 2, "")
    };
    let vm = builder.build().unwrap();
    let line = builder.full_command_line();
    let mut vcpus = vm.boot(&image("touch"), &line).unwrap();
    for _ in 0..2 {
        let lines = Lines::default();
        let devices = Arc::new(PlatformDevices::of(Arch::Arm64, lines.sink()));
        vcpus = start(&vm, vcpus, &devices).into_vcpus();
        assert_eq!(
            devices.ending(),
            Some(Ending::Exited(0)),
            "{}",
            lines.text()
        );
        vm.withdraw_kicks();
        vm.reload(&image("touch"), &line).unwrap();
        vcpus.iter_mut().for_each(|vcpu| vcpu.reset());
    }
}

/// A guest finds its `.bss` zeroed, also after the reset of a run that has written there.
#[test]
fn a_reload_writes_the_zeros_of_the_image() {
    let image = image("touch");
    let vm = builder(32, 32, 1, "");
    let vm = VmBuilder {
        arch: Arch::Arm64,
        ..vm
    };
    let vm = vm.build().unwrap();
    vm.boot(&image, "").unwrap();
    let ends_with_zeros = |segment: &&Segment<'_>| segment.size > segment.bytes.len() as u64;
    let segment = image.segments.iter().find(ends_with_zeros);
    let segment = segment.expect("the guest has variables without a value");
    let start = segment.gpa.get();
    let zeros = [start + segment.bytes.len() as u64, start + segment.size - 1];
    for at in zeros {
        vm.write(Gpa::truncate(at), &[7]).unwrap();
    }
    vm.reload(&image, "").unwrap();
    for at in zeros {
        let mut byte = [1];
        vm.read(Gpa::truncate(at), &mut byte).unwrap();
        assert_eq!(byte, [0]);
    }
}

/// `rng-seed` in the device tree of a booted VM.
fn rng_seed(vm: &Vm) -> Vec<u8> {
    let mut tree = [0; 4096];
    vm.read(Gpa::truncate(1 << 30), &mut tree).unwrap();
    // A property is its token, its length, the offset of its name, and its value. The first one of
    // 32 bytes is the seed.
    let head = [3_u32, 32].map(u32::to_be_bytes).concat();
    let at = tree.windows(8).position(|part| part == head);
    let value = at.expect("a property of 32 bytes") + 12;
    tree[value..value + 32].to_vec()
}

/// The guest's random numbers have another seed at every boot. In a seeded run this seed follows
/// from the run's seed.
#[test]
fn random_numbers_have_a_new_seed_at_every_boot() {
    let image = image("hello");
    let boot = |seed| {
        let builder = VmBuilder {
            arch: Arch::Arm64,
            seed,
            ..builder(32, 32, 1, "")
        };
        let vm = builder.build().unwrap();
        vm.boot(&image, "").unwrap();
        let first = rng_seed(&vm);
        vm.reload(&image, "").unwrap();
        [first, rng_seed(&vm)]
    };
    let (one, two) = (boot(None), boot(None));
    assert!(one[0] != one[1] && one[0] != two[0] && two[0] != two[1]);
    let (seven, eight) = (boot(Some(7)), boot(Some(8)));
    assert_eq!((&seven[0], &seven), (&seven[1], &boot(Some(7))));
    assert_ne!(seven[0], eight[0]);
}
