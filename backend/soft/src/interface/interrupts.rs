//! The interrupts of devices: inputs of the I/O APIC or the GIC.

use crate::vm::Vm;
use lacuna_arm64::gic::Line;
use lacuna_machine::{Arch, InterruptController, InterruptError, InterruptLines, Msi};

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
