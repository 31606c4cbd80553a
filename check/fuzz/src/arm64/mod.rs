//! AArch64 guests of random instructions: the memory map, a runtime that survives every exception,
//! and (`sequence`) the random part.
//!
//! The map is as in [`place`](crate::place), from [`BASE`] on, except for these parts:
//!
//! ```text
//! 0x10000  runtime: entry     0x10800 vectors     0x11000 the handler     0x11800 SDEI handler
//! 0x18000  the good tables of stage 1
//! 0x60000  a table of level 2 and seven of level 3, which the guest changes at random
//! ```
//! With stage 1 on, virtual addresses equal guest-physical ones below 2 GiB and from 4 GiB on. An
//! alias of the sequences for EL0 is at 2 GiB. The random tables translate the addresses at 3 GiB.
//!
//! The handler turns stage 1 off, so it needs no table. It counts the vector, acknowledges
//! interrupts and async faults, and enters the next sequence with ERET, with stage 1 on or off by
//! the sequence's choice. If a guest has lost its vectors, it raises an exception at its vector for
//! ever, or cannot fetch its handler.

pub mod sequence;

use crate::place::{
    AREA, BEGUN, DATA, GOOD, HOSTILE, NEXT, PER_CPU, PLAY, RUNTIME, SEQUENCE_COUNT, SEQUENCES,
    STATE_SIZE, STATES, VECTORS,
};
use crate::runtime::{Manners, Piece, words};
use lacuna_a64::*;
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::mmio;

const PAGE: u64 = PAGE_SIZE as u64;
/// The beginning of memory.
pub const START: u64 = 1 << 30;
/// The beginning of the map of [`place`](crate::place), behind the device tree.
pub const BASE: u64 = START + BOOT_DATA;
/// Bytes of memory before the map.
pub const BOOT_DATA: u64 = 2 << 20;
/// The alias of the sequences for EL0.
const USER_SEQUENCES: u64 = 2 << 30;
/// The addresses that the random tables translate.
const PLAY_VA: u64 = 3 << 30;

const ENTRY: u64 = BASE + RUNTIME;
const VECTOR_TABLE: u64 = ENTRY + 0x800;
const VECTOR_SIZE: u64 = 0x80;
const HANDLER: u64 = ENTRY + 0x1000;
const SDEI_HANDLER: u64 = ENTRY + 0x1800;
/// Counted in place of a vector: the vCPU has started.
const STARTED: u64 = 16;

/// SCTLR_EL1 with stage 1 off, and its bit for stage 1. Alignment is not checked.
const SCTLR_VALUE: u64 = 0x30d0_0800;
const STAGE_1: u64 = 1;

const ELR: u32 = sysreg([3, 0, 4, 0, 1]);
const SPSR: u32 = sysreg([3, 0, 4, 0, 0]);
const SP_EL0: u32 = sysreg([3, 0, 4, 1, 0]);
const MPIDR: u32 = sysreg([3, 0, 0, 0, 5]);
const CNTKCTL: u32 = sysreg([3, 0, 14, 1, 0]);
const ICC_PMR: u32 = sysreg([3, 0, 4, 6, 0]);
const ICC_IAR1: u32 = sysreg([3, 0, 12, 12, 0]);
const ICC_EOIR1: u32 = sysreg([3, 0, 12, 12, 1]);
const ICC_IGRPEN1: u32 = sysreg([3, 0, 12, 12, 7]);

/// 39 bits of address below; TTBR1 is not walked; 48 bits of output.
const TCR_VALUE: u64 = 5 << 32 | 1 << 23 | 25;

/// Functions of SMCCC calls.
mod function {
    pub const CPU_ON: u64 = 0xc400_0003;
    pub const ABORT: u64 = 0x8600_0001;
    pub const SDEI: u64 = 0x8600_0002;
    pub const EVENT_REGISTER: u64 = 0xc400_0021;
    pub const EVENT_ENABLE: u64 = 0xc400_0022;
    pub const EVENT_COMPLETE: u64 = 0xc400_0025;
    pub const PE_UNMASK: u64 = 0xc400_002c;
}

/// Bits of a descriptor of stage 1.
pub mod pte {
    /// A table, or a page at level 3.
    pub const TABLE: u64 = 3;
    /// A block.
    pub const BLOCK: u64 = 1;
    /// EL0 may use it.
    pub const USER: u64 = 1 << 6;
    /// It cannot be written.
    pub const READ_ONLY: u64 = 1 << 7;
    /// Inner shareable.
    pub const SHARED: u64 = 3 << 8;
    /// Accessed.
    pub const AF: u64 = 1 << 10;
    /// EL0 cannot execute it.
    pub const UXN: u64 = 1 << 54;
}
use pte::{AF, BLOCK, SHARED, TABLE, USER, UXN};

/// The common parts of all sequences. All addresses are guest-physical.
pub fn pieces(vcpus: u64, manners: Manners) -> Vec<Piece> {
    let mut pieces = vec![(ENTRY, runtime())];
    for vcpu in 0..vcpus {
        let mut page = vec![0; PAGE_SIZE];
        page[HOSTILE as usize] = u8::from(manners.hostile);
        page[..8].copy_from_slice(&(vcpu * 37 % SEQUENCE_COUNT).to_le_bytes());
        pieces.push((BASE + PER_CPU + vcpu * PAGE, page));
    }
    pieces.extend(good_tables());
    pieces.extend(play_tables());
    pieces
}

fn runtime() -> Vec<u8> {
    let mut a = Asm::at(ENTRY);
    let handler = a.label();
    enter(&mut a, handler);
    for vector in 0..16 {
        a.pad_to(VECTOR_TABLE + vector * VECTOR_SIZE);
        a.set(9, vector).branch(B, handler);
    }
    a.pad_to(HANDLER).place(handler);
    handle(&mut a);
    a.pad_to(SDEI_HANDLER);
    own_page(&mut a);
    a.store(8, 31, 14, AREA as u32);
    a.call(&[function::EVENT_COMPLETE]).raw(SVC);
    a.bytes()
}

/// X14 := the page of this vCPU.
fn own_page(a: &mut Asm) {
    a.mrs(MPIDR, 13).low_bits(13, 4);
    a.set(14, BASE + PER_CPU).add_shifted(14, 13, 12);
}

/// The first instructions of a vCPU: its vectors, its interrupts, the other vCPUs.
fn enter(a: &mut Asm, handler: Label) {
    a.set(1, VECTOR_TABLE).msr(VBAR, 1);
    a.mrs(MPIDR, 13).low_bits(13, 4);
    a.set(2, mmio::REDISTRIBUTORS.get()).add_shifted(2, 13, 17);
    a.store(4, 31, 2, 0x14); // GICR_WAKER
    a.set(3, 0x1_0000).add_shifted(2, 3, 0);
    a.set(3, 0xffff_ffff).store(4, 3, 2, 0x80); // GICR_IGROUPR0
    a.store(4, 3, 2, 0x100); // GICR_ISENABLER0
    a.set(2, mmio::DISTRIBUTOR.get()).set(3, 2);
    a.store(4, 3, 2, 0); // GICD_CTLR: EnableGrp1
    a.set(3, 1).msr(ICC_IGRPEN1, 3);
    a.set(3, 3).msr(CNTKCTL, 3);
    for other in 0..4 {
        a.call(&[function::CPU_ON, other, ENTRY, 0]);
    }
    a.set(9, STARTED).branch(B, handler);
}

/// The handler of all vectors; the vector's number is in X9.
fn handle(a: &mut Asm) {
    a.set(10, SCTLR_VALUE).msr(SCTLR, 10).raw(ISB);
    a.set(11, BASE + VECTORS)
        .add_shifted(11, 9, 3)
        .count(8, 12, 11, 0);
    a.mrs(ICC_IAR1, 12).msr(ICC_EOIR1, 12);
    a.set(12, 0xf0).msr(ICC_PMR, 12);
    own_page(a);
    a.load(8, 15, 14, HOSTILE as u32);
    let silent = a.label();
    a.branch(CBNZ | 15, silent);
    a.store(8, 31, 14, AREA as u32);
    // The sub-function 5 acknowledges a page-ready interrupt.
    a.call(&[function::SDEI, 5]).call(&[function::PE_UNMASK]);
    a.place(silent);
    a.set(11, BASE + BEGUN).count(8, 12, 11, 0);
    a.load(8, 12, 14, NEXT as u32).add(12, 12, 1);
    a.low_bits(12, SEQUENCE_COUNT.trailing_zeros());
    a.store(8, 12, 14, NEXT as u32);
    a.set(15, BASE + STATES);
    a.add_shifted(15, 12, STATE_SIZE.trailing_zeros());
    for (at, register) in (0..).step_by(8).zip([ELR, SPSR, SP_EL0]) {
        a.load(8, 16, 15, at).msr(register, 16);
    }
    a.set(16, 0xff).msr(MAIR, 16);
    a.set(16, BASE + GOOD).msr(TTBR0, 16);
    a.set(16, TCR_VALUE).msr(TCR, 16);
    a.load(8, 16, 15, 24).msr(SCTLR, 16);
    a.raw(ISB).raw(ERET);
}

/// The address of page `index` of the good tables.
const fn table(index: u64) -> u64 {
    BASE + GOOD + index * PAGE
}

/// Level 1; level 2 of memory and level 3 of its second 2 MiB, where the map begins; levels 2 and 3
/// of the alias.
fn good_tables() -> Vec<Piece> {
    let block = |at: u64| at | BLOCK | USER | SHARED | AF;
    let mut root = vec![0; 512];
    (root[0], root[4]) = (block(0), block(4 << 30));
    (root[1], root[2]) = (table(1) | TABLE, table(3) | TABLE);
    root[3] = (BASE + PLAY) | TABLE;
    let mut memory: Vec<u64> = (0..512).map(|i| block(START + (i << 21))).collect();
    memory[1] = table(2) | TABLE;
    let pages = (0..512).map(|i| page_entry(i * PAGE)).collect();
    let mut alias = vec![0; 512];
    alias[0] = table(4) | TABLE;
    let user = (0..512).map(|i| match SEQUENCES + i * PAGE {
        at if at < PLAY => (BASE + at) | TABLE | USER | SHARED | AF,
        _ => 0,
    });
    let tables = [root, memory, pages, alias, user.collect()];
    let pieces = tables.iter().map(|entries| words(entries));
    (0..).map(table).zip(pieces).collect()
}

/// A page of the map. EL0 has the counters, the random tables and the data. EL1 cannot execute what
/// EL0 may write.
fn page_entry(at: u64) -> u64 {
    let rights = match at {
        VECTORS..STATES => USER,
        _ if at >= PLAY => USER,
        _ => UXN,
    };
    (BASE + at) | TABLE | SHARED | AF | rights
}

fn play_tables() -> Vec<Piece> {
    let tables = (0..crate::place::PLAY_TABLES).map(|table| {
        let entry = |i: u64| match (table, i) {
            (0, 0..7) => (BASE + PLAY + (i + 1) * PAGE) | TABLE,
            (0, _) => 0,
            _ => (BASE + DATA + (i * 7 + table * 3) % 128 * PAGE) | TABLE | USER | SHARED | AF,
        };
        let entries: Vec<u64> = (0..512).map(entry).collect();
        (BASE + PLAY + table * PAGE, words(&entries))
    });
    tables.collect()
}
