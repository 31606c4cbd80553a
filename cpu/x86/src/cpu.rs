//! The processor.

use crate::apic::ApicBus;
use crate::exit::Exit;
use crate::state::System;
use lacuna_addr::Gfn;
use lacuna_cpu::Bus;
use lacuna_sync::{Clock, VcpuSlot};
use std::sync::Arc;

/// The registers that instructions name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Regs {
    /// RAX RCX RDX RBX RSP RBP RSI RDI R8 to R15, in encoding order.
    pub gpr: [u64; 16],
    /// Address of the next instruction.
    pub rip: u64,
    /// Flags, arithmetic ones included.
    pub rflags: u64,
}

/// One vCPU.
pub struct Cpu {
    system: System,
    regs: Regs,
    retired: u64,
}

impl Cpu {
    /// A processor with APIC id `index`, halted nowhere: set [`Cpu::system_mut`] and [`Cpu::set_regs`].
    pub fn new(index: usize, apics: Arc<ApicBus>, clock: Arc<dyn Clock>) -> Self {
        let _ = (index, apics, clock);
        Self { system: System::long_mode(0), regs: Regs::default(), retired: 0 }
    }

    /// General registers, RIP and RFLAGS.
    pub fn regs(&self) -> Regs {
        self.regs
    }

    /// Sets general registers, RIP and RFLAGS.
    pub fn set_regs(&mut self, regs: &Regs) {
        self.regs = *regs;
    }

    /// System registers.
    pub fn system(&self) -> &System {
        &self.system
    }

    /// Replaces the system registers; forgets every translation.
    pub fn set_system(&mut self, system: System) {
        self.system = system;
    }

    /// Executes until there is a reason to exit; about `fuel` instructions at most.
    pub fn run<B: Bus>(&mut self, _bus: &mut B, _slot: &VcpuSlot, _fuel: u64) -> Exit {
        Exit::Fuel
    }

    /// Executes one instruction with every other vCPU stopped, after [`Exit::Exclusive`].
    pub fn run_exclusive<B: Bus>(&mut self, _bus: &mut B, _slot: &VcpuSlot) -> Exit {
        Exit::Fuel
    }

    /// The value for the last [`Exit::IoIn`] or [`Exit::MmioRead`].
    pub fn complete_read(&mut self, _value: u64) {}

    /// Forgets every translation: pages were taken back.
    pub fn flush_tlb(&mut self) {}

    /// Drops the decoded instructions of a page: somebody wrote it.
    pub fn drop_code(&mut self, _gfn: Gfn) {}

    /// Drops all decoded instructions.
    pub fn drop_all_code(&mut self) {}

    /// Instructions executed so far.
    pub fn retired(&self) -> u64 {
        self.retired
    }
}
