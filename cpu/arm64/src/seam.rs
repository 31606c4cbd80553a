//! The processor's interface to a hypervisor: [`lacuna_cpu::Processor`].
//!
//! Beside that trait, a hypervisor drives it so:
//!
//! ```text
//! a VM          one Fabric for all its vCPUs; no memory slot at Gic::register_pages, because the
//!               processor answers those accesses itself
//! a device      Gic::set_spi, Gic::set_ppi, from any thread
//! a vCPU        is entered only while Power::is_on; else it waits until Power::take_start says
//!               where it starts, and is then reset and started (Cpu::start)
//! Hypercall     Call::architecture, else Power::call, else a service of the hypervisor's own, else
//!               NOT_SUPPORTED; the answer is given by Cpu::complete_hypercall. If something has
//!               to come first: Cpu::repeat_hypercall
//! async fault   Cpu::inject_abort, if Cpu::interruptible and the contract with the guest allow it;
//!               PSTATE masks no abort. Or an event of firmware (SDEI): Cpu::return_from_firmware
//! save          Gic::distributor, Counter::value; each vCPU, and its Power::state
//! restore       Gic::set_distributor, Counter::set; then Cpu::check, each vCPU, Power::set
//! reset         Gic::reset_distributor, then each vCPU
//! ```

use crate::cpu::Cpu;
use crate::fabric::Fabric;
use crate::gic::VcpuGic;
use crate::smccc::Call;
use crate::state::{Exception, Regs, status};
use crate::sysreg::System;
use lacuna_addr::Gfn;
use lacuna_cpu::{Bus, Event, Privilege, Processor, Refused, Wake};
use lacuna_sync::{Clock, Nanos, VcpuSlot};
use std::sync::Arc;

/// Why the processor returned from its run loop.
pub type Exit = lacuna_cpu::Exit<Own>;

/// The exits of arm64 only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Own {
    /// HVC of EL1: answer with [`Cpu::complete_hypercall`] before the next run, or let the guest
    /// repeat the call ([`Cpu::repeat_hypercall`]). PC is behind it.
    Hypercall(Call),
    /// No progress is possible: this is an instruction abort at the vector of this very exception.
    /// The guest has crashed.
    Exception(Exception),
}

/// A field of a state, with an impossible value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Invalid {
    /// Which field.
    pub field: &'static str,
    /// Its value, or its wrong bits.
    pub value: u64,
}

/// The whole state of a processor, between two instructions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct State {
    /// The registers that instructions name.
    pub regs: Regs,
    /// System registers. The timers' counter belongs to no vCPU ([`crate::Counter`]).
    pub system: System,
    /// The vCPU's part of the interrupt controller. The distributor belongs to no vCPU:
    /// [`crate::gic::Gic::distributor`] saves it.
    pub gic: VcpuGic,
    /// The abort at the begin of the next run.
    pub injected: Option<Exception>,
    /// WFI waits for an interrupt.
    pub halted: bool,
}

impl Processor for Cpu {
    type Fabric = Fabric;
    type Own = Own;
    type State = State;

    fn fabric(vcpus: usize, wake: Arc<dyn Wake>) -> Fabric {
        Fabric::new(vcpus, wake)
    }

    fn new(index: usize, fabric: Arc<Fabric>, clock: Arc<dyn Clock>) -> Self {
        Self::new(index, fabric, clock)
    }

    fn run<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot, fuel: u64) -> Exit {
        Self::run(self, bus, slot, fuel)
    }

    fn run_exclusive<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot) -> Exit {
        Self::run_exclusive(self, bus, slot)
    }

    fn complete_read(&mut self, value: u64) {
        Self::complete_read(self, value);
    }

    fn inject(&mut self, event: Event) -> Result<(), Refused> {
        match event {
            Event::Interrupt(intid) => {
                let interface = &self.core.interface;
                interface.gic().post(interface.index(), intid);
                Ok(())
            }
            // The async page faults of 2020 are external aborts with the token as address.
            Event::AsyncFault { address } => {
                self.inject_abort(status::EXTERNAL, address);
                Ok(())
            }
            // There are no non-maskable interrupts (FEAT_NMI).
            Event::Nmi => Err(Refused),
        }
    }

    fn is_interruptible(&self) -> bool {
        self.interruptible()
    }

    fn privilege(&self) -> Privilege {
        Self::privilege(self)
    }

    fn has_interrupt(&mut self) -> bool {
        Self::has_interrupt(self)
    }

    fn next_deadline(&self) -> Option<Nanos> {
        Self::next_deadline(self)
    }

    fn unhalt(&mut self) {
        Self::unhalt(self);
    }

    fn flush_tlb(&mut self) {
        Self::flush_tlb(self);
    }

    fn drop_code(&mut self, gfn: Gfn) {
        Self::drop_code(self, gfn);
    }

    fn drop_all_code(&mut self) {
        Self::drop_all_code(self);
    }

    fn retired(&self) -> u64 {
        Self::retired(self)
    }

    fn pc(&self) -> u64 {
        self.regs().pc
    }

    fn reset(&mut self) {
        Self::reset(self);
    }

    fn save(&mut self) -> Option<State> {
        self.state()
    }

    fn restore(&mut self, state: &State) {
        self.set_state(state);
    }
}
