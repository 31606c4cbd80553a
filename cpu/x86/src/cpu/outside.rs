//! The interface to a hypervisor: [`Processor`], and what only x86 has.

use super::events::Pending;
use super::{Cpu, Progress, SLICE};
use crate::apic::{ApicBus, Lapic};
use crate::cpuid::cpuid;
use crate::exit::{Exit, Own};
use crate::processor::Core;
use crate::state::bits::CR0_PG;
use crate::state::{Exception, System};
use crate::tsc::{Tsc, TscRate};
use crate::walk::at_cpl;
use lacuna_addr::Gfn;
use lacuna_cpu::code::CodeCache;
use lacuna_cpu::{Bus, Event, Privilege, Processor, Refused, Wake};
use lacuna_state::StateError;
use lacuna_state::x86::cpuid::Leaf;
use lacuna_state::x86::{Regs, State};
use lacuna_sync::{Clock, Nanos, VcpuSlot};
use std::sync::Arc;

impl Cpu {
    /// General registers, RIP and RFLAGS.
    pub fn regs(&self) -> Regs {
        let mut gpr = [0; 16];
        gpr.copy_from_slice(&self.core.r[..16]);
        Regs {
            gpr,
            rip: self.core.rip,
            rflags: self.core.rflags(),
        }
    }

    /// Sets general registers, RIP and RFLAGS.
    pub fn set_regs(&mut self, regs: &Regs) {
        self.core.r[..16].copy_from_slice(&regs.gpr);
        self.core.rip = regs.rip;
        self.core.set_rflags(regs.rflags);
        self.code.forget_exit();
    }

    /// System registers.
    pub fn system(&self) -> &System {
        &self.core.sys
    }

    /// Replaces the system registers; forgets every translation. The TSC keeps its rate, and takes
    /// over the offset.
    pub fn set_system(&mut self, system: System) {
        let rate = self.core.sys.tsc.rate();
        self.core.sys = system;
        self.set_tsc_rate(rate);
        self.core.sync_privilege();
        self.flush_tlb();
    }

    /// Gives the answer to the last [`Own::MsrRead`](crate::Own::MsrRead) or
    /// [`Own::MsrWrite`](crate::Own::MsrWrite); it must come before the next run. `Some`
    /// completes the instruction: a read returns this value, a write ignores it. `None` raises
    /// #GP(0) at the instruction.
    pub fn complete_msr(&mut self, answer: Option<u64>) {
        match answer {
            Some(value) => self.core.replay.push(value),
            None => self.pending = Pending::Exception(Exception::GP0),
        }
    }

    /// Sets the KVM features in EAX of CPUID leaf 0x40000001, besides the processor's own. They are
    /// the features of the MSRs that the machine answers. At first there are none; a reset keeps
    /// them.
    pub fn set_kvm_features(&mut self, bits: u32) {
        self.core.announced.kvm_features = bits;
    }

    /// Sets CPUID's answers, in place of the processor's own. Except for the TSC's rate, the caller
    /// announces only features of the processor. A reset keeps the answers.
    pub fn set_cpuid(&mut self, leaves: impl IntoIterator<Item = Leaf>) {
        self.core.announced.leaves = Some(leaves.into_iter().collect());
    }

    /// CPUID's present answer, in EAX, EBX, ECX, EDX.
    pub fn cpuid(&self, function: u32, index: u32) -> [u32; 4] {
        let core = &self.core;
        let leaf = cpuid(&core.sys, &core.apic, &core.announced, function, index);
        [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]
    }

    /// Sets the rate of the TSC, which is 1 GHz at first. A reset keeps the rate, because the guest
    /// has read it.
    pub fn set_tsc_rate(&mut self, rate: TscRate) {
        let tsc = &mut self.core.sys.tsc;
        *tsc = Tsc::new(rate, tsc.at(Nanos(0)));
    }

    /// Whether no event and no instruction is half done.
    fn is_quiet(&self) -> bool {
        self.pending == Pending::Nothing && self.core.replay.is_idle()
    }

    /// Injects a page fault with error code 0 at `address`. The processor must be
    /// [`Processor::is_interruptible`]. The next run begins with the fault, before any interrupt.
    /// The fault ends a halt. CR2 changes when the handler is entered. A stop during delivery does
    /// not lose the fault.
    pub fn inject_page_fault(&mut self, address: u64) {
        self.pending = Pending::Exception(Exception::page_fault(0, address));
    }

    /// Current privilege level: 0 to 3.
    pub fn cpl(&self) -> u8 {
        self.core.sys.cpl
    }

    /// CR0.PG. Always set here: the processor never leaves long mode.
    pub fn paging(&self) -> bool {
        self.core.sys.cr0 & CR0_PG != 0
    }

    /// Sends the processor's own APIC a fixed interrupt. It is ignored while the APIC is disabled.
    /// A vector below 16 sets the APIC's receive error (SDM vol 3 11.5.3) and raises no interrupt.
    pub fn raise_interrupt(&mut self, vector: u8) {
        self.core.apic.receive(vector);
    }

    /// The bus of its APIC, with the I/O APIC.
    pub fn apic_bus(&self) -> &ApicBus {
        self.core.apic.bus()
    }

    /// Whether the APIC takes interrupts: `IA32_APIC_BASE` and SVR both enable it.
    pub fn apic_enabled(&self) -> bool {
        self.core.apic.is_accepting()
    }

    /// Sends the processor a non-maskable interrupt.
    pub fn raise_nmi(&mut self) {
        self.core.apic.set_nmi(true);
    }

    /// Whether the processor is halted by HLT.
    pub fn is_halted(&self) -> bool {
        self.core.sys.halted
    }
}

impl Processor for Cpu {
    type Fabric = ApicBus;
    type Own = Own;
    type State = State;

    fn fabric(vcpus: usize, wake: Arc<dyn Wake>) -> ApicBus {
        ApicBus::new(vcpus, wake)
    }

    /// A processor with APIC id `index`, in long mode with all registers zero. Set its initial
    /// state with [`Cpu::set_system`] and [`Cpu::set_regs`].
    fn new(index: usize, apics: Arc<ApicBus>, clock: Arc<dyn Clock>) -> Self {
        Self {
            core: Core::new(Lapic::new(index, apics), clock),
            code: CodeCache::new(),
            fresh: Vec::new(),
            progress: Progress::None,
            pending: Pending::Nothing,
            retired: 0,
        }
    }

    fn run<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot, fuel: u64) -> Exit {
        let end = self.retired.saturating_add(fuel);
        self.core.replay.enter();
        loop {
            let left = end.saturating_sub(self.retired);
            if left == 0 {
                return Exit::Fuel;
            }
            let granted = left.min(SLICE) as i64;
            self.core.budget = granted;
            let exit = self.slice(bus, slot);
            self.retired = self
                .retired
                .saturating_add_signed(granted - self.core.budget);
            if let Some(exit) = exit {
                return exit;
            }
        }
    }

    fn run_exclusive<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot) -> Exit {
        self.core.sys.exclusive = true;
        self.core.budget = 1;
        let exit = match std::mem::take(&mut self.pending) {
            Pending::Exception(exception) => self.raise_once(bus, exception),
            _ => self.step(bus, slot),
        };
        self.core.sys.exclusive = false;
        self.retired = self.retired.saturating_add_signed(1 - self.core.budget);
        exit.unwrap_or(Exit::Fuel)
    }

    fn complete_read(&mut self, value: u64) {
        self.core.replay.answer(value);
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

    /// Whether the processor would take an interrupt now, so that a fault may be injected too.
    /// RFLAGS.IF is set, there is no STI or MOV SS shadow, no event is pending or was stopped
    /// during its delivery, and no instruction waits for the answer of a device or an MSR, or holds
    /// one.
    fn is_interruptible(&self) -> bool {
        self.is_quiet() && self.core.is_interruptible()
    }

    fn privilege(&self) -> Privilege {
        at_cpl(self.cpl())
    }

    /// Whether the next run would take an interrupt before its first instruction: an NMI waits that
    /// is not blocked, or an interrupt above the processor's priority is requested and the
    /// processor is [`Processor::is_interruptible`]. A timer due by now counts.
    fn has_interrupt(&mut self) -> bool {
        self.core.apic.tick(self.core.clock.now());
        let interrupts = self.is_interruptible() && self.core.apic.pending().is_some();
        interrupts || self.is_quiet() && self.core.takes_nmi()
    }

    fn next_deadline(&self) -> Option<Nanos> {
        self.core.apic.next_deadline()
    }

    fn unhalt(&mut self) {
        self.core.sys.halted = false;
    }

    /// Forgets every translation, also in parked address spaces, because the host has taken pages
    /// back.
    fn flush_tlb(&mut self) {
        self.core.translations.flush(self.core.sys.pcid());
        self.code.new_epoch();
    }

    fn drop_code(&mut self, gfn: Gfn) {
        self.code.drop_page(gfn);
    }

    fn drop_all_code(&mut self) {
        self.code.clear();
    }

    /// Instructions executed so far. Every 64 iterations of a repeated string instruction count as
    /// one.
    fn retired(&self) -> u64 {
        self.retired
    }

    fn pc(&self) -> u64 {
        self.core.rip
    }

    /// Puts the processor back into the state of [`Cpu::new`]: registers, the APIC with its timer
    /// and its requested interrupts, translations, half-done instructions, pending events. The
    /// caller sets the initial state afterwards. [`Cpu::retired`] keeps counting. The set CPUID and
    /// the TSC's rate stay. Decoded code stays too, because it still matches memory.
    fn reset(&mut self) {
        let (announced, rate) = (self.core.announced.clone(), self.core.sys.tsc.rate());
        self.core = Core::new(self.core.apic.reset(), Arc::clone(&self.core.clock));
        self.core.announced = announced;
        self.core.apic.set_nmi(false);
        self.set_tsc_rate(rate);
        self.code.new_epoch();
        self.pending = Pending::Nothing;
    }

    /// The whole state of the processor; `None` in the middle of an instruction that waits for the
    /// answer of a device or an MSR, or holds one. A due timer requests its interrupt.
    fn save(&mut self) -> Option<State> {
        if !self.core.replay.is_idle() {
            return None;
        }
        Some(self.state())
    }

    fn restore(&mut self, state: &State) -> Result<(), StateError> {
        let (mut system, apic) = self.accept(state)?;
        let now = self.core.clock.now();
        system.tsc.set(state.tsc.value, now);
        self.core.replay.clear();
        self.set_system(system);
        self.set_regs(&state.regs);
        let own = &mut self.core.apic;
        own.set_registers(&apic, self.core.sys.tsc, now);
        own.set_nmi(state.events.nmi_pending);
        self.pending = state.events.exception.into();
        Ok(())
    }
}
