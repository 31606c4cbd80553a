//! Images and boot data: every refusal with its text, and the writes of a successful load.

use lacuna_addr::{Gpa, PAGE_SIZE, PageCount};
use lacuna_machine::{Arch, Boot, BootError, GuestMemory, Image, ImageError, Layout, MemoryError};
use proptest::prelude::*;
use std::cell::RefCell;

/// An ELF64 x86-64 file with one PVH note and the given loadable segments (paddr, memsz, bytes).
fn elf(segments: &[(u64, u64, &[u8])], entry: u64) -> Vec<u8> {
    let headers = segments.len() + 1;
    let mut out = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    out.extend(2u16.to_le_bytes()); // ET_EXEC
    out.extend(62u16.to_le_bytes()); // EM_X86_64
    out.extend(1u32.to_le_bytes());
    out.extend(entry.to_le_bytes());
    out.extend(64u64.to_le_bytes()); // program headers
    out.extend(0u64.to_le_bytes());
    out.extend(0u32.to_le_bytes());
    for half in [64u16, 56, headers as u16, 64, 0, 0] {
        out.extend(half.to_le_bytes());
    }
    let note: Vec<u8> = [4u32, 4, 18].iter().flat_map(|w| w.to_le_bytes()).collect();
    let note = [note, b"Xen\0".to_vec(), 0x10_0000u32.to_le_bytes().to_vec()].concat();
    let mut offset = (64 + 56 * headers) as u64;
    let mut header = |kind: u32, paddr: u64, file: u64, memory: u64| {
        out.extend(kind.to_le_bytes());
        out.extend(7u32.to_le_bytes());
        for word in [offset, paddr, paddr, file, memory, 4] {
            out.extend(word.to_le_bytes());
        }
        offset += file;
    };
    header(4, 0, note.len() as u64, note.len() as u64);
    for (paddr, memsz, bytes) in segments {
        header(1, *paddr, bytes.len() as u64, *memsz);
    }
    out.extend(note);
    for (_, _, bytes) in segments {
        out.extend(*bytes);
    }
    out
}

struct Flat(RefCell<Vec<u8>>);

impl Flat {
    fn new(bytes: usize) -> Self {
        Self(RefCell::new(vec![0; bytes]))
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0.borrow()[at..at + 8].try_into().unwrap())
    }
}

impl GuestMemory for Flat {
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError> {
        let at = gpa.get() as usize;
        let mut all = self.0.borrow_mut();
        let into = all
            .get_mut(at..at + bytes.len())
            .ok_or(MemoryError::NoSlot(gpa))?;
        into.copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, gpa: Gpa, into: &mut [u8]) -> Result<(), MemoryError> {
        let at = gpa.get() as usize;
        into.copy_from_slice(&self.0.borrow()[at..at + into.len()]);
        Ok(())
    }

    fn peek(&self, gpa: Gpa, into: &mut [u8]) -> bool {
        self.read(gpa, into).is_ok()
    }
}

fn layout(mib: u64) -> Layout {
    Layout::new(PageCount::from_bytes(mib << 20)).unwrap()
}

#[test]
fn a_good_image_is_loaded_with_its_boot_data() {
    let file = elf(
        &[(0x10_0000, 0x2000, b"code"), (0x20_0000, 4, b"data")],
        0x10_0002,
    );
    let image = Image::parse(&file).unwrap();
    assert_eq!(image.arch, Arch::X86_64);
    let memory = Flat::new(4 << 20);
    let boot = Boot::load(&image, &layout(4), "smp=2", &memory).unwrap();
    assert_eq!(boot.entry.get(), 0x10_0002);
    assert_eq!(&memory.0.borrow()[0x10_0000..0x10_0004], b"code");
    assert_eq!(&memory.0.borrow()[0x20_0000..0x20_0004], b"data");
    let info = boot.start_info.get() as usize;
    assert_eq!(memory.word(info) as u32, 0x336e_c578);
    let command_line = memory.word(info + 24) as usize;
    assert_eq!(
        &memory.0.borrow()[command_line..command_line + 6],
        b"smp=2\0"
    );
    let map = memory.word(info + 40) as usize;
    assert_eq!((memory.word(map), memory.word(map + 8)), (0, 4 << 20));
    assert_identity_map(&memory, boot.page_table.get());
}

/// Walks the boot tables for some addresses, as a processor would.
fn assert_identity_map(memory: &Flat, root: u64) {
    for addr in [0u64, 0x10_0002, 0x3fff_ffff, 0xffff_f000] {
        let next = |table: u64, shift: u32| {
            let entry = memory.word((table + ((addr >> shift) & 511) * 8) as usize);
            assert_eq!(entry & 3, 3, "present and writable");
            entry & !0xfff
        };
        let directory = next(next(root, 39), 30);
        let leaf = memory.word((directory + ((addr >> 21) & 511) * 8) as usize);
        assert_eq!(leaf & 0x83, 0x83);
        assert_eq!(leaf & !0x1f_ffff, addr & !0x1f_ffff);
    }
}

#[test]
fn memory_past_three_gigabytes_continues_at_four() {
    let layout = layout(5 << 10);
    let ends: Vec<_> = layout
        .ranges()
        .iter()
        .map(|r| (r.start().gpa().get(), r.end_raw() << 12))
        .collect();
    assert_eq!(ends, [(0, 3 << 30), (4 << 30, 6 << 30)]);
}

#[test]
fn what_is_no_guest_image_is_refused_with_what_to_do() {
    let text = |file: &[u8]| Image::parse(file).unwrap_err().to_string();
    assert!(text(b"#!/bin/sh\n").starts_with("not an ELF file"));
    let mut arm = elf(&[(0x10_0000, 4, b"code")], 0x10_0000);
    arm[18] = 183;
    let wanted = "ELF file for AArch64; give a 64-bit x86-64 kernel, or an AArch64 kernel in the \
                  form of Linux's `Image` (objcopy -O binary)";
    assert_eq!(text(&arm), wanted);
    for (machine, name) in [
        (3, "32-bit x86"),
        (40, "32-bit Arm"),
        (243, "RISC-V (64-bit)"),
    ] {
        arm[18] = machine;
        assert!(text(&arm).contains(name), "{}", text(&arm));
    }
    let mut plain = elf(&[(0x10_0000, 4, b"code")], 0x10_0000);
    let note = plain.windows(4).position(|w| w == b"Xen\0").unwrap();
    plain[note] = b'Y';
    assert!(text(&plain).contains("without the PVH note"));
    assert_eq!(Image::parse(&elf(&[], 0)), Err(ImageError::Empty));
    let outside = elf(&[(0x10_0000, 4, b"code")], 0x9000);
    assert_eq!(Image::parse(&outside), Err(ImageError::BadEntry(0x9000)));
    let mut cut = elf(&[(0x10_0000, 4, b"code")], 0x10_0000);
    cut.truncate(cut.len() - 1);
    assert!(text(&cut).contains("lie outside the file"));
    let high = elf(&[(u64::MAX - 4, 4, b"code")], 0x10_0000);
    assert!(text(&high).contains("past 48 bits"));
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let memory = Flat::new(2 << 20);
    let load = |segment: (u64, u64, &[u8]), line: &str| {
        let file = elf(&[segment], segment.0);
        let image = Image::parse(&file).unwrap();
        Boot::load(&image, &layout(2), line, &memory).unwrap_err()
    };
    let outside = load((0x10_0000, 8 << 20, b"code"), "");
    assert_eq!(
        outside.to_string(),
        "segment 0 at 0x100000 (0x800000 bytes) lies outside the guest's memory; \
         the guest needs at least 9M of memory"
    );
    assert!(matches!(
        load((0x8000, 4, b"code"), ""),
        BootError::SegmentTooLow { .. }
    ));
    let long = "x".repeat(PAGE_SIZE);
    assert_eq!(
        load((0x10_0000, 4, b"code"), &long),
        BootError::CommandLine(PAGE_SIZE)
    );
    assert!(memory.0.borrow().iter().all(|&b| b == 0));
    assert_eq!(
        Layout::new(PageCount::new(3)),
        Err(BootError::BadSize(3 * PAGE_SIZE as u64))
    );
}

proptest! {
    /// Any bytes, and any damage to a valid file, are parsed or refused; a parsed file stays in
    /// bounds.
    #[test]
    fn hostile_files_never_panic(
        noise in proptest::collection::vec(any::<u8>(), 0..400),
        at in 0usize..200,
        value in any::<u8>(),
    ) {
        let _ = Image::parse(&noise);
        let mut file = elf(&[(0x10_0000, 64, b"code"), (0x20_0000, 4, b"data")], 0x10_0000);
        file[at] = value;
        if let Ok(image) = Image::parse(&file) {
            let memory = Flat::new(4 << 20);
            let _ = Boot::load(&image, &layout(4), "", &memory);
        }
    }
}
