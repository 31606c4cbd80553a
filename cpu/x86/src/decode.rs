//! Decodes bytes to basic blocks.

use crate::lower::{Flow, Lower};
use crate::op::{Code, Op};
use crate::quiet::silence;
use iced_x86::{Decoder, DecoderError, DecoderOptions, Instruction, Mnemonic};
use lacuna_addr::PAGE_SIZE;
use lacuna_cpu::HostPage;

/// The most instructions in a basic block: `Links` counts them in a byte, and an interrupt waits
/// until they are done.
const INSTRUCTIONS_MAX: u32 = 48;
/// The most bytes of a basic block's instructions.
const WINDOW: usize = 256;
/// The longest instruction.
const LONGEST: usize = 15;

/// A copy of code bytes, so that another vCPU's writes cannot change them between two reads.
pub(crate) struct Window {
    bytes: [u8; WINDOW],
    len: usize,
}

impl Window {
    /// The bytes from `offset` in `page` to its end, at most a basic block's.
    pub(crate) fn new(page: HostPage, offset: usize) -> Self {
        let mut window = Self {
            bytes: [0; WINDOW],
            len: 0,
        };
        window.append(page, offset, WINDOW.min(PAGE_SIZE - offset));
        window
    }

    /// Adds the next page's first bytes, as far as one instruction can reach.
    pub(crate) fn extend(&mut self, next: HostPage) {
        self.append(next, 0, LONGEST);
    }

    fn append(&mut self, page: HostPage, offset: usize, count: usize) {
        let (mut at, end) = (offset, offset + count);
        while at < end {
            let n = (8 - at % 8).min(end - at).min(WINDOW - self.len);
            if n == 0 {
                return;
            }
            let word = page.load_u64(at & !7).to_le_bytes();
            self.bytes[self.len..self.len + n].copy_from_slice(&word[at % 8..at % 8 + n]);
            (at, self.len) = (at + n, self.len + n);
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The decoder's result at the start of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// A basic block was appended.
    BasicBlock,
    /// The first instruction continues behind the window's end.
    Incomplete,
}

/// Appends the basic block of the instructions at `rip`, which start the window.
pub(crate) fn basic_block(window: &Window, rip: u64, ops: &mut Vec<Op>) -> Found {
    decode(window, rip, ops, INSTRUCTIONS_MAX)
}

/// Appends a basic block of the one instruction at `rip`.
pub(crate) fn one(window: &Window, rip: u64, ops: &mut Vec<Op>) -> Found {
    decode(window, rip, ops, 1)
}

fn decode(window: &Window, rip: u64, ops: &mut Vec<Op>, max: u32) -> Found {
    let start = ops.len();
    // The features behind some of the reserved NOPs are absent.
    let options = DecoderOptions::FORCE_RESERVED_NOP;
    let mut decoder = Decoder::with_ip(64, window.bytes(), rip, options);
    let mut instruction = Instruction::default();
    let mut flow = Flow::On;
    for n in 0..max {
        let at = decoder.position();
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() && decoder.last_error() == DecoderError::NoMoreBytes {
            if n == 0 {
                return Found::Incomplete;
            }
            break;
        }
        if instruction.mnemonic() == Mnemonic::Pause {
            pause_or_exchange(&mut instruction, &window.bytes()[at..]);
        }
        let mut lower = Lower {
            i: &instruction,
            ops,
            start,
        };
        flow = if instruction.is_invalid()
            && instruction.len() == LONGEST
            && is_too_long(&window.bytes()[at..])
        {
            lower.too_long()
        } else {
            lower.instruction()
        };
        if flow == Flow::End {
            break;
        }
    }
    if flow == Flow::On {
        ops.push(Op::new(Code::Jump));
        ops.push(Op::unlinked(0));
    }
    silence(&mut ops[start..]);
    close(ops, start);
    Found::BasicBlock
}

/// Decodes XCHG of R8 and RAX: with F3 before REX.B, the decoder mistakes it for PAUSE. `bytes`
/// begin with the instruction. Neither F3 nor CS has an effect on XCHG.
fn pause_or_exchange(instruction: &mut Instruction, bytes: &[u8]) {
    const CS: u8 = 0x2e;
    const F3: u8 = 0xf3;
    let mut bytes = bytes[..instruction.len()].to_vec();
    // A REX prefix stands right before the opcode.
    if !matches!(bytes[..], [.., rex, _] if rex & 0xf1 == 0x41) {
        return;
    }
    for byte in &mut bytes {
        if *byte == F3 {
            *byte = CS;
        }
    }
    Decoder::with_ip(64, &bytes, instruction.ip(), DecoderOptions::NONE).decode_out(instruction);
}

/// Whether an undecodable instruction of at least 15 bytes is longer than 15. Such an instruction
/// raises #GP, whatever its opcode.
///
/// The first two bytes are prefixes that change nothing, so the check decodes without them. Then 14
/// of 16 bytes remain, enough for the ModRM byte that the decoder counts in an undefined opcode.
fn is_too_long(bytes: &[u8]) -> bool {
    let rest = &bytes[2..bytes.len().min(LONGEST + 1)];
    let options = DecoderOptions::FORCE_RESERVED_NOP | DecoderOptions::NO_INVALID_CHECK;
    let mut decoder = Decoder::new(64, rest, options);
    let len = decoder.decode().len();
    match decoder.last_error() {
        DecoderError::None => len + 2 > LONGEST,
        error => error == DecoderError::NoMoreBytes,
    }
}

/// Writes the number of the basic block's instructions into its links.
fn close(ops: &mut [Op], start: usize) {
    let count: u64 = ops[start..].iter().map(Op::instructions).sum();
    if let Some(last) = ops.last_mut().filter(|op| op.code == Code::Links) {
        *last = Op::unlinked(count as u8);
    }
}
