//! Guests of a few instructions, for what no whole guest does on purpose.
//!
//! They start as every image does: long mode, CPL 0, interrupts off, the identity map.

use iced_x86::IcedError;
use iced_x86::code_asm::CodeAssembler;
use lacuna_addr::Gpa;
use lacuna_machine::{Arch, Image, Segment};

/// Where a program lies, and its first instruction.
pub const CODE: u64 = 0x20_0000;
/// One past its stack.
pub const STACK: u64 = 0x21_0000;
/// Where there is no memory in a small VM, and the identity map still reaches.
pub const DEVICE: u64 = 0xd000_0000;

/// The machine code of `program` at [`CODE`].
pub fn assemble(program: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    let mut assembler = CodeAssembler::new(64).expect("64 bits");
    program(&mut assembler).expect("instructions of this mode");
    assembler.assemble(CODE).expect("labels within reach")
}

/// The image of such code.
pub fn image(code: &[u8]) -> Image<'_> {
    let entry = Gpa::truncate(CODE);
    Image {
        arch: Arch::X86_64,
        segments: vec![Segment {
            gpa: entry,
            bytes: code,
            size: code.len() as u64,
        }],
        entry,
    }
}
