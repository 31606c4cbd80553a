//! The decoded form of an instruction, in the layout of [`lacuna_cpu::op`].
//!
//! `dst`, `src`, `base`, `index` are slots of the register file: 0-30 are X0 to X30, 31 is the
//! stack pointer, then come the slots below. Register 31 is decoded to [`SP`], [`ZERO`] or, as a
//! destination, [`SINK`]. `len` is the number of instructions that this op completes.
//!
//! The ops of a basic block end in a branch and its links, or in a [`Code::System`] op.

use lacuna_cpu::op;

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
pub(crate) type Op = op::Op<Code>;

impl op::Code for Code {
    const UNREACHABLE: Self = Self::Undefined;
    const LINKS: Self = Self::Links;
    const SLOTS: [u8; 4] = [SINK, ZERO, ZERO, ZERO];

    #[inline]
    fn bytes(len: u8) -> u64 {
        4 * u64::from(len)
    }

    #[inline]
    fn instructions(len: u8) -> u64 {
        len.into()
    }
}

/// The target of the direct branch `op`. `pc` is the address of its first instruction.
pub(crate) fn branch_target(op: &Op, pc: u64, condition: bool) -> u64 {
    let next = pc.wrapping_add(op.bytes());
    let taken = condition != op.has(INVERTED);
    let displacement = match op.code {
        // The return address takes the place of the immediates.
        Code::Call => i32::from_ne_bytes([op.dst, op.src, op.base, op.index]),
        _ if taken => op.disp,
        _ => return next,
    };
    next.wrapping_add(displacement as i64 as u64)
}
