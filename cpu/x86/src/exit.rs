//! Why a processor left its run loop.

use crate::state::Exception;
use lacuna_addr::Gpa;
use lacuna_cpu::Stop;

/// Why [`crate::Cpu::run`] returned. Except after `Shutdown`, the processor can be entered again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Exit {
    /// The requested number of instructions has been executed.
    Fuel,
    /// A vCPU request is pending: take its bits, act on them, enter again.
    Requested,
    /// Halted (HLT with interrupts on): enter again when an interrupt may be pending.
    Halt,
    /// The bus could not give a page; the instruction will be executed again from its start.
    Stop(Stop),
    /// OUT. The instruction is complete.
    IoOut {
        /// Port number.
        port: u16,
        /// 1, 2 or 4 bytes.
        size: u8,
        /// The written value, zero-extended.
        value: u32,
    },
    /// IN: provide the value with [`crate::Cpu::complete_read`] before the next run.
    IoIn {
        /// Port number.
        port: u16,
        /// 1, 2 or 4 bytes.
        size: u8,
    },
    /// A load from an address without memory: as `IoIn`.
    MmioRead {
        /// Guest-physical address.
        gpa: Gpa,
        /// 1 to 8 bytes.
        size: u8,
    },
    /// A store to an address without (writable) memory. It is complete at the next run.
    MmioWrite {
        /// Guest-physical address.
        gpa: Gpa,
        /// 1 to 8 bytes.
        size: u8,
        /// The written value, zero-extended.
        value: u64,
    },
    /// RDMSR of one of KVM's MSRs, at CPL 0: answer with [`crate::Cpu::complete_msr`] before the
    /// next run.
    MsrRead {
        /// 0x4b564d00 to 0x4b564dff.
        index: u32,
    },
    /// WRMSR to one of KVM's MSRs: as `MsrRead`.
    MsrWrite {
        /// 0x4b564d00 to 0x4b564dff.
        index: u32,
        /// EDX:EAX.
        value: u64,
    },
    /// A misaligned locked access: stop every other vCPU, then call [`crate::Cpu::run_exclusive`].
    Exclusive,
    /// Triple fault: the processor can never run again.
    Shutdown(Shutdown),
}

/// The state at a triple fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shutdown {
    /// RIP of the first fault.
    pub rip: u64,
    /// The exception whose delivery failed, even as a double fault.
    pub first: Exception,
}
