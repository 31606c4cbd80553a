//! Architectural state, and the two ways an instruction can fail to complete.

use lacuna_cpu::Stop;

/// Why an instruction did not complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trap {
    /// The architecture's own: delivered to the guest through its IDT.
    Exception(Exception),
    /// The machine's: the run loop leaves, and the instruction is executed again later.
    Stop(Stop),
    /// A locked access that crosses a cache line or page needs every other vCPU out of the way
    /// (`Exit::Exclusive`), then the instruction again with `State::exclusive` set.
    Exclusive,
}

impl From<Stop> for Trap {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

/// A fault or trap to deliver (SDM vol 3, table 6-1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exception {
    /// IDT vector.
    pub vector: u8,
    /// Error code, for the vectors that push one.
    pub error: Option<u32>,
    /// Faulting linear address, for #PF only: goes to CR2 at delivery.
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
    /// #GP(0), the most frequent.
    pub const GP0: Self = Self::gp(0);

    /// A vector without error code.
    pub const fn plain(vector: u8) -> Self {
        Self { vector, error: None, cr2: None }
    }

    /// #GP with a selector error code.
    pub const fn gp(error: u32) -> Self {
        Self { vector: 13, error: Some(error), cr2: None }
    }

    /// #TS, #NP, #SS, #AC, #DF: any vector with an error code.
    pub const fn with_error(vector: u8, error: u32) -> Self {
        Self { vector, error: Some(error), cr2: None }
    }

    /// #PF at linear address `addr`.
    pub const fn page_fault(error: u32, addr: u64) -> Self {
        Self { vector: 14, error: Some(error), cr2: Some(addr) }
    }
}

impl From<Exception> for Trap {
    fn from(e: Exception) -> Self {
        Self::Exception(e)
    }
}

/// A descriptor-table register or TR: where the table or segment lies.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Table {
    /// Linear base address.
    pub base: u64,
    /// Limit in bytes, inclusive.
    pub limit: u32,
    /// Selector (TR and LDTR only).
    pub selector: u16,
}

/// System registers: everything but general registers, RIP and the arithmetic flags, which the executor
/// keeps in its own (lazy) form.
#[derive(Clone, Debug)]
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
    /// Current privilege level, 0 or 3 (1 and 2 are allowed but nothing uses them).
    pub cpl: u8,
    /// Selectors: ES CS SS DS FS GS.
    pub selectors: [u16; 6],
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
    /// What TSC adds to the clock.
    pub tsc_offset: u64,
    /// STI or MOV SS shadow: no interrupt before the next instruction has completed.
    pub interrupt_shadow: bool,
    /// Halted by HLT until an interrupt.
    pub halted: bool,
    /// Every other vCPU is stopped: a split locked access may go ahead.
    pub exclusive: bool,
}
