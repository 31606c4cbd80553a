//! Translates one instruction to ops. Here: data processing with an immediate, and helpers for all
//! classes.

use crate::encoding::{Class, class};
use crate::op::{Code, Op, SINK, SP, TEMP, ZERO};

/// Whether the basic block continues after an instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flow {
    /// The next instruction follows in the basic block.
    On,
    /// A branch, a system op or an undefined word ended it.
    End,
}

/// An operand is not allocated: the instruction is undefined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Unallocated;

pub(crate) type Lowered = Result<Flow, Unallocated>;

/// Whether an instruction is decoded with its neighbours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Extent {
    /// It is part of a basic block, which runs only while SP is aligned to 16 bytes.
    Block,
    /// It is stepped. SP may be misaligned.
    Alone,
}

/// Appends the ops of one instruction to the arena.
pub(crate) struct Lower<'a> {
    pub(crate) word: u32,
    pub(crate) extent: Extent,
    /// Its address.
    pub(crate) pc: u64,
    pub(crate) ops: &'a mut Vec<Op>,
    /// The basic block's first op.
    pub(crate) start: usize,
}

/// The code for 32 or 64 bits, from a pair.
pub(crate) fn by_width(wide: Width, codes: [Code; 2]) -> Code {
    codes[wide as usize]
}

/// Of a general register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Width {
    W,
    X,
}

impl Width {
    pub(crate) const fn bits(self) -> u32 {
        match self {
            Self::W => 32,
            Self::X => 64,
        }
    }

    /// All ones.
    pub(crate) const fn mask(self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }
}

impl Lower<'_> {
    /// The whole instruction.
    pub(crate) fn instruction(&mut self) -> Flow {
        let first = self.ops.len();
        let lowered = class(self.word).map_or(Err(Unallocated), |class| self.by_class(class));
        let flow = lowered.unwrap_or_else(|Unallocated| {
            self.ops.truncate(first);
            self.ops.push(Op::new(Code::Undefined));
            Flow::End
        });
        self.seal(first);
        flow
    }

    /// Counts the instruction in its last op. Each op before it changes only scratch slots, or can
    /// be blocked, which leaves the instruction incomplete. An op for two instructions has its
    /// count already.
    fn seal(&mut self, first: usize) {
        let Some(ops) = self.ops.get_mut(first..) else {
            return;
        };
        if ops.iter().all(|op| op.len == 0)
            && let Some(last) = ops.iter_mut().rev().find(|op| op.code != Code::Links)
        {
            last.len = 1;
        }
    }

    fn by_class(&mut self, class: Class) -> Lowered {
        match class {
            Class::Adr => self.adr(),
            Class::AddSubImmediate => self.add_sub_immediate(),
            Class::LogicalImmediate => self.logical_immediate(),
            Class::MoveWide => self.move_wide(),
            Class::Bitfield => self.bitfield(),
            Class::Extract => self.extract(),
            Class::Branch => self.branch(),
            Class::CompareBranch => self.compare_branch(),
            Class::TestBranch => self.test_branch(),
            Class::ConditionalBranch => self.conditional_branch(),
            Class::BranchRegister => self.branch_register(),
            Class::Hint | Class::Isb => self.emit(Op::new(Code::Nop)),
            Class::Clrex => self.emit(Op::new(Code::Clrex)),
            Class::Barrier => self.barrier(),
            Class::ZeroBlock => self.zero_block(),
            Class::System => self.system(),
            Class::Exclusive => self.exclusive(),
            Class::ExclusivePair => self.exclusive_pair(),
            Class::Ordered | Class::LoadRcpc => self.ordered(class),
            Class::Cas => self.compare_and_swap(),
            Class::CasPair => self.compare_and_swap_pair(),
            Class::Atomic | Class::Swap => self.atomic(),
            Class::Literal => self.literal(),
            Class::Pair => self.pair(),
            Class::Unscaled => self.unscaled(),
            Class::PostIndex => self.post_index(),
            Class::Unprivileged => self.unprivileged(),
            Class::PreIndex => self.pre_index(),
            Class::RegisterOffset => self.register_offset(),
            Class::UnsignedOffset => self.unsigned_offset(),
            Class::TwoSource => self.two_source(),
            Class::OneSource => self.one_source(),
            Class::LogicalShifted => self.logical_shifted(),
            Class::AddSubShifted => self.add_sub_shifted(),
            Class::AddSubExtended => self.add_sub_extended(),
            Class::Carry => self.carry(),
            Class::ConditionalCompare => self.conditional_compare(),
            Class::ConditionalSelect => self.conditional_select(),
            Class::ThreeSource => self.three_source(),
        }
    }

    pub(crate) fn emit(&mut self, op: Op) -> Lowered {
        self.ops.push(op);
        Ok(Flow::On)
    }

    /// Emits an op that may have SP as its destination. If the op can misalign SP, the value goes
    /// through a checking op.
    pub(crate) fn emit_checked(&mut self, op: Op) -> Lowered {
        let keeps = op.code == Code::AddRi64 && op.src == SP && op.imm & 15 == 0;
        if op.dst != SP || keeps {
            return self.emit(op);
        }
        self.emit(Op { dst: TEMP, ..op })?;
        self.emit(Op {
            dst: SP,
            src: TEMP,
            ..Op::new(Code::SetSp)
        })
    }

    /// Emits a check of SP in front of an access whose base is `base`.
    pub(crate) fn check_base(&mut self, base: u8) {
        if base == SP && self.extent == Extent::Alone {
            self.ops.push(Op::new(Code::CheckSp));
        }
    }

    /// The field of `width` bits from `low` on.
    pub(crate) fn field(&self, low: u32, width: u32) -> u32 {
        self.word >> low & ((1 << width) - 1)
    }

    /// The field as a signed number.
    pub(crate) fn signed(&self, low: u32, width: u32) -> i32 {
        (self.word << (32 - low - width)) as i32 >> (32 - width)
    }

    /// Whether bit `at` is set.
    pub(crate) fn bit(&self, at: u32) -> bool {
        self.word >> at & 1 != 0
    }

    /// Bit 31, sf.
    pub(crate) fn width(&self) -> Width {
        if self.bit(31) { Width::X } else { Width::W }
    }

    /// Register field `low` as a source, where 31 is the zero register.
    pub(crate) fn source(&self, low: u32) -> u8 {
        match self.field(low, 5) as u8 {
            31 => ZERO,
            register => register,
        }
    }

    /// Register field `low` where 31 is the stack pointer.
    pub(crate) fn or_sp(&self, low: u32) -> u8 {
        // Slot 31 is the stack pointer.
        self.field(low, 5) as u8
    }

    /// The destination register, bits 4 to 0, where 31 is the zero register.
    pub(crate) fn destination(&self) -> u8 {
        destination(self.field(0, 5) as u8)
    }

    fn adr(&mut self) -> Lowered {
        let offset = self.signed(5, 19) << 2 | self.field(29, 2) as i32;
        let value = if self.bit(31) {
            (self.pc & !0xfff).wrapping_add((i64::from(offset) << 12) as u64)
        } else {
            self.pc.wrapping_add(i64::from(offset) as u64)
        };
        self.constant(self.destination(), value)
    }

    /// Puts `value` into `slot`.
    pub(crate) fn constant(&mut self, slot: u8, value: u64) -> Lowered {
        self.emit(
            Op {
                dst: slot,
                ..Op::new(Code::Const)
            }
            .with_wide(value),
        )
    }

    /// The last op, if it is a constant in `slot` that this instruction may replace.
    fn last_constant(&mut self, slot: u8) -> Option<&mut Op> {
        let last = self.ops[self.start..].last_mut()?;
        let count_fits = last.len > 0 && last.len < 4;
        (last.code == Code::Const && last.dst == slot && count_fits && slot < SP).then_some(last)
    }

    fn add_sub_immediate(&mut self) -> Lowered {
        let width = self.width();
        let value = (self.field(10, 12) << if self.bit(22) { 12 } else { 0 }) as i32;
        let (negative, src) = (self.bit(30), self.or_sp(5));
        if self.bit(29) {
            let codes = if negative {
                [Code::SubsRi32, Code::SubsRi64]
            } else {
                [Code::AddsRi32, Code::AddsRi64]
            };
            return self.emit(Op {
                dst: self.destination(),
                src,
                imm: value,
                ..Op::new(by_width(width, codes))
            });
        }
        let (dst, imm) = (self.or_sp(0), if negative { -value } else { value });
        // ADRP and ADD, to the same register.
        if width == Width::X
            && dst == src
            && let Some(last) = self.last_constant(src)
        {
            let value = last.wide().wrapping_add(imm as i64 as u64);
            *last = Op {
                len: last.len + 1,
                ..*last
            }
            .with_wide(value);
            return Ok(Flow::On);
        }
        if imm == 0 && width == Width::X {
            return self.emit_checked(Op {
                dst,
                src,
                ..Op::new(Code::MovRr64)
            });
        }
        self.emit_checked(Op {
            dst,
            src,
            imm,
            ..Op::new(by_width(width, [Code::AddRi32, Code::AddRi64]))
        })
    }

    fn logical_immediate(&mut self) -> Lowered {
        let width = self.width();
        let (n, immr, imms) = (self.field(22, 1), self.field(16, 6), self.field(10, 6));
        let value = bitmask(width, n, immr, imms).ok_or(Unallocated)?;
        let (opc, src) = (self.field(29, 2), self.source(5));
        let dst = if opc == 3 {
            self.destination()
        } else {
            self.or_sp(0)
        };
        let codes = match opc {
            0 => [Code::AndRi32, Code::AndRi64],
            1 if src == ZERO && dst != SP => return self.constant(dst, value),
            1 => [Code::OrrRi32, Code::OrrRi64],
            2 => [Code::EorRi32, Code::EorRi64],
            _ => [Code::AndsRi32, Code::AndsRi64],
        };
        self.emit_checked(
            Op {
                dst,
                src,
                ..Op::new(by_width(width, codes))
            }
            .with_wide(value),
        )
    }

    fn move_wide(&mut self) -> Lowered {
        let (width, shift) = (self.width(), self.field(21, 2) * 16);
        if shift >= width.bits() {
            return Err(Unallocated);
        }
        let (value, dst) = (u64::from(self.field(5, 16)) << shift, self.destination());
        match self.field(29, 2) {
            0 => self.constant(dst, !value & width.mask()),
            2 => self.constant(dst, value),
            3 => self.move_keep(width, dst, shift, value),
            _ => Err(Unallocated),
        }
    }

    fn move_keep(&mut self, width: Width, dst: u8, shift: u32, value: u64) -> Lowered {
        let keep = !(0xffff << shift) & width.mask();
        if let Some(last) = self.last_constant(dst) {
            let value = last.wide() & keep | value;
            *last = Op {
                len: last.len + 1,
                ..*last
            }
            .with_wide(value);
            return Ok(Flow::On);
        }
        self.emit(Op {
            dst,
            src: self.source(0),
            aux: shift as u8,
            imm: self.field(5, 16) as i32,
            ..Op::new(by_width(width, [Code::Movk32, Code::Movk64]))
        })
    }

    fn bitfield(&mut self) -> Lowered {
        let (width, opc) = (self.width(), self.field(29, 2));
        let (r, s) = (self.field(16, 6), self.field(10, 6));
        let bits = width.bits();
        if opc == 3 || self.bit(22) != self.bit(31) || r >= bits || s >= bits {
            return Err(Unallocated);
        }
        let op = Op {
            dst: self.destination(),
            src: self.source(5),
            ..Op::new(Code::Nop)
        };
        // SBFX, UBFX and BFXIL take the field of `length` bits at `r`. The others put it at `low`.
        let (extracts, length) = (s >= r, if s >= r { s - r + 1 } else { s + 1 });
        let low = if extracts { 0 } else { bits - r };
        match opc {
            0 => self.signed_field(op, width, [s, length, low]),
            1 => {
                let field = (u64::MAX >> (64 - length)) << low;
                let code = by_width(width, [Code::Insert32, Code::Insert64]);
                // The source is rotated right by `r`, then the field is taken in place.
                let op = Op {
                    code,
                    base: self.source(0),
                    aux: r as u8,
                    ..op
                };
                self.emit(op.with_wide(field))
            }
            _ if extracts && s == bits - 1 => self.emit(Op {
                code: by_width(width, [Code::LsrRi32, Code::LsrRi64]),
                imm: r as i32,
                ..op
            }),
            _ if extracts && r == 0 => self.emit(
                Op {
                    code: Code::AndRi64,
                    ..op
                }
                .with_wide(u64::MAX >> (64 - length)),
            ),
            _ if extracts => self.emit(Op {
                code: Code::Ubfx,
                aux: length as u8,
                imm: r as i32,
                ..op
            }),
            _ if low + length == bits => self.emit(Op {
                code: by_width(width, [Code::LslRi32, Code::LslRi64]),
                imm: low as i32,
                ..op
            }),
            _ => self.emit(Op {
                code: Code::Ubfiz,
                aux: length as u8,
                imm: low as i32,
                ..op
            }),
        }
    }

    fn signed_field(&mut self, op: Op, width: Width, [s, length, low]: [u32; 3]) -> Lowered {
        if low == 0 && s == length - 1 && length == 32 && width == Width::X {
            let code = Code::Sxtw;
            return self.emit(Op { code, ..op });
        }
        // The field goes up to bit 63, and then down with its sign.
        let up = 63 - s;
        let down = 64 - length - low;
        self.emit(Op {
            code: by_width(width, [Code::SignField32, Code::SignField64]),
            aux: up as u8,
            imm: down as i32,
            ..op
        })
    }

    fn extract(&mut self) -> Lowered {
        let (width, low) = (self.width(), self.field(10, 6));
        if self.bit(22) != self.bit(31) || low >= width.bits() {
            return Err(Unallocated);
        }
        self.emit(Op {
            dst: self.destination(),
            base: self.source(5),
            src: self.source(16),
            imm: low as i32,
            ..Op::new(by_width(width, [Code::Extr32, Code::Extr64]))
        })
    }
}

/// The slot of destination register `register`.
pub(crate) const fn destination(register: u8) -> u8 {
    if register == 31 { SINK } else { register }
}

/// The immediate of a logical instruction (Arm ARM, DecodeBitMasks).
pub(crate) fn bitmask(width: Width, n: u32, immr: u32, imms: u32) -> Option<u64> {
    let length = (n << 6 | !imms & 0x3f).checked_ilog2()?;
    if length == 0 || n == 1 && width == Width::W {
        return None;
    }
    let (size, levels) = (1 << length, (1 << length) - 1);
    let (ones, rotation) = ((imms & levels) + 1, immr & levels);
    if ones == size {
        return None;
    }
    let run = u64::MAX >> (64 - ones);
    let element = u64::MAX >> (64 - size);
    let rotated = (run >> rotation | run.checked_shl(size - rotation).unwrap_or(0)) & element;
    let repeated = (0..64 / size).fold(0, |value, i| value | rotated << (i * size));
    Some(repeated & width.mask())
}
