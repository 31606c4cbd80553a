//! Translates one instruction to ops: branches, and instructions for the run loop.

use crate::lower::{Flow, Lower, Lowered, Unallocated, by_width};
use crate::op::{Code, INVERTED, Op};

/// The accesses that [`Code::Fence`] orders, in its `aux`.
pub(crate) mod fence {
    /// Earlier loads with later loads and stores.
    pub(crate) const LOADS: u8 = 1;
    /// Earlier stores with later stores.
    pub(crate) const STORES: u8 = 2;
    /// Everything.
    pub(crate) const ALL: u8 = 3;
}

impl Lower<'_> {
    /// Ends the basic block with a branch and its links.
    fn emit_branch(&mut self, op: Op) -> Lowered {
        self.ops.push(op);
        self.ops.push(Op::unlinked(0));
        Ok(Flow::End)
    }

    /// Branch displacements count from the instruction; displacements of ops count from its end.
    fn displacement(&self, low: u32, width: u32) -> i32 {
        (self.signed(low, width) << 2) - 4
    }

    pub(crate) fn branch(&mut self) -> Lowered {
        let disp = self.displacement(0, 26);
        if !self.bit(31) {
            return self.emit_branch(Op {
                disp,
                ..Op::new(Code::Jump)
            });
        }
        let [dst, src, base, index] = disp.to_ne_bytes();
        self.emit_branch(
            Op {
                dst,
                src,
                base,
                index,
                ..Op::new(Code::Call)
            }
            .with_wide(self.pc.wrapping_add(4)),
        )
    }

    pub(crate) fn compare_branch(&mut self) -> Lowered {
        let codes = [Code::Cbz32, Code::Cbz64];
        self.emit_branch(Op {
            form: if self.bit(24) { INVERTED } else { 0 },
            src: self.source(0),
            disp: self.displacement(5, 19),
            ..Op::new(by_width(self.width(), codes))
        })
    }

    pub(crate) fn test_branch(&mut self) -> Lowered {
        let bit = self.field(31, 1) << 5 | self.field(19, 5);
        self.emit_branch(Op {
            form: if self.bit(24) { INVERTED } else { 0 },
            src: self.source(0),
            aux: bit as u8,
            disp: self.displacement(5, 14),
            ..Op::new(Code::Tbz)
        })
    }

    pub(crate) fn conditional_branch(&mut self) -> Lowered {
        let (cond, disp) = (self.field(0, 4) as u8, self.displacement(5, 19));
        let (aux, inverted) = (cond & 14, cond & 1 != 0 && cond < 14);
        if aux == 14 {
            return self.emit_branch(Op {
                disp,
                ..Op::new(Code::Jump)
            });
        }
        let start = self.start;
        if let Some(compare) = self.ops[start..].last_mut()
            && let Some((code, opposite)) = fused(compare, aux)
        {
            let form = if inverted != opposite { INVERTED } else { 0 };
            // The compare's slot becomes the branch, which completes both instructions.
            *compare = Op {
                code,
                form,
                disp,
                len: compare.len + 1,
                ..*compare
            };
            self.ops.push(Op::unlinked(0));
            return Ok(Flow::End);
        }
        let form = if inverted { INVERTED } else { 0 };
        let code = if aux == 0 { Code::JumpZ } else { Code::JumpCc };
        self.emit_branch(Op {
            form,
            aux,
            disp,
            ..Op::new(code)
        })
    }

    /// BR, BLR and RET.
    pub(crate) fn branch_register(&mut self) -> Lowered {
        let src = self.source(5);
        match self.field(21, 2) {
            0 | 2 => self.emit_branch(Op {
                src,
                ..Op::new(Code::JumpR)
            }),
            1 => self.emit_branch(
                Op {
                    src,
                    ..Op::new(Code::CallR)
                }
                .with_wide(self.pc.wrapping_add(4)),
            ),
            _ => Err(Unallocated),
        }
    }

    /// An instruction that the run loop executes.
    pub(crate) fn system(&mut self) -> Lowered {
        // MRS changes no translation and no mask, so the basic block continues.
        if self.word >> 20 == 0xd53 {
            return self.emit(Op {
                dst: self.destination(),
                imm: self.word as i32,
                ..Op::new(Code::ReadSystem)
            });
        }
        self.emit(Op {
            imm: self.word as i32,
            ..Op::new(Code::System)
        })?;
        Ok(Flow::End)
    }

    pub(crate) fn zero_block(&mut self) -> Lowered {
        // `aux` is Rt, for the syndrome of a trap.
        self.emit(Op {
            base: self.source(0),
            aux: self.field(0, 5) as u8,
            ..Op::new(Code::ZeroBlock)
        })
    }

    /// DMB.
    pub(crate) fn barrier(&mut self) -> Lowered {
        let aux = match self.field(8, 2) {
            1 => fence::LOADS,
            2 => fence::STORES,
            _ => fence::ALL,
        };
        self.emit(Op {
            aux,
            ..Op::new(Code::Fence)
        })
    }
}

/// The branch that also does the operation before it, for the even condition `cond`; and whether
/// the branch tests the opposite of that condition.
#[rustfmt::skip]
fn fused(compare: &Op, cond: u8) -> Option<(Code, bool)> {
    use Code::*;
    if compare.len != 1 {
        return None;
    }
    // EQ, CS (not LO), HI (not LS), GE (not LT), GT (not LE).
    Some(match (compare.code, cond) {
        (SubsRr32, 0) => (JumpSubEqRr32, false), (SubsRr64, 0) => (JumpSubEqRr64, false),
        (SubsRi32, 0) => (JumpSubEqRi32, false), (SubsRi64, 0) => (JumpSubEqRi64, false),
        (SubsRr32, 2) => (JumpSubLoRr32, true), (SubsRr64, 2) => (JumpSubLoRr64, true),
        (SubsRi32, 2) => (JumpSubLoRi32, true), (SubsRi64, 2) => (JumpSubLoRi64, true),
        (SubsRr32, 8) => (JumpSubLsRr32, true), (SubsRr64, 8) => (JumpSubLsRr64, true),
        (SubsRi32, 8) => (JumpSubLsRi32, true), (SubsRi64, 8) => (JumpSubLsRi64, true),
        (SubsRr32, 10) => (JumpSubLtRr32, true), (SubsRr64, 10) => (JumpSubLtRr64, true),
        (SubsRi32, 10) => (JumpSubLtRi32, true), (SubsRi64, 10) => (JumpSubLtRi64, true),
        (SubsRr32, 12) => (JumpSubLeRr32, true), (SubsRr64, 12) => (JumpSubLeRr64, true),
        (SubsRi32, 12) => (JumpSubLeRi32, true), (SubsRi64, 12) => (JumpSubLeRi64, true),
        (AddsRi32, 0) => (JumpAddEqRi32, false), (AddsRi64, 0) => (JumpAddEqRi64, false),
        (AndsRr32, 0) => (JumpAndEqRr32, false), (AndsRr64, 0) => (JumpAndEqRr64, false),
        // The displacement takes the place of the immediate's high half.
        (AndsRi32, 0) => (JumpAndEqRi32, false),
        (AndsRi64, 0) if compare.imm64() == compare.wide() => (JumpAndEqRi64, false),
        _ => return None,
    })
}
