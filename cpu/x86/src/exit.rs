//! Why a processor left its run loop.

use crate::state::Exception;

/// Why the processor returned from its run loop.
pub type Exit = lacuna_cpu::Exit<Own>;

/// The exits of x86 only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Own {
    /// OUT. The instruction is complete.
    IoOut {
        /// Port number.
        port: u16,
        /// 1, 2 or 4 bytes.
        size: u8,
        /// The written value, zero-extended.
        value: u32,
    },
    /// IN: provide the value with [`lacuna_cpu::Processor::complete_read`] before the next run.
    IoIn {
        /// Port number.
        port: u16,
        /// 1, 2 or 4 bytes.
        size: u8,
    },
    /// RDMSR of one of KVM's MSRs: answer with [`crate::Cpu::complete_msr`] before the next run.
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
    /// Triple fault: the processor cannot be entered again.
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
