//! 2 MiB translations: their use and their invalidation.

use crate::support;

use iced_x86::code_asm::*;
use lacuna_cpu::Processor;
use lacuna_x86::Exit;
use support::{CODE, DATA, LARGE, Leaf, Machine, RIGHTS};

const SIZE: u64 = 16 << 20;
/// Two 2 MiB blocks of data behind the blocks of code and stack.
const FIRST: u64 = DATA + (2 << 20);
const SECOND: u64 = FIRST + (2 << 20);
/// Entries of the first directory, where `Leaf::Block` maps the first GiB.
const DIRECTORY: u64 = 0x3000;

/// Adds RAX to the first word of each of RCX pages from RDI on, and halts.
fn touch_pages(a: &mut CodeAssembler) {
    let mut top = a.create_label();
    a.set_label(&mut top).unwrap();
    a.add(qword_ptr(rdi), rax).unwrap();
    a.add(rdi, 4096).unwrap();
    a.dec(ecx).unwrap();
    a.jne(top).unwrap();
    a.hlt().unwrap();
}

/// Starts the program at [`CODE`] again over `pages` pages from `from` on. Returns the number of
/// bus look-ups.
fn touch(m: &mut Machine, from: u64, pages: u64) -> u64 {
    m.set_regs(|r| (r.rip, r.gpr[0], r.gpr[1], r.gpr[7]) = (CODE, 1, pages, from));
    m.cpu.unhalt();
    let before = m.memory.lookups;
    assert_eq!(m.run(100_000), Exit::Halt);
    m.memory.lookups - before
}

/// A machine after its first run, so that its code is decoded.
fn machine(leaf: Leaf) -> Machine {
    let mut m = Machine::with(SIZE, touch_pages);
    m.by_blocks(leaf);
    let _ = touch(&mut m, FIRST, 1);
    m.cpu.flush_tlb();
    m
}

#[test]
fn one_walk_serves_a_block_where_both_stages_are_large() {
    for leaf in [Leaf::Block, Leaf::Gib] {
        let mut m = machine(leaf);
        let first = touch(&mut m, FIRST, 1);
        assert_eq!(touch(&mut m, FIRST, 512), 0, "{leaf:?}");
        assert_eq!(
            touch(&mut m, SECOND, 512),
            first - touch_code(leaf),
            "{leaf:?}"
        );
        for page in 0..512 {
            let wanted = if page == 0 { 3 } else { 1 };
            assert_eq!(m.memory.read_u64(FIRST + page * 4096), wanted);
            assert_eq!(m.memory.read_u64(SECOND + page * 4096), 1);
        }
    }
}

/// The bus look-ups of a fetch after a flush: the tables, then the page.
fn touch_code(leaf: Leaf) -> u64 {
    match leaf {
        Leaf::Page => 5,
        Leaf::Block => 4,
        Leaf::Gib => 3,
    }
}

#[test]
fn every_page_is_walked_where_either_stage_is_small() {
    let mut m = machine(Leaf::Page);
    let _ = touch(&mut m, FIRST, 1);
    assert_eq!(
        touch(&mut m, FIRST + 4096, 200),
        400,
        "the last table, and the page"
    );
    for leaf in [Leaf::Block, Leaf::Gib] {
        let mut m = machine(leaf);
        m.memory.whole[(FIRST >> 21) as usize] = false;
        let _ = touch(&mut m, FIRST, 1);
        let each = touch_code(leaf);
        assert_eq!(
            touch(&mut m, FIRST + 4096, 200),
            200 * each,
            "{leaf:?}: tables, and the page"
        );
        let _ = touch(&mut m, SECOND, 1);
        assert_eq!(touch(&mut m, SECOND, 512), 0, "the GiB is whole elsewhere");
    }
}

#[test]
fn invlpg_of_any_page_and_a_flush_end_a_block() {
    let mut m = machine(Leaf::Block);
    let invlpg = CODE + 0x1000;
    let code = support::assemble(invlpg, |a| {
        a.invlpg(byte_ptr(rdi)).unwrap();
        a.hlt().unwrap();
    });
    m.memory.write(invlpg, &code);
    let entry = DIRECTORY + (FIRST >> 21) * 8;
    // The leaf now maps the next block. The processor may use the old translation until its
    // invalidation.
    let _ = touch(&mut m, FIRST, 1);
    m.memory.write_u64(entry, SECOND | LARGE | RIGHTS);
    m.set_regs(|r| (r.rip, r.gpr[7]) = (invlpg, FIRST + 0x12_3456));
    m.cpu.unhalt();
    assert_eq!(m.run(100), Exit::Halt);
    let _ = touch(&mut m, FIRST, 512);
    assert_eq!(
        (m.memory.read_u64(FIRST), m.memory.read_u64(SECOND)),
        (2, 1)
    );
    m.memory.write_u64(entry, FIRST | LARGE | RIGHTS);
    m.cpu.flush_tlb();
    let _ = touch(&mut m, FIRST, 512);
    assert_eq!(
        (m.memory.read_u64(FIRST), m.memory.read_u64(SECOND)),
        (3, 1)
    );
    assert_eq!(m.memory.read_u64(SECOND + 511 * 4096), 1);
}

/// INVLPG of any page in a leaf of 1 GiB drops all translations of the leaf.
#[test]
fn invlpg_ends_every_block_of_a_gib() {
    let mut m = machine(Leaf::Gib);
    let invlpg = CODE + 0x1000;
    let code = support::assemble(invlpg, |a| {
        a.invlpg(byte_ptr(rdi)).unwrap();
        a.hlt().unwrap();
    });
    m.memory.write(invlpg, &code);
    let _ = touch(&mut m, FIRST, 2);
    let _ = touch(&mut m, SECOND, 2);
    assert_eq!(touch(&mut m, FIRST, 2) + touch(&mut m, SECOND, 2), 0);
    m.set_regs(|r| (r.rip, r.gpr[7]) = (invlpg, 0x3fff_f123));
    m.cpu.unhalt();
    assert_eq!(m.run(100), Exit::Halt);
    let each = touch_code(Leaf::Gib);
    assert_eq!(touch(&mut m, FIRST, 2), 2 * each, "code and data");
    assert_eq!(touch(&mut m, SECOND, 2), each);
}

/// A page of a 2 MiB block becomes code while the block is cached as writable. Writes to the page
/// are detected; writes to its neighbours stay plain writes.
#[test]
fn a_watched_page_takes_its_block_s_write_right() {
    let sub = FIRST + 5 * 4096;
    let mut m = Machine::with(SIZE, |a| {
        a.mov(rdi, FIRST).unwrap();
        a.mov(rsi, sub).unwrap();
        a.mov(qword_ptr(rdi), rax).unwrap(); // The block is cached.
        a.mov(dword_ptr(rsi), 0xc3_01_b0).unwrap(); // mov al, 1; ret
        a.call(rsi).unwrap();
        a.movzx(ebx, al).unwrap();
        a.mov(qword_ptr(rdi + 8), rbx).unwrap();
        a.inc(byte_ptr(rsi + 1)).unwrap(); // Now it is write-tracked: mov al, 2.
        a.call(rsi).unwrap();
        a.movzx(ecx, al).unwrap();
        a.mov(qword_ptr(rdi + 16), rcx).unwrap();
        a.mov(byte_ptr(rsi + 4095), 7).unwrap(); // Another place of the page.
        a.mov(byte_ptr(rsi + 4096), 8).unwrap(); // The page behind it.
        a.mov(byte_ptr(rsi + 1), 3).unwrap();
        a.call(rsi).unwrap();
        a.movzx(edx, al).unwrap();
        a.hlt().unwrap();
    });
    for leaf in [Leaf::Block, Leaf::Gib, Leaf::Page] {
        m.by_blocks(leaf);
        m.memory.code_writes.clear();
        m.memory.write(sub, &[0; 8]);
        m.set_regs(|r| r.rip = CODE);
        m.cpu.drop_all_code();
        m.cpu.unhalt();
        assert_eq!(m.run(1000), Exit::Halt);
        assert_eq!((m.reg(3), m.reg(1), m.reg(2)), (1, 2, 3), "{leaf:?}");
        assert_eq!(
            (m.memory.read_u64(FIRST + 8), m.memory.read_u64(FIRST + 16)),
            (1, 2)
        );
        assert_eq!(m.memory.read(sub + 4095, 2), [7, 8]);
        assert!(
            m.memory
                .code_writes
                .iter()
                .all(|gfn| gfn.get() == sub >> 12)
        );
        assert!(m.memory.code_writes.len() >= 3, "each write was reported");
    }
}

/// Code inside a huge page rewrites itself; its block was cached as writable before.
#[test]
fn code_in_a_block_rewrites_its_next_instruction() {
    for leaf in [Leaf::Block, Leaf::Gib] {
        let mut m = Machine::with(SIZE, |a| {
            let (mut patch, mut top) = (a.create_label(), a.create_label());
            a.lea(rdi, ptr(patch)).unwrap();
            a.add(rdi, 0x4000).unwrap();
            a.mov(byte_ptr(rdi), 1).unwrap();
            a.sub(rdi, 0x4000).unwrap();
            a.mov(ecx, 50).unwrap();
            a.set_label(&mut top).unwrap();
            a.inc(byte_ptr(rdi + 1)).unwrap();
            a.inc(byte_ptr(rdi + 0x4000)).unwrap();
            a.set_label(&mut patch).unwrap();
            a.mov(eax, 7).unwrap();
            a.add(ebx, eax).unwrap();
            a.dec(ecx).unwrap();
            a.jne(top).unwrap();
            a.hlt().unwrap();
        });
        m.by_blocks(leaf);
        assert_eq!(m.run(10_000), Exit::Halt);
        assert_eq!(m.reg(3), (8..58).sum::<u64>(), "{leaf:?}");
    }
}

/// The first write to a page after reads: the walk must set D, and the block becomes writable.
#[test]
fn reads_through_a_clean_leaf_give_no_write_permission() {
    let mut m = Machine::with(SIZE, |a| {
        let mut next = a.create_label();
        a.mov(rax, qword_ptr(rdi)).unwrap();
        a.jmp(next).unwrap(); // Fuel is counted in basic blocks.
        a.set_label(&mut next).unwrap();
        a.mov(qword_ptr(rdi + 4096), rax).unwrap();
        a.hlt().unwrap();
    });
    m.by_blocks(Leaf::Block);
    let entry = DIRECTORY + (FIRST >> 21) * 8;
    m.set_regs(|r| r.gpr[7] = FIRST);
    assert_eq!(m.run(1), Exit::Fuel);
    assert_eq!(m.memory.read_u64(entry) & 0x60, 0x20, "A and not D");
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(m.memory.read_u64(entry) & 0x60, 0x60);
}
