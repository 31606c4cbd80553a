//! A VMM resets guests of several vCPUs in the middle of a run, at points chosen by a seed.
//! Whatever the vCPUs do then, the guest starts again in zeroed memory, and succeeds.

use crate::common;

use common::{Lines, builder, image_for};
use fastrand::Rng;
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{
    Apf, Arch, Ending, GuestMemory as _, Kick as _, MemorySlots as _, PlatformDevices, Vm as _,
};
use lacuna_skip::test;
use lacuna_soft::{SimulatedVm, Simulator, SimulatorConfig, Trace, Vm, VmConfig};
use lacuna_sync::{Clock, VirtualClock};
use std::sync::Arc;
use std::time::Duration;

/// The number of resets in one run.
const RESETS: usize = 3;

/// The largest number of slices after the last reset.
const SLICES_MAX: u64 = 3_000_000;

/// A run with resets, to its end; its trace.
fn run(arch: Arch, vcpus: usize, line: &str, seed: u64) -> Trace {
    let mut builder = builder(8, 6, vcpus, line);
    builder.arch = arch;
    builder.apf = Apf::On;
    builder.seed = Some(seed);
    builder.latency.set(Duration::from_micros(100));
    let clock = Arc::new(VirtualClock::default());
    let time = Arc::clone(&clock) as Arc<dyn Clock>;
    let host = builder.host(Arc::clone(&time)).unwrap();
    let config = VmConfig {
        arch,
        memory: builder.memory,
        vcpus,
        apf: builder.apf,
        ..VmConfig::default()
    };
    let vm = Vm::new(Arc::clone(&host), time, config).unwrap();
    let (image, line) = (image_for(arch, "verify"), builder.full_command_line());
    let lines = Lines::default();
    let devices = Arc::new(PlatformDevices::of(arch, lines.sink()));
    let mut simulator = Simulator::new(SimulatorConfig { seed, clock, host });
    simulator.add(SimulatedVm {
        vcpus: vm.boot(&image, &line).unwrap(),
        vm: Arc::clone(&vm),
        devices: Arc::clone(&devices),
    });
    let mut rng = Rng::with_seed(seed);
    for _ in 0..RESETS {
        for _ in 0..rng.usize(1..600) {
            assert!(simulator.run_slice(), "{arch:?}, {line}: it ended early");
        }
        // `verify` expects zeroed memory, as after power-on.
        for slot in vm.memory_slots() {
            for at in 0..slot.gfns.pages() {
                let gfn = slot.gfns.start().checked_add(at).unwrap();
                vm.write(gfn.gpa(), &[0; PAGE_SIZE]).unwrap();
            }
        }
        vm.reload(&image, &line).unwrap();
        let mut vcpus: Vec<_> = simulator.vcpus_mut(0).collect();
        rng.shuffle(&mut vcpus);
        vcpus.into_iter().for_each(|vcpu| vcpu.reset());
        // The simulator has recorded waits of some vCPUs.
        vm.kick_all();
        vm.withdraw_kicks();
    }
    let mut slices = 0;
    let trace = simulator.run_beside(|| {
        slices += 1;
        assert!(slices < SLICES_MAX, "{arch:?}, {line}: it hangs");
    });
    let ending = devices.ending();
    assert_eq!(ending, Some(Ending::Exited(0)), "{line}: {}", lines.text());
    trace
}

fn all(arch: Arch, line: &str) {
    for vcpus in [1, 2, 4] {
        for seed in 0..2 {
            run(arch, vcpus, line, seed);
        }
    }
}

#[test]
fn a_guest_of_x86_starts_again() {
    all(Arch::X86_64, "rounds=1 pages=600");
}

#[test]
fn a_guest_of_arm64_starts_again() {
    all(Arch::Arm64, "rounds=1 pages=600 apf=abort");
    all(Arch::Arm64, "rounds=1 pages=600 apf=sdei");
}

#[test]
fn a_run_with_resets_repeats() {
    for (arch, line) in [
        (Arch::X86_64, "rounds=1 pages=600"),
        (Arch::Arm64, "rounds=1 pages=600 apf=abort"),
        (Arch::Arm64, "rounds=1 pages=600 apf=sdei"),
    ] {
        let first = run(arch, 4, line, 9);
        assert_eq!(run(arch, 4, line, 9), first, "{arch:?}");
        assert_ne!(run(arch, 4, line, 10).hash, first.hash, "{arch:?}");
    }
}
