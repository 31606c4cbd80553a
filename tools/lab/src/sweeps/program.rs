//! The machine code of the guest of [`super::Sweeps`], and its page tables.
//!
//! ```text
//! start   base = first + next * number of this vCPU     (AArch64: vCPU 0 starts the others)
//! again   limit, multiplier <- the device                 two reads, which the host answers
//!         for each page, in the order x = x * multiplier + 1:
//!             write a byte if a random number of 31 bits is below the limit, else read one
//!         the device <- number of written pages           a write, which ends the sweep
//! ```
//! With the multiplier 1 the guest follows the addresses in their order. [`AT_RANDOM`] makes a
//! linear congruential generator of full period: each page has one turn, and successive pages are
//! rarely neighbours. Each page's access is 64 bytes further inside of its page than the last
//! one's, because accesses at one offset would use the same sets of the caches.
//!
//! The x86-64 guest has page tables of its own, with 4 KiB pages, in which every entry has A and D.
//! The AArch64 guest runs without any.

use lacuna::{Arch, PAGE_SIZE};
use lacuna_addr::Level;
use std::collections::BTreeSet;
use std::ops::Range;

const PAGE: u64 = PAGE_SIZE as u64;
const BLOCK: u64 = Level::L2M.pages() * PAGE;
/// Where the parameters lie after the code.
const PARAMETERS: u64 = 0x1000;

/// Multipliers of the order.
pub const BY_ADDRESS: u32 = 1;
pub const AT_RANDOM: u32 = 1_664_525;

/// The work of the guest.
#[derive(Clone, Copy)]
pub struct Work {
    pub arch: Arch,
    pub vcpus: usize,
    /// The address of the first vCPU's first page.
    pub first: u64,
    /// From one vCPU's first page to the next vCPU's, in bytes.
    pub next: u64,
    /// Pages of each vCPU.
    pub pages: u64,
    /// The end of all pages.
    pub end: u64,
    pub variant: Variant,
}

/// Changes of the program for experiments.
#[derive(Clone, Copy, Default)]
pub struct Variant {
    /// Flushes the TLB before each sweep, so that each access walks.
    pub flushes: bool,
    /// Leaves out the pages that it does not write.
    pub skips: bool,
}

/// The address of the code.
const fn code(arch: Arch) -> u64 {
    match arch {
        Arch::Arm64 => 0x4020_0000,
        _ => 0x10_0000,
    }
}

/// The address after the code and the page tables of a guest with `pages` pages.
pub fn room(arch: Arch, pages: u64) -> u64 {
    let tables = match arch {
        Arch::Arm64 => BLOCK,
        // 8 bytes for each page, more for the upper levels, and for the tables themselves.
        _ => pages * 9 + (64 << 10),
    };
    (code(arch) + PARAMETERS + PAGE).next_multiple_of(BLOCK) + tables.next_multiple_of(BLOCK)
}

/// The pieces of the guest with their addresses; its entry is the first one's.
pub fn pieces(work: &Work) -> Vec<(u64, Vec<u8>)> {
    let start = code(work.arch);
    let root = (start + PARAMETERS + PAGE).next_multiple_of(BLOCK);
    let parameters = (start + PARAMETERS, parameters(work, root));
    if work.arch == Arch::Arm64 {
        let code = ARM64.iter().flat_map(|word| word.to_le_bytes());
        return vec![(start, code.collect()), parameters];
    }
    let end = room(work.arch, work.end.saturating_sub(work.first) / PAGE);
    let tables = tables(root, [0..end, work.first..work.end]);
    assert!(root + tables.len() as u64 <= end, "the tables have room");
    vec![(start, X86.to_vec()), parameters, (root, tables)]
}

fn parameters(work: &Work, root: u64) -> Vec<u8> {
    let pages = u32::try_from(work.pages).expect("less than 16 TiB for a vCPU");
    let longs = |values: &[u64]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let words = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let parts: [Vec<u8>; 4] = [
        longs(&[work.first, work.next]),
        // The mask of the order, and the pages; the program leaves out the numbers between.
        words(&[0, 0, pages.next_power_of_two() - 1, pages]),
        longs(&[root]),
        words(&[
            work.vcpus as u32,
            1_103_515_245,
            12_345,
            u32::from(work.variant.flushes),
            u32::from(work.variant.skips),
        ]),
    ];
    parts.concat()
}

/// Page tables at `at` that map `parts` to themselves.
fn tables(at: u64, parts: [Range<u64>; 2]) -> Vec<u8> {
    const USED: u64 = 0x67; // present, writable, user, accessed, dirty
    let blocks = parts.map(|part| part.start / BLOCK..part.end.div_ceil(BLOCK));
    let blocks: BTreeSet<u64> = blocks.into_iter().flatten().collect();
    let directories: BTreeSet<u64> = blocks.iter().map(|block| block / 512).collect();
    let table = |index: u64| (at + index * PAGE) | USED;
    let mut words = vec![0; (2 + directories.len() + blocks.len()) * 512];
    words[0] = table(1);
    let first = 2 + directories.len() as u64;
    for (directory, index) in directories.iter().zip(2..) {
        words[512 + *directory as usize] = table(index);
    }
    for (&block, leaf) in blocks.iter().zip(first..) {
        let directory = 2 + directories.range(..block / 512).count();
        words[directory * 512 + (block % 512) as usize] = table(leaf);
        let leaves = &mut words[leaf as usize * 512..][..512];
        for (entry, page) in leaves.iter_mut().zip(block * 512..) {
            *entry = (page * PAGE) | USED;
        }
    }
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// RBP: the parameters; RBX: the first page; R9: x; R10: the random number; EDX: limit; R11: the
/// multiplier; R8: written pages; ESI: numbers left.
#[rustfmt::skip]
const X86: [u8; 143] = [
    0xbd, 0x00, 0x10, 0x10, 0x00, // mov ebp, 0x101000
    0xb8, 0x01, 0x00, 0x00, 0x00, 0x0f, 0xa2, // mov eax, 0x1; cpuid
    0xc1, 0xeb, 0x18, 0x41, 0x89, 0xda, // shr ebx, 0x18; mov r10d, ebx
    0x48, 0x0f, 0xaf, 0x5d, 0x08, // imul rbx, [rbp+0x8]
    0x48, 0x03, 0x5d, 0x00, 0x41, 0x83, 0xc9, 0xff, // add rbx, [rbp]; or r9d, 0xffffffff
    0x48, 0x8b, 0x45, 0x20, 0x0f, 0x22, 0xd8, // load: mov rax, [rbp+0x20]; mov cr3, rax
    0xe5, 0xf4, 0x89, 0xc2, 0xe5, 0xf4, // again: in eax, 0xf4; mov edx, eax; in eax, 0xf4
    0x41, 0x89, 0xc3, 0x45, 0x31, 0xc0, // mov r11d, eax; xor r8d, r8d
    0x8b, 0x75, 0x18, 0xff, 0xc6, // mov esi, [rbp+0x18]; inc esi
    0x45, 0x0f, 0xaf, 0xcb, 0x41, 0xff, 0xc1, // touch: imul r9d, r11d; inc r9d
    0x44, 0x23, 0x4d, 0x18, // and r9d, [rbp+0x18]
    0x44, 0x3b, 0x4d, 0x1c, 0x73, 0x36, // cmp r9d, [rbp+0x1c]; jae next
    0x44, 0x89, 0xcf, 0x48, 0xc1, 0xe7, 0x0c, // mov edi, r9d; shl rdi, 0xc
    0x44, 0x89, 0xc9, 0x83, 0xe1, 0x3f, // mov ecx, r9d; and ecx, 0x3f
    0xc1, 0xe1, 0x06, 0x48, 0x01, 0xcf, // shl ecx, 0x6; add rdi, rcx
    0x44, 0x0f, 0xaf, 0x55, 0x2c, // imul r10d, [rbp+0x2c]
    0x44, 0x03, 0x55, 0x30, 0x44, 0x89, 0xd0, // add r10d, [rbp+0x30]; mov eax, r10d
    0xd1, 0xe8, 0x39, 0xd0, 0x73, 0x08, // shr eax, 1; cmp eax, edx; jae read
    0x88, 0x04, 0x3b, 0x41, 0xff, 0xc0, // mov [rbx+rdi], al; inc r8d
    0xeb, 0x09, // jmp next
    0x80, 0x7d, 0x38, 0x00, 0x75, 0x03, // read: cmp [rbp+0x38], 0x0; jne next
    0x8a, 0x04, 0x3b, // mov al, [rbx+rdi]
    0xff, 0xce, 0x75, 0xb5, 0x44, 0x89, 0xc0, // next: dec esi; jne touch; mov eax, r8d
    0xe7, 0xf4, 0x80, 0x7d, 0x34, 0x00, // out 0xf4, eax; cmp [rbp+0x34], 0x0
    0x75, 0x92, 0xeb, 0x97, // jne load; jmp again
];

/// X9: the parameters; X1: the first page; W13: x; W14: the random number; W10: the limit; W2: the
/// multiplier; W11: written pages; W12: the numbers left; X8: the device.
#[rustfmt::skip]
const ARM64: [u32; 54] = [
    0x10008009, 0xd53800aa, // adr x9, parameters; mrs x10, mpidr_el1
    0x92400d4b, 0xd3483d4a, // and x11, x10, #0xf; ubfx x10, x10, #8, #8
    0x8b0a116a, 0xb50001ca, // add x10, x11, x10, lsl #4; cbnz x10, both
    0xb940292c, 0x5280000d, // ldr w12, [x9, #40]; mov w13, #0x0
    0x110005ad, 0x6b0c01bf, 0x54000122, // on: add w13, w13, #0x1; cmp w13, w12; b.cs both
    0x52800060, 0x72b88000, // mov w0, #0x3; movk w0, #0xc400, lsl #16
    0x92400da1, 0x53047dae, // and x1, x13, #0xf; lsr w14, w13, #4
    0xb3781dc1, 0x10fffe02, 0xd4000002, // bfi x1, x14, #8, #8; adr x2, start; hvc #0x0
    0x17fffff6, // b on
    0xa9400921, 0x9b020541, // both: ldp x1, x2, [x9]; madd x1, x10, x2, x1
    0x29431524, 0x29459d26, // ldp w4, w5, [x9, #24]; ldp w6, w7, [x9, #44]
    0xb9403931, 0x52800023, // ldr w17, [x9, #56]; mov w3, #0x1
    0x52a12008, 0x2a0a03ee, // mov w8, #0x9000000; mov w14, w10
    0x1280000d, // mov w13, #0xffffffff
    0xb940352a, 0x3400004a, // again: ldr w10, [x9, #52]; cbz w10, load
    0xd508871f, // tlbi vmalle1
    0xb940010a, 0xb9400102, 0x5280000b, // load: ldr w10, [x8]; ldr w2, [x8]; mov w11, #0x0
    0x1100048c, // add w12, w4, #0x1
    0x1b020dad, 0x0a0401ad, // touch: madd w13, w13, w2, w3; and w13, w13, w4
    0x6b0501bf, 0x54000182, 0x1b061dce, // cmp w13, w5; b.cs next; madd w14, w14, w6, w7
    0xd37a15af, 0x8b0d31ef, // ubfiz x15, x13, #6, #6; add x15, x15, x13, lsl #12
    0x53017dd0, 0x6b0a021f, 0x54000082, // lsr w16, w14, #1; cmp w16, w10; b.cs read
    0x382f6830, 0x1100056b, 0x14000003, // strb w16, [x1, x15]; add w11, w11, #0x1; b next
    0x35000051, 0x386f6830, // read: cbnz w17, next; ldrb w16, [x1, x15]
    0x7100058c, 0x54fffe01, 0xb900010b, // next: subs w12, w12, #0x1; b.ne touch; str w11, [x8]
    0x17ffffe7, // b again
];
