//! Tables: the instruction forms with their own hot code.

use crate::arith::alu;
use crate::op::{Code, IMMEDIATE, LOCKED, MEMORY, Op, Operand};

/// The code for 32 or 64 bits, from a pair.
pub(crate) fn by_width(width: u8, codes: [Code; 2]) -> Code {
    codes[usize::from(width == 3)]
}

/// The `op r, [m]` forms of `dispatch`.
pub(crate) fn hot_load(kind: u8, width: u8) -> Option<Code> {
    let codes = match kind {
        alu::ADD => [Code::AddRm32, Code::AddRm64],
        alu::OR => [Code::OrRm32, Code::OrRm64],
        alu::AND => [Code::AndRm32, Code::AndRm64],
        alu::SUB => [Code::SubRm32, Code::SubRm64],
        alu::XOR => [Code::XorRm32, Code::XorRm64],
        alu::CMP => [Code::CmpRm32, Code::CmpRm64],
        _ => return None,
    };
    (width >= 2).then(|| by_width(width, codes))
}

/// The register operands of an instruction.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Registers {
    /// None is AH, BH, CH or DH.
    Plain,
    /// One of them is.
    SecondByte,
}

/// The `op e, g` forms of `dispatch`.
pub(crate) fn hot_alu(kind: u8, op: &Op, registers: Registers) -> Option<Code> {
    let plain = registers == Registers::Plain;
    let (memory, immediate, width) = (op.has(MEMORY), op.has(IMMEDIATE), op.width());
    let codes = match (kind, memory, immediate) {
        _ if op.has(LOCKED) => return None,
        (alu::CMP, true, true) if width == 0 => return Some(Code::CmpMi8),
        (alu::TEST, true, true) if width == 0 => return Some(Code::TestMi8),
        (alu::TEST, false, false) if width == 0 && plain => return Some(Code::TestRr8),
        (alu::TEST, false, true) if width == 0 && plain => return Some(Code::TestRi8),
        (alu::CMP, false, false) if width == 0 && plain => return Some(Code::CmpRr8),
        (alu::CMP, false, true) if width == 0 && plain => return Some(Code::CmpRi8),
        (alu::ADD, true, false) => [Code::AddMr32, Code::AddMr64],
        (alu::ADD, true, true) => [Code::AddMi32, Code::AddMi64],
        (alu::CMP, true, false) => [Code::CmpMr32, Code::CmpMr64],
        (alu::CMP, true, true) => [Code::CmpMi32, Code::CmpMi64],
        (_, true, _) => return None,
        (alu::ADD, _, false) => [Code::AddRr32, Code::AddRr64],
        (alu::ADD, _, true) => [Code::AddRi32, Code::AddRi64],
        (alu::SUB, _, false) => [Code::SubRr32, Code::SubRr64],
        (alu::SUB, _, true) => [Code::SubRi32, Code::SubRi64],
        (alu::AND, _, false) => [Code::AndRr32, Code::AndRr64],
        (alu::AND, _, true) => [Code::AndRi32, Code::AndRi64],
        (alu::OR, _, false) => [Code::OrRr32, Code::OrRr64],
        (alu::OR, _, true) => [Code::OrRi32, Code::OrRi64],
        (alu::XOR, _, false) => [Code::XorRr32, Code::XorRr64],
        (alu::XOR, _, true) => [Code::XorRi32, Code::XorRi64],
        (alu::CMP, _, false) => [Code::CmpRr32, Code::CmpRr64],
        (alu::CMP, _, true) => [Code::CmpRi32, Code::CmpRi64],
        (alu::TEST, _, false) => [Code::TestRr32, Code::TestRr64],
        (alu::TEST, _, true) => [Code::TestRi32, Code::TestRi64],
        _ => return None,
    };
    (width >= 2).then(|| by_width(width, codes))
}

/// The branch that also does the operation before it, for the condition without its inversion.
#[rustfmt::skip]
pub(crate) fn fused(compare: Code, cc: u8) -> Option<Code> {
    use Code::*;
    Some(match (compare, cc >> 1) {
        (CmpRr32, 1) => JumpCmpBelowRr32, (CmpRr32, 2) => JumpCmpEqRr32,
        (CmpRr32, 3) => JumpCmpBeRr32, (CmpRr32, 6) => JumpCmpLessRr32,
        (CmpRr32, 7) => JumpCmpLeRr32,
        (CmpRr64, 1) => JumpCmpBelowRr64, (CmpRr64, 2) => JumpCmpEqRr64,
        (CmpRr64, 3) => JumpCmpBeRr64, (CmpRr64, 6) => JumpCmpLessRr64,
        (CmpRr64, 7) => JumpCmpLeRr64,
        (CmpRi32, 1) => JumpCmpBelowRi32, (CmpRi32, 2) => JumpCmpEqRi32,
        (CmpRi32, 3) => JumpCmpBeRi32, (CmpRi32, 6) => JumpCmpLessRi32,
        (CmpRi32, 7) => JumpCmpLeRi32,
        (CmpRi64, 1) => JumpCmpBelowRi64, (CmpRi64, 2) => JumpCmpEqRi64,
        (CmpRi64, 3) => JumpCmpBeRi64, (CmpRi64, 6) => JumpCmpLessRi64,
        (CmpRi64, 7) => JumpCmpLeRi64,
        (TestRr32, 2) => JumpTestZRr32, (TestRr64, 2) => JumpTestZRr64,
        (TestRi32, 2) => JumpTestZRi32, (TestRi64, 2) => JumpTestZRi64,
        (TestRr32, 4 | 6) => JumpTestSRr32, (TestRr64, 4 | 6) => JumpTestSRr64,
        (TestRr32, 7) => JumpTestLeRr32, (TestRr64, 7) => JumpTestLeRr64,
        (CmpRr8, 2) => JumpCmpEqRr8, (CmpRi8, 2) => JumpCmpEqRi8,
        (TestRr8, 2) => JumpTestZRr8, (TestRi8, 2) => JumpTestZRi8,
        (DecR32, 2) => JumpDecZ32, (DecR64, 2) => JumpDecZ64,
        (SubRi32, 2) => JumpSubZRi32, (SubRi64, 2) => JumpSubZRi64,
        _ => return None,
    })
}

/// The code without flags for the same operands, if there is one: quiet.rs.
#[rustfmt::skip]
pub(crate) fn quiet(code: Code) -> Option<Code> {
    use Code::*;
    Some(match code {
        AddRr32 => QuietAddRr32, AddRr64 => QuietAddRr64,
        AddRi32 => QuietAddRi32, AddRi64 => QuietAddRi64,
        SubRr32 => QuietSubRr32, SubRr64 => QuietSubRr64,
        AndRr32 => QuietAndRr32, AndRr64 => QuietAndRr64,
        AndRi32 => QuietAndRi32, AndRi64 => QuietAndRi64,
        OrRr32 => QuietOrRr32, OrRr64 => QuietOrRr64,
        OrRi32 => QuietOrRi32, OrRi64 => QuietOrRi64,
        XorRr32 => QuietXorRr32, XorRr64 => QuietXorRr64,
        XorRi32 => QuietXorRi32, XorRi64 => QuietXorRi64,
        ShlRi32 => QuietShlRi32, ShlRi64 => QuietShlRi64,
        ShrRi32 => QuietShrRi32, ShrRi64 => QuietShrRi64,
        SarRi32 => QuietSarRi32, SarRi64 => QuietSarRi64,
        ImulRr32 => QuietImulRr32, ImulRr64 => QuietImulRr64,
        ImulRri32 => QuietImulRri32, ImulRri64 => QuietImulRri64,
        _ => return None,
    })
}
