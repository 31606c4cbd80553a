//! The processor: its run loop.
//!
//! ```text
//! slice: the timer ticks; an event that events.rs still holds is delivered first
//!        +------------------------------ turn -----------------------------------+
//! run -> | asked? -> NMI, interrupt? -> halted? -> basic_block_at(rip) -> dispatch      | -> Exit
//!        |    ^                               or, for one instruction, step        |
//!        |    +--- branch: link, continue     system op: system.rs                 |
//!        |    +--- blocked: deliver the exception, or leave with an Exit           |
//!        +-------------------------------------------------------------------------+
//! ```
//! *Stepping* executes one instruction alone, decoded afresh: if it writes decoded code, repeats a
//! device access, is single-stepped, follows STI, or lies across two pages.
//!
//! events.rs delivers events. outside.rs has the interface to a hypervisor: registers,
//! answers, injected exceptions.

mod events;
mod outside;

use crate::control::Flush;
use crate::decode::{self, Found, Window};
use crate::deliver::Event;
use crate::dispatch::{Leave, RSP, dispatch};
use crate::exit::Exit;
use crate::flags::TF;
use crate::mem::{Touch, View};
use crate::op::{Code, Op, System as SystemOp, branch_target};
use crate::processor::{Core, Why};
use crate::stack;
use crate::state::{Exception, Trap, is_canonical};
use crate::system::{self, Done};
use crate::walk::User;
use events::Pending;
use lacuna_addr::PAGE_SIZE;
use lacuna_cpu::code::{CodeCache, Key, NEVER};
use lacuna_cpu::{Bus, HostPage, Processor};
use lacuna_sync::VcpuSlot;

/// The number of instructions between two reads of the clock, for the timer: some 50 us.
const SLICE: u64 = 1 << 14;
/// DR6: single step.
const DR6_BS: u64 = 1 << 14;

/// One vCPU.
pub struct Cpu {
    pub(crate) core: Core,
    code: CodeCache<Code>,
    /// The basic block being decoded.
    fresh: Vec<Op>,
    progress: Progress,
    pub(crate) pending: Pending,
    retired: u64,
}

/// The progress of the last instruction. It decides whether the trap flag raises #DB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Progress {
    /// It did not complete: the processor executes it again, or has entered a handler.
    None,
    /// It completed, or one iteration of a REP did.
    Done,
    /// It completed, and raises no #DB in spite of the trap flag.
    Untrapped,
}

impl Cpu {
    /// Executes until the budget is used up or there is an exit.
    fn slice<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot) -> Option<Exit> {
        self.core.apic.tick(self.core.clock.now());
        // One check is enough: an instruction that leaves an event pending also ends the run.
        if self.pending != Pending::Nothing
            && !slot.has_request()
            && let Some(exit) = self.settle(bus)
        {
            return Some(exit);
        }
        while self.core.budget > 0 {
            if slot.has_request() {
                return Some(Exit::Requested);
            }
            if let Some(exit) = self.turn(bus, slot) {
                return Some(exit);
            }
        }
        None
    }

    /// Runs from one exit of `dispatch` to the next.
    fn turn<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot) -> Option<Exit> {
        if self.core.replay.is_active() {
            return self.step(bus, slot);
        }
        if self.core.takes_nmi() {
            return self.nmi(bus);
        }
        if self.core.is_interruptible()
            && let Some(vector) = self.core.apic.pending()
        {
            return self.interrupt(bus, vector);
        }
        if self.core.sys.halted {
            return Some(Exit::Halt);
        }
        if self.core.sys.interrupt_shadow || self.core.rflags & TF != 0 {
            return self.step(bus, slot);
        }
        let start = match self.basic_block_at(bus) {
            Ok(start) => start,
            Err(_) => return self.blocked(bus, slot, None),
        };
        self.core.stepping = false;
        let epoch = self.code.epoch(self.core.user);
        let leave = self.dispatch(bus, slot, start, epoch);
        let exit = self.left(bus, slot, leave, 0);
        if let Leave::Branch(branch, condition) = leave {
            let (target, user) = (self.core.rip, self.core.user);
            self.code.leave(branch, condition, target, user, epoch);
        }
        exit
    }

    fn dispatch<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot, at: u16, epoch: u32) -> Leave {
        dispatch(&mut self.core, self.code.decoded(epoch), at, bus, slot)
    }

    /// Brings the architectural state to the last op of `dispatch`, and acts on the reason.
    /// `scratch` is the address of the scratch place.
    fn left<B: Bus>(
        &mut self,
        bus: &mut B,
        slot: &VcpuSlot,
        leave: Leave,
        scratch: u64,
    ) -> Option<Exit> {
        let (Leave::Blocked(at) | Leave::System(at) | Leave::Branch(at, _) | Leave::Indirect(at)) =
            leave;
        if matches!(leave, Leave::Indirect(_)) && is_canonical(self.core.rip) {
            self.progress = Progress::Done;
            return None;
        }
        let (op, origin) = (self.code.ops[at as usize], self.code.origin(at, scratch));
        if let Leave::Branch(_, condition) = leave {
            self.core.rip = branch_target(&op, origin.pc, condition);
            self.progress = Progress::Done;
            return None;
        }
        self.core.rip = origin.pc;
        if matches!(leave, Leave::Indirect(_)) {
            return self.refuse_branch(bus, op);
        }
        self.core.budget -= origin.before as i64;
        match leave {
            Leave::Blocked(_) => self.blocked(bus, slot, Some(op)),
            _ => self.system_op(bus, slot, op),
        }
    }

    /// The indirect branch at RIP was executed, but its target is not canonical: undoes its effects
    /// and raises #GP(0). The jump cache holds only canonical targets, so such a branch always
    /// leaves the hot loop, and the loop needs no check.
    #[cold]
    fn refuse_branch<B: Bus>(&mut self, bus: &mut B, op: Op) -> Option<Exit> {
        if op.code == Code::Ret {
            let popped = op.imm64().wrapping_add(8);
            self.core.r[RSP] = self.core.r[RSP].wrapping_sub(popped);
        }
        // The budget was charged for the whole basic block.
        self.core.budget += 1;
        self.raise(bus, Exception::GP0)
    }

    /// The basic block at RIP, decoded if it is not cached. Links the exit that led here.
    fn basic_block_at<B: Bus>(&mut self, bus: &mut B) -> Touch<u16> {
        let (rip, user) = (self.core.rip, self.core.user);
        let start = match self.code.jumps.find(rip, user, self.code.epoch(user)) {
            Some(start) => start,
            None => {
                let (gfn, page) = self.core.fetch_page(bus, rip)?;
                let key = Key { pc: rip, gfn, user };
                let start = match self.code.find(key) {
                    Some(start) => start,
                    None => self.decode(bus, key, page)?,
                };
                self.code.remember_jump(rip, user, start);
                start
            }
        };
        self.code.enter(rip, user, start);
        Ok(start)
    }

    #[cold]
    fn decode<B: Bus>(&mut self, bus: &mut B, key: Key, page: HostPage) -> Touch<u16> {
        self.code.reserve();
        if !self.code.knows_page(key.gfn) {
            if let Err(stop) = bus.track_code(key.gfn) {
                return self.core.block(Why::Trap(stop.into()));
            }
            self.core.translations.protect(key.gfn);
        }
        self.fresh.clear();
        let window = Window::new(page, key.pc as usize & (PAGE_SIZE - 1));
        if decode::basic_block(&window, key.pc, &mut self.fresh) == Found::Incomplete {
            let aux = SystemOp::Crossing as u8;
            self.fresh.push(Op {
                aux,
                ..Op::new(Code::System)
            });
        }
        Ok(self.code.insert(key, &self.fresh))
    }

    /// Executes the instruction at RIP alone.
    fn step<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot) -> Option<Exit> {
        let shadow = std::mem::take(&mut self.core.sys.interrupt_shadow);
        let trace = self.core.rflags & TF != 0;
        let rip = self.core.rip;
        self.core.replay.rewind();
        self.progress = Progress::None;
        let exit = match self.decode_one(bus) {
            Ok(()) => self.step_decoded(bus, slot, rip),
            Err(_) => self.blocked(bus, slot, None),
        };
        if exit.is_some() && self.progress == Progress::None {
            // The instruction was not executed; it will be executed again.
            self.core.sys.interrupt_shadow = shadow;
            return exit;
        }
        self.core.replay.clear();
        match (trace && self.progress == Progress::Done, exit) {
            (false, _) => exit,
            (true, None) => self.trap(bus),
            (true, Some(_)) => {
                // OUT exits first; the next run begins with the #DB.
                self.core.sys.dr6 |= DR6_BS;
                self.pending = Pending::Exception(Exception::DB);
                exit
            }
        }
    }

    /// Raises the trap flag's #DB, with RIP behind the instruction.
    fn trap<B: Bus>(&mut self, bus: &mut B) -> Option<Exit> {
        self.core.sys.dr6 |= DR6_BS;
        self.raise_once(bus, Exception::DB)
    }

    fn decode_one<B: Bus>(&mut self, bus: &mut B) -> Touch<()> {
        let rip = self.core.rip;
        let (_, page) = self.core.fetch_page(bus, rip)?;
        let mut window = Window::new(page, rip as usize & (PAGE_SIZE - 1));
        self.fresh.clear();
        if decode::one(&window, rip, &mut self.fresh) == Found::Incomplete {
            let next = (rip | (PAGE_SIZE as u64 - 1)).wrapping_add(1);
            let (_, page) = self.core.fetch_page(bus, next)?;
            window.extend(page);
            if decode::one(&window, rip, &mut self.fresh) == Found::Incomplete {
                return self.core.raise(Exception::GP0);
            }
        }
        Ok(())
    }

    fn step_decoded<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot, rip: u64) -> Option<Exit> {
        self.core.stepping = true;
        let start = self.code.set_scratch(&self.fresh);
        let leave = self.dispatch(bus, slot, start, NEVER);
        self.drop_written(bus);
        self.left(bus, slot, leave, rip)
    }

    /// Drops decoded pages that this processor has written.
    #[inline(always)]
    fn drop_written<B: Bus>(&mut self, bus: &mut B) {
        let core = &mut self.core;
        self.code
            .drop_written(&mut core.code_written, &mut core.translations.walk, bus);
    }

    /// Handles an instruction at RIP that did not complete; [`Core::why`] has the reason. `op` is
    /// its op, if it could be fetched.
    fn blocked<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot, op: Option<Op>) -> Option<Exit> {
        self.drop_written(bus);
        match self.core.why {
            Why::Trap(Trap::Exception(exception)) => self.raise(bus, exception),
            Why::Trap(Trap::Stop(stop)) => Some(Exit::Stop(stop)),
            Why::Trap(Trap::Exclusive) => Some(Exit::Exclusive),
            Why::NonCanonical => {
                let stack = op.is_some_and(|op| stack::is_stack_access(&self.core, &op));
                let exception = if stack {
                    Exception::SS0
                } else {
                    Exception::GP0
                };
                self.raise(bus, exception)
            }
            Why::DeviceRead(gpa, size) => Some(Exit::MmioRead { gpa, size }),
            Why::DeviceWrite(gpa, size, value) => {
                self.core.replay.push(0);
                Some(Exit::MmioWrite { gpa, size, value })
            }
            Why::Again => {
                self.progress = Progress::Done;
                None
            }
            Why::Step => self.step(bus, slot),
        }
    }

    /// Executes a system op at RIP.
    fn system_op<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot, op: Op) -> Option<Exit> {
        if op.aux == SystemOp::Crossing as u8 {
            return self.step(bus, slot);
        }
        let next = self.core.rip.wrapping_add(op.bytes());
        let done = system::execute(&mut View::new(&mut self.core, bus), &op, next);
        self.drop_written(bus);
        let done = match done {
            Ok(done) => done,
            Err(trap) => {
                // If the operand is in a device, the access exits, and the instruction is executed
                // again.
                if !(trap.is_mmio() && self.core.why.is_device()) {
                    self.core.why = Why::Trap(trap);
                }
                return self.blocked(bus, slot, Some(op));
            }
        };
        match done {
            Done::Next | Done::Untrapped | Done::Flush(_) | Done::Exit(_) => self.core.rip = next,
            Done::Jumped | Done::SystemCall | Done::Wait(_) | Done::Event(_) => {}
        }
        self.core.sync_privilege();
        match done {
            Done::Wait(exit) => return Some(exit),
            Done::Event(event) => {
                // INT n itself may fault; INT1 is reported with RIP behind the instruction.
                let rip = self.core.rip;
                if matches!(event, Event::Interrupt(_)) {
                    self.core.rip = next;
                }
                let outcome = self.event(bus, event);
                if outcome.is_err() {
                    self.core.rip = rip;
                }
                return outcome.err();
            }
            Done::Flush(flush) => self.flush(flush),
            _ => {}
        }
        self.core.budget -= 1;
        self.progress = match done {
            Done::Untrapped | Done::SystemCall => Progress::Untrapped,
            _ => Progress::Done,
        };
        match done {
            Done::Exit(exit) => Some(exit),
            Done::SystemCall if self.core.rflags & TF != 0 => self.trap(bus),
            _ => None,
        }
    }

    /// Drops an instruction's invalidated translations.
    pub(crate) fn flush(&mut self, flush: Flush) {
        match flush {
            Flush::Keep => {}
            Flush::All => self.flush_tlb(),
            Flush::Address(va) => {
                self.core.translations.invalidate(va);
                self.code.begin_epoch(User::Supervisor);
                self.code.begin_epoch(User::User);
            }
            Flush::Space(pcid, retain) => {
                let (running, code) = (self.core.user, self.code.user_code());
                let translations = &mut self.core.translations;
                let switched = translations.switch(pcid, retain, running, code);
                self.code.follow(User::Supervisor, switched.supervisor);
                self.code.follow(User::User, switched.user);
            }
        }
    }
}
