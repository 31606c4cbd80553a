//! Whole vCPU states on KVM with the host's processor model, which has an FPU. The tests with the
//! common model are in `check/conformance`.

mod common;

use common::{builder, can_run, image, within};
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_kvm::{CpuModel, Vcpu, Vm, VmBuilder};
use lacuna_machine::{
    Ending, Exit, GuestMemory as _, Kick as _, MemorySlots as _, Next, PlatformDevices,
    SaveRestore, Vcpu as _, dispatch,
};
use lacuna_skip::test;
use std::thread;
use std::time::{Duration, Instant};

fn run_for(vm: &Vm, vcpus: Vec<Vcpu>, devices: &PlatformDevices, time: Duration) -> Vec<Vcpu> {
    thread::scope(|scope| {
        let drive = |mut vcpu: Vcpu| {
            scope.spawn(move || {
                loop {
                    let exit = vcpu.run();
                    let kicked = matches!(exit, Ok(Exit::Interrupted));
                    let next = dispatch(&mut vcpu, exit, devices, vm);
                    if kicked || next == Next::Stop {
                        return vcpu;
                    }
                }
            })
        };
        let threads: Vec<_> = vcpus.into_iter().map(drive).collect();
        let end = Instant::now() + time;
        while Instant::now() < end && devices.ending().is_none() {
            thread::sleep(Duration::from_micros(200));
        }
        vm.kick_all();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn copy_memory(from: &Vm, to: &Vm) {
    for slot in from.memory_slots() {
        let mut page = [0; PAGE_SIZE];
        for n in 0..slot.gfns.pages() {
            let gpa = Gpa::truncate(slot.gfns.start().gpa().get() + n * PAGE_SIZE as u64);
            from.read(gpa, &mut page).unwrap();
            to.write(gpa, &page).unwrap();
        }
    }
}

fn migrate(builder: &VmBuilder, name: &str) -> (Option<Ending>, usize) {
    let devices = PlatformDevices::new(|line: &str| println!("{line}"));
    let mut vm = builder.vm().unwrap();
    let mut vcpus = vm.boot(&image(name), &builder.full_command_line()).unwrap();
    for moves in 0.. {
        // The last one runs to the guest's end.
        let time = match moves {
            6 => Duration::from_secs(600),
            _ => Duration::from_millis(150),
        };
        vcpus = run_for(&vm, vcpus, &devices, time);
        if devices.ending().is_some() {
            return (devices.ending(), moves);
        }
        let states: Vec<_> = vcpus.iter_mut().map(|vcpu| vcpu.save().unwrap()).collect();
        let next = builder.vm().unwrap();
        copy_memory(&vm, &next);
        let mut restored = next.bare_vcpus().unwrap();
        for (vcpu, state) in restored.iter_mut().zip(&states) {
            vcpu.restore(state).unwrap();
        }
        (vm, vcpus) = (next, restored);
    }
    unreachable!("the guest ends")
}

#[test]
fn a_guest_with_the_hosts_processor_goes_on_in_another_vm() {
    if !can_run() {
        return;
    }
    let mut builder = builder(16, 16, 2, "rounds=6");
    builder.cpu = CpuModel::Host;
    let (ending, moves) = within(200, move || migrate(&builder, "verify"));
    assert!(matches!(ending, Some(Ending::Exited(0))), "{ending:?}");
    assert!(moves > 0, "it never moved");
}
