//! The state of an AArch64 vCPU, and the state shared by a VM's vCPUs. `neutral` and `apf` have the
//! forms.
//!
//! The whole state of a vCPU is checked before the first change: features, every register, the
//! contract of asynchronous page faults.
#![cfg(feature = "arm64")]

mod apf;
mod neutral;

use crate::vcpu::VcpuOf;
use crate::vm::Vm;
use lacuna_addr::Gpa;
use lacuna_arm64::psci::{PowerState, Start};
use lacuna_arm64::{Cpu, FREQUENCY, Regs, is_legal_pstate};
use lacuna_cpu::Processor as _;
use lacuna_machine::arm64::{AsyncFaults, Counter, RunState, Shared, State, check_id};
use lacuna_machine::{SaveRestore, SharedState, StateError, VcpuState};
use std::sync::atomic::Ordering;

impl VcpuOf<Cpu> {
    /// Its registers, for tests and debuggers.
    pub fn regs(&self) -> Regs {
        self.entry.cpu.regs()
    }

    /// The address of its exception vectors (VBAR_EL1), for tests and debuggers.
    pub fn vectors(&self) -> u64 {
        self.entry.cpu.system().vbar
    }

    fn check_apf(&mut self, faults: &AsyncFaults) -> Result<(), StateError> {
        apf::check_offer(&faults.offered, &apf::offered(self.apf.offered()))?;
        let pstate = faults.sdei.interrupted.map(|context| context.pstate);
        if let Some(value) = pstate.filter(|pstate| !is_legal_pstate(*pstate)) {
            let field = "apf.sdei.interrupted.pstate";
            return Err(StateError::Invalid { field, value });
        }
        let saved = apf::configuration(faults);
        let checked = self.apf.check(&saved, &mut self.entry);
        checked.map_err(apf::not_restorable)
    }

    fn restore_apf(&mut self, faults: &AsyncFaults) -> Result<(), StateError> {
        let (saved, now) = (apf::configuration(faults), self.vm.clock.now());
        let restored = self.apf.restore(&saved, now, &mut self.entry);
        restored.map_err(apf::not_restorable)
    }

    fn run_state(&self, halted: bool) -> RunState {
        match self.entry.cpu.fabric().power.state(self.index) {
            PowerState::Off => RunState::Off,
            PowerState::On if halted => RunState::Halted,
            PowerState::On => RunState::Running,
            PowerState::OnPending(start) => RunState::OnPending {
                entry: start.entry.get(),
                context: start.context,
            },
        }
    }
}

/// The power state of a vCPU in this run state.
fn power(run: RunState) -> Result<PowerState, StateError> {
    let RunState::OnPending { entry, context } = run else {
        return Ok(match run {
            RunState::Off => PowerState::Off,
            _ => PowerState::On,
        });
    };
    match Gpa::new(entry) {
        Some(entry) if entry.get().is_multiple_of(4) => {
            Ok(PowerState::OnPending(Start { entry, context }))
        }
        _ => Err(StateError::Invalid {
            field: "run.entry",
            value: entry,
        }),
    }
}

impl SaveRestore for VcpuOf<Cpu> {
    fn save(&mut self) -> Result<VcpuState, StateError> {
        let state = self.processor_state()?;
        let run = self.run_state(state.halted);
        let apf = apf::async_faults(&self.apf.save(), self.apf.offered());
        Ok(VcpuState::Arm64(Box::new(State {
            run,
            apf,
            ..neutral::of(&state)
        })))
    }

    fn restore(&mut self, state: &VcpuState) -> Result<(), StateError> {
        let VcpuState::Arm64(state) = state else {
            return Err(StateError::Architecture);
        };
        if !self.vm.has_shared_state.load(Ordering::Acquire) {
            let vcpu = self.index;
            return Err(StateError::SharedFirst { vcpu });
        }
        let system = self.entry.cpu.system();
        check_id(&state.id, &neutral::id(system))?;
        let processor = neutral::processor(state, self.index)?;
        self.entry.cpu.check(&processor).map_err(neutral::invalid)?;
        let power = power(state.run)?;
        self.check_apf(&state.apf)?;
        self.forget_stop();
        self.entry.cpu.restore(&processor);
        self.entry.cpu.fabric().power.set(self.index, power);
        self.restore_apf(&state.apf)
    }
}

impl Vm {
    /// [`lacuna_machine::Vm::save_shared`] of an AArch64 VM.
    pub(crate) fn save_arm64(&self) -> SharedState {
        let fabric = self.arm64_fabric();
        let distributor = fabric.gic.distributor();
        SharedState::Arm64(Box::new(Shared {
            counter: Counter {
                value: fabric.counter.value(self.clock.now()),
                hz: FREQUENCY,
            },
            distributor: neutral::distributor(&distributor),
        }))
    }

    /// [`lacuna_machine::Vm::restore_shared`] of an AArch64 VM.
    pub(crate) fn restore_arm64(&self, state: &SharedState) -> Result<(), StateError> {
        let SharedState::Arm64(shared) = state else {
            return Err(StateError::Architecture);
        };
        let Counter { value, hz } = shared.counter;
        if hz != FREQUENCY {
            let field = "counter.hz";
            return Err(StateError::Unsupported { field, value: hz });
        }
        let fabric = self.arm64_fabric();
        let distributor = neutral::processor_distributor(&shared.distributor)?;
        fabric
            .gic
            .set_distributor(&distributor)
            .map_err(neutral::invalid)?;
        fabric.counter.set(value, self.clock.now());
        self.has_shared_state.store(true, Ordering::Release);
        Ok(())
    }
}
