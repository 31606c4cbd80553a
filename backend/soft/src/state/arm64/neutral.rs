//! The processor's forms of a state (`lacuna_arm64`) from and to the neutral ones.

use lacuna_arm64::gic::{self, Bank, Distributor, InterfaceRegisters, VcpuGic};
use lacuna_arm64::{Exception, Invalid, Regs, System, Timer};
use lacuna_machine::StateError;
use lacuna_machine::arm64 as neutral;
use lacuna_machine::arm64::{RunState, State, SysReg};
use std::collections::BTreeMap;

/// ESR_EL1.EC of a data abort from a lower exception level. The processor adjusts it.
const DATA_ABORT: u8 = 0x24;

pub(super) fn invalid(wrong: Invalid) -> StateError {
    StateError::Invalid {
        field: wrong.field,
        value: wrong.value,
    }
}

fn named(registers: impl Iterator<Item = (u16, u64)>) -> BTreeMap<SysReg, u64> {
    let named = registers.map(|(bits, value)| (SysReg::from_bits(bits), value));
    named.collect()
}

/// The ID registers of a processor.
pub(super) fn id(system: &System) -> BTreeMap<SysReg, u64> {
    named(system.id_registers())
}

/// The neutral form, without run state and async faults.
pub(super) fn of(state: &lacuna_arm64::State) -> State {
    let lacuna_arm64::State {
        regs,
        system,
        gic,
        injected,
        halted: _,
    } = state;
    let timer = |timer: &Timer| neutral::Timer {
        ctl: timer.ctl,
        cval: timer.cval,
    };
    let abort = |exception: &Exception| neutral::Abort {
        iss: exception.iss,
        address: exception.far.unwrap_or(0),
    };
    State {
        regs: neutral::Regs {
            x: regs.x,
            sp_el0: regs.sp_el0,
            sp_el1: regs.sp_el1,
            pc: regs.pc,
            pstate: regs.pstate,
        },
        system: named(system.saved()),
        id: id(system),
        timers: neutral::Timers {
            virt: timer(&system.timers.virt),
            phys: timer(&system.timers.phys),
        },
        gic: neutral::Gic {
            cpu: cpu_interface(&gic.interface),
            asleep: gic.asleep,
            private: interrupts(&gic.private),
        },
        abort: injected.as_ref().map(abort),
        ..State::default()
    }
}

/// The processor's form of a neutral state, for [`Cpu::check`](lacuna_arm64::Cpu::check).
///
/// # Errors
/// The processor's form lacks a part of the state.
pub(super) fn processor(state: &State, index: usize) -> Result<lacuna_arm64::State, StateError> {
    let mut system = System::reset(index);
    for (&register, &value) in &state.system {
        if !system.restore_register(register.bits(), value) {
            return Err(StateError::SystemRegister { register, value });
        }
    }
    let timer = |timer: &neutral::Timer| Timer {
        ctl: timer.ctl,
        cval: timer.cval,
    };
    system.timers.virt = timer(&state.timers.virt);
    system.timers.phys = timer(&state.timers.phys);
    let regs = &state.regs;
    Ok(lacuna_arm64::State {
        regs: Regs {
            x: regs.x,
            sp_el0: regs.sp_el0,
            sp_el1: regs.sp_el1,
            pc: regs.pc,
            pstate: regs.pstate,
        },
        system,
        gic: VcpuGic {
            interface: interface_registers(&state.gic.cpu)?,
            private: bank(&state.gic.private),
            asleep: state.gic.asleep,
        },
        injected: state.abort.map(|abort| Exception {
            class: DATA_ABORT,
            iss: abort.iss,
            far: Some(abort.address),
        }),
        halted: state.run == RunState::Halted,
    })
}

fn cpu_interface(registers: &InterfaceRegisters) -> neutral::CpuInterface {
    let InterfaceRegisters {
        pmr,
        bpr,
        cbpr,
        eoi_mode,
        enabled,
        active,
    } = *registers;
    neutral::CpuInterface {
        pmr,
        bpr,
        cbpr,
        eoi_mode,
        enabled,
        active: active.map(|first| [first, 0, 0, 0]),
    }
}

fn interface_registers(cpu: &neutral::CpuInterface) -> Result<InterfaceRegisters, StateError> {
    // The state has more priorities than this processor.
    if let Some(&word) = cpu
        .active
        .iter()
        .flat_map(|words| &words[1..])
        .find(|w| **w != 0)
    {
        return Err(StateError::Unsupported {
            field: "gic.cpu.active",
            value: word.into(),
        });
    }
    Ok(InterfaceRegisters {
        pmr: cpu.pmr,
        bpr: cpu.bpr,
        cbpr: cpu.cbpr,
        eoi_mode: cpu.eoi_mode,
        enabled: cpu.enabled,
        active: cpu.active.map(|[first, ..]| first),
    })
}

fn interrupts(bank: &Bank) -> neutral::Interrupts {
    neutral::Interrupts {
        group: bank.group,
        enabled: bank.enabled,
        pending: bank.latched,
        level: bank.line,
        active: bank.active,
        edge: bank.edge,
        priority: bank.priority,
    }
}

fn bank(interrupts: &neutral::Interrupts) -> Bank {
    Bank {
        group: interrupts.group,
        enabled: interrupts.enabled,
        latched: interrupts.pending,
        line: interrupts.level,
        active: interrupts.active,
        edge: interrupts.edge,
        priority: interrupts.priority,
    }
}

/// The neutral form of a distributor.
pub(super) fn distributor(from: &Distributor) -> neutral::Distributor {
    let spis = |(spis, route): (&Bank, &[u64; 32])| neutral::Spis {
        interrupts: interrupts(spis),
        route: *route,
    };
    neutral::Distributor {
        enabled: from.enabled,
        spis: from.spis.iter().zip(&from.routes).map(spis).collect(),
    }
}

/// The processors' form of a distributor.
///
/// # Errors
/// It has another number of interrupts.
pub(super) fn processor_distributor(
    from: &neutral::Distributor,
) -> Result<Distributor, StateError> {
    let Ok(spis) = <&[neutral::Spis; gic::SPI_BANKS]>::try_from(&*from.spis) else {
        return Err(StateError::Unsupported {
            field: "distributor.spis",
            value: from.spis.len() as u64,
        });
    };
    Ok(Distributor {
        enabled: from.enabled,
        spis: spis.map(|spis| bank(&spis.interrupts)),
        routes: spis.map(|spis| spis.route),
    })
}
