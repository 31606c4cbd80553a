//! The state of one processor, without its decoded instructions.

use crate::fabric::Fabric;
use crate::flags::{Flags, NZCV};
use crate::gic::CpuInterface;
use crate::monitor::Monitor;
use crate::op::SP;
use crate::state::{Exception, Trap, privilege, pstate};
use crate::sysreg::System;
use crate::timer::Driven;
use crate::user_pages::UserPages;
use lacuna_addr::{Access, Gfn, Gpa};
use lacuna_cpu::{Privilege, Replay, Stop, Translations};
use lacuna_sync::{Clock, Nanos};
use std::sync::Arc;

/// Why an instruction did not complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Why {
    /// An exception or stop, for the guest or the machine.
    Trap(Trap),
    /// A stop in a stage-1 walk for this access.
    StoppedWalk(Stop, Access),
    /// A device must answer first.
    DeviceRead(Gpa, u8),
    /// A device must take the value first.
    DeviceWrite(Gpa, u8, u64),
    /// The instruction writes decoded instructions, so it must be executed alone.
    Step,
}

impl Why {
    /// Whether the instruction touched a device, which must answer.
    pub(crate) const fn is_device(self) -> bool {
        matches!(self, Self::DeviceRead(..) | Self::DeviceWrite(..))
    }
}

/// Registers and translations of one processor.
pub(crate) struct Core {
    /// The register file: X0 to X30, the current stack pointer, then the slots of op.rs. It has an
    /// entry for each `u8`, so no access needs a bounds check. The last ones are never used.
    pub(crate) r: [u64; 256],
    /// The address of the next instruction. It is valid outside `dispatch`.
    pub(crate) pc: u64,
    pub(crate) flags: Flags,
    /// PSTATE without N, Z, C and V. [`Core::set_pstate`] changes it.
    pstate: u64,
    /// SP_EL0 and SP_EL1. The current one is in the register file instead.
    stack_pointers: [u64; 2],
    /// Instructions left before `dispatch` leaves; a basic block may overdraw this budget.
    pub(crate) budget: i64,
    /// The count of retired instructions plus the budget, at the time of its grant. So `granted -
    /// budget` counts instructions at each start of a basic block.
    pub(crate) granted: u64,
    /// The privilege of the running code.
    pub(crate) user: Privilege,
    pub(crate) translations: Translations,
    pub(crate) sys: System,
    pub(crate) interface: CpuInterface,
    /// The levels of the timers' lines at the interrupt controller.
    driven: Driven,
    /// An injected abort. The next run begins with it.
    pub(crate) injected: Option<Exception>,
    pub(crate) fabric: Arc<Fabric>,
    /// The pages in EL1's TLB that programs may access.
    pub(crate) user_pages: UserPages,
    /// A TLB may hold a tagged address, which no invalidation by address finds.
    pub(crate) tagged: bool,
    pub(crate) monitor: Monitor,
    /// Why the last access was [`crate::mem::Blocked`].
    pub(crate) why: Why,
    /// An instruction is executed alone: it may write decoded pages.
    pub(crate) stepping: bool,
    /// Every other vCPU is stopped.
    pub(crate) exclusive: bool,
    /// WFI waits for an interrupt.
    pub(crate) halted: bool,
    /// Decoded pages written while stepping.
    pub(crate) code_written: Vec<Gfn>,
    pub(crate) replay: Replay,
    pub(crate) clock: Arc<dyn Clock>,
}

impl Core {
    /// The state after a reset of processor `index`.
    pub(crate) fn new(index: usize, fabric: Arc<Fabric>, clock: Arc<dyn Clock>) -> Self {
        let mut sys = System::reset(index);
        sys.timers.offset = fabric.counter.offset();
        Self {
            r: [0; 256],
            pc: 0,
            flags: Flags::default(),
            pstate: pstate::RESET,
            stack_pointers: [0; 2],
            budget: 0,
            granted: 0,
            user: privilege(pstate::RESET),
            translations: Translations::default(),
            sys,
            interface: CpuInterface::new(index, Arc::clone(&fabric.gic)),
            driven: Driven::default(),
            injected: None,
            fabric,
            user_pages: UserPages::default(),
            tagged: false,
            monitor: Monitor::default(),
            why: Why::Step,
            stepping: false,
            exclusive: false,
            halted: false,
            code_written: Vec::with_capacity(8),
            replay: Replay::default(),
            clock,
        }
    }

    /// Instructions retired before the current basic block.
    pub(crate) fn retired_before(&self) -> u64 {
        self.granted.wrapping_sub(self.budget as u64)
    }

    /// PSTATE as SPSR_EL1 has it.
    pub(crate) fn pstate(&self) -> u64 {
        self.pstate | self.flags.bits()
    }

    /// Sets PSTATE from an image checked by the architecture's rules: selects the stack pointer and
    /// the TLB of its exception level.
    pub(crate) fn set_pstate(&mut self, image: u64) {
        self.flags.set_bits(image);
        self.set_control(image & !NZCV);
    }

    /// [`Core::set_pstate`], but keeps the condition flags.
    pub(crate) fn set_control(&mut self, image: u64) {
        let stack_pointers = self.stack_pointers();
        self.pstate = image & !NZCV;
        self.set_stack_pointers(stack_pointers);
        self.sys.pan = image & pstate::PAN != 0;
        if self.sys.pan {
            self.user_pages.forget(&mut self.translations, self.user);
        }
        let user = privilege(self.pstate);
        if user != self.user {
            self.user = user;
            self.translations.swap();
        }
    }

    /// Sets the bits `field` of PSTATE, but no condition flags.
    pub(crate) fn set_field(&mut self, field: u64, bits: u64) {
        self.set_control(self.pstate & !field | bits & field);
    }

    /// Passes the levels of the timers' lines to the interrupt controller. Cheap if none has
    /// changed.
    pub(crate) fn tick(&mut self) {
        let now = self.clock.now();
        self.sys
            .timers
            .drive(&mut self.driven, now, &self.interface);
    }

    /// The time for the next [`Core::tick`].
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        let now = self.clock.now();
        self.sys.timers.next_deadline(&self.driven, now)
    }

    /// Passes all lines to the interrupt controller at the next [`Core::tick`].
    pub(crate) fn forget_lines(&mut self) {
        self.driven = Driven::default();
    }

    /// Which of SP_EL0 and SP_EL1 is current.
    fn current_sp(&self) -> usize {
        usize::from(self.pstate & (pstate::EL | pstate::SP) == pstate::EL1 | pstate::SP)
    }

    /// SP_EL0 and SP_EL1.
    pub(crate) fn stack_pointers(&self) -> [u64; 2] {
        let mut both = self.stack_pointers;
        both[self.current_sp()] = self.r[SP as usize];
        both
    }

    /// Sets SP_EL0 and SP_EL1.
    pub(crate) fn set_stack_pointers(&mut self, both: [u64; 2]) {
        self.stack_pointers = both;
        self.r[SP as usize] = both[self.current_sp()];
    }

    /// The undefined-instruction exception at the current instruction.
    pub(crate) fn undefined<T>(&mut self) -> crate::mem::Touch<T> {
        self.raise(Exception::UNDEFINED)
    }
}
