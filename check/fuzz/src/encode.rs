//! A small encoder of x86-64 instructions for the generator and the guest's runtime.
//!
//! It does not check whether a processor accepts the instruction.

/// RAX RCX RDX RBX RSP RBP RSI RDI R8 to R15, in encoding order.
pub type Reg = u8;

/// RAX.
pub const RAX: Reg = 0;
/// RCX.
pub const RCX: Reg = 1;
/// RDX.
pub const RDX: Reg = 2;
/// RBX.
pub const RBX: Reg = 3;
/// RSP.
pub const RSP: Reg = 4;
/// RSI.
pub const RSI: Reg = 6;
/// RDI.
pub const RDI: Reg = 7;

/// The second operand of ModRM.
#[derive(Clone, Copy, Debug)]
pub enum Rm {
    /// A register.
    Reg(Reg),
    /// `[base + disp]`.
    At(Reg, i32),
    /// `[base + index * 2^scale + disp]`.
    Indexed(Reg, Reg, u8, i32),
    /// `[index * 8 + disp]`, no base.
    Table(Reg, i32),
    /// `[disp]`, sign-extended.
    Abs(i32),
    /// `[rip + disp]`.
    Rip(i32),
}

/// Operand size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Size {
    /// 8 bits: the even opcode, without a prefix.
    Byte,
    /// 16 bits: prefix 66.
    Word,
    /// 32 bits.
    Long,
    /// 64 bits: REX.W.
    Quad,
}

impl Size {
    /// All.
    pub const ALL: [Self; 4] = [Self::Byte, Self::Word, Self::Long, Self::Quad];

    /// Bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Byte => 1,
            Self::Word => 2,
            Self::Long => 4,
            Self::Quad => 8,
        }
    }
}

/// Code under construction.
#[derive(Clone, Default, Debug)]
pub struct Asm {
    /// The bytes so far.
    pub bytes: Vec<u8>,
}

impl Asm {
    /// Appends these bytes unchanged.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend(bytes);
        self
    }

    /// `opcode reg, rm` with legacy `prefixes`. The opcode is used as it is for every size; the
    /// caller sets its low bit.
    pub fn op(
        &mut self,
        prefixes: &[u8],
        size: Size,
        opcode: &[u8],
        reg: Reg,
        rm: Rm,
    ) -> &mut Self {
        self.raw(prefixes);
        if size == Size::Word {
            self.raw(&[0x66]);
        }
        let (index, base) = match rm {
            Rm::Reg(r) | Rm::At(r, _) => (0, r),
            Rm::Indexed(base, index, ..) => (index, base),
            Rm::Table(index, _) => (index, 0),
            Rm::Abs(_) | Rm::Rip(_) => (0, 0),
        };
        let wide = u8::from(size == Size::Quad) << 3;
        let rex = 0x40 | wide | (reg >> 3 & 1) << 2 | (index >> 3 & 1) << 1 | base >> 3 & 1;
        // SPL, BPL, SIL and DIL need an empty REX prefix too.
        let low_byte = size == Size::Byte && (reg > 3 || matches!(rm, Rm::Reg(4..)));
        if rex != 0x40 || low_byte {
            self.raw(&[rex]);
        }
        self.raw(opcode);
        self.modrm(reg, rm)
    }

    fn modrm(&mut self, reg: Reg, rm: Rm) -> &mut Self {
        let reg = (reg & 7) << 3;
        match rm {
            Rm::Reg(r) => self.raw(&[0xc0 | reg | r & 7]),
            Rm::At(base, disp) if base & 7 == RSP => {
                self.raw(&[0x80 | reg | 4, 0x24]).raw(&disp.to_le_bytes())
            }
            Rm::At(base, disp) => self.raw(&[0x80 | reg | base & 7]).raw(&disp.to_le_bytes()),
            Rm::Indexed(base, index, scale, disp) => {
                let sib = (scale & 3) << 6 | (index & 7) << 3 | base & 7;
                self.raw(&[0x80 | reg | 4, sib]).raw(&disp.to_le_bytes())
            }
            Rm::Table(index, disp) => {
                let sib = 3 << 6 | (index & 7) << 3 | 5;
                self.raw(&[reg | 4, sib]).raw(&disp.to_le_bytes())
            }
            Rm::Abs(disp) => self.raw(&[reg | 4, 0x25]).raw(&disp.to_le_bytes()),
            Rm::Rip(disp) => self.raw(&[reg | 5]).raw(&disp.to_le_bytes()),
        }
    }

    /// `mov reg, imm64`.
    pub fn mov_imm(&mut self, reg: Reg, value: u64) -> &mut Self {
        self.raw(&[0x48 | reg >> 3, 0xb8 | reg & 7])
            .raw(&value.to_le_bytes())
    }

    /// `mov r32, imm32`.
    pub fn mov_imm32(&mut self, reg: Reg, value: u32) -> &mut Self {
        if reg > 7 {
            self.raw(&[0x41]);
        }
        self.raw(&[0xb8 | reg & 7]).raw(&value.to_le_bytes())
    }

    /// EDX:EAX := `value`.
    pub fn mov_pair(&mut self, value: u64) -> &mut Self {
        self.mov_imm32(RAX, value as u32)
            .mov_imm32(RDX, (value >> 32) as u32)
    }

    /// `mov reg, rm` of 64 bits.
    pub fn load(&mut self, reg: Reg, rm: Rm) -> &mut Self {
        self.op(&[], Size::Quad, &[0x8b], reg, rm)
    }

    /// `mov rm, reg` of 64 bits.
    pub fn store(&mut self, rm: Rm, reg: Reg) -> &mut Self {
        self.op(&[], Size::Quad, &[0x89], reg, rm)
    }

    /// `lock inc qword rm`.
    pub fn count(&mut self, rm: Rm) -> &mut Self {
        self.op(&[0xf0], Size::Quad, &[0xff], 0, rm)
    }

    /// WRMSR of `index` with `value`.
    pub fn wrmsr(&mut self, index: u32, value: u64) -> &mut Self {
        self.mov_imm32(RCX, index)
            .mov_pair(value)
            .raw(&[0x0f, 0x30])
    }

    /// A short jump with `opcode`. [`Asm::land`] sets its target later.
    pub fn jump(&mut self, opcode: u8) -> Jump {
        self.raw(&[opcode, 0]);
        Jump(self.bytes.len())
    }

    /// Makes the end of the code so far the target of `jump`.
    ///
    /// # Panics
    /// If the target is too far for a short jump.
    pub fn land(&mut self, jump: Jump) {
        let distance = i8::try_from(self.bytes.len() - jump.0).expect("a short jump");
        self.bytes[jump.0 - 1] = distance as u8;
    }
}

/// A short jump without a target yet.
#[must_use]
pub struct Jump(usize);

#[cfg(test)]
mod tests {
    use super::*;

    fn code(build: impl FnOnce(&mut Asm)) -> Vec<u8> {
        let mut asm = Asm::default();
        build(&mut asm);
        asm.bytes
    }

    #[test]
    fn encodings_are_those_of_the_manual() {
        let load = code(|a| _ = a.load(9, Rm::At(12, 0x10)));
        assert_eq!(load, [0x4d, 0x8b, 0x8c, 0x24, 0x10, 0, 0, 0]);
        let store = code(|a| _ = a.store(Rm::Abs(0x1234), RAX));
        assert_eq!(store, [0x48, 0x89, 0x04, 0x25, 0x34, 0x12, 0, 0]);
        let count = code(|a| _ = a.count(Rm::Table(RAX, 0x3_0000)));
        assert_eq!(count, [0xf0, 0x48, 0xff, 0x04, 0xc5, 0, 0, 3, 0]);
        let mov = code(|a| _ = a.mov_imm32(8, 7));
        assert_eq!(mov, [0x41, 0xb8, 7, 0, 0, 0]);
    }
}
