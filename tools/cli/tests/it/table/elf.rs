//! Guest images that the tests make: one segment at 1 MiB, the PVH note, a few instructions.

/// The address of the segment.
const BASE: u64 = 1 << 20;
const HEADERS: u64 = 64 + 2 * 56;
const NOTE: [u8; 24] = *b"\x04\0\0\0\x08\0\0\0\x12\0\0\0Xen\0\0\0\x10\0\0\0\0\0";

/// A guest of one vCPU that prints `text` and ends with code 0.
pub fn printing(text: &str) -> Vec<u8> {
    let mut code = vec![0x66, 0xba, 0xf8, 0x03]; // mov dx, 0x3f8
    code.extend([0x48, 0x8d, 0x35, 19, 0, 0, 0]); // lea rsi, [rip + text]
    code.push(0xb9); // mov ecx, the length
    code.extend((text.len() as u32).to_le_bytes());
    code.extend([0xac, 0xee, 0xe2, 0xfc]); // lodsb; out dx, al; loop
    code.extend([0x66, 0xba, 0xf4, 0x00]); // mov dx, 0xf4
    code.extend([0x31, 0xc0, 0xef]); // xor eax, eax; out dx, eax
    code.extend([0xf4, 0xeb, 0xfd]); // hlt, for ever
    code.extend(text.bytes());
    image(&code)
}

/// A guest whose segment has so many bytes, without a page of zeros. It is never started.
pub fn of_size(bytes: usize) -> Vec<u8> {
    image(
        &(0..bytes)
            .map(|i| (i / 4096 + 1) as u8 | 1)
            .collect::<Vec<u8>>(),
    )
}

/// A guest that loops for ever. Its segment has so many bytes, without a page of zeros.
pub fn looping(bytes: usize) -> Vec<u8> {
    let mut code = vec![0xeb, 0xfe]; // jmp to itself
    code.resize(bytes, 1);
    image(&code)
}

fn image(code: &[u8]) -> Vec<u8> {
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    elf.extend([2, 0, 62, 0, 1, 0, 0, 0]); // an executable for x86-64
    let words = |elf: &mut Vec<u8>, words: &[u64]| {
        words.iter().for_each(|word| elf.extend(word.to_le_bytes()));
    };
    words(&mut elf, &[BASE, 64, 0]); // entry, program headers, no sections
    let halves: [u16; 8] = [0, 0, 64, 56, 2, 64, 0, 0]; // flags, then sizes and counts
    halves
        .iter()
        .for_each(|half| elf.extend(half.to_le_bytes()));
    let note = NOTE.len() as u64;
    let len = code.len() as u64;
    for (kind, offset, addr, size) in [(1u64, HEADERS + note, BASE, len), (4, HEADERS, 0, note)] {
        elf.extend((kind as u32).to_le_bytes());
        elf.extend(7u32.to_le_bytes());
        words(&mut elf, &[offset, addr, addr, size, size, 4]);
    }
    elf.extend(NOTE);
    elf.extend(code);
    elf
}
