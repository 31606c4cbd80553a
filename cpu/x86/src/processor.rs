//! The state of one processor, without its decoded instructions.

use crate::apic::Lapic;
use crate::cpuid::Announced;
use crate::deliver::Flow;
use crate::dispatch::RSP;
use crate::flags::{ALWAYS, Flags, IF};
use crate::state::{Exception, System, Trap};
use crate::walk::User;
use lacuna_addr::{Gfn, Gpa};
use lacuna_cpu::{Replay, Stop, Translations};
use lacuna_sync::Clock;
use std::sync::Arc;

/// Why an instruction did not complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Why {
    /// An exception or stop, for the guest or the machine.
    Trap(Trap),
    /// A non-canonical data address: #SS or #GP, depending on the base register.
    NonCanonical,
    /// A device must answer first.
    DeviceRead(Gpa, u8),
    /// A device must take the value first.
    DeviceWrite(Gpa, u8, u64),
    /// A long string instruction has completed a piece. The run loop checks for events, then
    /// continues it.
    Again,
    /// The instruction writes decoded instructions, so it must be executed alone.
    Step,
}

impl Why {
    /// Whether the instruction touched a device, which must answer.
    pub(crate) const fn is_device(self) -> bool {
        matches!(self, Self::DeviceRead(..) | Self::DeviceWrite(..))
    }

    /// The reason as a trap, for event delivery. A delivery cannot wait for devices, so descriptor
    /// tables and handler stacks must not be in devices. A system instruction can wait, and reads
    /// [`Core::why`] itself.
    pub(crate) fn as_trap(self) -> Trap {
        match self {
            Self::Trap(trap) => trap,
            Self::DeviceRead(gpa, _) | Self::DeviceWrite(gpa, ..) => Trap::Stop(Stop::Mmio(gpa)),
            Self::NonCanonical => Exception::GP0.into(),
            Self::Again | Self::Step => Trap::Stop(Stop::Again),
        }
    }
}

/// Registers and translations of one processor.
pub(crate) struct Core {
    /// The register file: 0-15 are the general registers, then come the slots of op.rs. It has an
    /// entry for each `u8`, so no access needs a bounds check. The last ones are never used.
    pub(crate) r: [u64; 256],
    /// RIP. It is valid outside `dispatch`.
    pub(crate) rip: u64,
    pub(crate) flags: Flags,
    /// RFLAGS without the six arithmetic flags.
    pub(crate) rflags: u64,
    /// Instructions left before `dispatch` leaves; a basic block may overdraw this budget.
    pub(crate) budget: i64,
    pub(crate) user: User,
    pub(crate) translations: Translations,
    pub(crate) sys: System,
    /// Why the last access was [`crate::mem::Blocked`].
    pub(crate) why: Why,
    /// An instruction is executed alone: it may write decoded pages.
    pub(crate) stepping: bool,
    /// Decoded pages written while stepping.
    pub(crate) code_written: Vec<Gfn>,
    pub(crate) replay: Replay,
    pub(crate) apic: Lapic,
    /// The CPUID set by the machine.
    pub(crate) announced: Announced,
    pub(crate) clock: Arc<dyn Clock>,
}

impl Core {
    pub(crate) fn new(apic: Lapic, clock: Arc<dyn Clock>) -> Self {
        let sys = System::long_mode(0);
        Self {
            r: [0; 256],
            rip: 0,
            flags: Flags::default(),
            rflags: ALWAYS,
            budget: 0,
            user: crate::walk::at_cpl(sys.cpl),
            translations: Translations::default(),
            sys,
            why: Why::Step,
            stepping: false,
            code_written: Vec::with_capacity(8),
            replay: Replay::default(),
            apic,
            announced: Announced::default(),
            clock,
        }
    }

    /// Follows a change of CPL: selects that privilege's TLB.
    pub(crate) fn sync_privilege(&mut self) {
        let user = crate::walk::at_cpl(self.sys.cpl);
        if user != self.user {
            self.user = user;
            self.translations.swap();
        }
    }

    /// Whether the processor takes interrupts before the next instruction.
    pub(crate) fn is_interruptible(&self) -> bool {
        self.rflags & IF != 0 && !self.sys.interrupt_shadow
    }

    /// Whether the processor takes an NMI before the next instruction. MOV SS delays NMIs, and STI
    /// may (SDM vol 3 6.8.3).
    pub(crate) fn takes_nmi(&self) -> bool {
        self.apic.has_nmi() && !self.sys.nmi_blocked && !self.sys.interrupt_shadow
    }

    /// RFLAGS as the guest sees them.
    pub(crate) fn rflags(&self) -> u64 {
        self.rflags | self.flags.bits()
    }

    /// Sets RFLAGS from an image checked by the architecture's rules.
    pub(crate) fn set_rflags(&mut self, image: u64) {
        self.flags.set_bits(image & crate::flags::ARITHMETIC);
        self.rflags = image & !crate::flags::ARITHMETIC | ALWAYS;
    }

    /// RIP, RSP and RFLAGS for code that changes all three.
    pub(crate) fn flow(&self, rip: u64) -> Flow {
        Flow {
            rip,
            rsp: self.r[RSP],
            rflags: self.rflags(),
        }
    }

    /// Sets RIP, RSP and RFLAGS from `flow`, and follows the privilege in the system registers.
    pub(crate) fn follow(&mut self, flow: Flow) {
        self.rip = flow.rip;
        self.r[RSP] = flow.rsp;
        self.set_rflags(flow.rflags);
        self.sync_privilege();
    }
}
