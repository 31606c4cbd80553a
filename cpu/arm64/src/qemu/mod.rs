//! Comparison with `qemu-aarch64`, an independent implementation. The tests are skipped if it is
//! not installed.
//!
//! A test makes one program for many cases, because a process costs more than thousands of cases.

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
