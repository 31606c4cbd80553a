//! The interrupts of devices: inputs of the I/O APIC or the GIC. Eventfds at the guest's writes.

use crate::vm::Vm;
use lacuna_machine::{
    Arch, GuestWrite, Input, InterruptController, InterruptError, InterruptLines, IoBus,
    IoEventFdError, Msi,
};
use std::os::fd::OwnedFd;
use std::sync::Arc;

impl Vm {
    fn check(&self, input: Input) -> Result<(), InterruptError> {
        match (self.config.arch, input) {
            (Arch::X86_64, _) | (_, Input::Line(_)) => Ok(()),
            (other, Input::Msi(_)) => Err(InterruptError::NoMessages(other)),
        }
    }
}

impl InterruptController for Vm {
    fn interrupt_lines(&self) -> &InterruptLines {
        &self.interrupt_lines
    }

    fn set_line(&self, number: u32, level: bool) {
        self.controller().set_line(number, level);
    }

    fn send_msi(&self, msi: Msi) -> Result<(), InterruptError> {
        let input = Input::Msi(msi);
        self.check(input)?;
        self.controller().signal(input);
        Ok(())
    }

    fn connect(&self, input: Input) -> Result<Arc<OwnedFd>, InterruptError> {
        self.check(input)?;
        self.eventfds.connect(|| self.controller(), input)
    }

    fn disconnect(&self, eventfd: &Arc<OwnedFd>) {
        self.eventfds.disconnect(eventfd);
    }
}

impl IoBus for Vm {
    fn assign(&self, write: GuestWrite, eventfd: &Arc<OwnedFd>) -> Result<(), IoEventFdError> {
        self.ioeventfds.assign(write, eventfd)
    }

    fn deassign(&self, write: GuestWrite, _: &Arc<OwnedFd>) {
        self.ioeventfds.deassign(write);
    }
}
