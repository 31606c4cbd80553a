//! Leaves out the store of flags that no instruction can read.
//!
//! ```text
//!   add rcx, rax      flags overwritten below and not read before: QuietAddRr64
//!   lea rsi, [rdi+8]  touches no flags, cannot leave
//!   rol ecx, 5        changes CF and OF only, overwritten too: QuietRolRi32
//!   xor rdx, rax      kept: the load may fault, and the handler would see the flags
//!   mov rax, [rsi]
//! ```
//! The pass goes backwards through a finished basic block. Flags are dead from an operation that
//! overwrites all six up to the last op before it that reads them or may leave the basic block.
//! Interrupts and requests are taken only at the end of a basic block, where all flags are live. A
//! single-stepped basic block has one instruction.

use crate::arith::shift;
use crate::lower_tables::quiet;
use crate::op::{Code, IMMEDIATE, LOCKED, MEMORY, Op, Operand};

/// The effect of an op on the arithmetic flags, if the op cannot leave the basic block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Effect {
    /// Neither reads nor writes them.
    None,
    /// Overwrites all six, and reads none.
    All,
    /// Overwrites some, reads none.
    Some,
    /// Reads them, or may leave the basic block.
    Seen,
}

/// Replaces each op of a basic block that computes dead flags by an op that stores none.
pub(crate) fn silence(block: &mut [Op]) {
    let mut dead = false;
    for op in block.iter_mut().rev() {
        let effect = effect(op);
        let quiet = if dead && matches!(effect, Effect::All | Effect::Some) {
            without_flags(op)
        } else {
            None
        };
        match (quiet, effect) {
            (Some(quiet), _) => *op = quiet,
            (_, Effect::None) => {}
            (_, Effect::All) => dead = true,
            // A kept op needs the flags that it does not write.
            (_, Effect::Some | Effect::Seen) => dead = false,
        }
    }
}

#[rustfmt::skip]
fn effect(op: &Op) -> Effect {
    use Code::*;
    match op.code {
        MovRr32 | MovRr64 | MovRi32 | MovRi64 | Const | Address | Lea32 | Lea64 | Nop | Links
        | MovZx8 | MovZx16 | MovSx8To32 | MovSx8To64 | MovSx16To32 | MovSx16To64 | MovSx32To64 => {
            Effect::None
        }
        AddRr32 | AddRr64 | AddRi32 | AddRi64 | SubRr32 | SubRr64 | SubRi32 | SubRi64
        | AndRr32 | AndRr64 | AndRi32 | AndRi64 | OrRr32 | OrRr64 | OrRi32 | OrRi64
        | XorRr32 | XorRr64 | XorRi32 | XorRi64 | NegR32 | NegR64
        | CmpRr8 | CmpRi8 | CmpRr32 | CmpRr64 | CmpRi32 | CmpRi64
        | TestRr8 | TestRr32 | TestRr64 | TestRi8 | TestRi32 | TestRi64
        // Their count is not zero.
        | ShlRi32 | ShlRi64 | ShrRi32 | ShrRi64 | SarRi32 | SarRi64
        | ImulRr32 | ImulRr64 | ImulRri32 | ImulRri64 => Effect::All,
        // They leave the basic block, but set all flags first.
        JumpCmpEqRr8 | JumpCmpEqRi8 | JumpTestZRr8 | JumpTestZRi8 | JumpSubZRi32 | JumpSubZRi64
        | JumpCmpEqRr32 | JumpCmpBelowRr32 | JumpCmpBeRr32 | JumpCmpLessRr32 | JumpCmpLeRr32
        | JumpCmpEqRr64 | JumpCmpBelowRr64 | JumpCmpBeRr64 | JumpCmpLessRr64 | JumpCmpLeRr64
        | JumpCmpEqRi32 | JumpCmpBelowRi32 | JumpCmpBeRi32 | JumpCmpLessRi32 | JumpCmpLeRi32
        | JumpCmpEqRi64 | JumpCmpBelowRi64 | JumpCmpBeRi64 | JumpCmpLessRi64 | JumpCmpLeRi64
        | JumpTestZRr32 | JumpTestZRr64 | JumpTestZRi32 | JumpTestZRi64
        | JumpTestSRr32 | JumpTestSRr64 | JumpTestLeRr32 | JumpTestLeRr64 => Effect::All,
        IncR32 | IncR64 | DecR32 | DecR64 => Effect::Some,
        Shift if is_plain_rotate(op) => Effect::Some,
        _ => Effect::Seen,
    }
}

/// ROL or ROR of a 32 or 64-bit register by an immediate.
fn is_plain_rotate(op: &Op) -> bool {
    let plain = op.has(IMMEDIATE) && !op.has(MEMORY) && !op.has(LOCKED) && op.width() >= 2;
    plain && matches!(op.aux, shift::ROL | shift::ROR)
}

/// The same op without flags.
fn without_flags(op: &Op) -> Option<Op> {
    let by = |imm: i32, codes: [Code; 2]| Op {
        code: codes[usize::from(op.width() == 3)],
        imm,
        ..*op
    };
    let adds = [Code::QuietAddRi32, Code::QuietAddRi64];
    match op.code {
        Code::SubRi32 | Code::SubRi64 => op.imm.checked_neg().map(|imm| by(imm, adds)),
        Code::IncR32 | Code::IncR64 => Some(Op {
            src: op.dst,
            ..by(1, adds)
        }),
        Code::DecR32 | Code::DecR64 => Some(Op {
            src: op.dst,
            ..by(-1, adds)
        }),
        Code::Shift => {
            // A rotation to the right is a rotation to the left by the width less the count.
            let left = if op.aux == shift::ROL {
                op.imm
            } else {
                op.imm.wrapping_neg()
            };
            let codes = [Code::QuietRolRi32, Code::QuietRolRi64];
            Some(Op {
                src: op.dst,
                ..by(left, codes)
            })
        }
        code => quiet(code).map(|code| Op { code, ..*op }),
    }
}
