//! A monitor keeps a copy of a running guest's memory: it copies the pages of each harvest. At the
//! end the copy must equal the guest's memory.

use crate::common;

use common::shadow::{DETECTIONS, Shadow, ring};
use common::{boot_with, builder_for, on_both, start};
use lacuna_machine::{
    Apf, Arch, DirtyRings as _, DirtyTracking as _, Ending, Exit, GuestMemory as _, MemoryError,
    MemorySlot, MemorySlots as _, Vcpu as _,
};
use lacuna_soft::{
    Backup, Delivery, Detection, HugePages, Logging, SlotFlags, SlotId, Vm, VmBuilder,
};
use lacuna_sync::HostClock;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Duration;

/// Runs `name` to its end beside a monitor, which calls `between` between two harvests. Returns the
/// number of harvested pages.
fn follow(
    builder: &VmBuilder,
    name: &str,
    (detection, delivery): (Detection, Delivery),
    mut between: impl FnMut(&Vm, usize),
) -> usize {
    let clock = Arc::new(HostClock::default());
    let host = builder.host(Arc::clone(&clock) as _).unwrap();
    let background = host.spawn_background().unwrap();
    let before_boot = |vm: &Vm| vm.set_delivery(delivery).unwrap();
    let (vm, vcpus, devices, lines) = boot_with(builder, &host, clock, name, before_boot);
    vm.set_detection(detection);
    let mut copy = Shadow::begin(&vm);
    let mut harvested = 0;
    let running = start(&vm, vcpus, &devices);
    let mut round = 0;
    while !running.wait_timeout(Duration::from_millis(2)) {
        harvested += copy.harvest(&vm);
        between(&vm, round);
        round += 1;
    }
    running.wait();
    let ending = devices.ending();
    assert!(
        matches!(ending, Some(Ending::Exited(0))),
        "{ending:?}\n{}",
        lines.text()
    );
    harvested += copy.harvest(&vm);
    copy.compare(&vm);
    drop(background);
    vm.mmu().verify();
    harvested
}

on_both!(
    every_detection_with_every_delivery,
    one_two_and_four_vcpus_change_their_heaps,
    modified_code_and_memory_order_are_as_without_a_log,
    huge_pages_asynchronous_faults_and_switches_on_the_way,
    a_full_ring_stops_the_vcpu_until_it_is_reset,
);

fn every_detection_with_every_delivery(arch: Arch) {
    for vcpus in [1, 2] {
        for detection in DETECTIONS {
            for delivery in [Delivery::Bitmap, ring(Backup::None)] {
                let builder = builder_for(arch, (8, 6), vcpus, "rounds=2");
                let harvested = follow(&builder, "verify", (detection, delivery), |_, _| ());
                assert!(
                    harvested > 1000,
                    "{detection:?} {delivery:?} {vcpus}: {harvested}"
                );
            }
        }
    }
}

fn one_two_and_four_vcpus_change_their_heaps(arch: Arch) {
    for vcpus in [1, 2, 4] {
        for detection in DETECTIONS {
            for delivery in [Delivery::Bitmap, ring(Backup::None)] {
                let builder = builder_for(arch, (16, 16), vcpus, "transactions=1500 cold=5000");
                let harvested = follow(&builder, "churn", (detection, delivery), |_, _| ());
                assert!(
                    harvested > 1000,
                    "{detection:?} {delivery:?} {vcpus}: {harvested}"
                );
            }
        }
    }
}

/// Harvests stop vCPUs in guest code and clear W of pages with code in them. The guest must not
/// notice.
fn modified_code_and_memory_order_are_as_without_a_log(arch: Arch) {
    for (name, arguments) in [("smc", "iters=50"), ("litmus", "iters=300 adds=300")] {
        for delivery in [Delivery::Bitmap, ring(Backup::None)] {
            let switch = |vm: &Vm, round: usize| vm.set_detection(DETECTIONS[round / 3 % 2]);
            let builder = builder_for(arch, (16, 16), 2, arguments);
            follow(&builder, name, (Detection::Pml, delivery), switch);
        }
    }
}

fn huge_pages_asynchronous_faults_and_switches_on_the_way(arch: Arch) {
    let deliveries = [Delivery::Bitmap, ring(Backup::None), ring(Backup::Bitmap)];
    for (delivery, huge) in
        deliveries
            .into_iter()
            .zip([HugePages::Always, HugePages::Always, HugePages::Never])
    {
        let builder = VmBuilder {
            huge,
            apf: Apf::On,
            ..builder_for(arch, (24, 15), 3, "rounds=1")
        };
        let switch = |vm: &Vm, round: usize| {
            vm.set_detection(DETECTIONS[round / 3 % 2]);
            if round % 7 == 3 {
                // Replaces the slot; the new one logs.
                for MemorySlot { id, .. } in vm.memory_slots() {
                    vm.set_slot_flags(id, SlotFlags::empty()).unwrap();
                }
            }
        };
        follow(&builder, "verify", (Detection::Pml, delivery), switch);
    }
}

fn a_full_ring_stops_the_vcpu_until_it_is_reset(arch: Arch) {
    let builder = builder_for(arch, (32, 32), 1, "rounds=1");
    let clock = Arc::new(HostClock::default());
    let host = builder.host(Arc::clone(&clock) as _).unwrap();
    let before_boot = |vm: &Vm| vm.set_delivery(ring(Backup::None)).unwrap();
    let (vm, mut vcpus, _board, _) = boot_with(&builder, &host, clock, "verify", before_boot);
    let vcpu = &mut vcpus[0];
    for detection in DETECTIONS {
        vm.set_detection(detection);
        for MemorySlot { id, .. } in vm.memory_slots() {
            vm.set_logging(id, Logging::LAZY).unwrap();
        }
        while vcpu.run().unwrap() != Exit::DirtyRingFull {}
        let retired = vm.retired()[0];
        assert_eq!(vcpu.run().unwrap(), Exit::DirtyRingFull, "again");
        assert_eq!(vm.retired()[0], retired, "nothing ran meanwhile");
        // A panic of the VMM's code breaks no other call.
        let panics = || vm.reap_rings(&mut |_, _| panic!("the VMM's own"));
        assert!(panic::catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert!(vm.reap_rings(&mut |_, _| ()).unwrap() >= 1024 - 576);
        assert!(vm.reset_rings().unwrap() > 0);
        assert_ne!(vm.set_logging(SlotId(99), Logging::LAZY), Ok(()));
    }
    let last = vm.memory_slots().last().unwrap().gfns.last();
    let refused = vm.write(last.gpa(), &[1]);
    let Err(MemoryError::Refused { cause, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert!(cause.contains("without a backup bitmap"), "{cause}");
}
