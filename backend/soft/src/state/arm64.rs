//! The state of an AArch64 vCPU, and the state shared by a VM's vCPUs.
//!
//! The whole state of a vCPU is checked before the first change: features, every register, the
//! contract of asynchronous page faults.
#![cfg(feature = "arm64")]

use crate::vcpu::VcpuOf;
use crate::vm::Vm;
use lacuna_addr::Gpa;
use lacuna_arm64::psci::{PowerState, Start};
use lacuna_arm64::{Cpu, FREQUENCY, Regs, is_legal_pstate};
use lacuna_cpu::Processor as _;
use lacuna_machine::arm64::{AsyncFaults, Counter, RunState, Shared};
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
        let pstate = faults.sdei.interrupted.map(|context| context.pstate);
        if let Some(value) = pstate.filter(|pstate| !is_legal_pstate(*pstate)) {
            return StateError::invalid("apf.sdei.interrupted.pstate", value);
        }
        self.apf.check(faults, &mut self.entry)
    }

    /// The run state of a powered-on vCPU is `on`.
    fn run_state(&self, on: RunState) -> RunState {
        match self.entry.cpu.fabric().power.state(self.index) {
            PowerState::Off => RunState::Off,
            PowerState::On => on,
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
        _ => StateError::invalid("run.entry", entry),
    }
}

impl SaveRestore for VcpuOf<Cpu> {
    fn save(&mut self) -> Result<VcpuState, StateError> {
        let mut state = self.processor_state()?;
        state.run = self.run_state(state.run);
        state.apf = self.apf.save();
        Ok(VcpuState::Arm64(Box::new(state)))
    }

    fn restore(&mut self, state: &VcpuState) -> Result<(), StateError> {
        let VcpuState::Arm64(state) = state else {
            return Err(StateError::Architecture);
        };
        if !self.vm.has_shared_state.load(Ordering::Acquire) {
            let vcpu = self.index;
            return Err(StateError::SharedFirst { vcpu });
        }
        self.entry.cpu.check(state)?;
        let power = power(state.run)?;
        self.check_apf(&state.apf)?;
        self.forget_stop();
        self.entry.cpu.restore(state)?;
        self.entry.cpu.fabric().power.set(self.index, power);
        let now = self.vm.clock.now();
        self.apf.restore(&state.apf, now, &mut self.entry)
    }
}

impl Vm {
    /// [`lacuna_machine::Vm::save_shared`] of an AArch64 VM.
    pub(crate) fn save_arm64(&self) -> SharedState {
        let fabric = self.arm64_fabric();
        SharedState::Arm64(Box::new(Shared {
            counter: Counter {
                value: fabric.counter.value(self.clock.now()),
                hz: FREQUENCY,
            },
            distributor: fabric.gic.distributor(),
        }))
    }

    /// [`lacuna_machine::Vm::restore_shared`] of an AArch64 VM.
    pub(crate) fn restore_arm64(&self, state: &SharedState) -> Result<(), StateError> {
        let SharedState::Arm64(shared) = state else {
            return Err(StateError::Architecture);
        };
        let Counter { value, hz } = shared.counter;
        if hz != FREQUENCY {
            return StateError::unsupported("counter.hz", hz);
        }
        let fabric = self.arm64_fabric();
        fabric.gic.set_distributor(&shared.distributor)?;
        fabric.counter.set(value, self.clock.now());
        self.has_shared_state.store(true, Ordering::Release);
        Ok(())
    }
}
