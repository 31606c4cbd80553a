//! Sequences of random instructions. A sequence consists of *acts*: a few instructions with one
//! purpose.
//!
//! A completed act counts itself under its label in the guest's memory. So the table at the end
//! shows the executed acts, not only the generated ones.

mod data;
mod system;

use crate::encode::{REGISTERS, Reg, Rm, Size, Written, assemble};
use crate::place::*;
use crate::runtime::words;
use crate::values;
use fastrand::Rng;
use iced_x86::code_asm::CodeAssembler;
use lacuna_addr::PAGE_SIZE;

/// The privilege of a sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Kernel,
    User,
}

/// The names of acts. Each has a counter.
#[derive(Default)]
pub struct Labels(Vec<String>);

impl Labels {
    /// The number of `name`; `None` if there are too many names.
    pub fn number(&mut self, name: &str) -> Option<usize> {
        if let Some(at) = self.0.iter().position(|known| known == name) {
            return Some(at);
        }
        (self.0.len() < LABELS).then(|| {
            self.0.push(name.to_owned());
            self.0.len() - 1
        })
    }

    /// All, by number.
    pub fn names(&self) -> &[String] {
        &self.0
    }
}

/// Generates sequences.
pub struct Author<'a> {
    /// The random source.
    pub rng: &'a mut Rng,
    /// Bytes of main memory.
    pub memory: u64,
    /// The acts so far.
    pub labels: &'a mut Labels,
}

/// A sequence and its entry state.
pub struct Sequence {
    /// Its instructions.
    pub code: Vec<u8>,
    /// On x86-64 RIP, CS, RFLAGS, RSP, SS; on AArch64 PC, PSTATE, SP_EL0, SCTLR_EL1.
    pub state: Vec<u8>,
}

/// Registers that acts may change: all but RSP.
const FREE: [Reg; 15] = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
/// Registers that hold addresses in a sequence.
const POINTERS: [Reg; 6] = [3, 5, 8, 9, 13, 14];
/// The last offset at which an act may begin. Behind it there is room for one act and the end of
/// the sequence.
const LIMIT: usize = SEQUENCE_SIZE as usize - 112;

impl Author<'_> {
    /// Generates the sequence for `index`.
    pub fn sequence(&mut self, index: u64) -> Sequence {
        let mode = match self.rng.u8(..8) {
            ..3 => Mode::User,
            _ => Mode::Kernel,
        };
        let mut code = assemble(|a| {
            for reg in POINTERS {
                if self.rng.u8(..4) != 0 {
                    let at = values::address(self.rng, self.memory);
                    a.mov(REGISTERS[usize::from(reg)], at)?;
                }
            }
            Ok(())
        });
        let mut acts = self.rng.u8(2..24);
        while acts > 0 && code.len() < LIMIT {
            code.extend(assemble(|a| self.act(a, mode)));
            acts -= 1;
        }
        code.extend(assemble(|a| a.int(END_VECTOR)));
        debug_assert!(code.len() <= SEQUENCE_SIZE as usize, "{}", code.len());
        Sequence {
            code,
            state: self.state(index, mode),
        }
    }

    fn state(&mut self, index: u64, mode: Mode) -> Vec<u8> {
        let rng = &mut *self.rng;
        let (start, cs, ss) = match mode {
            Mode::User => (USER_SEQUENCES, USER_CS, USER_SS),
            Mode::Kernel => (SEQUENCES, KERNEL_CS, KERNEL_SS),
        };
        let mut flags = 2 | u64::from(rng.u8(..4) != 0) << 9;
        for (bit, odds) in [(8, 40), (10, 8), (12, 4), (13, 4), (18, 8)] {
            flags |= u64::from(rng.u8(..odds) == 0) << bit;
        }
        let stack = match rng.u8(..8) {
            0 => values::address(rng, self.memory),
            _ => values::data(rng, self.memory) & !7,
        };
        let rip = start + index * SEQUENCE_SIZE;
        words(&[rip, cs.into(), flags, stack, ss.into()])
    }

    fn act(&mut self, a: &mut CodeAssembler, mode: Mode) -> Written {
        let mut drawn = self.rng.u8(..100);
        // CPL 3 may execute few of these acts: most would only raise #GP.
        if mode == Mode::User && (64..97).contains(&drawn) && self.rng.u8(..4) != 0 {
            drawn = self.rng.u8(..64);
        }
        let label = match drawn {
            ..14 => self.arithmetic(a),
            14..34 => self.memory(a),
            34..42 => self.locked(a),
            42..48 => self.string(a),
            48..53 => self.stack(a),
            53..58 => self.flow(a),
            58..64 => self.modify_code(a),
            64..72 => self.page_table(a),
            72..80 => self.msr(a),
            80..84 => self.control(a),
            84..87 => self.port(a),
            87..90 => self.apic(a),
            90..92 => self.async_faults(a),
            92..97 => self.system(a, mode),
            97..99 => self.transfer(a),
            _ => self.noise(a),
        }?;
        if let Some(number) = self.labels.number(&label) {
            let counter = ACTS + 8 * number as u64;
            a.inc(iced_x86::code_asm::qword_ptr(counter))?;
        }
        Ok(())
    }

    /// A register that acts may change.
    fn free(&mut self) -> Reg {
        values::pick(self.rng, &FREE)
    }

    /// A register that most likely holds an address.
    fn pointer(&mut self) -> Reg {
        values::pick(self.rng, &POINTERS)
    }

    fn size(&mut self) -> Size {
        values::pick(self.rng, &Size::ALL)
    }

    /// A memory operand.
    fn operand(&mut self) -> Rm {
        let near = |rng: &mut Rng| match rng.u8(..4) {
            0 => rng.i32(-64..64),
            1 => rng.i32(..PAGE_SIZE as i32),
            _ => 0,
        };
        match self.rng.u8(..16) {
            0 => Rm::Abs(values::data(self.rng, self.memory) as i32),
            1 => Rm::Indexed(self.pointer(), self.free(), self.rng.u8(..4), 0),
            2 => Rm::Rip(self.rng.i32(-256..256)),
            _ => Rm::At(self.pointer(), near(self.rng)),
        }
    }
}
