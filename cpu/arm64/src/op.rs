//! The decoded form of an instruction: 16 bytes that the executor uses without a further look-up.
//!
//! ```text
//!  0     1     2      3     4    5    6     7      8          12         16
//!  code  form  count  aux   dst  src  base  index  disp i32   imm i32
//! ```
//! `dst`, `src`, `base`, `index` are slots of the register file: 0-30 are X0 to X30, 31 is the
//! stack pointer, then come the slots below. Register 31 is decoded to [`SP`], [`ZERO`] or, as a
//! destination, [`SINK`]. `count` is the number of instructions that this op completes.
//!
//! The ops of a basic block end in a branch and its links, or in a [`Code::System`] op.

use lacuna_cpu::code;

/// The current stack pointer.
pub(crate) const SP: u8 = 31;
/// Always zero: XZR as a source, an absent base or index.
pub(crate) const ZERO: u8 = 32;
/// Never read: XZR as a destination.
pub(crate) const SINK: u8 = 33;
/// Scratch.
pub(crate) const TEMP: u8 = 34;

/// On branches, in `form`: the tested condition is the inverse of the instruction's.
pub(crate) const INVERTED: u8 = 1 << 7;

/// The operation of an op. Names: `Rr` register-register, `Ri` register-immediate, `Lsl` and `Lsr`
/// with a shifted second operand, `X` with an index register; an `s` before it sets the flags; then
/// the width in bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
#[rustfmt::skip]
pub(crate) enum Code {
    // Hot forms, one arm each in dispatch.rs.
    AddRr32, AddRr64, AddRi32, AddRi64, SubRr32, SubRr64,
    AddsRr32, AddsRr64, AddsRi32, AddsRi64, SubsRr32, SubsRr64, SubsRi32, SubsRi64,
    AddLsl32, AddLsl64, AddLsr32, AddLsr64, SubLsl32, SubLsl64, SubLsr32, SubLsr64,
    AddUxtw, AddSxtw,
    AndRr32, AndRr64, AndRi32, AndRi64, AndLsl32, AndLsl64, AndLsr32, AndLsr64,
    OrrRr32, OrrRr64, OrrRi32, OrrRi64, OrrLsl32, OrrLsl64, OrrLsr32, OrrLsr64,
    EorRr32, EorRr64, EorRi32, EorRi64, EorLsl32, EorLsl64, EorLsr32, EorLsr64,
    AndsRr32, AndsRr64, AndsRi32, AndsRi64,
    BicRr32, BicRr64, OrnRr32, OrnRr64, EonRr32, EonRr64, BicsRr32, BicsRr64,
    MovRr32, MovRr64, Const, Movk32, Movk64, Nop,
    LslRi32, LslRi64, LsrRi32, LsrRi64, AsrRi32, AsrRi64, Extr32, Extr64,
    Ubfx, Ubfiz, SignField32, SignField64, Sxtw, Insert32, Insert64,
    Lslv32, Lslv64, Lsrv32, Lsrv64, Asrv32, Asrv64, Rorv32, Rorv64,
    Madd32, Madd64, Msub32, Msub64, Smaddl, Smsubl, Umaddl, Umsubl, Smulh, Umulh,
    Udiv32, Udiv64, Sdiv32, Sdiv64,
    Csel32, Csel64, Csinc32, Csinc64, Csinv32, Csinv64, Csneg32, Csneg64,
    Ccmp32, Ccmp64, Ccmn32, Ccmn64,
    Clz32, Clz64, Rev32, Rev64,
    LoadU8, LoadU16, LoadU32, LoadU64,
    LoadS8To32, LoadS8To64, LoadS16To32, LoadS16To64, LoadS32To64,
    LoadU8X, LoadU16X, LoadU32X, LoadU64X,
    LoadS8To32X, LoadS8To64X, LoadS16To32X, LoadS16To64X, LoadS32To64X,
    Store8, Store16, Store32, Store64, Store8X, Store16X, Store32X, Store64X,
    LoadPair32, LoadPair64, LoadPairS32, LoadPairBack64,
    StorePair32, StorePair64, StorePairBack64,
    // Ends of basic blocks, each followed by links.
    Jump, Call, JumpR, CallR, JumpZ, JumpCc, Cbz32, Cbz64, Tbz,
    JumpSubEqRr32, JumpSubLoRr32, JumpSubLsRr32, JumpSubLtRr32, JumpSubLeRr32,
    JumpSubEqRr64, JumpSubLoRr64, JumpSubLsRr64, JumpSubLtRr64, JumpSubLeRr64,
    JumpSubEqRi32, JumpSubLoRi32, JumpSubLsRi32, JumpSubLtRi32, JumpSubLeRi32,
    JumpSubEqRi64, JumpSubLoRi64, JumpSubLsRi64, JumpSubLtRi64, JumpSubLeRi64,
    JumpAddEqRi32, JumpAddEqRi64,
    JumpAndEqRr32, JumpAndEqRr64, JumpAndEqRi32, JumpAndEqRi64,
    // Ends of basic blocks, executed by the run loop (system.rs); `imm` is the instruction word.
    System,
    /// Not executed: the second slot of a basic block's end.
    Links,
    // Everything else: general.rs and atomics.rs.
    SetSp, CheckSp, Alone,
    Carry, Unary, Crc32, Unprivileged, ZeroBlock,
    Ordered, Atomic, Cas, CasPair, LoadExclusive, StoreExclusive, Clrex, Fence,
    /// MRS; `imm` is the instruction word.
    ReadSystem,
    Undefined,
}

/// See the module header.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Op {
    pub(crate) code: Code,
    pub(crate) form: u8,
    pub(crate) count: u8,
    pub(crate) aux: u8,
    pub(crate) dst: u8,
    pub(crate) src: u8,
    pub(crate) base: u8,
    pub(crate) index: u8,
    pub(crate) disp: i32,
    pub(crate) imm: i32,
}

const _: () = assert!(size_of::<Op>() == 16);

impl Op {
    pub(crate) const fn new(code: Code) -> Self {
        Self {
            code,
            form: 0,
            count: 0,
            aux: 0,
            dst: SINK,
            src: ZERO,
            base: ZERO,
            index: ZERO,
            disp: 0,
            imm: 0,
        }
    }

    /// This op with a 64-bit immediate.
    pub(crate) const fn with_wide(self, value: u64) -> Self {
        Self {
            disp: (value >> 32) as i32,
            imm: value as i32,
            ..self
        }
    }

    /// The 64-bit immediate.
    #[inline(always)]
    pub(crate) const fn wide(&self) -> u64 {
        (self.disp as u32 as u64) << 32 | self.imm as u32 as u64
    }

    /// `imm`, sign-extended.
    #[inline(always)]
    pub(crate) const fn imm64(&self) -> u64 {
        self.imm as i64 as u64
    }

    /// Whether `form` has `flag`.
    #[inline(always)]
    pub(crate) const fn has(&self, flag: u8) -> bool {
        self.form & flag != 0
    }

    /// The target of this direct branch. `pc` is the address of its first instruction.
    pub(crate) const fn branch_target(&self, pc: u64, condition: bool) -> u64 {
        let next = pc.wrapping_add(4 * self.count as u64);
        let taken = condition != self.has(INVERTED);
        let displacement = match self.code {
            // The return address takes the place of the immediates.
            Code::Call => i32::from_ne_bytes([self.dst, self.src, self.base, self.index]),
            _ if taken => self.disp,
            _ => return next,
        };
        next.wrapping_add(displacement as i64 as u64)
    }

    /// Links without targets, ending a basic block of `instructions`.
    pub(crate) const fn unlinked(instructions: u8) -> Self {
        Self {
            form: instructions,
            ..Self::new(Code::Links)
        }
    }

    /// These links: the op index of the basic block for `condition`. 0 is "not known yet".
    #[inline(always)]
    pub(crate) const fn target(&self, condition: bool) -> u32 {
        if condition {
            self.disp as u32
        } else {
            self.imm as u32
        }
    }

    /// These links: the epoch in which the indices are valid.
    #[inline(always)]
    pub(crate) const fn epoch(&self) -> u32 {
        u32::from_ne_bytes([self.dst, self.src, self.base, self.index])
    }

    /// These links: instructions in the whole basic block.
    #[inline(always)]
    pub(crate) const fn block_instructions(&self) -> i64 {
        self.form as i64
    }
}

impl code::Op for Op {
    const UNREACHABLE: Self = Self::new(Code::Undefined);

    #[inline]
    fn bytes(&self) -> u64 {
        4 * u64::from(self.count)
    }

    #[inline]
    fn instructions(&self) -> u64 {
        self.count.into()
    }

    fn link(&mut self, condition: bool, target: u32, epoch: u32) {
        if self.epoch() != epoch {
            (self.disp, self.imm) = (0, 0);
            [self.dst, self.src, self.base, self.index] = epoch.to_ne_bytes();
        }
        if condition {
            self.disp = target as i32;
        } else {
            self.imm = target as i32;
        }
    }
}
