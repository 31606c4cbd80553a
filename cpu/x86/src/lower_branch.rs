//! Translates one instruction to ops: branches, calls and the stack instructions around them.

use crate::lower::{Flow, Lower};
use crate::lower_tables::fused;
use crate::op::{Code, IMMEDIATE, INVERTED, MEMORY, Op, System, TARGET, TEMP, constant};
use crate::state::is_canonical;
use iced_x86::{OpKind, Register};

impl Lower<'_> {
    /// The direct branch's displacement from the instruction's end.
    pub(crate) fn displacement(&self) -> i32 {
        self.i.near_branch64().wrapping_sub(self.i.next_ip()) as i32
    }

    /// Whether the direct branch's target is not canonical. Such a branch becomes an op that raises
    /// #GP(0) where it would jump, and then changes nothing.
    pub(crate) fn has_bad_target(&self) -> bool {
        !is_canonical(self.i.near_branch64())
    }

    pub(crate) fn jcc(&mut self, cc: u8) -> Flow {
        let disp = self.displacement();
        if self.i.op0_kind() != OpKind::NearBranch64 {
            return self.undefined();
        }
        if self.has_bad_target() {
            return self.emit(Op {
                aux: cc,
                ..Op::new(Code::RefuseIf)
            });
        }
        let inverted = if cc & 1 != 0 { INVERTED } else { 0 };
        let whole = self.whole();
        if let Some(compare) = self.ops[self.start..].last_mut()
            && let Some(code) = fused(compare.code, cc)
            // Three instructions may be too long for `len`.
            && compare.instructions() == 1
        {
            // The compare's slot becomes the branch, which completes both instructions.
            let form = compare.form | inverted;
            *compare = Op {
                code,
                form,
                disp,
                len: compare.len + whole,
                ..*compare
            };
            self.ops.push(Op::unlinked(0));
            return Flow::End;
        }
        let op = match cc >> 1 {
            2 => Op {
                form: inverted,
                disp,
                ..Op::new(Code::JumpZ)
            },
            _ => Op {
                aux: cc,
                disp,
                ..Op::new(Code::JumpCc)
            },
        };
        self.emit_branch(op)
    }

    pub(crate) fn jump(&mut self) -> Flow {
        match self.i.op0_kind() {
            OpKind::NearBranch64 if self.has_bad_target() => self.refused(),
            OpKind::NearBranch64 => {
                let disp = self.displacement();
                self.emit_branch(Op {
                    disp,
                    ..Op::new(Code::Jump)
                })
            }
            _ if self.i.is_jmp_far_indirect() => self.jump_far(),
            _ if self.width(0) != 3 => self.undefined(),
            OpKind::Register => {
                let src = self.slot(0);
                self.emit_branch(Op {
                    src,
                    ..Op::new(Code::JumpR)
                })
            }
            _ => {
                self.load_target(Code::Load64);
                self.emit_branch(Op {
                    src: TARGET,
                    ..Op::new(Code::JumpR)
                })
            }
        }
    }

    fn jump_far(&mut self) -> Flow {
        let width = match self.i.code() {
            iced_x86::Code::Jmp_m1664 => 3,
            iced_x86::Code::Jmp_m1632 => 2,
            _ => 1,
        };
        let op = self.form(Code::System, width, 0, None);
        self.end_op(System::JumpFar, op)
    }

    fn load_target(&mut self, code: Code) {
        let mut op = Op {
            dst: TARGET,
            ..Op::new(code)
        };
        self.memory(&mut op);
        self.emit(op);
    }

    pub(crate) fn call(&mut self) -> Flow {
        let direct = self.i.op0_kind() == OpKind::NearBranch64;
        if !direct && (self.i.is_call_far_indirect() || self.width(0) != 3) {
            return self.undefined();
        }
        if direct && self.has_bad_target() {
            return self.refused();
        }
        if self.is_memory(0) {
            self.load_target(Code::TargetM);
        } else if self.is_register(0) {
            let src = self.slot(0);
            self.emit(Op {
                dst: TARGET,
                src,
                ..Op::new(Code::TargetR)
            });
        }
        let back = self.i.next_ip();
        // The target is canonical, so the push completes the instruction.
        let len = self.whole();
        if back as i32 as i64 as u64 == back {
            self.emit(Op {
                len,
                imm: back as i32,
                ..Op::new(Code::PushI)
            });
        } else {
            self.emit(constant(TEMP, back));
            self.emit(Op {
                len,
                src: TEMP,
                ..Op::new(Code::PushR)
            });
        }
        let jump = if direct {
            Op {
                disp: self.displacement(),
                ..Op::new(Code::Jump)
            }
        } else {
            Op {
                src: TARGET,
                ..Op::new(Code::JumpR)
            }
        };
        self.emit_branch(jump)
    }

    pub(crate) fn ret(&mut self) -> Flow {
        let imm = if self.i.op_count() == 0 {
            0
        } else {
            i32::from(self.i.immediate16())
        };
        if self.i.stack_pointer_increment() as i64 - i64::from(imm) != 8 {
            return self.undefined();
        }
        self.emit_branch(Op {
            imm,
            ..Op::new(Code::Ret)
        })
    }

    pub(crate) fn ret_far(&mut self) -> Flow {
        let imm = if self.i.op_count() == 0 {
            0
        } else {
            i32::from(self.i.immediate16())
        };
        let width = match self.i.code() {
            iced_x86::Code::Retfq | iced_x86::Code::Retfq_imm16 => 3,
            iced_x86::Code::Retfd | iced_x86::Code::Retfd_imm16 => 2,
            _ => 1,
        };
        self.end_op(
            System::RetFar,
            Op {
                form: width << 2,
                imm,
                ..Op::new(Code::System)
            },
        )
    }

    /// LOOPcc and JRCXZ: the condition into scratch, then a branch on it.
    pub(crate) fn count_loop(&mut self, kind: u8) -> Flow {
        if self.i.op0_kind() != OpKind::NearBranch64 {
            return self.undefined();
        }
        let bytes = self.i.code();
        let narrow = matches!(
            bytes,
            iced_x86::Code::Loopne_rel8_64_ECX
                | iced_x86::Code::Loope_rel8_64_ECX
                | iced_x86::Code::Loop_rel8_64_ECX
                | iced_x86::Code::Jecxz_rel8_64
        );
        let width = if narrow { 2 } else { 3 };
        let refused = self.has_bad_target();
        let count = Op {
            form: width << 2,
            aux: kind,
            dst: TEMP,
            imm: refused.into(),
            ..Op::new(Code::LoopCount)
        };
        self.emit(count);
        if refused {
            return Flow::On;
        }
        let disp = self.displacement();
        self.emit_branch(Op {
            src: TEMP,
            disp,
            ..Op::new(Code::JumpSlot)
        })
    }

    pub(crate) fn push(&mut self) -> Flow {
        let width = (-self.i.stack_pointer_increment()).trailing_zeros().min(3) as u8;
        if self.is_register(0) && self.i.op0_register().is_segment_register() {
            let aux = if self.i.op0_register() == Register::FS {
                1
            } else {
                2
            };
            return self.emit(Op {
                form: width << 2,
                aux,
                ..Op::new(Code::PushE)
            });
        }
        if !self.is_register(0) && !self.is_memory(0) {
            let imm = self.i.immediate(0) as i32;
            let code = if width == 3 { Code::PushI } else { Code::PushE };
            return self.emit(Op {
                form: width << 2 | IMMEDIATE,
                imm,
                ..Op::new(code)
            });
        }
        let op = self.form(Code::PushE, width, 0, None);
        let hot = !op.has(MEMORY) && width == 3;
        self.emit(if hot {
            Op {
                code: Code::PushR,
                src: op.dst,
                ..op
            }
        } else {
            op
        })
    }

    pub(crate) fn pop(&mut self) -> Flow {
        let width = self.i.stack_pointer_increment().trailing_zeros().min(3) as u8;
        if self.is_register(0) && self.i.op0_register().is_segment_register() {
            return self.pop_segment(width);
        }
        let op = self.form(Code::PopE, width, 0, None);
        if matches!(self.i.memory_base(), Register::RSP | Register::ESP)
            && let Some(rest) = self.split_address()
        {
            self.emit(Op {
                disp: 1 << width,
                ..rest
            });
        }
        let hot = !op.has(MEMORY) && width == 3;
        self.emit(Op {
            code: if hot { Code::PopR } else { op.code },
            ..op
        })
    }
}
