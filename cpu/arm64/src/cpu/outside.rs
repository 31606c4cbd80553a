//! The functions that a hypervisor calls: [`Processor`], and what only arm64 has.

use super::{ALONE, Cpu};
use crate::exception;
use crate::fabric::Fabric;
use crate::gic::{self, Line};
use crate::processor::Core;
use crate::psci::Start;
use crate::seam::{Exit, Own};
use crate::smccc;
use crate::state::{Exception, pstate, status};
use crate::sysreg::System;
use crate::system::Done;
use crate::timer::{self, Timers};
use lacuna_addr::{Access, Gfn};
use lacuna_cpu::code::CodeCache;
use lacuna_cpu::{Bus, Event, Privilege, Processor, Refused, Wake};
use lacuna_state::StateError;
use lacuna_state::arm64::{self, Abort, Regs, RunState, State};
use lacuna_sync::{Clock, Nanos, VcpuSlot};
use std::sync::Arc;

/// The class of a data abort from a lower exception level.
const DATA_ABORT: u8 = 0x24;

/// Whether a processor can have this PSTATE, in the format of SPSR_EL1.
pub fn is_legal_pstate(pstate: u64) -> bool {
    pstate & !exception::SPSR_VALID == 0 && exception::is_legal_return(pstate)
}

impl Cpu {
    /// General registers, stack pointers, PC and PSTATE.
    pub fn regs(&self) -> Regs {
        let mut x = [0; 31];
        x.copy_from_slice(&self.core.r[..31]);
        let [sp_el0, sp_el1] = self.core.stack_pointers();
        Regs {
            x,
            sp_el0,
            sp_el1,
            pc: self.core.pc,
            pstate: self.core.pstate(),
        }
    }

    /// Sets general registers, stack pointers, PC and PSTATE. The exclusive monitor is cleared.
    pub fn set_regs(&mut self, regs: &Regs) {
        self.core.set_pstate(regs.pstate);
        self.core.r[..31].copy_from_slice(&regs.x);
        self.core.set_stack_pointers([regs.sp_el0, regs.sp_el1]);
        self.core.pc = regs.pc;
        self.core.monitor.clear();
        self.code.forget_exit();
    }

    /// System registers.
    pub fn system(&self) -> &System {
        &self.core.sys
    }

    /// Puts a freshly reset processor at the entry point of an image or a PSCI `CPU_ON`: EL1h,
    /// interrupts masked, stage 1 off, `context` in X0 (DEN 0022, 6.4).
    pub fn start(&mut self, start: Start) {
        self.core.pc = start.entry.get();
        self.core.r[0] = start.context;
    }

    /// Gives the results of the last [`Own::Hypercall`](crate::Own::Hypercall): X0 to X3.
    pub fn complete_hypercall(&mut self, results: [u64; 4]) {
        self.core.r[..4].copy_from_slice(&results);
    }

    /// Gives the result of a hypercall with only one: X0.
    pub fn complete_hypercall_in_x0(&mut self, result: u64) {
        self.core.r[0] = result;
    }

    /// Lets the processor execute the instruction of the last
    /// [`Own::Hypercall`](crate::Own::Hypercall) again, instead of giving results: the hypervisor
    /// has done nothing, because another step must come first. Until then no instruction is half
    /// done, so the processor may take an interrupt, or be saved.
    pub fn repeat_hypercall(&mut self) {
        self.core.pc = self.core.pc.wrapping_sub(4);
    }

    /// As a return from firmware: the first general registers become `x`, and execution continues
    /// at `pc` with `pstate`, in the format of SPSR_EL1. An illegal `pstate` acts as in ERET
    /// (D1.11.4). This ends a wait for an interrupt.
    pub fn return_from_firmware(&mut self, x: &[u64], pc: u64, pstate: u64) {
        self.core.r[..x.len()].copy_from_slice(x);
        self.core.monitor.clear();
        self.core.halted = false;
        self.code.forget_exit();
        if exception::return_to(&mut self.core, pc, pstate) == Done::Illegal {
            self.code.new_epoch();
        }
    }

    /// Sets ELR_EL1 and SPSR_EL1.
    pub fn set_exception_return(&mut self, elr: u64, spsr: u64) {
        (self.core.sys.elr, self.core.sys.spsr) = (elr, spsr);
    }

    /// Sets the level of an input of the processor's own interrupts, 16 to 31. The vCPU's thread
    /// calls this between two runs, so no wake-up is needed. Other threads call
    /// [`Gic::set_ppi`](crate::gic::Gic::set_ppi).
    pub fn set_ppi(&mut self, intid: u32, line: Line) {
        let interface = &self.core.interface;
        interface.gic().set_own_ppi(interface.index(), intid, line);
    }

    /// PSCI `CPU_SUSPEND`: the processor waits for an interrupt, as by WFI, with success in X0.
    pub fn suspend(&mut self) {
        self.core.r[0] = smccc::SUCCESS;
        self.core.halted = true;
    }

    /// Injects a data abort with fault status code `dfsc` and `address` in FAR_EL1. The processor
    /// must be [`Processor::is_interruptible`]. The next run begins with the abort, before any
    /// interrupt; PSTATE does not mask it. It ends a wait for an interrupt.
    pub fn inject_abort(&mut self, dfsc: u32, address: u64) {
        let abort = Exception::data_abort(address, dfsc & 0x3f, Access::Read);
        self.core.injected = Some(abort);
    }

    /// Whether PSTATE masks IRQs.
    pub fn masks_interrupts(&self) -> bool {
        self.core.pstate() & pstate::I != 0
    }

    /// Whether the processor waits for an interrupt.
    pub fn is_halted(&self) -> bool {
        self.core.halted
    }

    /// The common state of the machine's processors.
    pub fn fabric(&self) -> &Arc<Fabric> {
        &self.core.fabric
    }

    /// Whether this processor can be in `state`.
    ///
    /// # Errors
    /// The first impossible field.
    pub fn check(&self, state: &State) -> Result<(), StateError> {
        self.accept(state).map(drop)
    }

    /// The system registers of a possible `state`.
    fn accept(&self, state: &State) -> Result<System, StateError> {
        arm64::check_id(&state.id, &self.core.sys.id_registers().collect())?;
        let mut system = System::restored(self.core.interface.index(), &state.system)?;
        if !is_legal_pstate(state.regs.pstate) {
            return StateError::invalid("regs.pstate", state.regs.pstate);
        }
        if let Some(abort) = state.abort.filter(|abort| abort.iss >> 25 != 0) {
            return StateError::invalid("abort.iss", abort.iss);
        }
        timer::check(&state.timers)?;
        gic::check(&state.gic)?;
        system.timers = Timers::restored(&state.timers, self.core.fabric.counter.offset());
        Ok(system)
    }
}

impl Processor for Cpu {
    type Fabric = Fabric;
    type Own = Own;
    type State = State;

    fn fabric(vcpus: usize, wake: Arc<dyn Wake>) -> Fabric {
        Fabric::new(vcpus, wake)
    }

    /// Processor `index` in the state after a reset: EL1h, interrupts masked, stage 1 off, PC zero.
    fn new(index: usize, fabric: Arc<Fabric>, clock: Arc<dyn Clock>) -> Self {
        Self {
            core: Core::new(index, fabric, clock),
            code: CodeCache::new(),
            fresh: Vec::new(),
            completed: false,
            retired: 0,
        }
    }

    fn run<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot, fuel: u64) -> Exit {
        let end = self.retired.saturating_add(fuel);
        self.enter();
        let exit = self.run_until(bus, slot, end);
        self.leave();
        exit
    }

    /// Executes one instruction with every other vCPU stopped, after [`Exit::Exclusive`]; after a
    /// load-exclusive, the instructions up to its store-exclusive.
    fn run_exclusive<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot) -> Exit {
        self.enter();
        self.core.exclusive = true;
        let mut exit = None;
        for _ in 0..ALONE {
            self.grant(1);
            exit = self.step(bus, slot);
            self.retired = self.core.retired_before();
            if exit.is_some() || !self.core.monitor.is_alone() {
                break;
            }
        }
        if self.core.monitor.is_alone() {
            self.core.monitor.clear();
        }
        self.core.exclusive = false;
        self.leave();
        exit.unwrap_or(Exit::Fuel)
    }

    fn complete_read(&mut self, value: u64) {
        self.core.replay.answer(value);
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

    /// Whether an abort may be injected now: none is pending, and no instruction waits for a
    /// device's answer.
    fn is_interruptible(&self) -> bool {
        self.core.injected.is_none() && self.core.replay.is_idle()
    }

    fn privilege(&self) -> Privilege {
        self.core.user
    }

    /// Whether the next run would take an interrupt or an injected abort before its first
    /// instruction, or continue behind a WFI. A timer due by now counts.
    fn has_interrupt(&mut self) -> bool {
        self.core.tick();
        let masked = self.core.halted && self.core.interface.signalled().is_some();
        self.core.replay.is_idle() && (masked || exception::pending(&self.core).is_some())
    }

    fn next_deadline(&self) -> Option<Nanos> {
        self.core.next_deadline()
    }

    fn unhalt(&mut self) {
        self.core.halted = false;
    }

    /// Forgets every translation, also in parked address spaces.
    fn flush_tlb(&mut self) {
        self.core.translations.flush(self.core.sys.space());
        self.code.new_epoch();
    }

    fn drop_code(&mut self, gfn: Gfn) {
        self.code.drop_page(gfn);
    }

    fn drop_all_code(&mut self) {
        self.code.clear();
    }

    fn retired(&self) -> u64 {
        self.retired
    }

    fn pc(&self) -> u64 {
        self.regs().pc
    }

    /// Puts the processor back into the state of [`Cpu::new`]. [`Cpu::retired`] keeps counting.
    /// Decoded code stays, because it still matches memory.
    fn reset(&mut self) {
        let index = self.core.interface.index();
        self.core.interface.reset();
        let (fabric, clock) = (Arc::clone(&self.core.fabric), Arc::clone(&self.core.clock));
        self.core = Core::new(index, fabric, clock);
        self.code.new_epoch();
        self.code.forget_exit();
    }

    /// The state of the processor alone: its power state and asynchronous page faults belong to the
    /// machine. `None` in the middle of an instruction that waits for a device.
    fn save(&mut self) -> Option<State> {
        if !self.core.replay.is_idle() {
            return None;
        }
        self.core.tick();
        let core = &self.core;
        Some(State {
            regs: self.regs(),
            system: core.sys.saved().collect(),
            id: core.sys.id_registers().collect(),
            timers: core.sys.timers.saved(),
            gic: core.interface.save(),
            abort: core.injected.map(|abort| Abort {
                iss: abort.iss,
                address: abort.far.unwrap_or(0),
            }),
            run: match core.halted {
                true => RunState::Halted,
                false => RunState::Running,
            },
            ..State::default()
        })
    }

    /// The processor compares its timers with the machine's counter.
    fn restore(&mut self, state: &State) -> Result<(), StateError> {
        self.core.sys = self.accept(state)?;
        self.core.replay.clear();
        self.core.forget_lines();
        self.core.interface.restore(&state.gic);
        self.core.injected = state.abort.map(|abort| Exception {
            class: DATA_ABORT,
            iss: abort.iss,
            far: Some(abort.address),
        });
        self.core.halted = state.run == RunState::Halted;
        self.set_regs(&state.regs);
        self.flush_tlb();
        Ok(())
    }
}
