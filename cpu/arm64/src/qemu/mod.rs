//! Comparison with `qemu-aarch64`, an independent implementation. The tests are skipped if it is
//! not installed.
//!
//! A test makes one program for many cases, because a process costs more than thousands of cases.
//! The program needs no assembler and no compiler: [`Program`] has its few encodings.

mod defined;
mod kinds;
mod semantics;

use crate::lower::{Extent, Lower};
use crate::op::Code;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// The load address of a program.
const BASE: u64 = 0x40_0000;
/// The header of its file, in front of the code.
const HEADER: usize = 0x1000;
const NOP: u32 = 0xd503_201f;

/// Whether QEMU is installed; if not, records the test as skipped.
fn is_installed() -> bool {
    let installed = Command::new("qemu-aarch64")
        .arg("--version")
        .output()
        .is_ok();
    if !installed {
        lacuna_skip::skip("qemu-aarch64 is not installed (apt install qemu-user)");
    }
    installed
}

/// ADD of a 64-bit register and a number below 4096.
fn add_immediate(rd: u32, rn: u32, imm: u32) -> u32 {
    0x9100_0000 | imm << 10 | rn << 5 | rd
}

/// A program in the making.
#[derive(Default)]
struct Program {
    words: Vec<u32>,
}

impl Program {
    pub(super) fn here(&self) -> u64 {
        BASE + HEADER as u64 + 4 * self.words.len() as u64
    }

    pub(super) fn put(&mut self, word: u32) {
        self.words.push(word);
    }

    pub(super) fn constant(&mut self, rd: u32, value: u64) {
        for part in 0..4 {
            let base = if part == 0 { 0xd280_0000 } else { 0xf280_0000 };
            let imm = (value >> (16 * part)) as u32 & 0xffff;
            self.put(base | part << 21 | imm << 5 | rd);
        }
    }

    fn pair(&mut self, base: u32, first: u32, rn: u32, offset: usize) {
        let imm = (offset / 8) as u32;
        self.put(base | imm << 15 | (first + 1) << 10 | rn << 5 | first);
    }

    pub(super) fn load_pair(&mut self, first: u32, rn: u32, offset: usize) {
        self.pair(0xa940_0000, first, rn, offset);
    }

    pub(super) fn store_pair(&mut self, first: u32, rn: u32, offset: usize) {
        self.pair(0xa900_0000, first, rn, offset);
    }

    /// The branch `word` with a 19-bit displacement to `target`.
    pub(super) fn branch(&mut self, word: u32, target: u64) {
        let words = target.wrapping_sub(self.here()) as i64 / 4;
        self.put(word | (words as u32 & 0x7_ffff) << 5);
    }
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The header of a file of `size` bytes: ELF64, little-endian, executable, AArch64, with one
/// segment with all rights.
fn elf_header(size: u64) -> Vec<u8> {
    let entry = BASE + HEADER as u64;
    let mut header = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\xb7\0\x01\0\0\0".to_vec();
    for word in [entry, 64, 0] {
        header.extend(word.to_le_bytes());
    }
    header.extend(b"\0\0\0\0\x40\0\x38\0\x01\0\0\0\0\0\0\0\x01\0\0\0\x07\0\0\0");
    for word in [0, BASE, BASE, size, size, 0x1000] {
        header.extend(word.to_le_bytes());
    }
    header
}

/// The words that the program `image` writes under QEMU. Neoverse N1 has Armv8.2 with LSE, CRC32
/// and RCpc.
fn run(image: &[u8], name: &str) -> Vec<u64> {
    let path = std::env::temp_dir().join(format!("lacuna-arm64-{}-{name}", std::process::id()));
    std::fs::write(&path, image).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new("qemu-aarch64")
        .args(["-cpu", "neoverse-n1"])
        .arg(&path)
        .output()
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(output.status.success(), "qemu-aarch64: {output:?}");
    words_of(&output.stdout)
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    bytes.chunks_exact(8).map(word).collect()
}

/// Whether the decoder has an instruction for `word`.
fn is_defined(word: u32) -> bool {
    let mut ops = Vec::new();
    Lower {
        word,
        extent: Extent::Block,
        pc: 0,
        ops: &mut ops,
        start: 0,
    }
    .instruction();
    ops.iter().all(|op| op.code != Code::Undefined)
}
