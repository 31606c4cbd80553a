//! The processor: its run loop.
//!
//! ```text
//!        +------------------------------ turn -----------------------------------+
//! run -> | request? -> interrupt? -> halted? -> basic_block_at(pc) -> dispatch     | -> Exit
//!        |    ^                               or, for one instruction, step        |
//!        |    +--- branch: link, continue     system op: system.rs                 |
//!        |    +--- blocked: deliver the exception, or leave with an Exit           |
//!        +-------------------------------------------------------------------------+
//! ```
//! *Stepping* executes one instruction alone, decoded afresh: if the instruction writes decoded
//! code or repeats a device access, and while SP is misaligned.
//!
//! outside.rs has the interface to a hypervisor.

mod outside;

pub use outside::is_legal_pstate;

use crate::decode;
use crate::dispatch::{Leave, dispatch};
use crate::exception;
use crate::general::SP_ALIGNMENT;
use crate::mem::{Touch, View};
use crate::op::{Code, Op, SP, branch_target};
use crate::processor::{Core, Why};
use crate::seam::Exit;
use crate::state::{Exception, Trap, pstate};
use crate::system::{self, Done, Flush};
use crate::walk::untagged;
use lacuna_addr::Access;
use lacuna_cpu::code::{CodeCache, Key, NEVER};
use lacuna_cpu::{Bus, HostPage, Privilege, Processor};
use lacuna_sync::VcpuSlot;

/// The number of instructions between two reads of the clock, for the timer: some 50 us.
const SLICE: u64 = 1 << 14;
/// The most instructions from a load-exclusive to its store-exclusive, while every other vCPU is
/// stopped (monitor.rs).
const ALONE: usize = 64;

/// One vCPU.
pub struct Cpu {
    pub(crate) core: Core,
    code: CodeCache<Code>,
    /// The basic block being decoded.
    fresh: Vec<Op>,
    /// The instruction being stepped is complete.
    completed: bool,
    retired: u64,
}

impl Cpu {
    fn run_until<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot, end: u64) -> Exit {
        self.core.replay.enter();
        loop {
            let left = end.saturating_sub(self.retired);
            if left == 0 {
                self.core.monitor.leave();
                return Exit::Fuel;
            }
            self.grant(left.min(SLICE));
            let exit = self.slice(bus, slot);
            self.retired = self.core.retired_before();
            if let Some(exit) = exit {
                self.core.monitor.leave();
                return exit;
            }
        }
    }

    /// Begins to execute guest code: first drops the translations invalidated by other vCPUs.
    fn enter(&mut self) {
        let index = self.core.interface.index();
        for what in self.core.fabric.clone().shootdown.enter(index) {
            self.flush(what.into());
        }
    }

    /// Ends the execution of guest code.
    fn leave(&mut self) {
        self.core
            .fabric
            .shootdown
            .leave(self.core.interface.index());
    }

    fn grant(&mut self, instructions: u64) {
        self.core.budget = instructions as i64;
        self.core.granted = self.retired.wrapping_add(instructions);
    }

    /// Executes until the budget is used up or there is an exit.
    fn slice<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot) -> Option<Exit> {
        self.core.tick();
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
        if let Some(interrupt) = exception::pending(&self.core) {
            self.core.monitor.clear();
            self.core.budget -= 1;
            return exception::interrupt(&mut self.core, interrupt);
        }
        if self.core.halted {
            if self.core.interface.signalled().is_none() {
                return Some(Exit::Halt);
            }
            // A masked interrupt ends WFI too, and is not taken (D1.16.2).
            self.core.halted = false;
        }
        if self.core.r[SP as usize] & SP_ALIGNMENT != 0 {
            return self.step(bus, slot);
        }
        let start = match self.basic_block_at(bus) {
            Ok(start) => start,
            Err(_) => return self.blocked(bus, slot),
        };
        self.core.stepping = false;
        let epoch = self.code.epoch(self.core.user);
        let leave = self.dispatch(bus, slot, start, epoch);
        let exit = self.left(bus, slot, leave, 0);
        if let Leave::Branch(branch, condition) = leave {
            let (target, user) = (self.core.pc, self.core.user);
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
        let at = match leave {
            Leave::Indirect => {
                // A branch drops the tag of its target (D8.9). The jump cache has no tagged
                // address, so such a branch always ends here.
                self.core.pc = untagged(&self.core.sys, self.core.pc);
                self.completed = true;
                return None;
            }
            Leave::Blocked(at) | Leave::System(at) | Leave::Branch(at, _) => at,
        };
        let (op, origin) = (self.code.ops[at as usize], self.code.origin(at, scratch));
        if let Leave::Branch(_, condition) = leave {
            self.core.pc = branch_target(&op, origin.pc, condition);
            self.completed = true;
            return None;
        }
        self.core.pc = origin.pc;
        self.core.budget -= origin.before as i64;
        match leave {
            Leave::Blocked(_) => self.blocked(bus, slot),
            _ => self.system_op(bus, slot, op),
        }
    }

    /// The basic block at PC, decoded if it is not cached. Links the exit that led here.
    fn basic_block_at<B: Bus>(&mut self, bus: &mut B) -> Touch<u16> {
        let (pc, user) = (self.core.pc, self.core.user);
        let start = match self.code.jumps.find(pc, user, self.code.epoch(user)) {
            Some(start) => start,
            None => {
                self.check_fetch()?;
                let (gfn, page) = self.core.fetch_page(bus, pc)?;
                let key = Key { pc, gfn, user };
                let start = match self.code.find(key) {
                    Some(start) => start,
                    None => self.decode(bus, key, page)?,
                };
                self.code.remember_jump(pc, user, start);
                start
            }
        };
        self.code.enter(pc, user, start);
        Ok(start)
    }

    /// The checks before an instruction fetch. A cached basic block was checked when it was
    /// decoded. PSTATE.IL changes only with an epoch.
    fn check_fetch(&mut self) -> Touch<()> {
        if !self.core.pc.is_multiple_of(4) {
            return self.core.raise(Exception::pc_alignment(self.core.pc));
        }
        if self.core.pstate() & pstate::IL != 0 {
            return self.core.raise(Exception::ILLEGAL_STATE);
        }
        Ok(())
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
        decode::basic_block(page, key.pc, &mut self.fresh);
        Ok(self.code.insert(key, &self.fresh))
    }

    /// Executes the instruction at PC alone.
    fn step<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot) -> Option<Exit> {
        self.core.replay.rewind();
        self.completed = false;
        let exit = match self.decode_one(bus) {
            Ok(()) => self.step_decoded(bus, slot),
            Err(_) => self.blocked(bus, slot),
        };
        if exit.is_none() || self.completed {
            self.core.replay.clear();
        }
        exit
    }

    fn decode_one<B: Bus>(&mut self, bus: &mut B) -> Touch<()> {
        self.check_fetch()?;
        let pc = self.core.pc;
        let (_, page) = self.core.fetch_page(bus, pc)?;
        self.fresh.clear();
        decode::one(page, pc, &mut self.fresh);
        Ok(())
    }

    fn step_decoded<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot) -> Option<Exit> {
        self.core.stepping = true;
        let pc = self.core.pc;
        let start = self.code.set_scratch(&self.fresh);
        let leave = self.dispatch(bus, slot, start, NEVER);
        self.drop_written(bus);
        self.left(bus, slot, leave, pc)
    }

    /// Drops decoded pages that this processor has written.
    #[inline(always)]
    fn drop_written<B: Bus>(&mut self, bus: &mut B) {
        let core = &mut self.core;
        self.code
            .drop_written(&mut core.code_written, &mut core.translations.walk, bus);
    }

    /// After [`Exit::Stop`], the access whose stage-1 walk has stopped; `None` if the access itself
    /// has stopped.
    pub fn stopped_walk(&self) -> Option<Access> {
        match self.core.why {
            Why::StoppedWalk(_, access) => Some(access),
            _ => None,
        }
    }

    /// Handles an instruction at PC that did not complete; [`Core::why`] has the reason.
    fn blocked<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot) -> Option<Exit> {
        self.drop_written(bus);
        match self.core.why {
            Why::Trap(Trap::Exception(exception)) => self.raise(exception),
            Why::Trap(Trap::Stop(stop)) | Why::StoppedWalk(stop, _) => Some(Exit::Stop(stop)),
            Why::Trap(Trap::Exclusive) => Some(Exit::Exclusive),
            Why::DeviceRead(gpa, size) => Some(Exit::MmioRead { gpa, size }),
            Why::DeviceWrite(gpa, size, value) => {
                self.core.replay.push(0);
                Some(Exit::MmioWrite { gpa, size, value })
            }
            Why::Step => self.step(bus, slot),
        }
    }

    /// Takes an exception at PC.
    fn raise(&mut self, exception: Exception) -> Option<Exit> {
        self.core.replay.clear();
        self.core.monitor.clear();
        // A handler that faults at once must not occupy the run loop for ever.
        self.core.budget -= 1;
        exception::enter(&mut self.core, exception)
    }

    /// Executes a system op at PC.
    fn system_op<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot, op: Op) -> Option<Exit> {
        // An earlier exit's reason must not count as this instruction's.
        self.core.why = Why::Step;
        let done = system::execute(&mut View::new(&mut self.core, bus), op.imm as u32);
        self.drop_written(bus);
        let done = match done {
            Ok(done) => done,
            Err(trap) => {
                // If the operand is in a device, the access exits, and the instruction is executed
                // again.
                if !self.core.why.is_device() {
                    self.core.why = Why::Trap(trap);
                }
                return self.blocked(bus, slot);
            }
        };
        match done {
            // An exception return.
            Done::Jumped | Done::Illegal => self.core.monitor.clear(),
            _ => self.core.pc = self.core.pc.wrapping_add(4),
        }
        self.core.budget -= 1;
        self.completed = true;
        match done {
            Done::Next | Done::Jumped => None,
            Done::Illegal => {
                self.code.new_epoch();
                None
            }
            Done::Flush(flush) => {
                self.flush(flush);
                None
            }
            Done::Exit(exit) => Some(exit),
            Done::Raise(exception) => self.raise(exception),
        }
    }

    /// Drops an instruction's invalidated translations.
    fn flush(&mut self, flush: Flush) {
        match flush {
            Flush::All => self.flush_tlb(),
            // The plain address does not find a tagged address's translation.
            Flush::Address(_) if self.core.tagged => self.flush_tlb(),
            Flush::Address(va) => {
                self.core.translations.invalidate_everywhere(va);
                self.code.begin_epoch(Privilege::Supervisor);
                self.code.begin_epoch(Privilege::User);
            }
            Flush::Forget(space) => {
                if self.core.translations.forget_space(space) {
                    self.code.begin_epoch(Privilege::Supervisor);
                    self.code.begin_epoch(Privilege::User);
                }
            }
            Flush::Space(space, retain) => {
                let (running, code) = (self.core.user, self.code.user_code());
                let translations = &mut self.core.translations;
                let switched = translations.switch(space, retain, running, code);
                self.code.follow(Privilege::Supervisor, switched.supervisor);
                self.code.follow(Privilege::User, switched.user);
            }
        }
    }
}
