//! The state of vCPUs, saved and restored: in place, in a fresh VM, on another backend.

use std::time::Duration;

use fastrand::Rng;
use iced_x86::code_asm::*;
use lacuna_machine::x86::cpuid::Features;
use lacuna_machine::{
    Apf, CpuModel, Ending, Exit, Kick as _, PlatformDevices, SaveRestore as _, StateError,
    Vcpu as _, VcpuState, x86,
};

use super::Outcome;
use crate::backend::{Backend, Made, Request, VcpuOf};
use crate::moving::{move_to, run_for};
use crate::program::{assemble, image};
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

/// Counts in a register, and tells each number.
fn counter() -> Vec<u8> {
    assemble(|a| {
        let mut again = a.create_label();
        a.mov(r15, 0x1234_5678_9abc_def0_u64)?;
        a.xor(ebx, ebx)?;
        a.set_label(&mut again)?;
        a.inc(ebx)?;
        a.mov(eax, ebx)?;
        a.out(0x80, eax)?;
        a.jmp(again)
    })
}

/// The next number, and the instruction that tells it is complete.
pub(super) fn told<B: Backend>(vm: &B::Vm, vcpu: &mut VcpuOf<B>) -> u32 {
    let number = loop {
        match vcpu.run().expect("a vCPU that can go on") {
            Exit::IoOut { value, .. } => break value,
            Exit::Interrupted => {}
            exit => panic!("{exit:?}"),
        }
    };
    vm.kick(vcpu.index());
    let exit = vcpu.run().expect("a vCPU that can go on");
    assert_eq!(exit, Exit::Interrupted, "a kick before the run");
    number
}

pub(super) fn registers(state: &VcpuState) -> &x86::State {
    match state {
        VcpuState::X86(state) => state,
        other => panic!("{other:?}"),
    }
}

/// A state is what the vCPU goes on from, however far it has come since.
pub fn a_vcpu_goes_back_to_a_saved_state<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = counter();
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        let numbers = [(); 3].map(|()| told::<B>(&vm, vcpu));
        assert_eq!(numbers, [1, 2, 3]);
        let state = vcpu.save().expect("between two instructions");
        assert_eq!(registers(&state).regs.gpr[3], 3, "RBX");
        assert_eq!(registers(&state).regs.gpr[15], 0x1234_5678_9abc_def0);
        let again = vcpu.save().expect("between two instructions");
        assert_eq!(registers(&again).regs, registers(&state).regs);
        assert_eq!(registers(&again).system, registers(&state).system);
        for _ in 0..3 {
            assert_eq!(
                told::<B>(&vm, vcpu),
                4,
                "a save changes nothing, a restore all"
            );
            assert_eq!(told::<B>(&vm, vcpu), 5);
            vcpu.restore(&state).expect("its own state");
        }
        Ok(())
    })
}

/// A vCPU that waits for a device's answer has no state to save, and goes on after the answer.
pub fn half_an_instruction_is_not_saved<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = assemble(|a| {
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.in_(eax, 0x80)?;
            a.mov(ebx, eax)?;
            a.jmp(again)
        });
        let Made { mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        let exit = vcpu.run().expect("a vCPU that can go on");
        assert!(matches!(exit, Exit::IoIn { .. }), "{exit:?}");
        let refused = vcpu.save();
        let is_refused = matches!(refused, Err(StateError::MidInstruction { vcpu: 0 }));
        assert!(is_refused, "{refused:?}");
        vcpu.complete_read(42);
        let exit = vcpu.run().expect("a vCPU that can go on");
        assert!(matches!(exit, Exit::IoIn { .. }), "{exit:?}");
        Ok(())
    })
}

/// A damaged state is refused with the name of what is wrong, and the vCPU goes on as it was.
pub fn a_damaged_state_is_refused_by_name<B: Backend>(backend: &B) -> Outcome {
    type Damage = fn(&mut x86::State);
    // KVM refuses the system registers as a whole.
    let damages: [(&[&str], Damage); 7] = [
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
    let backend = backend.clone();
    within(move || {
        let code = counter();
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        assert_eq!(told::<B>(&vm, vcpu), 1);
        let state = vcpu.save().expect("between two instructions");
        for (names, damage) in damages {
            let mut damaged = state.clone();
            match &mut damaged {
                VcpuState::X86(state) => damage(state),
                other => panic!("{other:?}"),
            }
            let refused = vcpu.restore(&damaged).expect_err(names[0]).to_string();
            let is_named = names.iter().any(|name| refused.contains(name));
            assert!(is_named, "{names:?}: {refused}");
            let now = vcpu.save().expect("between two instructions");
            let (now, before) = (registers(&now), registers(&state));
            assert_eq!((&now.regs, &now.system), (&before.regs, &before.system));
            assert_eq!((&now.msrs, now.tsc.khz), (&before.msrs, before.tsc.khz));
        }
        vcpu.restore(&state).expect("its own state");
        assert_eq!(told::<B>(&vm, vcpu), 2);
        Ok(())
    })
}

/// A fresh VM has the state that was restored there.
pub fn a_restored_state_is_saved_again<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = counter();
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        assert_eq!(told::<B>(&vm, &mut vcpus[0]), 1);
        let state = vcpus[0].save().expect("between two instructions");
        let Made { mut vcpus, .. } = backend.make_bare(&small())?;
        vcpus[0].restore(&state).expect("a state of this backend");
        let again = vcpus[0].save().expect("between two instructions");
        let (state, again) = (registers(&state), registers(&again));
        assert_eq!(again.regs, state.regs);
        assert_eq!(again.system, state.system);
        assert_eq!(again.debug, state.debug);
        assert_eq!(again.msrs, state.msrs);
        assert_eq!(again.events, state.events);
        assert_eq!(again.apf, state.apf);
        assert_eq!((again.xcr0, again.run), (state.xcr0, state.run));
        Ok(())
    })
}

/// `verify` moves from VM to VM, and misses nothing.
pub fn verify_moves_through_fresh_vms<B: Backend>(backend: &B) -> Outcome {
    let request = Request::new(8, 6, 2, "rounds=40 pages=600");
    moves(backend, request, COMMON, "verify")
}

/// `verify` with the host's processor model, whose guests have an FPU on KVM.
pub fn a_guest_with_the_hosts_processor_moves<B: Backend>(backend: &B) -> Outcome {
    let request = Request::new(8, 6, 2, "rounds=30 pages=600");
    moves(backend, request, CpuModel::Host, "verify")
}

/// `litmus` moves from VM to VM. Its vCPUs check the order of each other's accesses.
pub fn litmus_moves_through_fresh_vms<B: Backend>(backend: &B) -> Outcome {
    let request = Request::new(16, 16, 2, "iters=3000 adds=3000");
    moves(backend, request, COMMON, "litmus")
}

/// `bm` with asynchronous page faults moves from VM to VM.
pub fn bm_moves_through_fresh_vms<B: Backend>(backend: &B) -> Outcome {
    let request = Request {
        apf: Apf::On,
        latency: Duration::from_micros(200),
        ..Request::new(16, 8, 2, "faulters=4 workers=2 accesses=4000 populate=1")
    };
    moves(backend, request, COMMON, "bm")
}

/// `apfstorm`, which enables and disables asynchronous page faults all the time, moves from VM to
/// VM.
pub fn apfstorm_moves_through_fresh_vms<B: Backend>(backend: &B) -> Outcome {
    let request = Request {
        apf: Apf::On,
        ..Request::new(16, 8, 2, "accesses=4000 switches=50")
    };
    moves(backend, request, COMMON, "apfstorm")
}

fn moves<B: Backend>(backend: &B, request: Request, cpu: CpuModel, name: &'static str) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request { cpu, ..request };
        let (mut rng, mut moves) = (Rng::with_seed(1), 0);
        let devices = PlatformDevices::new(|_: &str| ());
        let mut made = backend.make(&request, &guest(name))?;
        while moves < MOVES {
            let time = Duration::from_micros(rng.u64(2_000..40_000));
            run_for(&mut made, &devices, time);
            if devices.ending().is_some() {
                break;
            }
            made = move_to(&backend, &request, made, &devices)?;
            moves += 1;
        }
        run_for(&mut made, &devices, Duration::MAX);
        let ending = devices.ending();
        let is_passed = matches!(ending, Some(Ending::Exited(0)));
        assert!(is_passed, "{name}: {ending:?} after {moves} moves");
        assert!(moves > 1, "{name} ended after {moves} moves");
        Ok(())
    })
}
