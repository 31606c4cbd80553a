//! The interrupts of devices: inputs of the I/O APIC or the GIC.

use crate::vm::Vm;
use lacuna_arm64::gic::Line;
use lacuna_machine::x86::{IoApic, Shared};
use lacuna_machine::{
    Arch, InterruptController, InterruptError, InterruptLines, Msi, SharedState, StateError,
};
use lacuna_x86::IoApicRegisters;

impl InterruptController for Vm {
    fn interrupt_lines(&self) -> &InterruptLines {
        &self.interrupt_lines
    }

    fn set_line(&self, number: u32, level: bool) {
        match self.config.arch {
            Arch::Arm64 => {
                let line = if level { Line::High } else { Line::Low };
                self.arm64_fabric().gic.set_spi(number, line);
            }
            _ => self.apic_bus().set_pin(number as usize, level),
        }
    }

    fn send_msi(&self, msi: Msi) -> Result<(), InterruptError> {
        match self.config.arch {
            Arch::X86_64 => {
                self.apic_bus().signal_msi(msi.address as u32, msi.data);
                Ok(())
            }
            other => Err(InterruptError::NoMessages(other)),
        }
    }
}

impl Vm {
    /// [`lacuna_machine::Vm::save_shared`] of an x86-64 VM.
    pub(crate) fn save_x86(&self) -> SharedState {
        let IoApicRegisters {
            id,
            select,
            entries,
            high,
        } = self.apic_bus().io_apic();
        let io_apic = IoApic::new(id, select, entries, high);
        SharedState::X86Shared(Box::new(Shared { io_apic }))
    }

    /// [`lacuna_machine::Vm::restore_shared`] of an x86-64 VM.
    pub(crate) fn restore_x86(&self, state: &SharedState) -> Result<(), StateError> {
        let IoApic {
            id,
            select,
            entries,
            high,
        } = state.x86()?.io_apic;
        self.apic_bus().set_io_apic(&IoApicRegisters {
            id,
            select,
            entries,
            high,
        });
        Ok(())
    }
}
