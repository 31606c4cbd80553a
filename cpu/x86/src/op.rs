//! The decoded form of an instruction, in the layout of [`lacuna_cpu::op`].
//!
//! `len` has the bytes of the instructions that the op completes in bits 0-4, and their number in
//! bits 5-6.
//!
//! `dst`, `src`, `base`, `index` are slots of the register file: 0-15 are the general registers,
//! then come the constants and scratch slots below. A general register's second byte (AH to BH) is
//! slot [`HIGH`] + n, which only byte operations use. An absent base or index is [`ZERO`], so every
//! address is `base + (index << scale) + disp`. For other addresses (segment bases, 32 bits, far
//! RIP-relative), an earlier [`Code::Address`] or [`Code::Const`] op computes a scratch slot.
//!
//! The ops of a basic block end in a branch and its links, or in a [`Code::System`] op.

use lacuna_cpu::op;

/// Always zero.
pub(crate) const ZERO: u8 = 16;
/// Scratch address.
pub(crate) const TEMP: u8 = 17;
/// Scratch target of an indirect call.
pub(crate) const TARGET: u8 = 19;
/// First of the four second-byte registers.
pub(crate) const HIGH: u8 = 32;

/// `form`: scale (2 bits), log2 of the operand width (2 bits), then the flags below.
pub(crate) const MEMORY: u8 = 1 << 4;
/// The source is `imm`.
pub(crate) const IMMEDIATE: u8 = 1 << 5;
/// LOCK prefix (or XCHG with memory).
pub(crate) const LOCKED: u8 = 1 << 6;
/// On branches: the tested condition is the inverse of the instruction's.
pub(crate) const INVERTED: u8 = 1 << 7;

/// The operation of an op. Names: `Rr` register-register, `Ri` register-immediate, `Rm` register
/// from memory, `Mr` memory from register, `Mi` memory from immediate; then the width in bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
#[rustfmt::skip]
pub(crate) enum Code {
    // Hot forms, one arm each in dispatch.rs.
    AddRr32, AddRr64, AddRi32, AddRi64, AddRm32, AddRm64, AddMr32, AddMr64, AddMi32, AddMi64,
    SubRr32, SubRr64, SubRi32, SubRi64, SubRm32, SubRm64,
    AndRr32, AndRr64, AndRi32, AndRi64, AndRm32, AndRm64,
    OrRr32, OrRr64, OrRi32, OrRi64, OrRm32, OrRm64,
    XorRr32, XorRr64, XorRi32, XorRi64, XorRm32, XorRm64,
    CmpRr32, CmpRr64, CmpRi32, CmpRi64, CmpRm32, CmpRm64,
    CmpMr32, CmpMr64, CmpMi8, CmpMi32, CmpMi64,
    CmpRr8, CmpRi8,
    TestRr8, TestRr32, TestRr64, TestRi8, TestRi32, TestRi64, TestMi8,
    MovRr32, MovRr64, MovRi32, MovRi64, Const, Address,
    Load32, Load64, LoadZx8, LoadZx16, LoadSx8To32, LoadSx8To64, LoadSx16To32, LoadSx16To64,
    LoadSx32To64, Store8, Store16, Store32, Store64, StoreImm8, StoreImm32, StoreImm64,
    MovZx8, MovZx16, MovSx8To32, MovSx8To64, MovSx16To32, MovSx16To64, MovSx32To64,
    Lea32, Lea64,
    ShlRi32, ShlRi64, ShrRi32, ShrRi64, SarRi32, SarRi64,
    IncR32, IncR64, DecR32, DecR64, NegR32, NegR64,
    ImulRr32, ImulRr64, ImulRri32, ImulRri64, ImulRm32, ImulRm64,
    CmovRr32, CmovRr64, SetccR,
    PushR, PushI, PopR, Nop,
    // The target of an indirect call. It must be checked as canonical before the call pushes.
    TargetR, TargetM,
    // The same without flags, for quiet.rs.
    QuietAddRr32, QuietAddRr64, QuietAddRi32, QuietAddRi64, QuietSubRr32, QuietSubRr64,
    QuietAndRr32, QuietAndRr64, QuietAndRi32, QuietAndRi64,
    QuietOrRr32, QuietOrRr64, QuietOrRi32, QuietOrRi64,
    QuietXorRr32, QuietXorRr64, QuietXorRi32, QuietXorRi64,
    QuietShlRi32, QuietShlRi64, QuietShrRi32, QuietShrRi64, QuietSarRi32, QuietSarRi64,
    QuietRolRi32, QuietRolRi64,
    QuietImulRr32, QuietImulRr64, QuietImulRri32, QuietImulRri64,
    // Ends of basic blocks, each followed by Links.
    Jump, JumpR, Ret, JumpZ, JumpCc, JumpSlot,
    JumpCmpEqRr32, JumpCmpBelowRr32, JumpCmpBeRr32, JumpCmpLessRr32, JumpCmpLeRr32,
    JumpCmpEqRr64, JumpCmpBelowRr64, JumpCmpBeRr64, JumpCmpLessRr64, JumpCmpLeRr64,
    JumpCmpEqRi32, JumpCmpBelowRi32, JumpCmpBeRi32, JumpCmpLessRi32, JumpCmpLeRi32,
    JumpCmpEqRi64, JumpCmpBelowRi64, JumpCmpBeRi64, JumpCmpLessRi64, JumpCmpLeRi64,
    JumpTestZRr32, JumpTestZRr64, JumpTestZRi32, JumpTestZRi64,
    JumpTestSRr32, JumpTestSRr64, JumpTestLeRr32, JumpTestLeRr64,
    JumpCmpEqRr8, JumpCmpEqRi8, JumpTestZRr8, JumpTestZRi8,
    JumpDecZ32, JumpDecZ64, JumpSubZRi32, JumpSubZRi64,
    // Ends of basic blocks, executed by the run loop (system.rs); `aux` is a `System`.
    System,
    /// Not executed: the second slot of a basic block's end.
    Links,
    // Everything else: general.rs. E is the r/m operand, G the register or immediate.
    Alu, AluReverse, Shift, DoubleShift, Not, Neg, Inc, Dec,
    Mul, Imul, Div, Idiv, ImulG, ImulGImm,
    MovE, MovG, MovZx, MovSx, Xchg, Xadd, Cmpxchg, Cmpxchg8b,
    BitTest, BitOffset, BitScan, Bswap, CmovG, SetccE, Widen, SignFill,
    Lahf, Sahf, Carry, Direction, PushE, PopE, Pushf, Leave, Enter,
    LoopCount, RefuseIf, Fence, String, Float, Undefined,
}

/// Instructions that the run loop executes, in [`Code::System`]'s `aux`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
#[rustfmt::skip]
pub(crate) enum System {
    Cli, Sti, Popf, Iret, RetFar, Syscall, Sysret, Int, Int3, Int1, Hlt, Cpuid, Rdmsr, Wrmsr,
    Rdtsc, Rdtscp, In, Out, Swapgs, MovFromCr, MovToCr, MovFromDr, MovToDr, Clts, Lmsw, Smsw,
    Invlpg, Lgdt, Lidt, Sgdt, Sidt, Lldt, Ltr, Sldt, Str, Wbinvd, Wait, Verr, Verw, Lar, Lsl,
    LoadSegment, StoreSegment, PopSegment, LoadFar, JumpFar,
    /// Not an instruction: the instruction here continues in the next page, and is decoded when
    /// executed.
    Crossing,
}

/// See the module header.
pub(crate) type Op = op::Op<Code>;

impl op::Code for Code {
    const UNREACHABLE: Self = Self::Undefined;
    const LINKS: Self = Self::Links;
    const SLOTS: [u8; 4] = [0, 0, ZERO, ZERO];

    #[inline]
    fn bytes(len: u8) -> u64 {
        (len & 31).into()
    }

    #[inline]
    fn instructions(len: u8) -> u64 {
        (len >> 5 & 3).into()
    }
}

/// An op that puts `value` into `slot`.
pub(crate) const fn constant(slot: u8, value: u64) -> Op {
    Op {
        dst: slot,
        ..Op::new(Code::Const).with_wide(value)
    }
}

/// The target of the direct branch `op`, if its (first) instruction is at `rip`.
pub(crate) fn branch_target(op: &Op, rip: u64, condition: bool) -> u64 {
    let taken = condition != op.has(INVERTED);
    let displacement = if taken { op.disp as i64 as u64 } else { 0 };
    rip.wrapping_add(op.bytes()).wrapping_add(displacement)
}

/// The operand of an op.
pub(crate) trait Operand {
    /// log2 of its bytes.
    fn width(&self) -> u8;
}

impl Operand for Op {
    #[inline(always)]
    fn width(&self) -> u8 {
        (self.form >> 2) & 3
    }
}
