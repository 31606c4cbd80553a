//! Guests of a few instructions, for behaviour that no complete guest shows on purpose.
//!
//! They start like every image: long mode, CPL 0, interrupts off, the identity map.

use iced_x86::code_asm::*;
use lacuna_addr::Gpa;
use lacuna_machine::{Image, Segment};

/// The address of the program and of its first instruction.
pub const CODE: u64 = 0x20_0000;
/// The end of its stack.
pub const STACK: u64 = 0x21_0000;
/// Its interrupt descriptor table; the operand of LIDT follows it.
pub const IDT: u64 = 0x22_0000;
const IDT_POINTER: u64 = IDT + 0x1000;
/// The code segment that the boot sets up.
const CODE_SELECTOR: u64 = 0x10;

/// Bytes for guest memory, and their address.
pub type Piece = (u64, Vec<u8>);

/// A program at `at`.
pub fn assemble(
    at: u64,
    program: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Piece {
    let mut a = CodeAssembler::new(64).unwrap();
    program(&mut a).unwrap();
    (at, a.assemble(at).unwrap())
}

/// `words` at `at`.
pub fn words(at: u64, words: &[u64]) -> Piece {
    (
        at,
        words.iter().flat_map(|word| word.to_le_bytes()).collect(),
    )
}

/// An interrupt descriptor table with these handlers, by vector; [`load_idt`] uses it.
pub fn idt(handlers: &[(u8, u64)]) -> Vec<Piece> {
    const PRESENT_INTERRUPT_GATE: u64 = 0x8e00;
    let mut table = [0; 512];
    for &(vector, at) in handlers {
        let low = at & 0xffff | CODE_SELECTOR << 16 | PRESENT_INTERRUPT_GATE << 32;
        table[2 * usize::from(vector)] = low | (at >> 16 & 0xffff) << 48;
        table[2 * usize::from(vector) + 1] = at >> 32;
    }
    let limit = 8 * table.len() as u64 - 1;
    vec![
        words(IDT, &table),
        words(IDT_POINTER, &[limit | IDT << 16, IDT >> 48]),
    ]
}

/// Loads the table that [`idt`] makes.
pub fn load_idt(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, IDT_POINTER)?;
    a.lidt(ptr(rax))
}

/// Writes an MSR; changes RAX, RCX and RDX.
pub fn write_msr(a: &mut CodeAssembler, msr: u32, value: u32) -> Result<(), IcedError> {
    a.mov(ecx, msr)?;
    a.mov(eax, value)?;
    a.xor(edx, edx)?;
    a.wrmsr()
}

/// Exits to the VMM with `value` at port 0x80.
pub fn tell(a: &mut CodeAssembler, value: u8) -> Result<(), IcedError> {
    a.mov(al, i32::from(value))?;
    a.out(0x80, al)
}

/// The image of these pieces. It starts at [`CODE`].
pub fn image(pieces: &[Piece]) -> Image<'_> {
    Image {
        arch: lacuna_machine::Arch::X86_64,
        segments: pieces
            .iter()
            .map(|(at, bytes)| Segment {
                gpa: Gpa::new(*at).unwrap(),
                bytes,
                size: bytes.len() as u64,
            })
            .collect(),
        entry: Gpa::new(CODE).unwrap(),
    }
}
