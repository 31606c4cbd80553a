//! Translates one instruction to ops: data processing with registers.

use crate::lower::{Lower, Lowered, Unallocated, Width, by_width};
use crate::op::{Code, Op, TEMP, ZERO};

/// The operation of [`Code::Unary`], in its `aux`: the opcode field of the class.
pub(crate) mod unary {
    pub(crate) const RBIT: u8 = 0;
    pub(crate) const REV16: u8 = 1;
    pub(crate) const REV32: u8 = 2;
    pub(crate) const REV64: u8 = 3;
    pub(crate) const CLZ: u8 = 4;
    pub(crate) const CLS: u8 = 5;
}

/// A shift of the second operand.
const LSL: u32 = 0;
const LSR: u32 = 1;
const ASR: u32 = 2;

/// The ops of one operation with a shifted operand, for 32 and 64 bits.
struct Shifted {
    plain: [Code; 2],
    /// By LSL and LSR.
    shifted: Option<[[Code; 2]; 2]>,
}

impl Lower<'_> {
    /// An op with the registers of three-operand instructions.
    fn three(&self, code: Code) -> Op {
        Op {
            dst: self.destination(),
            base: self.source(5),
            src: self.source(16),
            ..Op::new(code)
        }
    }

    pub(crate) fn two_source(&mut self) -> Lowered {
        let width = self.width();
        let codes = match self.field(10, 6) {
            0b000010 => [Code::Udiv32, Code::Udiv64],
            0b000011 => [Code::Sdiv32, Code::Sdiv64],
            0b001000 => [Code::Lslv32, Code::Lslv64],
            0b001001 => [Code::Lsrv32, Code::Lsrv64],
            0b001010 => [Code::Asrv32, Code::Asrv64],
            0b001011 => [Code::Rorv32, Code::Rorv64],
            crc @ 0b010000..=0b010111 => {
                let size = crc & 3;
                if (size == 3) != (width == Width::X) {
                    return Err(Unallocated);
                }
                let aux = crc as u8 & 7;
                let op = self.three(Code::Crc32);
                return self.emit(Op { aux, ..op });
            }
            _ => return Err(Unallocated),
        };
        self.emit(self.three(by_width(width, codes)))
    }

    pub(crate) fn one_source(&mut self) -> Lowered {
        let width = self.width();
        let code = match (self.field(10, 6) as u8, width) {
            (unary::CLZ, _) => by_width(width, [Code::Clz32, Code::Clz64]),
            (unary::REV32, Width::W) => Code::Rev32,
            (unary::REV64, Width::X) => Code::Rev64,
            (unary::REV64, Width::W) => return Err(Unallocated),
            (unary::RBIT..=unary::CLS, _) => Code::Unary,
            _ => return Err(Unallocated),
        };
        self.emit(Op {
            dst: self.destination(),
            src: self.source(5),
            aux: self.field(10, 6) as u8,
            form: width as u8,
            ..Op::new(code)
        })
    }

    pub(crate) fn logical_shifted(&mut self) -> Lowered {
        let width = self.width();
        let (kind, amount) = (self.field(22, 2), self.field(10, 6));
        if amount >= width.bits() {
            return Err(Unallocated);
        }
        let op = self.three(Code::Nop);
        let codes = match (self.field(29, 2), self.bit(21)) {
            // MOV.
            (1, false) if op.base == ZERO && amount == 0 => {
                let code = by_width(width, [Code::MovRr32, Code::MovRr64]);
                return self.emit(Op { code, ..op });
            }
            (0, false) => Shifted {
                plain: [Code::AndRr32, Code::AndRr64],
                shifted: Some([
                    [Code::AndLsl32, Code::AndLsl64],
                    [Code::AndLsr32, Code::AndLsr64],
                ]),
            },
            (1, false) => Shifted {
                plain: [Code::OrrRr32, Code::OrrRr64],
                shifted: Some([
                    [Code::OrrLsl32, Code::OrrLsl64],
                    [Code::OrrLsr32, Code::OrrLsr64],
                ]),
            },
            (2, false) => Shifted {
                plain: [Code::EorRr32, Code::EorRr64],
                shifted: Some([
                    [Code::EorLsl32, Code::EorLsl64],
                    [Code::EorLsr32, Code::EorLsr64],
                ]),
            },
            (3, false) => plain([Code::AndsRr32, Code::AndsRr64]),
            (0, true) => plain([Code::BicRr32, Code::BicRr64]),
            (1, true) => plain([Code::OrnRr32, Code::OrnRr64]),
            (2, true) => plain([Code::EonRr32, Code::EonRr64]),
            _ => plain([Code::BicsRr32, Code::BicsRr64]),
        };
        self.shifted(op, codes, kind, amount)
    }

    pub(crate) fn add_sub_shifted(&mut self) -> Lowered {
        let width = self.width();
        let (kind, amount) = (self.field(22, 2), self.field(10, 6));
        if kind == 3 || amount >= width.bits() {
            return Err(Unallocated);
        }
        let codes = match (self.bit(30), self.bit(29)) {
            (false, false) => Shifted {
                plain: [Code::AddRr32, Code::AddRr64],
                shifted: Some([
                    [Code::AddLsl32, Code::AddLsl64],
                    [Code::AddLsr32, Code::AddLsr64],
                ]),
            },
            (true, false) => Shifted {
                plain: [Code::SubRr32, Code::SubRr64],
                shifted: Some([
                    [Code::SubLsl32, Code::SubLsl64],
                    [Code::SubLsr32, Code::SubLsr64],
                ]),
            },
            (false, true) => plain([Code::AddsRr32, Code::AddsRr64]),
            (true, true) => plain([Code::SubsRr32, Code::SubsRr64]),
        };
        let op = self.three(Code::Nop);
        self.shifted(op, codes, kind, amount)
    }

    /// Emits an operation with a shifted `src`: as one op, or after a shift into [`TEMP`].
    fn shifted(&mut self, op: Op, codes: Shifted, kind: u32, amount: u32) -> Lowered {
        let width = self.width();
        let imm = amount as i32;
        if amount == 0 {
            let code = by_width(width, codes.plain);
            return self.emit(Op { code, ..op });
        }
        if let (Some(shifted), LSL | LSR) = (codes.shifted, kind) {
            let code = by_width(width, shifted[kind as usize]);
            return self.emit(Op { code, imm, ..op });
        }
        let shift = match kind {
            LSL => [Code::LslRi32, Code::LslRi64],
            LSR => [Code::LsrRi32, Code::LsrRi64],
            ASR => [Code::AsrRi32, Code::AsrRi64],
            _ => [Code::Extr32, Code::Extr64],
        };
        self.emit(Op {
            dst: TEMP,
            src: op.src,
            base: op.src,
            imm,
            ..Op::new(by_width(width, shift))
        })?;
        let code = by_width(width, codes.plain);
        self.emit(Op {
            code,
            src: TEMP,
            ..op
        })
    }

    pub(crate) fn add_sub_extended(&mut self) -> Lowered {
        let (width, option, amount) = (self.width(), self.field(13, 3), self.field(10, 3));
        if amount > 4 {
            return Err(Unallocated);
        }
        let (negative, flags) = (self.bit(30), self.bit(29));
        let op = Op {
            dst: if flags {
                self.destination()
            } else {
                self.or_sp(0)
            },
            base: self.or_sp(5),
            ..self.three(Code::Nop)
        };
        let plain = match (negative, flags) {
            (false, false) => [Code::AddRr32, Code::AddRr64],
            (true, false) => [Code::SubRr32, Code::SubRr64],
            (false, true) => [Code::AddsRr32, Code::AddsRr64],
            (true, true) => [Code::SubsRr32, Code::SubsRr64],
        };
        // SXTW and UXTW, to add an index to an address.
        if width == Width::X && matches!(option, 2 | 6) && !negative && !flags {
            let code = match option {
                2 => Code::AddUxtw,
                _ => Code::AddSxtw,
            };
            let imm = amount as i32;
            return self.emit_checked(Op { code, imm, ..op });
        }
        let src = self.extended(op.src, option, amount)?;
        let code = by_width(width, plain);
        self.emit_checked(Op { code, src, ..op })
    }

    /// The slot of `src`, extended by `option` and then shifted left. If this is not `src` itself,
    /// an op before puts the value into [`TEMP`].
    pub(crate) fn extended(
        &mut self,
        src: u8,
        option: u32,
        amount: u32,
    ) -> Result<u8, Unallocated> {
        let bits = 8 << (option & 3);
        if bits == 64 && amount == 0 {
            return Ok(src);
        }
        let op = Op {
            dst: TEMP,
            src,
            ..Op::new(Code::Nop)
        };
        let op = if option & 4 == 0 {
            // The field of `bits` at bit 0 goes to bit `amount`.
            Op {
                code: Code::Ubfiz,
                aux: bits as u8,
                imm: amount as i32,
                ..op
            }
        } else {
            let up = 64 - bits;
            Op {
                code: if up < amount {
                    Code::LslRi64
                } else {
                    Code::SignField64
                },
                aux: up as u8,
                imm: if up < amount { amount } else { up - amount } as i32,
                ..op
            }
        };
        self.emit(op)?;
        Ok(TEMP)
    }

    pub(crate) fn carry(&mut self) -> Lowered {
        let op = Op {
            aux: self.field(29, 2) as u8,
            form: self.width() as u8,
            ..self.three(Code::Carry)
        };
        self.emit(op)
    }

    pub(crate) fn conditional_compare(&mut self) -> Lowered {
        let width = self.width();
        let src = if self.bit(11) {
            self.constant(TEMP, self.field(16, 5).into())?;
            TEMP
        } else {
            self.source(16)
        };
        let codes = if self.bit(30) {
            [Code::Ccmp32, Code::Ccmp64]
        } else {
            [Code::Ccmn32, Code::Ccmn64]
        };
        self.emit(Op {
            src,
            base: self.source(5),
            aux: self.field(12, 4) as u8,
            imm: (self.field(0, 4) << 28) as i32,
            ..Op::new(by_width(width, codes))
        })
    }

    pub(crate) fn conditional_select(&mut self) -> Lowered {
        let codes = match (self.bit(30), self.bit(10)) {
            (false, false) => [Code::Csel32, Code::Csel64],
            (false, true) => [Code::Csinc32, Code::Csinc64],
            (true, false) => [Code::Csinv32, Code::Csinv64],
            (true, true) => [Code::Csneg32, Code::Csneg64],
        };
        if self.bit(29) {
            return Err(Unallocated);
        }
        let op = Op {
            aux: self.field(12, 4) as u8,
            ..self.three(by_width(self.width(), codes))
        };
        self.emit(op)
    }

    pub(crate) fn three_source(&mut self) -> Lowered {
        let (width, subtract) = (self.width(), self.bit(15));
        let codes = match (self.field(21, 3), subtract) {
            (0, false) => [Code::Madd32, Code::Madd64],
            (0, true) => [Code::Msub32, Code::Msub64],
            _ if width == Width::W => return Err(Unallocated),
            (1, false) => [Code::Smaddl; 2],
            (1, true) => [Code::Smsubl; 2],
            (2, false) => [Code::Smulh; 2],
            (5, false) => [Code::Umaddl; 2],
            (5, true) => [Code::Umsubl; 2],
            (6, false) => [Code::Umulh; 2],
            _ => return Err(Unallocated),
        };
        let op = Op {
            index: self.source(10),
            ..self.three(by_width(width, codes))
        };
        self.emit(op)
    }
}

/// An operation without its own ops for shifted operands.
const fn plain(plain: [Code; 2]) -> Shifted {
    Shifted {
        plain,
        shifted: None,
    }
}
