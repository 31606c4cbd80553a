//! The x86 processor's interface to a hypervisor: [`lacuna_cpu::Processor`].

use crate::ApicBus;
use crate::apic::ApicRegisters;
use crate::cpu::{Cpu, Regs};
use crate::exit::{Exit, Own};
use crate::state::{Exception, System};
use crate::walk::at_cpl;
use lacuna_addr::Gfn;
use lacuna_cpu::{Bus, Event, Privilege, Processor, Refused, Wake};
use lacuna_sync::{Clock, Nanos, VcpuSlot};
use std::sync::Arc;

/// The whole state of an x86 processor, between two instructions. The features of
/// [`Cpu::set_kvm_features`] belong to the machine and are not included.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct State {
    /// General registers, RIP and RFLAGS.
    pub regs: Regs,
    /// System registers. The TSC's offset is the value of the TSC at the save, as if the clock read
    /// 0 then.
    pub system: System,
    /// The local APIC.
    pub apic: ApicRegisters,
    /// The exception at the begin of the next run.
    pub exception: Option<Exception>,
    /// Whether an NMI waits.
    pub nmi: bool,
}

impl Processor for Cpu {
    type Fabric = ApicBus;
    type Own = Own;
    type State = State;

    fn fabric(vcpus: usize, wake: Arc<dyn Wake>) -> ApicBus {
        ApicBus::new(vcpus, wake)
    }

    fn new(index: usize, fabric: Arc<ApicBus>, clock: Arc<dyn Clock>) -> Self {
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
            Event::Interrupt(vector) => {
                self.raise_interrupt(u8::try_from(vector).map_err(|_| Refused)?);
                Ok(())
            }
            Event::AsyncFault { address } => {
                self.inject_page_fault(address);
                Ok(())
            }
            Event::Nmi => {
                self.raise_nmi();
                Ok(())
            }
        }
    }

    fn is_interruptible(&self) -> bool {
        self.interruptible()
    }

    fn privilege(&self) -> Privilege {
        at_cpl(self.cpl())
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
        self.core.rip
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
