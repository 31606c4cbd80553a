//! Why a vCPU returned to its VMM.

pub mod counts;

use crate::{ErrorKind, FaultToken, MissingMemory, TokenError};
use lacuna_addr::Gpa;
use lacuna_source::FailureKind;

/// Size of a port or device access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Width {
    /// 1 byte.
    Byte = 1,
    /// 2 bytes.
    Word = 2,
    /// 4 bytes.
    Long = 4,
    /// 8 bytes; device memory only.
    Quad = 8,
}

impl Width {
    /// A value with every bit of this width set: the result of reading an absent device.
    pub const fn ones(self) -> u64 {
        u64::MAX >> (64 - 8 * self as u32)
    }
}

bitflags::bitflags! {
    /// How a guest accessed the memory of an [`Exit::MemoryFault`]. The bits are KVM's. Linux has
    /// bit 3; bits 0 to 2 are from a patch series of 2023.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct MemoryFaultFlags: u64 {
        /// A read.
        const READ = 1 << 0;
        /// A write.
        const WRITE = 1 << 1;
        /// An instruction fetch.
        const EXEC = 1 << 2;
        /// The guest accessed the memory as private.
        const PRIVATE = 1 << 3;
        /// The guest can get page-not-present now: [`Vcpu::accept`] will succeed. Firecracker's
        /// patches for KVM use bit 5 too.
        const CAN_NOTIFY = 1 << 5;
        /// The page was provided before, and then evicted; its slot has
        /// [`EXIT_ON_NONRESIDENT`](lacuna_slots::SlotFlags::EXIT_ON_NONRESIDENT). Bring it back by
        /// [`MissingMemory::populate`] or [`MissingMemory::fetch`]: `provide` does not change it.
        const EVICTED = 1 << 6;
    }
}

/// What the VMM has to handle before it enters the vCPU again. Halts, page waits and interrupts
/// stay inside the backend, as with KVM's in-kernel interrupt controller.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Exit {
    /// `OUT`: the value is in the low bits.
    IoOut {
        /// Port number.
        port: u16,
        /// Access size.
        width: Width,
        /// The written value.
        value: u32,
    },
    /// `IN`: answer with [`Vcpu::complete_read`].
    IoIn {
        /// Port number.
        port: u16,
        /// Access size.
        width: Width,
    },
    /// A read from an address without a memory slot: answer with [`Vcpu::complete_read`].
    MmioRead {
        /// Guest-physical address.
        gpa: Gpa,
        /// Access size.
        width: Width,
    },
    /// A write to an address without a memory slot, or with a read-only one.
    MmioWrite {
        /// Guest-physical address.
        gpa: Gpa,
        /// Access size.
        width: Width,
        /// The written value.
        value: u64,
    },
    /// A vCPU accessed a never-provided page in a slot with
    /// [`EXIT_ON_MISSING`](lacuna_slots::SlotFlags::EXIT_ON_MISSING), or any page without a frame
    /// in a slot with `EXIT_ON_NONRESIDENT`. The VMM provides the page, or brings it back, and
    /// enters the vCPU again, and the vCPU repeats the access. Or the VMM accepts the token, and
    /// the guest runs another process until the page is ready: see [`MissingMemory`]. The fields
    /// before `token` are as in `KVM_EXIT_MEMORY_FAULT`.
    MemoryFault {
        /// The first guest-physical address of the missing memory.
        gpa: Gpa,
        /// Its size in bytes: a page, or all pages that the VMM has to provide together.
        size: u64,
        /// How the guest accessed it.
        flags: MemoryFaultFlags,
        /// Names this exit.
        token: FaultToken,
    },
    /// The vCPU shut down (triple fault), at the place in the text.
    Shutdown(String),
    /// The guest has switched its machine off, by the firmware's interface (PSCI `SYSTEM_OFF`).
    PoweredOff,
    /// The guest requests a reset of its machine, by the firmware's interface (PSCI
    /// `SYSTEM_RESET`).
    Reset,
    /// The vCPU's dirty ring is full. Every entry ends with this exit, or for a kick with
    /// [`Exit::Interrupted`], until a thread of the VMM has reaped and reset the ring.
    DirtyRingFull,
    /// [`Kick`](crate::Kick) interrupted the run.
    Interrupted,
}

/// A vCPU cannot continue; the run ends.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum VcpuError {
    /// The content of a page is gone.
    #[error(
        "vCPU {vcpu}: guest page {gpa} is lost: {cause}; \
         the guest was stopped, and nothing wrong that it may have read has left its VM"
    )]
    PageLost {
        /// Which vCPU needed it.
        vcpu: usize,
        /// The page.
        gpa: Gpa,
        /// The message of the host's memory manager.
        cause: String,
    },
    /// The page source has panicked during the request for a page.
    #[error(
        "vCPU {vcpu}: guest page {gpa} was not provided: {cause}; the guest was stopped: this is \
         an error in the program that has the page source"
    )]
    SourcePanicked {
        /// Which vCPU needed the page.
        vcpu: usize,
        /// The page.
        gpa: Gpa,
        /// The message of the host's memory manager.
        cause: String,
    },
    /// No frame could be freed.
    #[error("vCPU {vcpu}: no memory: {cause}")]
    NoMemory {
        /// Which vCPU needed a frame.
        vcpu: usize,
        /// The message of the host's memory manager.
        cause: String,
    },
    /// The host's hypervisor refused to run the vCPU.
    #[error("vCPU {vcpu}: {cause}")]
    Host {
        /// Which vCPU.
        vcpu: usize,
        /// The message of the hypervisor.
        cause: String,
    },
    /// The vCPU waits for time to pass, but the time of its VM is stopped.
    #[error(
        "vCPU {vcpu}: it waits, and the time of this VM is stopped, because the VM has a seed: \
         run it with `VmBuilder::run_seeded`, or build it without a seed"
    )]
    TimeStandsStill {
        /// Which vCPU.
        vcpu: usize,
    },
    /// Every vCPU is halted, and no event can wake one.
    #[error("every vCPU is halted with interrupts off or no timer armed: the guest hangs")]
    Hang,
}

impl VcpuError {
    /// The error of vCPU `vcpu`, which needs the page at `gpa` and cannot get it because of an
    /// error of this kind with this cause. For backends.
    pub const fn no_page(vcpu: usize, gpa: Gpa, kind: FailureKind, cause: String) -> Self {
        match kind {
            FailureKind::Panicked => Self::SourcePanicked { vcpu, gpa, cause },
            FailureKind::Lost => Self::PageLost { vcpu, gpa, cause },
        }
    }

    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::PageLost { .. }
            | Self::SourcePanicked { .. }
            | Self::NoMemory { .. }
            | Self::Host { .. } => ErrorKind::Host,
            Self::TimeStandsStill { .. } => ErrorKind::Request,
            Self::Hang => ErrorKind::Guest,
        }
    }
}

/// One virtual processor.
pub trait Vcpu: Send {
    /// The vCPU's number, from 0.
    fn index(&self) -> usize;

    /// Runs guest code until an exit that the VMM must handle.
    fn run(&mut self) -> Result<Exit, VcpuError>;

    /// Supplies the value of an [`Exit::IoIn`] or [`Exit::MmioRead`] before the next run. After
    /// another exit, or after an answer, the call does nothing. Without an answer, the next run
    /// returns the same exit, perhaps after an interrupt.
    fn complete_read(&mut self, value: u64);

    /// The VM's memory that the VMM provides, as [`Vm::missing_memory`](crate::Vm).
    fn missing_memory(&self) -> Option<&dyn MissingMemory>;

    /// Delivers page-not-present for the page of its last [`Exit::MemoryFault`]. The next run
    /// continues in the guest's handler. The VMM provides the page later, and then calls
    /// [`MissingMemory::ready`](crate::MissingMemory::ready).
    ///
    /// # Errors
    /// [`TokenError`].
    fn accept(&mut self, token: FaultToken) -> Result<(), TokenError>;
}
