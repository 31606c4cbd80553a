//! The guest's own runtime. With it, a guest of random instructions continues after any exception.
//!
//! Every vector has an interrupt gate that switches to the interrupt stack of the vCPU (IST 1), so
//! the handler always has a stack. The handler counts the vector, loads the good page tables, and
//! acknowledges interrupts and async faults. It never returns: it enters the next sequence, with
//! the state from that sequence's table. If the runtime cannot continue, the vCPU ends with a
//! triple fault. The VMM then writes the runtime to memory again and resets the vCPU.

use crate::asm::{Asm, RAX, RBX, RCX, RDX, Rm, Size};
use crate::place::*;
use lacuna_addr::PAGE_SIZE;

/// An address, and the bytes to write there.
pub type Piece = (u64, Vec<u8>);

const PAGE: u64 = PAGE_SIZE as u64;
const R12: u8 = 12;
/// Page-table entry bits.
pub mod pte {
    /// Present.
    pub const P: u64 = 1;
    /// Writable.
    pub const W: u64 = 2;
    /// CPL 3 may use it.
    pub const U: u64 = 4;
    /// Accessed.
    pub const A: u64 = 1 << 5;
    /// Dirty.
    pub const D: u64 = 1 << 6;
    /// A large page.
    pub const LARGE: u64 = 1 << 7;
}
use pte::{A, LARGE, P, U, W};

/// MSRs of async page faults.
pub const APF_ENABLE: u32 = 0x4b56_4d02;
/// Vector of page-ready interrupts.
pub const APF_VECTOR: u32 = 0x4b56_4d06;
/// Acknowledges a page-ready interrupt.
pub const APF_ACK: u32 = 0x4b56_4d07;

/// A mode of the local APIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ApicMode {
    /// Registers in memory.
    XApic,
    /// Registers are MSRs.
    X2Apic,
}

/// The runtime's settings.
#[derive(Clone, Copy, Debug)]
pub struct Manners {
    /// The runtime never acknowledges async page faults.
    pub hostile: bool,
    /// The mode in which vCPUs begin.
    pub apic: ApicMode,
}

/// The common parts of all vCPUs and sequences of a guest with `memory` bytes of main memory.
pub fn pieces(memory: u64, vcpus: u64, manners: Manners) -> Vec<Piece> {
    let (code, handler) = code(manners.apic);
    let mut pieces = vec![(RUNTIME, code)];
    pieces.push((GDT, words(&descriptors(vcpus))));
    pieces.push((POINTERS, pointers()));
    pieces.push((IDT, words(&gates(handler))));
    for vcpu in 0..vcpus {
        pieces.push((TSS + vcpu * TSS_SIZE, task_state(vcpu)));
        let mut page = vec![0; PAGE_SIZE];
        page[HOSTILE as usize] = u8::from(manners.hostile);
        // The vCPUs start in different sequences.
        page[..8].copy_from_slice(&(vcpu * 37 % SEQUENCE_COUNT).to_le_bytes());
        pieces.push((PER_CPU + vcpu * PAGE, page));
    }
    pieces.extend(good_tables(memory));
    pieces.extend(play_tables());
    pieces
}

/// `words` as bytes.
pub fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Entry, handler and stubs; returns also the address of the first stub.
fn code(apic: ApicMode) -> (Vec<u8>, u64) {
    let mut a = Asm::default();
    enter(&mut a, apic);
    let syscall = RUNTIME + a.bytes.len() as u64;
    a.raw(&[0xcd, SYSCALL_VECTOR]);
    let common = a.bytes.len();
    handle(&mut a);
    // The second pass uses the address found in the first.
    let mut b = Asm::default();
    b.wrmsr(0xc000_0082, syscall);
    let at = find(&a.bytes, 0xc000_0082);
    a.bytes[at..at + b.bytes.len()].copy_from_slice(&b.bytes);
    let stubs = a.bytes.len();
    for vector in 0..256 {
        stub(&mut a, vector, common);
    }
    (a.bytes, RUNTIME + stubs as u64)
}

/// Bytes of a stub.
const STUB: usize = 10;

/// `push vector; jmp common`.
fn stub(a: &mut Asm, vector: u32, common: usize) {
    a.raw(&[0x68]).raw(&vector.to_le_bytes());
    let distance = common as i32 - (a.bytes.len() + 5) as i32;
    a.raw(&[0xe9]).raw(&distance.to_le_bytes());
}

/// The offset of `mov ecx, msr`.
fn find(code: &[u8], msr: u32) -> usize {
    let mut wanted = vec![0xb9];
    wanted.extend(msr.to_le_bytes());
    let found = code.windows(wanted.len()).position(|bytes| bytes == wanted);
    found.expect("the entry writes it")
}

/// The first instructions of a vCPU: its own task state, tables, SYSCALL. Then it ends a sequence.
fn enter(a: &mut Asm, apic: ApicMode) {
    a.mov_imm32(RAX, 1).raw(&[0x0f, 0xa2]); // cpuid
    a.raw(&[0xc1, 0xeb, 24]); // shr ebx, 24: the APIC id
    a.mov_imm(RAX, POINTERS);
    a.raw(&[0x0f, 0x01, 0x10]); // lgdt [rax]
    a.raw(&[0x0f, 0x01, 0x58, 16]); // lidt [rax + 16]
    // The descriptor is marked busy after a reset.
    a.raw(&[0x89, 0xd8, 0xc1, 0xe0, 4]); // mov eax, ebx; shl eax, 4
    let descriptor = (GDT + u64::from(TSS_SELECTOR)) as i32;
    a.op(&[], Size::Byte, &[0x80], 4, Rm::At(RAX, descriptor + 5));
    a.raw(&[0xfd]); // and byte [rax + ..], !2
    a.raw(&[0x83, 0xc0, TSS_SELECTOR as u8, 0x0f, 0x00, 0xd8]); // add eax, ..; ltr ax
    a.mov_imm(RAX, GOOD).raw(&[0x0f, 0x22, 0xd8]); // mov cr3, rax
    a.wrmsr(0xc000_0082, 0);
    a.wrmsr(
        0xc000_0081,
        (u64::from(KERNEL_SS | 3) << 48) | (u64::from(KERNEL_CS) << 32),
    );
    a.wrmsr(0xc000_0080, 0xd01); // EFER: SCE, LME, LMA, NXE
    // The local APIC, enabled.
    match apic {
        ApicMode::X2Apic => a.wrmsr(0x1b, APIC | 0xc00).wrmsr(0x80f, 0x1ff),
        ApicMode::XApic => a
            .mov_imm(RAX, APIC + 0xf0)
            .raw(&[0xc7, 0x00, 0xff, 0x01, 0, 0]), // mov dword [rax], 0x1ff
    };
    a.raw(&[0xcd, END_VECTOR]);
}

/// The handler of all vectors; the vector is on the stack.
fn handle(a: &mut Asm) {
    a.raw(&[0x41, 0x5c]); // pop r12
    a.count(Rm::Table(R12, VECTORS as i32));
    a.raw(&[0x48, 0x89, 0xe3]); // mov rbx, rsp
    a.raw(&[0x48, 0x81, 0xe3])
        .raw(&(-(PAGE as i32)).to_le_bytes()); // and rbx, -4096
    a.raw(&[0x41, 0x83, 0xfc, 0x30]); // cmp r12d, 0x30
    let internal = a.jump(0x72);
    end_of_interrupt(a);
    a.land(internal);
    a.raw(&[0x41, 0x83, 0xfc, 0x20]);
    let external = a.jump(0x73);
    // CR3 is written only if it changes, because a write flushes the TLB.
    a.mov_imm(RAX, GOOD).raw(&[0x0f, 0x20, 0xda]); // mov rdx, cr3
    a.raw(&[0x48, 0x39, 0xc2]); // cmp rdx, rax
    let same = a.jump(0x74);
    a.raw(&[0x0f, 0x22, 0xd8]); // mov cr3, rax
    a.land(same);
    a.raw(&[0x31, 0xc0, 0x44, 0x0f, 0x22, 0xc0]); // xor eax, eax; mov cr8, rax
    a.land(external);
    a.op(&[], Size::Byte, &[0x80], 7, Rm::At(RBX, HOSTILE))
        .raw(&[0]); // cmp byte, 0
    let silent = a.jump(0x75);
    a.raw(&[0x31, 0xc0]);
    a.op(&[], Size::Quad, &[0x89], RAX, Rm::At(RBX, AREA));
    a.raw(&[0x41, 0x81, 0xfc])
        .raw(&u32::from(READY_VECTOR).to_le_bytes());
    let other = a.jump(0x75);
    a.wrmsr(APF_ACK, 1);
    a.land(other);
    a.land(silent);
    next_sequence(a);
}

/// Ends the interrupt in either mode of the local APIC.
fn end_of_interrupt(a: &mut Asm) {
    a.mov_imm32(RCX, 0x1b).raw(&[0x0f, 0x32]); // rdmsr
    a.raw(&[0xf6, 0xc4, 0x04]); // test ah, 4: x2APIC
    let mapped = a.jump(0x74);
    a.wrmsr(0x80b, 0);
    let done = a.jump(0xeb);
    a.land(mapped);
    a.mov_imm(RAX, APIC + 0xb0);
    a.raw(&[0xc7, 0x00, 0, 0, 0, 0]); // mov dword [rax], 0
    a.land(done);
}

/// Enters the next sequence with IRETQ.
fn next_sequence(a: &mut Asm) {
    a.count(Rm::Abs(BEGUN as i32));
    a.load(RAX, Rm::At(RBX, NEXT)).raw(&[0xff, 0xc0]); // inc eax
    a.raw(&[0x25])
        .raw(&(SEQUENCE_COUNT as u32 - 1).to_le_bytes());
    a.store(Rm::At(RBX, NEXT), RAX);
    a.raw(&[0x48, 0xc1, 0xe0, STATE_SIZE.trailing_zeros() as u8]); // shl rax
    a.mov_imm32(RDX, STATES as u32).raw(&[0x48, 0x01, 0xc2]); // add rdx, rax
    for at in (0..5).rev() {
        a.op(&[], Size::Long, &[0xff], 6, Rm::At(RDX, 8 * at)); // push
    }
    a.raw(&[0x48, 0xcf]); // iretq
}

fn descriptors(vcpus: u64) -> Vec<u64> {
    let mut table = vec![
        0,
        0,
        0x00af_9b00_0000_ffff, // code, CPL 0
        0x00cf_9300_0000_ffff, // data
        0x00cf_f300_0000_ffff, // data, CPL 3
        0x00af_fb00_0000_ffff, // code
    ];
    for vcpu in 0..vcpus {
        const AVAILABLE_TSS: u64 = 0x89;
        let base = TSS + vcpu * TSS_SIZE;
        let low = (TSS_SIZE - 1) | (base & 0xff_ffff) << 16 | AVAILABLE_TSS << 40;
        table.extend([low | (base >> 24 & 0xff) << 56, base >> 32]);
    }
    table
}

fn pointers() -> Vec<u8> {
    let pointer = |limit: u16, base: u64| {
        let mut bytes = limit.to_le_bytes().to_vec();
        bytes.extend(base.to_le_bytes());
        bytes.resize(16, 0);
        bytes
    };
    [pointer(0x3ff, GDT), pointer(0xfff, IDT)].concat()
}

/// Interrupt gates of DPL 3 onto IST 1.
fn gates(first: u64) -> Vec<u64> {
    const GATE: u64 = 0xee01;
    let gate = |vector: u64| {
        let at = first + vector * STUB as u64;
        let low = at & 0xffff | u64::from(KERNEL_CS) << 16 | GATE << 32;
        [low | (at >> 16 & 0xffff) << 48, at >> 32]
    };
    (0..256).flat_map(gate).collect()
}

/// RSP0 and IST 1 are the top of the vCPU's page; no I/O permission map.
fn task_state(vcpu: u64) -> Vec<u8> {
    let top = PER_CPU + (vcpu + 1) * PAGE;
    let mut bytes = vec![0; TSS_SIZE as usize];
    for at in [4, 0x24] {
        bytes[at..at + 8].copy_from_slice(&top.to_le_bytes());
    }
    bytes[0x66..0x68].copy_from_slice(&(TSS_SIZE as u16).to_le_bytes());
    bytes
}

/// The address of page `index` of the good tables.
const fn table(index: u64) -> u64 {
    GOOD + index * PAGE
}

/// PML4, PDPT, PD of the first and second GiB, PT of the first 2 MiB and of the alias; PDPT, PD
/// and PT of both edges of the canonical addresses: one entry each, so one page of each serves.
fn good_tables(memory: u64) -> Vec<Piece> {
    let link = |index| table(index) | P | W | U | A;
    let large = |at: u64, more: u64| at | P | W | A | LARGE | more;
    let mut root = vec![0; 512];
    root[0] = link(1);
    (root[1], root[255], root[256]) = ((PLAY + PAGE) | P | W | U | A, link(6), link(6));
    let mut pdpt = vec![0; 512];
    (pdpt[0], pdpt[1]) = (link(2), link(3));
    // The local APIC's GiB, and the addresses above 4 GiB.
    (pdpt[3], pdpt[4]) = (large(3 << 30, 0), large(4 << 30, U));
    let mut pd: Vec<u64> = (0..512).map(|i| large(i << 21, U)).collect();
    pd[0] = link(4);
    let mut alias_pd = vec![0; 512];
    alias_pd[0] = link(5);
    let alias: Vec<u64> = (0..512u64)
        .map(|i| SEQUENCES + i * PAGE)
        .map(|at| if at < PLAY { at | P | W | U | A } else { 0 })
        .collect();
    let first: Vec<u64> = (0..512).map(|i| first_entry(i * PAGE, memory)).collect();
    let mut edge_pdpt = vec![0; 512];
    (edge_pdpt[0], edge_pdpt[511]) = (link(7), link(7));
    let mut edge_pd = vec![0; 512];
    let edge = (DATA + PAGE) | P | W | U | A;
    (edge_pd[0], edge_pd[511]) = (edge, edge);
    let tables = [root, pdpt, pd, alias_pd, first, alias, edge_pdpt, edge_pd];
    let mut pieces: Vec<Piece> = (0..)
        .map(table)
        .zip(tables.iter().map(|t| words(t)))
        .collect();
    // The last table of the edges is a page of data: the guest may overwrite it.
    let edges: Vec<u64> = (0..512u64)
        .map(|i| (DATA + (i % 16) * PAGE) | P | W | U | A)
        .collect();
    pieces.push((DATA + PAGE, words(&edges)));
    pieces
}

/// The first 2 MiB, page by page: descriptor tables are read-only, the runtime's pages for CPL 0.
fn first_entry(at: u64, memory: u64) -> u64 {
    let rights = match at {
        _ if at >= memory => W | U,
        RUNTIME..TSS => 0,
        VECTORS..STATES => W | U,
        _ if at < DATA => W,
        _ => W | U,
    };
    at | P | A | rights
}

/// PML4, PDPT, PD and five PTs. The PML4 shares the first GiB with the good one.
fn play_tables() -> Vec<Piece> {
    let link = |index: u64| (PLAY + index * PAGE) | P | W | U;
    let mut tables = vec![vec![0; 512]; PLAY_TABLES as usize];
    (tables[0][0], tables[0][1]) = (table(1) | P | W | U | A, link(1));
    (tables[0][255], tables[0][256]) = (table(6) | P | W | U | A, table(6) | P | W | U | A);
    tables[1][0] = link(2);
    for index in 3..PLAY_TABLES {
        tables[2][index as usize - 3] = link(index);
        let entries = (0..512).map(|i| (DATA + ((i * 7 + index * 3) % 128) * PAGE) | P | W | U);
        tables[index as usize] = entries.collect();
    }
    let place = |index: usize| PLAY + index as u64 * PAGE;
    let piece = |(index, entries): (usize, Vec<u64>)| (place(index), words(&entries));
    tables.into_iter().enumerate().map(piece).collect()
}
