//! x86-64 code: fixed instructions by iced-x86, and random ones by their opcode, which need not be
//! instructions.

use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// RAX RCX RDX RBX RSP RBP RSI RDI R8 to R15, in encoding order.
pub type Reg = u8;

/// RAX.
pub const RAX: Reg = 0;
/// RSP.
pub const RSP: Reg = 4;
/// RDI.
pub const RDI: Reg = 7;

/// The registers by number.
pub const REGISTERS: [AsmRegister64; 16] = [
    rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15,
];

/// The result of writing instructions.
pub type Written<T = ()> = Result<T, IcedError>;

/// The machine code of what `write` writes, at any address.
///
/// # Panics
/// `write` fails, or leaves a label without an instruction.
pub fn assemble(write: impl FnOnce(&mut CodeAssembler) -> Written) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).expect("64 bits");
    write(&mut a).expect("instructions of this mode");
    a.assemble(0).expect("labels within reach")
}

/// WRMSR of `index` with `value`.
///
/// # Errors
/// As the assembler's.
pub fn wrmsr(a: &mut CodeAssembler, index: u32, value: u64) -> Written {
    a.mov(ecx, index)?;
    a.mov(eax, value as u32)?;
    a.mov(edx, (value >> 32) as u32)?;
    a.wrmsr()
}

/// The second operand of ModRM.
#[derive(Clone, Copy, Debug)]
pub enum Rm {
    /// A register.
    Reg(Reg),
    /// `[base + disp]`.
    At(Reg, i32),
    /// `[base + index * 2^scale + disp]`.
    Indexed(Reg, Reg, u8, i32),
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

/// Appends `opcode reg, rm` with legacy `prefixes`. The opcode is used as it is for every size; the
/// caller sets its low bit. Nothing checks whether a processor accepts the instruction.
///
/// # Errors
/// As the assembler's.
pub fn op(
    a: &mut CodeAssembler,
    prefixes: &[u8],
    size: Size,
    opcode: &[u8],
    reg: Reg,
    rm: Rm,
) -> Written {
    let mut bytes = prefixes.to_vec();
    if size == Size::Word {
        bytes.push(0x66);
    }
    let (index, base) = match rm {
        Rm::Reg(r) | Rm::At(r, _) => (0, r),
        Rm::Indexed(base, index, ..) => (index, base),
        Rm::Abs(_) | Rm::Rip(_) => (0, 0),
    };
    let wide = u8::from(size == Size::Quad) << 3;
    let rex = 0x40 | wide | (reg >> 3 & 1) << 2 | (index >> 3 & 1) << 1 | base >> 3 & 1;
    // SPL, BPL, SIL and DIL need an empty REX prefix too.
    let low_byte = size == Size::Byte && (reg > 3 || matches!(rm, Rm::Reg(4..)));
    if rex != 0x40 || low_byte {
        bytes.push(rex);
    }
    bytes.extend(opcode);
    let reg = (reg & 7) << 3;
    match rm {
        Rm::Reg(r) => bytes.push(0xc0 | reg | r & 7),
        Rm::At(base, _) if base & 7 == RSP => bytes.extend([0x80 | reg | 4, 0x24]),
        Rm::At(base, _) => bytes.push(0x80 | reg | base & 7),
        Rm::Indexed(base, index, scale, _) => {
            let sib = (scale & 3) << 6 | (index & 7) << 3 | base & 7;
            bytes.extend([0x80 | reg | 4, sib]);
        }
        Rm::Abs(_) => bytes.extend([reg | 4, 0x25]),
        Rm::Rip(_) => bytes.push(reg | 5),
    }
    if let Rm::At(_, disp) | Rm::Indexed(.., disp) | Rm::Abs(disp) | Rm::Rip(disp) = rm {
        bytes.extend(disp.to_le_bytes());
    }
    a.db(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_are_those_of_the_assembler() {
        let code = assemble(|a| {
            op(a, &[], Size::Quad, &[0x8b], 9, Rm::At(12, 0x1000))?;
            op(a, &[], Size::Byte, &[0x88], 6, Rm::Reg(7))?;
            op(a, &[0xf0], Size::Word, &[0x01], 8, Rm::Abs(0x1234))?;
            op(
                a,
                &[],
                Size::Long,
                &[0x89],
                0,
                Rm::Indexed(13, 10, 3, 0x1000),
            )
        });
        let expected = assemble(|a| {
            a.mov(r9, qword_ptr(r12 + 0x1000))?;
            a.mov(dil, sil)?;
            a.lock().add(word_ptr(0x1234), r8w)?;
            a.mov(dword_ptr(r13 + r10 * 8 + 0x1000), eax)
        });
        assert_eq!(code, expected);
    }
}
