//! The parts of a state that a vCPU takes over or refuses. `seeded_moves.rs` and
//! `check/conformance` have moving guests.

use crate::common;

use common::{builder, image};
use fastrand::Rng;
use lacuna_machine::{
    Builder as _, PlatformDevices, SaveRestore, VcpuState, Vm as _, dispatch, x86,
};
use lacuna_skip::test;
use lacuna_soft::{Step, Vcpu, Vm, VmBuilder};
use std::sync::Arc;

fn bare(builder: &VmBuilder) -> (Arc<Vm>, Vcpu) {
    let vm = builder.build().unwrap();
    let vcpu = vm.bare_vcpus().unwrap().pop().unwrap();
    (vm, vcpu)
}

/// A state of a guest after a short run, with its time stopped.
fn some_state() -> (VmBuilder, x86::State) {
    let mut builder = builder(16, 16, 1, "seconds=1");
    builder.seed = Some(1);
    let vm = builder.build().unwrap();
    let mut vcpus = vm.boot(&image("bm"), &builder.full_command_line()).unwrap();
    let devices = PlatformDevices::new(|_: &str| ());
    for _ in 0..200 {
        if let Step::Exit(exit) = vcpus[0].step(1000) {
            let _ = dispatch(&mut vcpus[0], Ok(exit), &devices, &*vm);
        }
    }
    while vcpus[0].save().is_err() {
        let _ = vcpus[0].step(1);
    }
    let VcpuState::X86(state) = vcpus[0].save().unwrap() else {
        panic!("an x86 processor");
    };
    (builder, *state)
}

#[test]
fn what_was_restored_is_saved_again() {
    let (builder, state) = some_state();
    let (_vm, mut vcpu) = bare(&builder);
    let state = VcpuState::X86(Box::new(state));
    vcpu.restore(&state).unwrap();
    assert_eq!(vcpu.save().unwrap(), state);
}

#[test]
fn what_the_processor_cannot_have_is_refused_by_its_name() {
    let (builder, state) = some_state();
    let (_vm, mut vcpu) = bare(&builder);
    let mut refusal = |change: &dyn Fn(&mut x86::State)| {
        let mut bad = state.clone();
        change(&mut bad);
        let bad = VcpuState::X86(Box::new(bad));
        vcpu.restore(&bad).unwrap_err().to_string()
    };
    for (change, name) in [
        (
            &(|s: &mut x86::State| s.tsc.khz = 2_500_000) as &dyn Fn(&mut x86::State),
            "tsc.khz",
        ),
        (&|s| s.regs.rip = 1 << 60, "regs.rip"),
        (&|s| s.system.cr4 |= 1 << 9, "system.cr4"),
        (&|s| s.system.efer = 0, "system.efer"),
        (
            &|s| s.system.segments[1].access &= !x86::Segment::LONG,
            "system.segments.cs",
        ),
        (&|s| s.xsave = Some(vec![0; 1024]), "xsave"),
        (&|s| s.run = x86::RunState::WaitingForStartup, "run"),
        (&|s| s.apic.base = 0, "apic.base"),
        (&|s| s.apf.enable = 0x1001, "apf.enable"),
        (&|s| _ = s.msrs.insert(0x17a, 5), "MSR 0x17a"),
    ] {
        let text = refusal(change);
        assert!(text.contains(name), "{name}: {text}");
    }
}

/// No state causes a panic when it is restored and run.
#[test]
fn a_damaged_state_is_refused_or_runs() {
    let (builder, state) = some_state();
    let (_vm, mut vcpu) = bare(&builder);
    let mut rng = Rng::with_seed(7);
    let mut taken = 0;
    for _ in 0..2000 {
        let mut bad = state.clone();
        for _ in 0..rng.usize(1..4) {
            damage(&mut bad, &mut rng);
        }
        if vcpu.restore(&VcpuState::X86(Box::new(bad))).is_ok() {
            taken += 1;
            for _ in 0..4 {
                let _ = vcpu.step(50);
            }
        }
    }
    assert!((100..1900).contains(&taken), "{taken} of 2000 are taken");
}

fn damage(state: &mut x86::State, rng: &mut Rng) {
    let bits = match rng.bool() {
        true => 1 << rng.u32(..64),
        false => rng.u64(..),
    };
    let part = rng.usize(..6);
    match rng.u8(..16) {
        0 => state.regs.rip ^= bits,
        1 => state.regs.rflags ^= bits,
        2 => state.system.cr0 ^= bits,
        3 => state.system.cr3 ^= bits,
        4 => state.system.cr4 ^= bits,
        5 => state.system.efer ^= bits,
        6 => state.system.segments[part].access ^= bits as u32,
        7 => state.system.segments[part].selector ^= bits as u16,
        8 => state.apic.regs[rng.usize(..64)] ^= bits as u32,
        9 => state.apic.base ^= bits,
        10 => {
            state.events.exception = Some(x86::Exception {
                vector: bits as u8,
                error: rng.bool().then_some(bits as u32),
                cr2: rng.bool().then_some(bits),
            })
        }
        11 => state.events.interrupt = Some(bits as u8),
        12 => state.apf.enable = bits,
        13 => state.system.idtr.base ^= bits,
        14 => state.apic.tsc_deadline ^= bits,
        _ => state.regs.gpr[rng.usize(..16)] = bits,
    }
}
