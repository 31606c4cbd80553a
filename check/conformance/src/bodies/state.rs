//! The state of vCPUs, saved and restored: in place, in a fresh VM, on another backend.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;
use lacuna_machine::x86::cpuid::Features;
use lacuna_machine::{
    Apf, Arch, CpuModel, Ending, Exit, Kick as _, PlatformDevices, SaveRestore as _, StateError,
    Vcpu as _, VcpuState, Vm as _, arm64, x86,
};

use super::Outcome;
use crate::backend::{Backend, Lacks, Made, Request, VcpuOf};
use crate::moving::{move_at_least, move_to, run_for};
use crate::program::{Code, Reg, assemble, image, is_question, reported, saved};
use crate::running::{guest, within};

/// How often a guest moves.
const MOVES: usize = 4;

/// Without an FPU, and at the backend's own TSC frequency.
const COMMON: CpuModel = CpuModel::Common { tsc_khz: None };

/// A VM of one vCPU with the common model.
pub(super) fn small() -> Request {
    Request {
        cpu: COMMON,
        ..Request::new(16, 16, 1, "")
    }
}

/// Counts in a register, and reports each number.
pub(super) fn counter(arch: Arch) -> Code {
    assemble(arch, |a| {
        a.set(Reg::H, UNTOUCHED);
        a.set(Reg::A, 0);
        let again = a.here();
        a.add_immediate(Reg::A, 1);
        a.report(Reg::A);
        a.jump(again);
    })
}

/// The counter leaves this value in register H.
const UNTOUCHED: u64 = 0x1234_5678_9abc_def0;

/// The next number; the instruction that reports it is complete.
pub(super) fn next_told<B: Backend>(vm: &B::Vm, vcpu: &mut VcpuOf<B>) -> u32 {
    let number = loop {
        let exit = vcpu.run().expect("a vCPU that can continue");
        match reported(&exit) {
            Some(value) => break value,
            None => assert_eq!(exit, Exit::Interrupted),
        }
    };
    vm.kick(vcpu.index());
    let exit = vcpu.run().expect("a vCPU that can continue");
    assert_eq!(exit, Exit::Interrupted, "a kick before the run");
    number
}

pub(super) fn registers(state: &VcpuState) -> &x86::State {
    match state {
        VcpuState::X86(state) => state,
        other => panic!("{other:?}"),
    }
}

/// Asserts that two states are equal, except for time and the host's properties.
#[track_caller]
pub(super) fn assert_same(a: &VcpuState, b: &VcpuState, context: &dyn fmt::Display) {
    match (a, b) {
        (VcpuState::X86(a), VcpuState::X86(b)) => {
            assert_eq!(a.regs, b.regs, "{context}");
            assert_eq!(a.system, b.system, "{context}");
            assert_eq!(a.debug, b.debug, "{context}");
            assert_eq!(a.msrs, b.msrs, "{context}");
            assert_eq!(a.events, b.events, "{context}");
            assert_eq!(a.apf, b.apf, "{context}");
            assert_eq!(a.xsave, b.xsave, "{context}");
            assert_eq!(
                (a.xcr0, a.run, a.tsc.khz),
                (b.xcr0, b.run, b.tsc.khz),
                "{context}"
            );
        }
        // Its timers compare with the counter, which is in no vCPU.
        (VcpuState::Arm64(a), VcpuState::Arm64(b)) => assert_eq!(a, b, "{context}"),
        (a, b) => panic!("{context}: {a:?}, {b:?}"),
    }
}

/// A vCPU continues from a restored state, even if it has run far since the save.
pub fn a_vcpu_goes_back_to_a_saved_state<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = counter(backend.arch());
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        let numbers = [(); 3].map(|()| next_told::<B>(&vm, vcpu));
        assert_eq!(numbers, [1, 2, 3]);
        let mut state = vcpu.save().expect("between two instructions");
        assert_eq!(*saved(&mut state, Reg::A), 3);
        assert_eq!(*saved(&mut state, Reg::H), UNTOUCHED);
        let again = vcpu.save().expect("between two instructions");
        assert_same(&again, &state, &"a save changes nothing");
        for _ in 0..3 {
            assert_eq!(
                next_told::<B>(&vm, vcpu),
                4,
                "a save changes nothing, a restore all"
            );
            assert_eq!(next_told::<B>(&vm, vcpu), 5);
            vcpu.restore(&state).expect("its own state");
        }
        Ok(())
    })
}

/// A vCPU that waits for a device's answer has no state to save, and continues after the answer.
pub fn half_an_instruction_is_not_saved<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = assemble(backend.arch(), |a| {
            let again = a.here();
            a.ask(Reg::A);
            a.jump(again);
        });
        let Made { mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        let exit = vcpu.run().expect("a vCPU that can continue");
        assert!(is_question(&exit), "{exit:?}");
        let refused = vcpu.save();
        let is_refused = matches!(refused, Err(StateError::MidInstruction { vcpu: 0 }));
        assert!(is_refused, "{refused:?}");
        vcpu.complete_read(42);
        let exit = vcpu.run().expect("a vCPU that can continue");
        assert!(is_question(&exit), "{exit:?}");
        Ok(())
    })
}

/// The names that a refusal may have, and the change to the state.
pub(super) type Damage<S> = (&'static [&'static str], fn(&mut S));

/// KVM refuses all system registers together.
const X86_DAMAGES: [Damage<x86::State>; 7] = [
    (&["system.cr4", "system registers"], |s| {
        s.system.cr4 |= 1 << 40
    }),
    (&["system.efer", "system registers"], |s| s.system.efer = 0),
    (&["tsc.khz"], |s| s.tsc.khz = 1),
    (&["features.fpu"], |s| {
        s.features = Features::of(|_, _| [0, 0, 0, 1])
    }),
    (&["features."], |s| {
        s.features = Features::of(|_, _| [!0; 4])
    }),
    (&["xsave"], |s| s.xsave = Some(Vec::new())),
    (&["MSR 0xdead:"], |s| _ = s.msrs.insert(0xdead, 1)),
];

const ID_AA64ISAR0: arm64::SysReg = arm64::SysReg::new([3, 0, 0, 6, 0]);
const NO_REGISTER: arm64::SysReg = arm64::SysReg::new([3, 7, 15, 15, 7]);

const ARM64_DAMAGES: [Damage<arm64::State>; 8] = [
    (&["pstate"], |s| s.regs.pstate = 0b1001),
    (&["S3_7_C15_C15_7"], |s| _ = s.system.insert(NO_REGISTER, 1)),
    (&["ID_AA64ISAR0_EL1"], |s| {
        _ = s.id.insert(ID_AA64ISAR0, 0xf << 4)
    }),
    (&["MPIDR_EL1"], |s| {
        _ = s.id.insert(arm64::SysReg::MPIDR, 1 << 31 | 77)
    }),
    (&["timers"], |s| s.timers.virt.ctl = !0),
    (&["gic"], |s| s.gic.cpu.bpr = [9, 9]),
    (&["abort"], |s| {
        s.abort = Some(arm64::Abort {
            iss: !0,
            address: 0,
        })
    }),
    (&["apf"], |s| s.apf.enabled = Some((arm64::Form::Abort, 1))),
];

/// A damaged state is refused with the wrong value's name, and the vCPU continues unchanged.
pub fn a_damaged_state_is_refused_by_name<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = counter(backend.arch());
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        assert_eq!(next_told::<B>(&vm, vcpu), 1);
        let state = vcpu.save().expect("between two instructions");
        let damaged: Vec<(_, VcpuState)> = match &state {
            VcpuState::X86(state) => damaged(&**state, &X86_DAMAGES, VcpuState::X86),
            VcpuState::Arm64(state) => damaged(&**state, &ARM64_DAMAGES, VcpuState::Arm64),
            other => panic!("{other:?}"),
        };
        for (names, damaged) in damaged {
            let refused = vcpu.restore(&damaged).expect_err(names[0]).to_string();
            let is_named = names.iter().any(|name| refused.contains(name));
            assert!(is_named, "{names:?}: {refused}");
            let now = vcpu.save().expect("between two instructions");
            assert_same(&now, &state, &refused);
        }
        vcpu.restore(&state).expect("its own state");
        assert_eq!(next_told::<B>(&vm, vcpu), 2);
        Ok(())
    })
}

/// A copy of `state` with each of the damages.
pub(super) fn damaged<S: Clone>(
    state: &S,
    damages: &[Damage<S>],
    tag: fn(Box<S>) -> VcpuState,
) -> Vec<(&'static [&'static str], VcpuState)> {
    let damage = |(names, damage): &Damage<S>| {
        let mut damaged = state.clone();
        damage(&mut damaged);
        (*names, tag(Box::new(damaged)))
    };
    damages.iter().map(damage).collect()
}

/// A fresh VM has the restored state.
pub fn a_restored_state_is_saved_again<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = counter(backend.arch());
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        assert_eq!(next_told::<B>(&vm, &mut vcpus[0]), 1);
        let state = vcpus[0].save().expect("between two instructions");
        let shared = vm.save_shared().expect("no vCPU runs");
        let Made { vm, mut vcpus, .. } = backend.make_bare(&small())?;
        let restored = vm.restore_shared(&shared);
        restored.expect("a state of this backend");
        vcpus[0].restore(&state).expect("a state of this backend");
        let again = vcpus[0].save().expect("between two instructions");
        assert_same(&again, &state, &"restored");
        Ok(())
    })
}

/// `verify` moves from VM to VM, and misses nothing.
pub fn verify_moves_through_fresh_vms<B: Backend>(backend: &B) -> Outcome {
    let request = Request::new(8, 6, 2, "rounds=40 pages=600");
    moves(backend, request, COMMON, "verify")
}

/// `bm` with asynchronous page faults moves from VM to VM.
pub fn bm_moves_through_fresh_vms<B: Backend>(backend: &B) -> Outcome {
    let request = Request {
        apf: Apf::On,
        latency: Duration::from_micros(200),
        ..Request::new(16, 8, 2, "faulters=4 workers=2 accesses=2000 populate=1")
    };
    moves(backend, request, COMMON, "bm")
}

/// `apfstorm` moves from VM to VM. It enables and disables asynchronous page faults all the time.
pub fn apfstorm_moves_through_fresh_vms<B: Backend>(backend: &B) -> Outcome {
    let request = Request {
        apf: Apf::On,
        ..Request::new(16, 8, 2, "accesses=4000 switches=50")
    };
    moves(backend, request, COMMON, "apfstorm")
}

/// The guest `name` moves from VM to VM, with this processor.
pub(super) fn moves<B: Backend>(
    backend: &B,
    request: Request,
    cpu: CpuModel,
    name: &'static str,
) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request { cpu, ..request };
        move_at_least(2, &request, |request| moves_of(&backend, request, name))
    })
}

/// How often a guest moved before it ended.
fn moves_of<B: Backend>(backend: &B, request: &Request, name: &str) -> Result<usize, Lacks> {
    let (mut rng, mut moves) = (Rng::with_seed(1), 0);
    let devices = PlatformDevices::of(backend.arch(), |_: &str| ());
    let mut made = backend.make(request, &guest(backend.arch(), name))?;
    while moves < MOVES {
        let time = Duration::from_micros(rng.u64(2_000..40_000));
        run_for(&mut made, &devices, time);
        if devices.ending().is_some() {
            break;
        }
        made = move_to(backend, request, made, &devices)?;
        moves += 1;
    }
    run_for(&mut made, &devices, Duration::MAX);
    let ending = devices.ending();
    let is_passed = matches!(ending, Some(Ending::Exited(0)));
    assert!(is_passed, "{name}: {ending:?} after {moves} moves");
    Ok(moves)
}
