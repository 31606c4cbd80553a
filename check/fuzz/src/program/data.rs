//! Acts of any program: arithmetic, memory, strings, stack, control flow.

use super::Author;
use crate::encode::{RAX, RDI, REGISTERS, Rm, Size, Written, op};
use crate::place::*;
use crate::values::{self, pick};
use iced_x86::code_asm::*;

impl Author<'_> {
    pub(super) fn arithmetic(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let (to, from, size) = (self.free(), self.free(), self.size());
        let wide = u8::from(size != Size::Byte);
        match self.rng.u8(..8) {
            0 => {
                let value = values::number(self.rng);
                a.mov(REGISTERS[usize::from(to)], value)?;
            }
            1 => {
                let opcode = [0xc0 | wide, 0xd2 | wide][self.rng.usize(..2)];
                op(a, &[], size, &[opcode], self.rng.u8(..8), Rm::Reg(to))?;
                if opcode < 0xd0 {
                    a.db(&[self.rng.u8(..)])?;
                }
            }
            2 => {
                let kind = self.rng.u8(2..8);
                op(a, &[], size, &[0xf6 | wide], kind, Rm::Reg(to))?;
            }
            3 => {
                // CMOVcc, SETcc, BT and its like, BSF, BSR, MOVZX, IMUL.
                let second = pick(
                    self.rng,
                    &[
                        0x44, 0x94, 0xa3, 0xab, 0xb3, 0xbb, 0xbc, 0xbd, 0xb6, 0xb7, 0xbe, 0xbf,
                        0xaf,
                    ],
                );
                op(a, &[], size, &[0x0f, second], from, Rm::Reg(to))?;
            }
            4 => {
                op(a, &[], Size::Quad, &[0x8d], to, self.operand())?; // lea
            }
            _ => {
                let kind = self.rng.u8(..8) << 3;
                op(a, &[], size, &[kind | wide], from, Rm::Reg(to))?;
            }
        }
        Ok("alu".into())
    }

    pub(super) fn memory(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let (reg, size, at) = (self.free(), self.size(), self.operand());
        let wide = u8::from(size != Size::Byte);
        let kind = self.rng.u8(..8) << 3;
        let (name, opcode) = match self.rng.u8(..8) {
            0 | 1 => ("load", 0x8a),
            2..5 => ("store", 0x88),
            5 => ("alu [m]", kind),
            6 => ("alu r, [m]", kind | 2),
            _ => ("xchg [m]", 0x86),
        };
        op(a, &[], size, &[opcode | wide], reg, at)?;
        Ok(name.into())
    }

    /// A locked operation, sometimes across a cache line or a page.
    pub(super) fn locked(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let (reg, size) = (self.free(), pick(self.rng, &Size::ALL[1..]));
        let split = self.rng.bool();
        let at = match split {
            true => {
                let base = values::data(self.rng, self.memory) & !63;
                let edge = size.bytes() as i64 - 1;
                Rm::Abs((base as i64 + 64 - self.rng.i64(1..=edge)) as i32)
            }
            false => self.operand(),
        };
        let lock = &[0xf0];
        match self.rng.u8(..6) {
            0 => op(a, lock, size, &[0x0f, 0xc1], reg, at), // xadd
            1 => op(a, lock, size, &[0x0f, 0xb1], reg, at), // cmpxchg
            2 => op(a, lock, size, &[0xff], self.rng.u8(..2), at),
            3 => {
                let kind = pick(self.rng, &[0xab, 0xb3, 0xbb]);
                op(a, lock, size, &[0x0f, kind], reg, at)
            }
            4 => op(a, lock, Size::Long, &[0x0f, 0xc7], 1, at), // cmpxchg8b
            _ => op(a, lock, size, &[0x01 | self.rng.u8(..7) << 3], reg, at),
        }?;
        Ok(if split { "split lock" } else { "lock" }.into())
    }

    pub(super) fn string(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let (to, from) = (
            values::address(self.rng, self.memory),
            values::address(self.rng, self.memory),
        );
        a.mov(rdi, to)?;
        a.mov(rsi, from)?;
        let count = match self.rng.u8(..8) {
            0 => self.rng.u32(..2048),
            _ => self.rng.u32(..40),
        };
        a.mov(ecx, count)?;
        let kinds: [(&str, u8); 7] = [
            ("movs", 0xa4),
            ("stos", 0xaa),
            ("lods", 0xac),
            ("scas", 0xae),
            ("cmps", 0xa6),
            ("ins", 0x6c),
            ("outs", 0x6e),
        ];
        let (name, opcode) = pick(self.rng, &kinds);
        if name == "ins" || name == "outs" {
            // Each iteration is an exit.
            a.mov(ecx, count % 8)?;
            a.mov(edx, 0x100)?;
        }
        let repeat = pick(self.rng, &[0xf3, 0xf3, 0xf2]);
        match self.rng.u8(..4) {
            0 => a.db(&[opcode]),
            1 => a.db(&[repeat, 0x48, opcode | 1]),
            2 => a.db(&[repeat, opcode | 1]),
            _ => a.db(&[repeat, opcode]),
        }?;
        Ok(name.into())
    }

    pub(super) fn stack(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let reg = self.free() & 7;
        match self.rng.u8(..8) {
            0 => a.db(&[0x50 | reg, 0x58 | reg]),
            1 => a.db(&[0x9c, 0x9d]),
            2 => op(a, &[], Size::Long, &[0xff], 6, self.operand()),
            3 => op(a, &[], Size::Long, &[0x8f], 0, self.operand()),
            4 => a.db(&[0xc8, self.rng.u8(..), 0, self.rng.u8(..4), 0xc9]), // enter, leave
            5 => a.db(&[0x66, 0x50 | reg]),
            6 => a.db(&[0x0f, 0xa0, 0x0f, 0xa1]), // push fs, pop fs
            _ => a.db(&[0x50 | reg]),
        }?;
        Ok("stack".into())
    }

    pub(super) fn flow(&mut self, a: &mut CodeAssembler) -> Written<String> {
        Ok(match self.rng.u8(..6) {
            4 => self.sweep(a)?,
            5 => self.hot_loop(a)?,
            0 => {
                // A loop over a little arithmetic.
                let mut start = a.create_label();
                a.mov(ecx, self.rng.u32(1..60))?;
                a.set_label(&mut start)?;
                a.add(rax, rdx)?;
                a.inc(rdx)?;
                a.loop_(start)?;
                "loop".into()
            }
            1 => {
                // over inc rax
                a.db(&[0x70 | self.rng.u8(..16), 3, 0x48, 0xff, 0xc0])?;
                "jcc".into()
            }
            2 => {
                // call the next instruction; drop the return address
                a.db(&[0xe8, 0, 0, 0, 0, 0x58])?;
                "call".into()
            }
            _ => {
                // Jumps into the middle of some sequence by a register, as an exploit would.
                let at = SEQUENCES + self.rng.u64(..SEQUENCE_COUNT) * SEQUENCE_SIZE;
                a.mov(rax, at)?;
                a.jmp(rax)?;
                "jmp".into()
            }
        })
    }

    /// Writes to some pages again and again, long enough for the host to evict them meanwhile.
    fn hot_loop(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let mut start = a.create_label();
        a.mov(ecx, 1 << self.rng.u32(4..16))?;
        a.set_label(&mut start)?;
        for _ in 0..self.rng.u8(1..5) {
            let at = Rm::Abs(values::data(self.rng, self.memory) as i32 & !7);
            let opcode = pick(self.rng, &[0x01, 0x89, 0x03, 0xff]);
            op(a, &[], Size::Quad, &[opcode], RAX, at)?;
        }
        a.loop_(start)?;
        Ok("hot loop".into())
    }

    /// Touches pages one after the other, usually a whole 2 MiB block.
    fn sweep(&mut self, a: &mut CodeAssembler) -> Written<String> {
        let first = match self.rng.bool() {
            true => self.rng.u64(..self.memory.div_ceil(2 << 20)) << 21,
            false => EXTRA + self.rng.u64(..EXTRAS) * EXTRA_STEP,
        };
        let mut start = a.create_label();
        a.mov(rdi, first.max(DATA))?;
        a.mov(ecx, self.rng.u32(300..=512))?;
        a.set_label(&mut start)?;
        let opcode = pick(self.rng, &[0x8a, 0x8a, 0x88, 0x00]);
        op(a, &[], Size::Byte, &[opcode], RAX, Rm::At(RDI, 0x800))?;
        a.add(rdi, 4096)?;
        a.loop_(start)?;
        Ok("sweep".into())
    }

    /// Writes to instructions: the following ones, or another sequence.
    pub(super) fn modify_code(&mut self, a: &mut CodeAssembler) -> Written<String> {
        if self.rng.bool() {
            // mov byte [rip + 1], imm8; it changes the operand of the `mov al, imm8` that follows
            op(a, &[], Size::Byte, &[0xc6], 0, Rm::Rip(2))?;
            a.db(&[self.rng.u8(..), 0xb0, 0])?;
            return Ok("modify own code".into());
        }
        let base = pick(self.rng, &[SEQUENCES, SEQUENCES, USER_SEQUENCES]);
        let at = base + self.rng.u64(..SEQUENCE_COUNT) * SEQUENCE_SIZE + self.rng.u64(..64);
        let byte = [0x90, 0xcc, 0xf4, 0x0f, 0x48, 0xf0, 0xc3, 0x06];
        a.mov(byte_ptr(at), pick(self.rng, &byte))?;
        Ok("modify a sequence".into())
    }
}
