//! Acts of any program: arithmetic, memory, strings, stack, control flow.

use super::Author;
use crate::asm::{Asm, RAX, RCX, RDI, RDX, RSI, Rm, Size};
use crate::place::*;
use crate::values::{self, pick};

impl Author<'_> {
    pub(super) fn arithmetic(&mut self, a: &mut Asm) -> String {
        let (to, from, size) = (self.free(), self.free(), self.size());
        let wide = u8::from(size != Size::Byte);
        match self.rng.u8(..8) {
            0 => {
                let value = values::number(self.rng);
                a.mov_imm(to, value);
            }
            1 => {
                let opcode = [0xc0 | wide, 0xd2 | wide][self.rng.usize(..2)];
                a.op(&[], size, &[opcode], self.rng.u8(..8), Rm::Reg(to));
                if opcode < 0xd0 {
                    a.raw(&[self.rng.u8(..)]);
                }
            }
            2 => {
                a.op(&[], size, &[0xf6 | wide], self.rng.u8(2..8), Rm::Reg(to));
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
                a.op(&[], size, &[0x0f, second], from, Rm::Reg(to));
            }
            4 => {
                a.op(&[], Size::Quad, &[0x8d], to, self.operand()); // lea
            }
            _ => {
                let kind = self.rng.u8(..8) << 3;
                a.op(&[], size, &[kind | wide], from, Rm::Reg(to));
            }
        }
        "alu".into()
    }

    pub(super) fn memory(&mut self, a: &mut Asm) -> String {
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
        a.op(&[], size, &[opcode | wide], reg, at);
        name.into()
    }

    /// A locked operation, sometimes across a cache line or a page.
    pub(super) fn locked(&mut self, a: &mut Asm) -> String {
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
            0 => a.op(lock, size, &[0x0f, 0xc1], reg, at), // xadd
            1 => a.op(lock, size, &[0x0f, 0xb1], reg, at), // cmpxchg
            2 => a.op(lock, size, &[0xff], self.rng.u8(..2), at),
            3 => a.op(
                lock,
                size,
                &[0x0f, pick(self.rng, &[0xab, 0xb3, 0xbb])],
                reg,
                at,
            ),
            4 => a.op(lock, Size::Long, &[0x0f, 0xc7], 1, at), // cmpxchg8b
            _ => a.op(lock, size, &[0x01 | self.rng.u8(..7) << 3], reg, at),
        };
        match split {
            true => "split lock",
            false => "lock",
        }
        .into()
    }

    pub(super) fn string(&mut self, a: &mut Asm) -> String {
        let (to, from) = (
            values::address(self.rng, self.memory),
            values::address(self.rng, self.memory),
        );
        a.mov_imm(RDI, to).mov_imm(RSI, from);
        let count = match self.rng.u8(..8) {
            0 => self.rng.u32(..2048),
            _ => self.rng.u32(..40),
        };
        a.mov_imm32(RCX, count);
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
            a.mov_imm32(RCX, count % 8).mov_imm32(RDX, 0x100);
        }
        let repeat = pick(self.rng, &[0xf3, 0xf3, 0xf2]);
        match self.rng.u8(..4) {
            0 => a.raw(&[opcode]),
            1 => a.raw(&[repeat, 0x48, opcode | 1]),
            2 => a.raw(&[repeat, opcode | 1]),
            _ => a.raw(&[repeat, opcode]),
        };
        name.into()
    }

    pub(super) fn stack(&mut self, a: &mut Asm) -> String {
        let reg = self.free() & 7;
        match self.rng.u8(..8) {
            0 => a.raw(&[0x50 | reg, 0x58 | reg]),
            1 => a.raw(&[0x9c, 0x9d]),
            2 => a.op(&[], Size::Long, &[0xff], 6, self.operand()),
            3 => a.op(&[], Size::Long, &[0x8f], 0, self.operand()),
            4 => a.raw(&[0xc8, self.rng.u8(..), 0, self.rng.u8(..4), 0xc9]), // enter, leave
            5 => a.raw(&[0x66, 0x50 | reg]),
            6 => a.raw(&[0x0f, 0xa0, 0x0f, 0xa1]), // push fs, pop fs
            _ => a.raw(&[0x50 | reg]),
        };
        "stack".into()
    }

    pub(super) fn flow(&mut self, a: &mut Asm) -> String {
        match self.rng.u8(..6) {
            4 => self.sweep(a),
            5 => self.hot_loop(a),
            0 => {
                // A loop over a little arithmetic.
                a.mov_imm32(RCX, self.rng.u32(1..60));
                let start = a.bytes.len();
                a.raw(&[0x48, 0x01, 0xd0, 0x48, 0xff, 0xc2]);
                let back = a.bytes.len() + 2 - start;
                a.raw(&[0xe2, (back as u8).wrapping_neg()]);
                "loop".into()
            }
            1 => {
                let over = a.jump(0x70 | self.rng.u8(..16));
                a.raw(&[0x48, 0xff, 0xc0]);
                a.land(over);
                "jcc".into()
            }
            2 => {
                // call the next instruction; drop the return address
                a.raw(&[0xe8, 0, 0, 0, 0, 0x58]);
                "call".into()
            }
            _ => {
                // Jumps into the middle of some sequence by a register, as an exploit would.
                let at = SEQUENCES + self.rng.u64(..SEQUENCE_COUNT) * SEQUENCE_SIZE;
                a.mov_imm(RAX, at).raw(&[0xff, 0xe0]);
                "jmp".into()
            }
        }
    }

    /// Writes to some pages again and again, long enough for the host to evict them meanwhile.
    fn hot_loop(&mut self, a: &mut Asm) -> String {
        a.mov_imm32(RCX, 1 << self.rng.u32(4..16));
        let start = a.bytes.len();
        for _ in 0..self.rng.u8(1..5) {
            let at = Rm::Abs(values::data(self.rng, self.memory) as i32 & !7);
            let opcode = pick(self.rng, &[0x01, 0x89, 0x03, 0xff]);
            a.op(&[], Size::Quad, &[opcode], RAX, at);
        }
        let back = a.bytes.len() + 2 - start;
        a.raw(&[0xe2, (back as u8).wrapping_neg()]);
        "hot loop".into()
    }

    /// Touches pages one after the other, usually a whole 2 MiB block.
    fn sweep(&mut self, a: &mut Asm) -> String {
        let first = match self.rng.bool() {
            true => self.rng.u64(..self.memory.div_ceil(2 << 20)) << 21,
            false => EXTRA + self.rng.u64(..EXTRAS) * EXTRA_STEP,
        };
        a.mov_imm(RDI, first.max(DATA))
            .mov_imm32(RCX, self.rng.u32(300..=512));
        let start = a.bytes.len();
        let opcode = pick(self.rng, &[0x8a, 0x8a, 0x88, 0x00]);
        a.op(&[], Size::Byte, &[opcode], RAX, Rm::At(RDI, 0x800));
        a.raw(&[0x48, 0x81, 0xc7]).raw(&4096i32.to_le_bytes()); // add rdi, 4096
        let back = a.bytes.len() + 2 - start;
        a.raw(&[0xe2, (back as u8).wrapping_neg()]);
        "sweep".into()
    }

    /// Writes to instructions: the following ones, or another sequence.
    pub(super) fn modify_code(&mut self, a: &mut Asm) -> String {
        if self.rng.bool() {
            // mov byte [rip + 1], imm8; it changes the operand of the `mov al, imm8` that follows
            a.op(&[], Size::Byte, &[0xc6], 0, Rm::Rip(2));
            a.raw(&[self.rng.u8(..), 0xb0, 0]);
            return "modify own code".into();
        }
        let base = pick(self.rng, &[SEQUENCES, SEQUENCES, USER_SEQUENCES]);
        let at = base + self.rng.u64(..SEQUENCE_COUNT) * SEQUENCE_SIZE + self.rng.u64(..64);
        a.op(&[], Size::Byte, &[0xc6], 0, Rm::Abs(at as i32));
        a.raw(&[pick(
            self.rng,
            &[0x90, 0xcc, 0xf4, 0x0f, 0x48, 0xf0, 0xc3, 0x06],
        )]);
        "modify a sequence".into()
    }
}
