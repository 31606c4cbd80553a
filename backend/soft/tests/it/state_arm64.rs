//! The parts of a state that an AArch64 vCPU and its VM take over or refuse. Every state of a
//! seeded run is taken over unchanged. `seeded_moves.rs` has moving guests.

use crate::common;

use common::{Lines, builder, config, image_for};
use fastrand::Rng;
use lacuna_machine::arm64::{
    Abort, Context, Counter, Form, Handler, RunState, Shared, State, SysReg,
};
use lacuna_machine::{
    Apf, Arch, Builder as _, Ending, Input, PlatformDevices, SaveRestore, SharedState, StateError,
    Vcpu as _, VcpuState, Vm as _,
};
use lacuna_skip::test;
use lacuna_soft::{SimulatedVm, Simulator, SimulatorConfig, Vcpu, Vm, VmBuilder};
use lacuna_sync::{Clock, VirtualClock};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A guest in half of its memory, with asynchronous page faults.
fn arm64(vcpus: usize, command_line: &str) -> VmBuilder {
    let builder = VmBuilder {
        arch: Arch::Arm64,
        apf: Apf::On,
        seed: Some(1),
        ..builder(16, 8, vcpus, command_line)
    };
    builder.latency.set(Duration::from_micros(100));
    builder
}

/// A VM of `builder` in virtual time, with `name` in it.
fn simulated(builder: &VmBuilder, name: &str) -> (Arc<Vm>, Simulator, Arc<PlatformDevices>, Lines) {
    let clock = Arc::new(VirtualClock::default());
    let time = Arc::clone(&clock) as Arc<dyn Clock>;
    let host = builder.host(Arc::clone(&time)).unwrap();
    let vm = Vm::new(Arc::clone(&host), time, config(builder)).unwrap();
    let image = image_for(builder.arch, name);
    let vcpus = vm.boot(&image, &builder.full_command_line()).unwrap();
    let lines = Lines::default();
    let devices = Arc::new(PlatformDevices::of(builder.arch, lines.sink()));
    let seed = builder.seed.unwrap();
    let mut simulator = Simulator::new(SimulatorConfig { seed, clock, host });
    simulator.add(SimulatedVm {
        vm: Arc::clone(&vm),
        vcpus,
        devices: Arc::clone(&devices),
    });
    (vm, simulator, devices, lines)
}

fn of_arm64(state: VcpuState) -> State {
    match state {
        VcpuState::Arm64(state) => *state,
        other => panic!("{other:?}"),
    }
}

/// The state of vCPU 0 of a guest that has enabled events of the form `form`, and of its VM.
fn some_state(form: &str) -> (State, Shared) {
    let builder = arm64(1, &format!("rounds=2 {form}"));
    let (vm, mut simulator, ..) = simulated(&builder, "verify");
    loop {
        assert!(simulator.run_slice(), "{form}: it ended before");
        let vcpu = simulator.vcpus_mut(0).next().unwrap();
        let Ok(state) = vcpu.save() else { continue };
        let state = of_arm64(state);
        if state.apf.enabled.is_some() {
            let SharedState::Arm64(shared) = vm.save_shared().unwrap() else {
                panic!("an AArch64 VM");
            };
            return (state, *shared);
        }
    }
}

/// A VM without an image, with the shared state, and its vCPU.
fn bare(shared: &Shared) -> (Arc<Vm>, Vcpu) {
    let vm = arm64(1, "").build().unwrap();
    let vcpu = vm.bare_vcpus().unwrap().pop().unwrap();
    vm.restore_shared(&SharedState::Arm64(Box::new(shared.clone())))
        .unwrap();
    (vm, vcpu)
}

fn restore(vcpu: &mut Vcpu, state: &State) -> Result<(), StateError> {
    vcpu.restore(&VcpuState::Arm64(Box::new(state.clone())))
}

fn reg(numbers: [u8; 5]) -> SysReg {
    SysReg::new(numbers)
}

type Change = fn(&mut State);

/// A change of each field that makes it wrong, and the name by which it is refused.
const WRONG: &[(&str, Change)] = &[
    ("regs.pstate", |s| s.regs.pstate = 0b1001),
    ("regs.pstate", |s| s.regs.pstate = 1 << 4),
    ("regs.pstate", |s| s.regs.pstate |= 1 << 40),
    ("SCTLR_EL1", |s| set(s, [3, 0, 1, 0, 0], 0)),
    ("TCR_EL1", |s| set(s, [3, 0, 2, 0, 2], 1 << 6)),
    ("TTBR0_EL1", |s| set(s, [3, 0, 2, 0, 0], 1)),
    ("VBAR_EL1", |s| set(s, [3, 0, 12, 0, 0], 4)),
    ("SPSR_EL1", |s| set(s, [3, 0, 4, 0, 0], 1 << 32)),
    ("OSLSR_EL1", |s| set(s, [2, 0, 1, 1, 4], 0)),
    ("CNTKCTL_EL1", |s| set(s, [3, 0, 14, 1, 0], 1 << 10)),
    ("ACTLR_EL1", |s| set(s, [3, 0, 1, 0, 1], 1)),
    ("MIDR_EL1", |s| set(s, [3, 0, 0, 0, 0], 0)),
    // ICC_PMR_EL1 and CNTV_CTL_EL0 have fields of their own.
    ("S3_0_C4_C6_0", |s| set(s, [3, 0, 4, 6, 0], 0)),
    ("S3_3_C14_C3_1", |s| set(s, [3, 3, 14, 3, 1], 0)),
    ("S3_7_C15_C15_7", |s| set(s, [3, 7, 15, 15, 7], 0)),
    ("MPIDR_EL1", |s| _ = s.id.insert(SysReg::MPIDR, 1 << 31 | 1)),
    ("MIDR_EL1", |s| {
        _ = s.id.insert(reg([3, 0, 0, 0, 0]), 0x410f_d0c1)
    }),
    // FP and Advanced SIMD; SHA1; 52 bits of address.
    ("ID_AA64PFR0_EL1", |s| {
        offered_more(s, [3, 0, 0, 4, 0], 1 << 16)
    }),
    ("ID_AA64ISAR0_EL1", |s| {
        offered_more(s, [3, 0, 0, 6, 0], 1 << 8)
    }),
    ("ID_AA64MMFR0_EL1", |s| offered_more(s, [3, 0, 0, 7, 0], 1)),
    ("ID_AA64MMFR2_EL1", |s| offered_more(s, [3, 0, 0, 7, 2], 1)),
    ("CTR_EL0", |s| _ = s.id.insert(reg([3, 3, 0, 0, 1]), 4)),
    ("timers.virt.ctl", |s| s.timers.virt.ctl |= 4),
    ("timers.phys.ctl", |s| s.timers.phys.ctl = u64::MAX),
    ("gic.cpu.pmr", |s| s.gic.cpu.pmr |= 1),
    ("gic.cpu.bpr", |s| s.gic.cpu.bpr[0] = 1),
    ("gic.cpu.bpr", |s| s.gic.cpu.bpr[1] = 8),
    ("gic.cpu.active", |s| s.gic.cpu.active[0][1] = 1),
    ("gic.cpu.active", |s| s.gic.cpu.active[1][3] = 1),
    ("gic.private.edge", |s| s.gic.private.edge ^= 1 << 27),
    ("gic.private.priority", |s| s.gic.private.priority[31] = 7),
    ("abort.iss", |s| {
        s.abort = Some(Abort {
            iss: 1 << 25,
            address: 0,
        })
    }),
    ("run.entry", |s| on_pending(s, 0x4000_0002)),
    ("run.entry", |s| on_pending(s, 1 << 63)),
    ("apf.offered.features", |s| s.apf.offered.features |= 1 << 3),
    ("apf.offered.event", |s| s.apf.offered.event = 1),
    ("apf.offered.interrupt", |s| s.apf.offered.interrupt = 18),
    ("apf.enabled", |s| enabled(s, 0)),
    ("apf.enabled", |s| enabled(s, 1 << 55)),
    ("apf.range", |s| s.apf.range = 0),
    ("apf.untaken", |s| {
        s.apf.enabled = None;
        s.apf.untaken = Some(1);
    }),
    ("apf.untaken", |s| s.apf.untaken = Some(0)),
    ("apf.unacknowledged", |s| {
        s.apf.enabled = None;
        s.apf.unacknowledged = true;
    }),
    ("apf.sdei.handler.entry", |s| {
        s.apf.sdei.handler = Some(Handler {
            entry: 2,
            argument: 0,
            enabled: false,
        })
    }),
    ("apf.sdei.interrupted.pstate", |s| {
        s.apf.sdei.interrupted = Some(Context {
            x: [0; 18],
            pc: 0,
            pstate: 0b1000,
        })
    }),
];

fn set(state: &mut State, numbers: [u8; 5], value: u64) {
    state.system.insert(reg(numbers), value);
}

fn offered_more(state: &mut State, numbers: [u8; 5], more: u64) {
    let register = reg(numbers);
    let saved = state.id.get(&register).copied().unwrap_or(0);
    // 0xf of a signed field wraps to 0, which means more.
    state.id.insert(register, saved.wrapping_add(more));
}

fn on_pending(state: &mut State, entry: u64) {
    state.run = RunState::OnPending { entry, context: 0 };
}

fn enabled(state: &mut State, block: u64) {
    state.apf.enabled = Some((Form::Abort, block | 1));
}

#[test]
fn each_wrong_field_is_named_and_changes_nothing() {
    for form in ["apf=abort", "apf=sdei"] {
        let (state, shared) = some_state(form);
        let (_vm, mut vcpu) = bare(&shared);
        restore(&mut vcpu, &state).unwrap();
        let before = vcpu.save().unwrap();
        for (name, change) in WRONG {
            let mut bad = state.clone();
            change(&mut bad);
            assert_ne!(bad, state, "{name}");
            let text = restore(&mut vcpu, &bad).expect_err(name).to_string();
            assert!(text.contains(name), "{name}: {text}");
            assert_eq!(vcpu.save().unwrap(), before, "{name}");
        }
        restore(&mut vcpu, &state).unwrap();
    }
}

/// Valid values of each field are taken over, and saved again.
#[test]
fn each_field_is_taken_over() {
    let changes: &[(&str, Change)] = &[
        ("regs", |s| s.regs.x[30] ^= u64::MAX),
        ("regs.sp", |s| {
            (s.regs.sp_el0, s.regs.sp_el1) = (u64::MAX, 1)
        }),
        ("regs.pc", |s| s.regs.pc = 0xffff_0000_0000_0001),
        ("regs.pstate", |s| s.regs.pstate = 0xf << 28 | 0x3 << 6),
        ("system", |s| set(s, [3, 3, 13, 0, 2], u64::MAX)),
        ("timers", |s| {
            (s.timers.virt.cval, s.timers.phys.ctl) = (u64::MAX, 3)
        }),
        ("gic", |s| {
            s.gic.private.pending ^= 1 << 20;
            s.gic.cpu.active[1][0] = u32::MAX;
            s.gic.cpu.cbpr = !s.gic.cpu.cbpr;
        }),
        ("gic.asleep", |s| s.gic.asleep = !s.gic.asleep),
        ("abort", |s| {
            s.abort = Some(Abort {
                iss: 0x10,
                address: 77,
            })
        }),
        ("run", |s| s.run = RunState::Off),
        ("run.halted", |s| s.run = RunState::Halted),
        ("run.entry", |s| on_pending(s, 0x4000_0000)),
        ("apf.enabled", |s| s.apf.enabled = None),
        ("apf.range", |s| s.apf.range = u64::MAX),
        ("apf.sdei.masked", |s| {
            s.apf.sdei.masked = !s.apf.sdei.masked
        }),
    ];
    let (state, shared) = some_state("apf=abort");
    let (_vm, mut vcpu) = bare(&shared);
    for (name, change) in changes {
        let mut good = state.clone();
        change(&mut good);
        assert_ne!(good, state, "{name}");
        restore(&mut vcpu, &good).expect(name);
        assert_eq!(of_arm64(vcpu.save().unwrap()), good, "{name}");
    }
}

/// A register missing in an older state has its reset value, and a missing offer or feature is no
/// hindrance.
#[test]
fn a_state_may_have_less() {
    let (state, shared) = some_state("apf=sdei");
    let (_vm, mut vcpu) = bare(&shared);
    let fresh = of_arm64(vcpu.save().unwrap());
    let less = State {
        system: BTreeMap::new(),
        id: BTreeMap::new(),
        ..state.clone()
    };
    restore(&mut vcpu, &less).unwrap();
    let again = of_arm64(vcpu.save().unwrap());
    assert_eq!((again.system, again.id), (fresh.system, fresh.id));
    let mut less = state;
    less.apf.offered.features &= 1 << 2;
    let isar0 = less.id.get_mut(&reg([3, 0, 0, 6, 0])).unwrap();
    assert_ne!(*isar0, 0);
    *isar0 = 0;
    restore(&mut vcpu, &less).unwrap();
}

#[test]
fn the_vms_own_state_comes_first() {
    let (state, shared) = some_state("apf=abort");
    let vm = arm64(1, "").build().unwrap();
    let mut vcpu = vm.bare_vcpus().unwrap().pop().unwrap();
    let refused = restore(&mut vcpu, &state).unwrap_err();
    assert_eq!(refused, StateError::SharedFirst { vcpu: 0 });
    let text = refused.to_string();
    assert!(text.contains("Vm::restore_shared"), "{text}");
    assert_eq!(
        vm.restore_shared(&SharedState::X86),
        Err(StateError::Architecture)
    );
    vm.restore_shared(&SharedState::Arm64(Box::new(shared)))
        .unwrap();
    restore(&mut vcpu, &state).unwrap();
    let x86 = VmBuilder {
        arch: Arch::X86_64,
        ..builder(16, 16, 1, "")
    };
    let x86 = x86.build().unwrap();
    x86.restore_shared(&SharedState::X86).unwrap();
    x86.restore_shared(&x86.save_shared().unwrap()).unwrap();
    let mut vcpu = x86.bare_vcpus().unwrap().pop().unwrap();
    assert_eq!(restore(&mut vcpu, &state), Err(StateError::Architecture));
    let other = vm.save_shared().unwrap();
    assert_eq!(x86.restore_shared(&other), Err(StateError::Architecture));
}

#[test]
fn a_wrong_shared_state_is_named_and_changes_nothing() {
    let (_, shared) = some_state("apf=abort");
    assert!(shared.distributor.enabled[1], "the guest has interrupts");
    let (vm, _) = bare(&shared);
    type Change = fn(&mut Shared);
    let wrong: &[(&str, Change)] = &[
        ("counter.hz", |s| s.counter.hz = 62_500_000),
        ("distributor.spis", |s| _ = s.distributor.spis.pop()),
        ("distributor.spis", |s| s.distributor.spis.clear()),
        ("distributor.spis.priority", |s| {
            s.distributor.spis[2].interrupts.priority[9] = 1
        }),
        ("distributor.spis.route", |s| {
            s.distributor.spis[0].route[31] = 1 << 31
        }),
    ];
    for (name, change) in wrong {
        let mut bad = shared.clone();
        bad.distributor.enabled = [true; 2];
        bad.counter.value = 5;
        change(&mut bad);
        let refused = vm.restore_shared(&SharedState::Arm64(Box::new(bad)));
        let text = refused.expect_err(name).to_string();
        assert!(text.contains(name), "{name}: {text}");
        // The clock of this VM is stopped.
        let now = vm.save_shared().unwrap();
        assert_eq!(now, SharedState::Arm64(Box::new(shared.clone())), "{name}");
    }
}

/// Timers follow their VM's counter, which a reset of a vCPU leaves alone.
#[test]
fn the_counter_is_the_vms() {
    let (state, mut shared) = some_state("apf=abort");
    shared.counter = Counter {
        value: 1 << 50,
        ..shared.counter
    };
    let (vm, mut vcpu) = bare(&shared);
    restore(&mut vcpu, &state).unwrap();
    vcpu.reset();
    let SharedState::Arm64(now) = vm.save_shared().unwrap() else {
        panic!("an AArch64 VM");
    };
    assert_eq!(now.counter, shared.counter);
}

/// No state causes a panic when it is restored and run.
#[test]
fn a_damaged_state_is_refused_or_runs() {
    for form in ["apf=abort", "apf=sdei"] {
        let (state, shared) = some_state(form);
        let (_vm, mut vcpu) = bare(&shared);
        let mut rng = Rng::with_seed(7);
        let mut taken = 0;
        for _ in 0..2000 {
            let mut bad = state.clone();
            for _ in 0..rng.usize(1..4) {
                damage(&mut bad, &mut rng);
            }
            if restore(&mut vcpu, &bad).is_ok() {
                taken += 1;
                assert_eq!(of_arm64(vcpu.save().unwrap()).regs, bad.regs);
                for _ in 0..4 {
                    let _ = vcpu.step(50);
                    vcpu.verify();
                }
            }
        }
        assert!((100..1900).contains(&taken), "{taken} of 2000 are taken");
    }
}

fn damage(state: &mut State, rng: &mut Rng) {
    let bits = match rng.bool() {
        true => 1 << rng.u32(..64),
        false => rng.u64(..),
    };
    let one = |map: &mut BTreeMap<SysReg, u64>, rng: &mut Rng| {
        let at = rng.usize(..map.len());
        *map.values_mut().nth(at).unwrap() ^= bits;
    };
    let interrupts = &mut state.gic.private;
    match rng.u8(..20) {
        0 => state.regs.pc ^= bits,
        1 => state.regs.pstate ^= bits,
        2 => state.regs.sp_el0 ^= bits,
        3..6 => one(&mut state.system, rng),
        6 => one(&mut state.id, rng),
        7 => state.timers.virt.ctl ^= bits & 3,
        8 => state.timers.virt.cval ^= bits,
        9 => state.gic.cpu.pmr ^= bits as u8,
        10 => state.gic.cpu.active[1][0] ^= bits as u32,
        11 => interrupts.pending ^= bits as u32,
        12 => interrupts.active ^= bits as u32,
        13 => interrupts.priority[rng.usize(..32)] ^= bits as u8,
        14 => {
            state.abort = Some(Abort {
                iss: bits as u32,
                address: bits,
            })
        }
        15 => {
            state.run = match rng.u8(..4) {
                0 => RunState::Running,
                1 => RunState::Halted,
                2 => RunState::Off,
                _ => RunState::OnPending {
                    entry: bits & !3,
                    context: bits,
                },
            }
        }
        16 => state.apf.untaken = Some(bits as u32),
        17 => {
            state.apf.sdei.interrupted = Some(Context {
                x: [bits; 18],
                pc: bits,
                pstate: 0,
            })
        }
        18 => state.apf.enabled = Some((Form::Sdei, bits)),
        _ => state.regs.x[rng.usize(..31)] = bits,
    }
}

/// A restore ends an instruction that waits for a device, and drops the device's answer.
#[test]
fn half_an_instruction_is_forgotten() {
    let (state, _) = some_state("apf=abort");
    let (_vm, mut simulator, ..) = simulated(&arm64(1, "rounds=2"), "verify");
    loop {
        assert!(simulator.run_slice(), "it has a serial line");
        let vcpu = simulator.vcpus_mut(0).next().unwrap();
        if let Err(refused) = vcpu.save() {
            assert_eq!(refused, StateError::MidInstruction { vcpu: 0 });
            restore(vcpu, &state).unwrap();
            assert_eq!(of_arm64(vcpu.save().unwrap()), state);
            break;
        }
    }
}

/// The situations of a vCPU between two slices.
#[derive(Default, Debug)]
struct Seen {
    states: usize,
    mid_instruction: usize,
    halted: usize,
    off: usize,
    on_pending: usize,
    aborts: usize,
    untaken: usize,
    handlers: usize,
    unacknowledged: usize,
}

impl Seen {
    fn note(&mut self, state: &State) {
        let count = |counter: &mut usize, is_so: bool| *counter += usize::from(is_so);
        count(&mut self.states, true);
        count(&mut self.halted, state.run == RunState::Halted);
        count(&mut self.off, state.run == RunState::Off);
        let is_pending = matches!(state.run, RunState::OnPending { .. });
        count(&mut self.on_pending, is_pending);
        count(&mut self.aborts, state.abort.is_some());
        count(&mut self.untaken, state.apf.untaken.is_some());
        count(&mut self.handlers, state.apf.sdei.interrupted.is_some());
        count(&mut self.unacknowledged, state.apf.unacknowledged);
    }
}

/// After each slice of a seeded run, every state is restored to a vCPU of another VM, and saved
/// there unchanged.
#[test]
fn every_state_of_a_run_is_taken_over_as_it_is() {
    for (form, vcpus) in [("apf=abort", 2), ("apf=sdei", 4)] {
        let builder = arm64(vcpus, &format!("rounds=1 {form}"));
        let (vm, mut simulator, devices, lines) = simulated(&builder, "verify");
        let other = builder.build().unwrap();
        let mut others = other.bare_vcpus().unwrap();
        let mut seen = Seen::default();
        while simulator.run_slice() {
            let shared = vm.save_shared().unwrap();
            other.restore_shared(&shared).unwrap();
            assert_eq!(other.save_shared().unwrap(), shared);
            for (vcpu, other) in simulator.vcpus_mut(0).zip(&mut others) {
                let state = match vcpu.save() {
                    Ok(state) => state,
                    Err(StateError::MidInstruction { vcpu: index }) => {
                        assert_eq!(index, vcpu.index());
                        seen.mid_instruction += 1;
                        continue;
                    }
                    Err(refused) => panic!("{refused}"),
                };
                other.restore(&state).unwrap();
                assert_eq!(other.save().unwrap(), state);
                seen.note(&of_arm64(state));
            }
        }
        let ending = devices.ending();
        assert_eq!(ending, Some(Ending::Exited(0)), "{}", lines.text());
        let Seen {
            mid_instruction,
            halted,
            off,
            on_pending,
            ..
        } = seen;
        let always = [mid_instruction, halted, off, on_pending];
        assert!(always.iter().all(|times| *times > 0), "{seen:?}");
        match form {
            "apf=abort" => assert!(seen.aborts > 0, "{seen:?}"),
            _ => {
                let events = [seen.untaken, seen.handlers, seen.unacknowledged];
                assert!(events.iter().all(|times| *times > 0), "{seen:?}");
            }
        }
        println!("{form}, {vcpus} vCPUs: {seen:?}");
    }
}

/// A device's line is an input of the distributor, and is in its state.
#[test]
fn a_line_is_an_input_of_the_distributor() {
    let vm = arm64(1, "").build().unwrap();
    let level = || match vm.save_shared().unwrap() {
        SharedState::Arm64(shared) => shared.distributor.spis[1].interrupts.level,
        other => panic!("{other:?}"),
    };
    let line = vm.interrupts().line(64 + 5).unwrap();
    line.raise();
    assert_eq!(level(), 1 << 5);
    drop(line);
    assert_eq!(level(), 0);
}

/// A write to an eventfd is an edge of its input, and is in the next saved state.
#[test]
fn an_eventfd_is_an_edge_of_the_distributor() {
    let vm = arm64(1, "").build().unwrap();
    let saved = || match vm.save_shared().unwrap() {
        SharedState::Arm64(shared) => shared,
        other => panic!("{other:?}"),
    };
    let mut shared = saved();
    shared.distributor.spis[1].interrupts.edge = 1 << 5;
    vm.restore_shared(&SharedState::Arm64(shared)).unwrap();
    let eventfd = vm.interrupts().eventfd(Input::Line(64 + 5)).unwrap();
    rustix::io::write(&eventfd, &1_u64.to_ne_bytes()).unwrap();
    let spis = saved().distributor.spis[1].interrupts;
    assert_eq!((spis.pending, spis.level), (1 << 5, 0));
}
