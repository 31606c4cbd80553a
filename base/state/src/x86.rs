//! The state of an x86-64 vCPU, and the state shared by a VM's vCPUs.
//!
//! Values are as the guest would read them, in the form of KVM's ioctls where the architecture
//! leaves a choice. Every number is plain: a backend checks it when it restores.

pub mod cpuid;

use crate::StateError;
use cpuid::Features;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The whole state of a vCPU.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// General registers.
    pub regs: Regs,
    /// System registers.
    pub system: System,
    /// Debug registers.
    pub debug: Debug,
    /// Model-specific registers by index, except those with a field of their own here.
    /// [`COMMON_MSRS`] are always present. Another register is left out if it has the same value as
    /// in a fresh vCPU of its backend.
    pub msrs: BTreeMap<u32, u64>,
    /// The features reported to the guest by CPUID. A vCPU that lacks one of them refuses the
    /// state.
    pub features: Features,
    /// The time-stamp counter.
    pub tsc: Tsc,
    /// The local interrupt controller with its timer.
    pub apic: Apic,
    /// Events to be delivered.
    pub events: Events,
    /// Asynchronous page faults: the guest's three MSRs.
    pub apf: AsyncFaults,
    /// The floating-point and vector state, in `XSAVE` form; `None` for a processor without.
    pub xsave: Option<Vec<u32>>,
    /// Extended control register 0; 1 for a processor without XSAVE.
    pub xcr0: u64,
    /// Whether the vCPU runs, halts or waits for its start-up.
    pub run: RunState,
}

/// The model-specific registers in every state, because backends differ in their first values:
/// MISC_ENABLE, PAT, STAR, LSTAR, CSTAR, FMASK, KERNEL_GS_BASE.
pub const COMMON_MSRS: [u32; 7] = [
    0x1a0,
    0x277,
    0xc000_0081,
    0xc000_0082,
    0xc000_0083,
    0xc000_0084,
    0xc000_0102,
];

/// General registers, RIP and RFLAGS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Regs {
    /// RAX RCX RDX RBX RSP RBP RSI RDI R8 to R15, in encoding order.
    pub gpr: [u64; 16],
    /// Address of the next instruction.
    pub rip: u64,
    /// Flags.
    pub rflags: u64,
}

/// A segment register with its hidden part.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Segment {
    /// The visible part.
    pub selector: u16,
    /// Linear base address.
    pub base: u64,
    /// Limit in bytes, inclusive.
    pub limit: u32,
    /// Access rights as in a descriptor's bytes 5 and 6: bits 3:0 type, 4 S, 6:5 DPL, 7 P, 12 AVL,
    /// 13 L, 14 D/B, 15 G; and bit 16 for an unusable register, as in VMX.
    pub access: u32,
}

impl Segment {
    /// [`Segment::access`]: the register holds no segment.
    pub const UNUSABLE: u32 = 1 << 16;
    /// [`Segment::access`]: 64-bit code.
    pub const LONG: u32 = 1 << 13;
    /// [`Segment::access`]: present.
    pub const PRESENT: u32 = 1 << 7;

    /// The descriptor privilege level.
    pub const fn dpl(&self) -> u8 {
        (self.access >> 5 & 3) as u8
    }
}

/// GDTR or IDTR.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Linear base address.
    pub base: u64,
    /// Limit in bytes, inclusive.
    pub limit: u16,
}

/// System registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    /// ES CS SS DS FS GS, in encoding order.
    pub segments: [Segment; 6],
    /// Task register.
    pub tr: Segment,
    /// Local descriptor table register.
    pub ldtr: Segment,
    /// Global descriptor table register.
    pub gdtr: Table,
    /// Interrupt descriptor table register.
    pub idtr: Table,
    /// CR0.
    pub cr0: u64,
    /// CR2.
    pub cr2: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// `IA32_EFER`.
    pub efer: u64,
}

/// Indices into [`System::segments`].
pub mod segment {
    /// CS.
    pub const CS: usize = 1;
    /// SS.
    pub const SS: usize = 2;
    /// FS.
    pub const FS: usize = 4;
    /// GS.
    pub const GS: usize = 5;
}

/// Debug registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Debug {
    /// DR0 to DR3.
    pub dr: [u64; 4],
    /// DR6.
    pub dr6: u64,
    /// DR7.
    pub dr7: u64,
}

/// The time-stamp counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tsc {
    /// The result of RDTSC at the moment of the save.
    pub value: u64,
    /// The frequency reported to the guest. A backend refuses a frequency at which it cannot run.
    pub khz: u32,
}

/// The local APIC.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Apic {
    /// `IA32_APIC_BASE`.
    pub base: u64,
    /// The register page, one entry for each 16 bytes of it, in xAPIC form: the ID is in bits 31:24
    /// in x2APIC mode too, and ICR is in two halves. The current count is as of the save.
    #[serde(with = "crate::words")]
    pub regs: [u32; 64],
    /// `IA32_TSC_DEADLINE`; 0 when disarmed.
    pub tsc_deadline: u64,
}

impl Default for Apic {
    fn default() -> Self {
        Self {
            base: 0,
            regs: [0; 64],
            tsc_deadline: 0,
        }
    }
}

/// A fault or trap to deliver (SDM vol 3, table 6-1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exception {
    /// IDT vector, below 32.
    pub vector: u8,
    /// Error code, for the vectors that push one.
    pub error: Option<u32>,
    /// Faulting linear address, for a page fault.
    pub cr2: Option<u64>,
}

impl Exception {
    /// #DE.
    pub const DE: Self = Self::plain(0);
    /// #DB.
    pub const DB: Self = Self::plain(1);
    /// #BP.
    pub const BP: Self = Self::plain(3);
    /// #UD.
    pub const UD: Self = Self::plain(6);
    /// #NM.
    pub const NM: Self = Self::plain(7);
    /// #SS(0).
    pub const SS0: Self = Self::with_error(12, 0);
    /// #GP(0), the most frequent.
    pub const GP0: Self = Self::gp(0);

    /// A vector without error code.
    pub const fn plain(vector: u8) -> Self {
        Self {
            vector,
            error: None,
            cr2: None,
        }
    }

    /// #GP with a selector error code.
    pub const fn gp(error: u32) -> Self {
        Self {
            vector: 13,
            error: Some(error),
            cr2: None,
        }
    }

    /// #TS, #NP, #SS, #AC, #DF: any vector with an error code.
    pub const fn with_error(vector: u8, error: u32) -> Self {
        Self {
            vector,
            error: Some(error),
            cr2: None,
        }
    }

    /// #PF at linear address `addr`.
    pub const fn page_fault(error: u32, addr: u64) -> Self {
        Self {
            vector: 14,
            error: Some(error),
            cr2: Some(addr),
        }
    }
}

/// The events to be delivered before the next instruction, and the reasons for a delay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Events {
    /// An exception. The next run begins by delivering it.
    pub exception: Option<Exception>,
    /// An interrupt that the APIC has in service, before its handler has been entered.
    pub interrupt: Option<u8>,
    /// A non-maskable interrupt waits.
    pub nmi_pending: bool,
    /// A non-maskable interrupt is being handled.
    pub nmi_masked: bool,
    /// STI or MOV SS shadow: no interrupt before the next instruction is complete.
    pub interrupt_shadow: bool,
}

/// `MSR_KVM_ASYNC_PF_EN` and `_INT`; `_ACK` has no state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AsyncFaults {
    /// EN.
    pub enable: u64,
    /// INT: the vector of page-ready.
    pub vector: u64,
}

/// Whether a vCPU executes instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum RunState {
    /// It executes instructions.
    #[default]
    Runnable,
    /// HLT waits for an interrupt.
    Halted,
    /// It waits for INIT and start-up.
    WaitingForStartup,
}

/// The state of a VM that belongs to none of its vCPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shared {
    /// The I/O APIC.
    pub io_apic: IoApic,
}

/// The I/O APIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IoApic {
    /// Its ID: 0 to 15.
    pub id: u8,
    /// IOREGSEL.
    pub select: u8,
    /// The redirection entries.
    pub entries: [u64; 24],
    /// A bit for each high line, except those whose edge was delivered. The edge is in IRR of a
    /// local APIC then.
    pub high: u32,
}

impl IoApic {
    const LEVEL: u64 = 1 << 15;
    const MASKED: u64 = 1 << 16;

    /// An I/O APIC with these registers; `high` has a bit for each high line.
    pub fn new(id: u8, select: u8, entries: [u64; 24], mut high: u32) -> Self {
        for (pin, entry) in entries.iter().enumerate() {
            if entry & (Self::LEVEL | Self::MASKED) == 0 {
                high &= !(1 << pin);
            }
        }
        Self {
            id,
            select,
            entries,
            high,
        }
    }

    /// Whether an I/O APIC can have these values. Reserved bits of the entries do not count: KVM
    /// keeps what a guest writes there.
    pub(crate) fn check(&self) -> Result<(), StateError> {
        for (field, value, valid) in [
            ("io_apic.id", u32::from(self.id), 15),
            ("io_apic.high", self.high, (1 << self.entries.len()) - 1),
        ] {
            if value & !valid != 0 {
                return StateError::invalid(field, value);
            }
        }
        Ok(())
    }
}

impl Default for IoApic {
    /// As after a reset.
    fn default() -> Self {
        Self::new(0, 0, [Self::MASKED; 24], 0)
    }
}
