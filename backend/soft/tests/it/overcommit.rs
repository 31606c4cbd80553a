//! A guest with frames for a quarter of its memory loses nothing, with every swap device, 1, 2 and
//! 4 vCPUs, two VMs in one budget, threads and seeds.

use crate::common;

use common::{boot, builder_for, on_both, pass, second_quarter, start};
use lacuna_machine::{Arch, Ending};
use lacuna_soft::{
    HostStats, HugePages, LatencySetting, SimulatedVm, Simulator, SimulatorConfig, Swap, Trace, Vm,
    VmBuilder,
};
use lacuna_sync::{Clock, HostClock, VirtualClock};
use std::sync::Arc;
use std::time::Duration;

on_both!(
    verify_on_a_file,
    verify_in_compressed_memory,
    verify_with_added_latency,
    incompressible_pages_on_a_file,
    two_vms_in_one_budget,
    a_seed_gives_one_trace,
    two_seeded_vms_in_one_budget,
    a_seeded_vm_whose_huge_pages_come_and_go,
);

const ARGUMENTS: &str = "rounds=2";

fn four_times(arch: Arch, vcpus: usize) -> VmBuilder {
    builder_for(arch, (24, 6), vcpus, ARGUMENTS)
}

fn assert_swapped(outcome: &lacuna_soft::RunSummary) {
    let host = &outcome.host;
    assert!(
        host.swapped_in > 1000 && host.swapped_out > 1000,
        "nothing was swapped: {host:?}"
    );
}

fn verify_on_a_file(arch: Arch) {
    for vcpus in [1, 2, 4] {
        assert_swapped(&pass(&four_times(arch, vcpus), "verify").0);
    }
}

fn verify_in_compressed_memory(arch: Arch) {
    for vcpus in [1, 2, 4] {
        let builder = VmBuilder {
            swap: Swap::Memory,
            ..four_times(arch, vcpus)
        };
        assert_swapped(&pass(&builder, "verify").0);
    }
}

fn verify_with_added_latency(arch: Arch) {
    for vcpus in [1, 2, 4] {
        let latency = Duration::from_micros(200);
        let builder = VmBuilder {
            latency: LatencySetting::new(latency),
            ..four_times(arch, vcpus)
        };
        assert_swapped(&pass(&builder, "verify").0);
    }
}

fn incompressible_pages_on_a_file(arch: Arch) {
    assert_swapped(
        &pass(
            &builder_for(arch, (24, 6), 2, "rounds=2 pattern=random"),
            "verify",
        )
        .0,
    );
}

fn two_vms_in_one_budget(arch: Arch) {
    common::image_for(arch, "verify"); // only this thread can end the test as skipped
    let builder = builder_for(arch, (32, 16), 2, ARGUMENTS);
    let clock: Arc<dyn Clock> = Arc::new(HostClock::default());
    let host = builder.host(Arc::clone(&clock)).unwrap();
    let background = host.spawn_background().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let (vm, vcpus, devices, lines) =
                    boot(&builder, &host, Arc::clone(&clock), "verify");
                start(&vm, vcpus, &devices).wait();
                let ending = devices.ending();
                let text = lines.text();
                assert!(
                    matches!(ending, Some(Ending::Exited(0))),
                    "{ending:?}\n{text}"
                );
            });
        }
    });
    drop(background);
    assert!(host.stats().swapped_in > 1000);
    host.verify();
}

fn seeded(arch: Arch, seed: u64, vms: usize) -> Trace {
    let builder = builder_for(arch, (16, 4 * vms as u64), 2, ARGUMENTS);
    let (trace, stats) = seeded_in(seed, vms, builder, "verify");
    assert!(stats.swapped_in > 200, "{stats:?}");
    trace
}

/// Forbids huge leaves in a part of the memory for a while; existing ones are split.
fn disturb(vm: &Vm, looks: u32) {
    let part = second_quarter(vm);
    match looks % 32 {
        8 => vm.mmu().disallow_huge(part).expect("tables enough"),
        24 => vm.mmu().allow_huge(part),
        _ => {}
    }
}

/// Verifies all structures now and then.
fn seeded_in(seed: u64, vms: usize, builder: VmBuilder, image: &str) -> (Trace, HostStats) {
    let builder = VmBuilder {
        seed: Some(seed),
        ..builder
    };
    let clock = Arc::new(VirtualClock::default());
    let host = builder.host(Arc::clone(&clock) as Arc<dyn Clock>).unwrap();
    let mut simulator = Simulator::new(SimulatorConfig {
        seed,
        clock: Arc::clone(&clock),
        host: Arc::clone(&host),
    });
    let mut guests = Vec::new();
    for _ in 0..vms {
        let clock = Arc::clone(&clock) as Arc<dyn Clock>;
        let (vm, vcpus, devices, lines) = boot(&builder, &host, clock, image);
        guests.push((Arc::clone(&vm), Arc::clone(&devices), lines));
        simulator.add(SimulatedVm { vm, vcpus, devices });
    }
    let mut looks = 0u32;
    let trace = simulator.run(|| {
        looks += 1;
        if looks.is_multiple_of(8) {
            guests.iter().for_each(|(vm, ..)| vm.mmu().verify());
            host.verify();
            guests.iter().for_each(|(vm, ..)| disturb(vm, looks));
        }
    });
    for (vm, devices, lines) in &guests {
        let (ending, text) = (devices.ending(), lines.text());
        assert!(
            matches!(ending, Some(Ending::Exited(0))),
            "seed {seed}: {ending:?}\n{text}"
        );
        vm.mmu().verify();
    }
    (trace, host.stats())
}

fn a_seed_gives_one_trace(arch: Arch) {
    let first = seeded(arch, 1, 1);
    assert_eq!(first, seeded(arch, 1, 1));
    assert_ne!(first.hash, seeded(arch, 2, 1).hash);
}

fn two_seeded_vms_in_one_budget(arch: Arch) {
    assert_eq!(seeded(arch, 3, 2), seeded(arch, 3, 2));
}

fn a_seeded_vm_whose_huge_pages_come_and_go(arch: Arch) {
    for vcpus in [1, 4] {
        let builder = || VmBuilder {
            huge: HugePages::Always,
            ..builder_for(arch, (32, 16), vcpus, "huge=1 accesses=30000 writes=30")
        };
        let (trace, stats) = seeded_in(5, 1, builder(), "zipf");
        assert!(stats.huge_faults > 0 && stats.splits > 0, "{stats:?}");
        assert!(stats.swapped_in > 200, "{stats:?}");
        assert_eq!(trace, seeded_in(5, 1, builder(), "zipf").0);
    }
}
