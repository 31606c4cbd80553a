//! A vCPU's whole state, saved and restored: the processor's part ([`Processor::save`]), and the
//! async-fault MSRs; and the I/O APIC of a VM. `arm64` does this for AArch64.
//!
//! [`Processor::save`]: lacuna_cpu::Processor::save

mod arm64;

use crate::platform::Platform;
use crate::vcpu::VcpuOf;
use crate::vm::Vm;
use lacuna_apf::x86::Msr;
use lacuna_cpu::Processor as _;
use lacuna_machine::x86::{AsyncFaults, Shared};
use lacuna_machine::{SaveRestore, SharedState, StateError, VcpuState};
use lacuna_x86::Cpu;

impl<P: Platform> VcpuOf<P> {
    /// The processor's part of the state.
    fn processor_state(&mut self) -> Result<P::State, StateError> {
        if let Some(lost) = self.entry.lost() {
            return Err(StateError::Host {
                step: "save a vCPU that has lost a page",
                cause: lost.to_string(),
            });
        }
        let vcpu = self.index;
        let state = self.entry.cpu.save();
        state.ok_or(StateError::MidInstruction { vcpu })
    }
}

impl SaveRestore for VcpuOf<Cpu> {
    fn save(&mut self) -> Result<VcpuState, StateError> {
        let mut state = self.processor_state()?;
        let msr = |msr| self.apf.read_msr(msr).unwrap_or(0);
        state.apf = AsyncFaults {
            enable: msr(Msr::Enable),
            vector: msr(Msr::Vector),
        };
        Ok(VcpuState::X86(Box::new(state)))
    }

    fn restore(&mut self, state: &VcpuState) -> Result<(), StateError> {
        let VcpuState::X86(state) = state else {
            return Err(StateError::Architecture);
        };
        self.entry.cpu.check(state)?;
        self.check_apf(&state.apf)?;
        self.forget_stop();
        self.entry.cpu.restore(state)?;
        self.restore_apf(&state.apf)
    }
}

/// The vector is first: the wake-all that EN causes uses it.
fn apf_msrs(apf: &AsyncFaults) -> impl Iterator<Item = (&'static str, Msr, u64)> {
    let fields = [
        ("apf.vector", Msr::Vector, apf.vector),
        ("apf.enable", Msr::Enable, apf.enable),
    ];
    fields.into_iter().filter(|(_, _, value)| *value != 0)
}

impl VcpuOf<Cpu> {
    /// Its registers, for tests and debuggers.
    pub fn regs(&self) -> lacuna_x86::Regs {
        self.entry.cpu.regs()
    }

    fn check_apf(&mut self, apf: &AsyncFaults) -> Result<(), StateError> {
        for (field, msr, value) in apf_msrs(apf) {
            if self.apf.check_msr(msr, value, &mut self.entry).is_err() {
                return StateError::unsupported(field, value);
            }
        }
        Ok(())
    }

    fn restore_apf(&mut self, apf: &AsyncFaults) -> Result<(), StateError> {
        for (field, msr, value) in apf_msrs(apf) {
            let now = self.vm.clock.now();
            let written = self.apf.write_msr(msr, value, now, &mut self.entry);
            if written.is_err() {
                return StateError::unsupported(field, value);
            }
        }
        Ok(())
    }
}

impl Vm {
    /// [`lacuna_machine::Vm::save_shared`] of an x86-64 VM.
    pub(crate) fn save_x86(&self) -> SharedState {
        let io_apic = self.apic_bus().io_apic();
        SharedState::X86Shared(Box::new(Shared { io_apic }))
    }

    /// [`lacuna_machine::Vm::restore_shared`] of an x86-64 VM.
    pub(crate) fn restore_x86(&self, state: &SharedState) -> Result<(), StateError> {
        self.apic_bus().set_io_apic(&state.x86()?.io_apic);
        Ok(())
    }
}
