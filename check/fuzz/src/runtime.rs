//! The guest's own runtime. With it, a guest of random instructions continues after any exception.
//!
//! Every vector has an interrupt gate that switches to the interrupt stack of the vCPU (IST 1), so
//! the handler always has a stack. The handler counts the vector, loads the good page tables, and
//! acknowledges interrupts and async faults. It never returns: it enters the next sequence, with
//! the state from that sequence's table. If the runtime cannot continue, the vCPU ends with a
//! triple fault. The VMM then writes the runtime to memory again and resets the vCPU.

use crate::encode::{Written, wrmsr};
use crate::place::*;
use iced_x86::BlockEncoderOptions;
use iced_x86::code_asm::*;
use lacuna_addr::PAGE_SIZE;

/// An address, and the bytes to write there.
pub type Piece = (u64, Vec<u8>);

const PAGE: u64 = PAGE_SIZE as u64;
const LSTAR: u32 = 0xc000_0082;
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
    let (code, handlers) = code(manners.apic).expect("instructions of this mode");
    let mut pieces = vec![(RUNTIME, code)];
    pieces.push((GDT, words(&descriptors(vcpus))));
    pieces.push((POINTERS, pointers()));
    pieces.push((IDT, words(&gates(&handlers))));
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

/// Entry, handler and a stub for each vector; returns also the addresses of the stubs.
fn code(apic: ApicMode) -> Written<(Vec<u8>, Vec<u64>)> {
    let mut a = CodeAssembler::new(64)?;
    let mut stubs: Vec<_> = (0..256).map(|_| a.create_label()).collect();
    let (mut syscall, mut common) = (a.create_label(), a.create_label());
    enter(&mut a, apic, syscall)?;
    a.set_label(&mut syscall)?;
    a.int(SYSCALL_VECTOR)?;
    a.set_label(&mut common)?;
    handle(&mut a)?;
    for (vector, stub) in (0..).zip(&mut stubs) {
        a.set_label(stub)?;
        a.push(vector)?;
        a.jmp(common)?;
    }
    let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let code = a.assemble_options(RUNTIME, options)?;
    let addresses: Written<_> = stubs.iter().map(|stub| code.label_ip(stub)).collect();
    Ok((code.inner.code_buffer, addresses?))
}

/// The first instructions of a vCPU: its own task state, tables, SYSCALL. Then it ends a sequence.
fn enter(a: &mut CodeAssembler, apic: ApicMode, syscall: CodeLabel) -> Written {
    a.mov(eax, 1)?;
    a.cpuid()?;
    a.shr(ebx, 24)?; // the APIC id
    a.mov(rax, POINTERS)?;
    a.lgdt(ptr(rax))?;
    a.lidt(ptr(rax + 16))?;
    // The descriptor is marked busy after a reset.
    a.mov(eax, ebx)?;
    a.shl(eax, 4)?;
    let descriptor = (GDT + u64::from(TSS_SELECTOR)) as i32;
    a.and(byte_ptr(rax + (descriptor + 5)), !2)?;
    a.add(eax, i32::from(TSS_SELECTOR))?;
    a.ltr(ax)?;
    a.mov(rax, GOOD)?;
    a.mov(cr3, rax)?;
    a.lea(rax, ptr(syscall))?;
    a.mov(ecx, LSTAR)?;
    a.xor(edx, edx)?;
    a.wrmsr()?;
    let segments = u64::from(KERNEL_SS | 3) << 48 | u64::from(KERNEL_CS) << 32;
    wrmsr(a, 0xc000_0081, segments)?;
    wrmsr(a, 0xc000_0080, 0xd01)?; // EFER: SCE, LME, LMA, NXE
    // The local APIC, enabled.
    match apic {
        ApicMode::X2Apic => {
            wrmsr(a, 0x1b, APIC | 0xc00)?;
            wrmsr(a, 0x80f, 0x1ff)?;
        }
        ApicMode::XApic => {
            a.mov(rax, APIC + 0xf0)?;
            a.mov(dword_ptr(rax), 0x1ff)?;
        }
    }
    a.int(END_VECTOR)
}

/// The handler of all vectors; the vector is on the stack.
fn handle(a: &mut CodeAssembler) -> Written {
    let [mut internal, mut external, mut same, mut silent] = [(); 4].map(|()| a.create_label());
    a.pop(r12)?;
    a.lock().inc(qword_ptr(r12 * 8 + VECTORS as i32))?;
    a.mov(rbx, rsp)?;
    a.and(rbx, -(PAGE as i32))?;
    a.cmp(r12d, 0x30)?;
    a.jb(internal)?;
    end_of_interrupt(a, internal)?;
    a.set_label(&mut internal)?;
    a.cmp(r12d, 0x20)?;
    a.jae(external)?;
    // CR3 is written only if it changes, because a write flushes the TLB.
    a.mov(rax, GOOD)?;
    a.mov(rdx, cr3)?;
    a.cmp(rdx, rax)?;
    a.je(same)?;
    a.mov(cr3, rax)?;
    a.set_label(&mut same)?;
    a.xor(eax, eax)?;
    a.mov(cr8, rax)?;
    a.set_label(&mut external)?;
    a.cmp(byte_ptr(rbx + HOSTILE), 0)?;
    a.jne(silent)?;
    a.xor(eax, eax)?;
    a.mov(qword_ptr(rbx + AREA), rax)?;
    a.cmp(r12d, i32::from(READY_VECTOR))?;
    a.jne(silent)?;
    wrmsr(a, APF_ACK, 1)?;
    a.set_label(&mut silent)?;
    next_sequence(a)
}

/// Ends the interrupt in either mode of the local APIC. `done` is behind it.
fn end_of_interrupt(a: &mut CodeAssembler, done: CodeLabel) -> Written {
    let mut mapped = a.create_label();
    a.mov(ecx, 0x1b)?;
    a.rdmsr()?;
    a.test(ah, 4)?; // x2APIC
    a.je(mapped)?;
    wrmsr(a, 0x80b, 0)?;
    a.jmp(done)?;
    a.set_label(&mut mapped)?;
    a.mov(rax, APIC + 0xb0)?;
    a.mov(dword_ptr(rax), 0)
}

/// Enters the next sequence with IRETQ.
fn next_sequence(a: &mut CodeAssembler) -> Written {
    a.lock().inc(qword_ptr(BEGUN))?;
    a.mov(rax, qword_ptr(rbx + NEXT))?;
    a.inc(eax)?;
    a.and(eax, SEQUENCE_COUNT as i32 - 1)?;
    a.mov(qword_ptr(rbx + NEXT), rax)?;
    a.shl(rax, STATE_SIZE.trailing_zeros())?;
    for at in (0..5).rev() {
        a.push(qword_ptr(rax + (STATES as i32 + 8 * at)))?;
    }
    a.iretq()
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
fn gates(handlers: &[u64]) -> Vec<u64> {
    const GATE: u64 = 0xee01;
    let gate = |at: &u64| {
        let low = at & 0xffff | u64::from(KERNEL_CS) << 16 | GATE << 32;
        [low | (at >> 16 & 0xffff) << 48, at >> 32]
    };
    handlers.iter().flat_map(gate).collect()
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
