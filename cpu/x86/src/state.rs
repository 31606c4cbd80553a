//! Architectural state, and the reasons why an instruction does not complete.

use crate::tsc::{Tsc, TscRate};
use lacuna_cpu::{Space, Stop};
pub(crate) use lacuna_state::x86::Exception;

/// Why an instruction did not complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trap {
    /// An architectural exception: delivered to the guest through its IDT.
    Exception(Exception),
    /// A stop of the machine: the run loop leaves, and the instruction is executed again later.
    Stop(Stop),
    /// A locked access that crosses a cache line or page. Every other vCPU must stop
    /// (`Exit::Exclusive`); then the instruction is executed again with `State::exclusive` set.
    Exclusive,
}

impl Trap {
    /// Whether a frame without memory was touched.
    pub(crate) const fn is_mmio(self) -> bool {
        matches!(self, Self::Stop(Stop::Mmio(_)))
    }
}

impl From<Stop> for Trap {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

impl From<Exception> for Trap {
    fn from(e: Exception) -> Self {
        Self::Exception(e)
    }
}

/// A descriptor-table register or TR: the place of the table or segment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Table {
    /// Linear base address.
    pub base: u64,
    /// Limit in bytes, inclusive.
    pub limit: u32,
    /// Selector (TR and LDTR only).
    pub selector: u16,
}

/// Bits of the control registers and EFER (SDM vol 3 2.5, 2.2.1).
pub(crate) mod bits {
    pub(crate) const CR0_PE: u64 = 1 << 0;
    pub(crate) const CR0_MP: u64 = 1 << 1;
    pub(crate) const CR0_EM: u64 = 1 << 2;
    pub(crate) const CR0_TS: u64 = 1 << 3;
    pub(crate) const CR0_ET: u64 = 1 << 4;
    pub(crate) const CR0_NE: u64 = 1 << 5;
    pub(crate) const CR0_WP: u64 = 1 << 16;
    pub(crate) const CR0_AM: u64 = 1 << 18;
    pub(crate) const CR0_NW: u64 = 1 << 29;
    pub(crate) const CR0_CD: u64 = 1 << 30;
    pub(crate) const CR0_PG: u64 = 1 << 31;

    pub(crate) const CR4_TSD: u64 = 1 << 2;
    pub(crate) const CR4_DE: u64 = 1 << 3;
    pub(crate) const CR4_PSE: u64 = 1 << 4;
    pub(crate) const CR4_PAE: u64 = 1 << 5;
    pub(crate) const CR4_PGE: u64 = 1 << 7;
    pub(crate) const CR4_PCIDE: u64 = 1 << 17;
    pub(crate) const CR4_SMEP: u64 = 1 << 20;

    /// The PCID in CR3, with CR4.PCIDE.
    pub(crate) const CR3_PCID: u64 = 0xfff;
    /// In a value written to CR3, with CR4.PCIDE: keep the translations of its PCID. Reads as zero.
    pub(crate) const CR3_NO_FLUSH: u64 = 1 << 63;

    pub(crate) const EFER_SCE: u64 = 1 << 0;
    pub(crate) const EFER_LME: u64 = 1 << 8;
    pub(crate) const EFER_LMA: u64 = 1 << 10;
    pub(crate) const EFER_NXE: u64 = 1 << 11;

    /// `IA32_MISC_ENABLE`: EFER.NXE is reserved.
    pub(crate) const MISC_XD_DISABLE: u64 = 1 << 34;
}

/// Whether bits 63 to 47 of a linear address are all equal.
#[inline(always)]
pub(crate) const fn is_canonical(va: u64) -> bool {
    ((va << 16) as i64 >> 16) as u64 == va
}

/// System registers: everything but general registers, RIP and the arithmetic flags. The executor
/// keeps these in its own (lazy) form.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct System {
    /// CR0; PE and PG are always set (long mode only).
    pub cr0: u64,
    /// CR2.
    pub cr2: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4; PAE is always set.
    pub cr4: u64,
    /// EFER; LME and LMA are always set.
    pub efer: u64,
    /// Current privilege level, 0 or 3 (1 and 2 are allowed, but unused).
    pub cpl: u8,
    /// Selectors: ES CS SS DS FS GS.
    pub selectors: [u16; 6],
    /// DPL of the segment in each selector. A return to an outer level finds here the selectors
    /// that must become null. It is 3 for a null selector, conforming code, CS and SS, which never
    /// become null.
    pub segment_dpl: [u8; 6],
    /// FS base.
    pub fs_base: u64,
    /// GS base.
    pub gs_base: u64,
    /// `IA32_KERNEL_GS_BASE`.
    pub kernel_gs_base: u64,
    /// GDTR.
    pub gdtr: Table,
    /// IDTR.
    pub idtr: Table,
    /// TR.
    pub tr: Table,
    /// LDTR.
    pub ldtr: Table,
    /// `IA32_STAR`.
    pub star: u64,
    /// `IA32_LSTAR`.
    pub lstar: u64,
    /// `IA32_CSTAR`.
    pub cstar: u64,
    /// `IA32_FMASK`.
    pub fmask: u64,
    /// `IA32_TSC_AUX`.
    pub tsc_aux: u64,
    /// `IA32_PAT`.
    pub pat: u64,
    /// `IA32_MISC_ENABLE`: stored; only XD disable, bit 34, has an effect.
    pub misc_enable: u64,
    /// DR0 to DR3. Breakpoints are stored but never hit.
    pub dr: [u64; 4],
    /// DR6.
    pub dr6: u64,
    /// DR7.
    pub dr7: u64,
    /// The time-stamp counter.
    pub tsc: Tsc,
    /// STI or MOV SS shadow: no interrupt before the next instruction has completed.
    pub interrupt_shadow: bool,
    /// The handler of an NMI runs: no further NMI before IRET.
    pub nmi_blocked: bool,
    /// Halted by HLT until an interrupt.
    pub halted: bool,
    /// Every other vCPU is stopped, so a split locked access may proceed.
    pub exclusive: bool,
}

impl System {
    /// A vCPU's initial state: long mode, CPL 0, paging on with the tables at `cr3`, flat null
    /// segments, empty descriptor tables, a TSC of 1 GHz. Every other register is as after a
    /// hardware reset.
    pub fn long_mode(cr3: u64) -> Self {
        use bits::{CR0_ET, CR0_NE, CR0_PE, CR0_PG, CR4_PAE, EFER_LMA, EFER_LME};
        Self {
            cr0: CR0_PE | CR0_ET | CR0_NE | CR0_PG,
            cr2: 0,
            cr3,
            cr4: CR4_PAE,
            efer: EFER_LME | EFER_LMA,
            cpl: 0,
            selectors: [0; 6],
            segment_dpl: [3; 6],
            fs_base: 0,
            gs_base: 0,
            kernel_gs_base: 0,
            gdtr: Table::default(),
            idtr: Table::default(),
            tr: Table::default(),
            ldtr: Table::default(),
            star: 0,
            lstar: 0,
            cstar: 0,
            fmask: 0,
            tsc_aux: 0,
            pat: 0x0007_0406_0007_0406,
            misc_enable: 0x1801,
            dr: [0; 4],
            dr6: 0xffff_0ff0,
            dr7: 0x400,
            tsc: Tsc::new(TscRate::GIGAHERTZ, 0),
            interrupt_shadow: false,
            nmi_blocked: false,
            halted: false,
            exclusive: false,
        }
    }

    /// The current address space's number.
    pub(crate) const fn pcid(&self) -> Space {
        if self.cr4 & bits::CR4_PCIDE == 0 {
            Space(0)
        } else {
            Space((self.cr3 & bits::CR3_PCID) as u16)
        }
    }

    /// Whether EFER.NXE may be set and CPUID announces NX (SDM vol 4, `IA32_MISC_ENABLE` bit 34).
    pub(crate) const fn has_nx(&self) -> bool {
        self.misc_enable & bits::MISC_XD_DISABLE == 0
    }
}
