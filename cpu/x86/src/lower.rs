//! Translates one instruction to ops: the hot forms here, the rest in `lower_rare.rs`.

use crate::arith::{alu, shift};
use crate::lower_tables::Registers::{Plain, SecondByte};
use crate::lower_tables::{by_width, hot_alu, hot_load};
use crate::op::{Code, HIGH, IMMEDIATE, LOCKED, MEMORY, Op, Operand, TEMP, ZERO, constant};
use iced_x86::{ConditionCode, Instruction, Mnemonic, OpKind, Register};

/// Whether the basic block continues after an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flow {
    /// The next instruction follows in the basic block.
    On,
    /// A branch or system op ended it.
    End,
}

/// Appends the ops of one instruction to the arena.
pub(crate) struct Lower<'a> {
    pub(crate) i: &'a Instruction,
    pub(crate) ops: &'a mut Vec<Op>,
    /// The basic block's first op.
    pub(crate) start: usize,
}

impl Lower<'_> {
    /// The whole instruction.
    pub(crate) fn instruction(&mut self) -> Flow {
        let first = self.ops.len();
        let flow = self.by_mnemonic();
        self.seal(first);
        flow
    }

    /// An instruction of more than 15 bytes.
    pub(crate) fn too_long(&mut self) -> Flow {
        let first = self.ops.len();
        let flow = self.refused();
        self.seal(first);
        flow
    }

    /// Writes the instruction's length and count into its last op. The ops before it can be
    /// blocked, or change only scratch slots. The code for CALL and fused ops has done this itself.
    fn seal(&mut self, first: usize) {
        let whole = self.whole();
        let Some(ops) = self.ops.get_mut(first..) else {
            return;
        };
        if ops.iter().all(|op| op.len == 0)
            && let Some(last) = ops.iter_mut().rev().find(|op| op.code != Code::Links)
        {
            last.len = whole;
        }
    }

    /// This whole instruction, as the `len` of an op.
    pub(crate) fn whole(&self) -> u8 {
        self.i.len() as u8 | 1 << 5
    }

    fn by_mnemonic(&mut self) -> Flow {
        use Mnemonic as M;
        match self.i.mnemonic() {
            M::Mov => self.mov(),
            M::Lea => self.lea(),
            M::Add => self.alu(alu::ADD),
            M::Or => self.alu(alu::OR),
            M::Adc => self.alu(alu::ADC),
            M::Sbb => self.alu(alu::SBB),
            M::And => self.alu(alu::AND),
            M::Sub => self.alu(alu::SUB),
            M::Xor => self.alu(alu::XOR),
            M::Cmp => self.alu(alu::CMP),
            M::Test => self.alu(alu::TEST),
            M::Shl | M::Sal => self.shift(shift::SHL),
            M::Shr => self.shift(shift::SHR),
            M::Sar => self.shift(shift::SAR),
            M::Movzx => self.extend(Code::MovZx),
            M::Movsx | M::Movsxd => self.extend(Code::MovSx),
            M::Inc => self.unary(Code::Inc, [Code::IncR32, Code::IncR64]),
            M::Dec => self.unary(Code::Dec, [Code::DecR32, Code::DecR64]),
            M::Neg => self.unary(Code::Neg, [Code::NegR32, Code::NegR64]),
            M::Imul if self.i.op_count() > 1 => self.multiply(),
            M::Push => self.push(),
            M::Pop => self.pop(),
            M::Jmp => self.jump(),
            M::Call => self.call(),
            M::Ret => self.ret(),
            _ => match self.i.condition_code() {
                ConditionCode::None => self.rare(),
                cc => self.conditional(cc as u8 - 1),
            },
        }
    }

    pub(crate) fn emit(&mut self, op: Op) -> Flow {
        self.ops.push(op);
        Flow::On
    }

    /// Ends the basic block with a branch and its links.
    pub(crate) fn emit_branch(&mut self, op: Op) -> Flow {
        self.ops.push(op);
        self.ops.push(Op::unlinked(0));
        Flow::End
    }

    /// log2 of operand `n`'s bytes.
    pub(crate) fn width(&self, n: u32) -> u8 {
        let bytes = match self.i.op_kind(n) {
            OpKind::Register => self.i.op_register(n).size(),
            OpKind::Memory => self.i.memory_size().size(),
            _ => 8,
        };
        bytes.max(1).trailing_zeros().min(3) as u8
    }

    pub(crate) fn is_memory(&self, n: u32) -> bool {
        self.i.op_kind(n) == OpKind::Memory
    }

    pub(crate) fn is_register(&self, n: u32) -> bool {
        self.i.op_kind(n) == OpKind::Register
    }

    /// The slot of register operand `n`.
    pub(crate) fn slot(&self, n: u32) -> u8 {
        slot(self.i.op_register(n))
    }

    /// An op of width `width` with the r/m operand `e` in `dst` or memory, and `g` (if any) in
    /// `src` or `imm`.
    pub(crate) fn form(&mut self, code: Code, width: u8, e: u32, g: Option<u32>) -> Op {
        let mut op = Op {
            form: width << 2,
            ..Op::new(code)
        };
        if self.i.has_lock_prefix() {
            op.form |= LOCKED;
        }
        match g {
            Some(g) if self.is_register(g) => op.src = self.slot(g),
            Some(g) => {
                op.form |= IMMEDIATE;
                op.imm = self.i.immediate(g) as i32;
            }
            None => {}
        }
        if self.is_memory(e) {
            self.memory(&mut op);
        } else {
            op.dst = self.slot(e);
        }
        op
    }

    /// Fills in the memory operand. Earlier ops compute the parts that do not fit into it.
    pub(crate) fn memory(&mut self, op: &mut Op) {
        let segment = match self.i.memory_segment() {
            Register::FS => 1,
            Register::GS => 2,
            _ => 0,
        };
        let (base, index) = (self.i.memory_base(), self.i.memory_index());
        let narrow = base.is_gpr32() || index.is_gpr32() || base == Register::EIP;
        let displacement = self.i.memory_displacement64();
        op.form |= MEMORY | self.i.memory_index_scale().trailing_zeros() as u8;
        op.index = address_slot(index);
        if matches!(base, Register::None | Register::RIP | Register::EIP) {
            op.base = ZERO;
            op.disp = displacement as i32;
            if op.disp as i64 as u64 != displacement {
                self.emit(constant(TEMP, displacement));
                (op.base, op.disp) = (TEMP, 0);
            }
        } else {
            op.base = address_slot(base);
            op.disp = displacement as i32;
        }
        if segment != 0 || narrow {
            self.emit(Op {
                code: Code::Address,
                dst: TEMP,
                src: segment,
                aux: narrow.into(),
                form: op.form & 3,
                len: 0,
                imm: 0,
                ..*op
            });
            (op.base, op.index, op.disp) = (TEMP, ZERO, 0);
            op.form &= !3;
        }
    }

    /// If [`Lower::memory`] computes the address by an earlier op, removes the segment's base from
    /// that op. Returns another op: the caller adds an `index` and a `disp` to it, and emits it.
    /// This op wraps a 32-bit offset, and then adds the base.
    pub(crate) fn split_address(&mut self) -> Option<Op> {
        let address = self.ops.last_mut().filter(|op| op.code == Code::Address)?;
        let rest = Op {
            base: TEMP,
            index: ZERO,
            disp: 0,
            form: 0,
            ..*address
        };
        address.src = 0;
        Some(rest)
    }

    fn mov(&mut self) -> Flow {
        let i = self.i;
        let special = |n: u32| {
            self.is_register(n) && {
                let r = i.op_register(n);
                r.is_segment_register() || r.is_cr() || r.is_dr() || r.is_tr()
            }
        };
        if special(0) || special(1) {
            return self.mov_special();
        }
        let (width, plain) = (self.width(0), self.is_plain(0) && self.is_plain(1));
        let op = match (self.is_memory(0), self.is_memory(1)) {
            (true, _) => self.form(Code::MovE, width, 0, Some(1)),
            (_, true) => {
                let mut op = self.form(Code::MovG, width, 1, Some(0));
                if width >= 2 {
                    op.dst = op.src;
                    op.code = by_width(width, [Code::Load32, Code::Load64]);
                }
                return self.emit(op);
            }
            _ if width == 3 && !self.is_register(1) => {
                let value = i.immediate(1);
                let slot = self.slot(0);
                if value as i32 as i64 as u64 != value {
                    return self.emit(constant(slot, value));
                }
                self.form(Code::MovE, width, 0, Some(1))
            }
            _ => self.form(Code::MovE, width, 0, Some(1)),
        };
        let code = match (op.has(MEMORY), op.has(IMMEDIATE), width) {
            (false, false, 2) => Code::MovRr32,
            (false, false, 3) => Code::MovRr64,
            (false, true, 2) => Code::MovRi32,
            (false, true, 3) => Code::MovRi64,
            (true, false, 0) if plain => Code::Store8,
            (true, false, 1) => Code::Store16,
            (true, false, 2) => Code::Store32,
            (true, false, 3) => Code::Store64,
            (true, true, 0) => Code::StoreImm8,
            (true, true, 2) => Code::StoreImm32,
            (true, true, 3) => Code::StoreImm64,
            _ => Code::MovE,
        };
        self.emit(Op { code, ..op })
    }

    /// Not a second-byte register.
    fn is_plain(&self, n: u32) -> bool {
        !self.is_register(n) || self.slot(n) < HIGH
    }

    fn lea(&mut self) -> Flow {
        let width = self.width(0);
        let mut op = Op {
            form: width << 2,
            ..Op::new(Code::Lea64)
        };
        // LEA takes only the offset: no segment base, whatever the prefix.
        let mut bare = *self.i;
        bare.set_segment_prefix(Register::None);
        let (start, dst) = (self.start, self.slot(0));
        Lower {
            i: &bare,
            ops: self.ops,
            start,
        }
        .memory(&mut op);
        op.form &= !MEMORY;
        if width == 1 {
            self.emit(Op { dst: TEMP, ..op });
            return self.emit(Op {
                form: 1 << 2,
                dst,
                src: TEMP,
                ..Op::new(Code::MovE)
            });
        }
        op.code = by_width(width, [Code::Lea32, Code::Lea64]);
        self.emit(Op { dst, ..op })
    }

    fn alu(&mut self, kind: u8) -> Flow {
        let width = self.width(0);
        if self.is_memory(1) && kind != alu::TEST {
            let op = self.form(Code::AluReverse, width, 1, Some(0));
            return self.emit(match hot_load(kind, width) {
                Some(code) => Op {
                    code,
                    dst: op.src,
                    ..op
                },
                None => Op { aux: kind, ..op },
            });
        }
        // TEST is symmetric; iced may put memory second.
        let (e, g) = if self.is_memory(1) { (1, 0) } else { (0, 1) };
        let op = self.form(Code::Alu, width, e, Some(g));
        let plain = self.is_plain(0) && self.is_plain(1);
        let registers = if plain { Plain } else { SecondByte };
        let Some(code) = hot_alu(kind, &op, registers) else {
            return self.emit(Op { aux: kind, ..op });
        };
        let op = Op { code, ..op };
        if op.has(MEMORY) || matches!(kind, alu::CMP | alu::TEST) {
            return self.emit(op);
        }
        // dst = base kind src, or dst = src kind imm.
        if op.has(IMMEDIATE) {
            self.emit_copying(Op { src: op.dst, ..op })
        } else {
            self.emit_copying(Op { base: op.dst, ..op })
        }
    }

    /// Emits a three-operand register op. If the basic block's last op is a move of the same width
    /// into its destination, the two are merged: x86's copy-then-change idiom then costs one
    /// dispatch.
    fn emit_copying(&mut self, op: Op) -> Flow {
        let wanted = by_width(op.width(), [Code::MovRr32, Code::MovRr64]);
        let whole = self.whole();
        match self.ops[self.start..].last_mut() {
            // A move into TARGET is no separate instruction.
            Some(copy) if copy.code == wanted && copy.dst == op.dst && copy.len != 0 => {
                let through = |slot: u8| if slot == op.dst { copy.src } else { slot };
                let (src, base) = (through(op.src), through(op.base));
                *copy = Op {
                    src,
                    base,
                    len: copy.len + whole,
                    ..op
                };
                Flow::On
            }
            _ => self.emit(op),
        }
    }

    fn shift(&mut self, kind: u8) -> Flow {
        let width = self.width(0);
        let by_cl = self.is_register(1);
        let mut op = self.form(Code::Shift, width, 0, (!by_cl).then_some(1));
        op.aux = kind;
        let count = op.imm & if width == 3 { 63 } else { 31 };
        if !by_cl && !op.has(MEMORY) && width >= 2 && count != 0 {
            op.imm = count;
            op.src = op.dst;
            op.code = match kind {
                shift::SHL => by_width(width, [Code::ShlRi32, Code::ShlRi64]),
                shift::SHR => by_width(width, [Code::ShrRi32, Code::ShrRi64]),
                _ => by_width(width, [Code::SarRi32, Code::SarRi64]),
            };
            return self.emit_copying(op);
        }
        self.emit(op)
    }

    fn extend(&mut self, code: Code) -> Flow {
        let (to, from) = (self.width(0), self.width(1));
        let plain = self.is_plain(1);
        let op = Op {
            aux: to,
            ..self.form(code, from, 1, Some(0))
        };
        let hot = match (code == Code::MovZx, op.has(MEMORY), from, to) {
            _ if !plain => None,
            (true, true, 0, 2 | 3) => Some(Code::LoadZx8),
            (true, true, 1, 2 | 3) => Some(Code::LoadZx16),
            (true, false, 0, 2 | 3) => Some(Code::MovZx8),
            (true, false, 1, 2 | 3) => Some(Code::MovZx16),
            (false, true, 0, 2) => Some(Code::LoadSx8To32),
            (false, true, 0, 3) => Some(Code::LoadSx8To64),
            (false, true, 1, 2) => Some(Code::LoadSx16To32),
            (false, true, 1, 3) => Some(Code::LoadSx16To64),
            (false, true, 2, 3) => Some(Code::LoadSx32To64),
            (false, false, 0, 2) => Some(Code::MovSx8To32),
            (false, false, 0, 3) => Some(Code::MovSx8To64),
            (false, false, 1, 2) => Some(Code::MovSx16To32),
            (false, false, 1, 3) => Some(Code::MovSx16To64),
            (false, false, 2, 3) => Some(Code::MovSx32To64),
            _ => None,
        };
        self.emit(match hot {
            // The hot forms go from `src` to `dst`, the general ones from E to G.
            Some(code) => Op {
                code,
                dst: op.src,
                src: op.dst,
                ..op
            },
            None => op,
        })
    }

    fn unary(&mut self, code: Code, hot: [Code; 2]) -> Flow {
        let width = self.width(0);
        let op = self.form(code, width, 0, None);
        let is_hot = !op.has(MEMORY) && width >= 2;
        self.emit(Op {
            code: if is_hot { by_width(width, hot) } else { code },
            ..op
        })
    }

    fn multiply(&mut self) -> Flow {
        let width = self.width(0);
        let three = self.i.op_count() == 3;
        let mut op = self.form(Code::ImulG, width, 1, Some(0));
        if three {
            op.imm = self.i.immediate(2) as i32;
            op.code = Code::ImulGImm;
        }
        if width >= 2 && !(three && op.has(MEMORY)) {
            let codes = match (three, op.has(MEMORY)) {
                (true, _) => [Code::ImulRri32, Code::ImulRri64],
                (_, true) => [Code::ImulRm32, Code::ImulRm64],
                _ => [Code::ImulRr32, Code::ImulRr64],
            };
            op = Op {
                code: by_width(width, codes),
                dst: op.src,
                src: op.dst,
                ..op
            };
        }
        self.emit(op)
    }

    /// Jcc, SETcc, CMOVcc and LOOPcc carry a condition.
    fn conditional(&mut self, cc: u8) -> Flow {
        let i = self.i;
        if i.is_jcc_short_or_near() {
            return self.jcc(cc);
        }
        if i.op_count() == 1 && !i.is_loopcc() && !i.is_loop() {
            let op = Op {
                aux: cc,
                ..self.form(Code::SetccE, 0, 0, None)
            };
            let hot = !op.has(MEMORY) && op.dst < HIGH;
            return self.emit(Op {
                code: if hot { Code::SetccR } else { op.code },
                ..op
            });
        }
        if i.op_count() == 2 && i.op0_register().is_gpr() {
            let width = self.width(0);
            let mut op = Op {
                aux: cc,
                ..self.form(Code::CmovG, width, 1, Some(0))
            };
            if !op.has(MEMORY) && width >= 2 {
                let code = by_width(width, [Code::CmovRr32, Code::CmovRr64]);
                op = Op {
                    code,
                    dst: op.src,
                    src: op.dst,
                    ..op
                };
            }
            return self.emit(op);
        }
        self.rare()
    }
}

/// The register file's slot of a general register.
pub(crate) fn slot(r: Register) -> u8 {
    match r {
        Register::AH | Register::CH | Register::DH | Register::BH => {
            HIGH + (r as u8 - Register::AH as u8)
        }
        // Counting the 8-bit registers from AL would give R9L the number 13.
        _ => r.full_register().number() as u8,
    }
}

fn address_slot(r: Register) -> u8 {
    if r.is_gpr64() || r.is_gpr32() {
        r.number() as u8
    } else {
        ZERO
    }
}
