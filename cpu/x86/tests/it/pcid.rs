//! A kernel switches between two address spaces in every possible way. Each address space runs its
//! own code on its own data.

use crate::support;

use iced_x86::code_asm::*;
use lacuna_cpu::Processor;
use lacuna_x86::Exit;
use support::kernel::{HANDLERS, USER, enter_user, handle, kernel};
use support::{Machine, RIGHTS, assemble};

const CR4_PGE: u64 = 1 << 7;
const CR4_PCIDE: u64 = 1 << 17;
const NO_FLUSH: u64 = 1 << 63;
/// The second address space's tables, and its own code and data.
const TABLES: u64 = 0x110_0000;
const OTHER: u64 = TABLES + 0x1_0000;
const GLOBAL: u64 = 1 << 8;
/// A page of the user's code with another frame in each address space.
const OWN: u64 = USER + 0x1000;
const ROUNDS: u64 = 500;

/// Copies the tables of the 2 MiB around [`USER`], with `page` moved to `frame`.
fn second_space(m: &mut Machine, page: u64, frame: u64) {
    let mut from = 0x1000;
    for (level, shift) in [39, 30, 21, 12].into_iter().enumerate() {
        let to = TABLES + level as u64 * 0x1000;
        let table = m.memory.read(from, 4096);
        m.memory.write(to, &table);
        let slot = (page >> shift) % 512 * 8;
        from = m.memory.read_u64(to + slot) & !0xfff;
        let next = if shift == 12 { frame } else { to + 0x1000 };
        m.memory.write_u64(to + slot, next | RIGHTS);
    }
}

/// Makes a page of the first address space global, in both if they share the tables.
fn make_global(m: &mut Machine, page: u64) {
    let mut at = 0x1000;
    for shift in [39, 30, 21] {
        at = m.memory.read_u64(at + (page >> shift) % 512 * 8) & !0xfff;
    }
    at += (page >> 12) % 512 * 8;
    let leaf = m.memory.read_u64(at);
    m.memory.write_u64(at, leaf | GLOBAL);
}

/// Adds `by` to RBX, in two basic blocks.
fn body(by: i32) -> Vec<u8> {
    assemble(OWN, |a| {
        let mut skip = a.create_label();
        a.add(rbx, by).unwrap();
        a.jmp(skip).unwrap();
        a.set_label(&mut skip).unwrap();
        a.ret().unwrap();
    })
}

/// The user calls its own page and then asks for the other address space, [`ROUNDS`] times.
fn switching(bits: u64, first: u64, second: u64) -> Machine {
    let mut m = kernel(enter_user);
    let handler = assemble(HANDLERS, |a| {
        a.xchg(r8, r9).unwrap();
        a.mov(cr3, r8).unwrap();
        a.sysretq().unwrap();
    });
    m.memory.write(HANDLERS, &handler);
    let user = assemble(USER, |a| {
        let mut top = a.create_label();
        a.set_label(&mut top).unwrap();
        a.mov(rax, OWN).unwrap();
        a.call(rax).unwrap();
        a.syscall().unwrap();
        a.dec(r12).unwrap();
        a.jne(top).unwrap();
        a.int3().unwrap();
    });
    m.memory.write(USER, &user);
    handle(&mut m, 3, |a| a.hlt().unwrap());
    make_global(&mut m, HANDLERS);
    m.memory.write(OWN, &body(1));
    m.memory.write(OTHER, &body(1000));
    second_space(&mut m, OWN, OTHER);
    let mut system = m.cpu.system().clone();
    system.cr3 = first & !NO_FLUSH;
    system.cr4 |= bits;
    m.cpu.set_system(system);
    m.set_regs(|r| (r.gpr[8], r.gpr[9], r.gpr[12]) = (first, second, ROUNDS));
    m
}

#[test]
fn each_address_space_runs_its_own_code() {
    for global in [0, CR4_PGE] {
        for (bits, first, second) in [
            (0, 0x1000, TABLES),
            (CR4_PCIDE, 0x1000, TABLES | 7),
            (CR4_PCIDE, 0x1005, TABLES | 7 | NO_FLUSH),
            (CR4_PCIDE, 0x1005 | NO_FLUSH, TABLES | 7 | NO_FLUSH),
            // One PCID for both: every switch must flush.
            (CR4_PCIDE, 0x1007, TABLES | 7),
        ] {
            let mut m = switching(bits | global, first, second);
            assert_eq!(m.run(100_000), Exit::Halt);
            assert_eq!(m.cpu.regs().rip, HANDLERS + 0x301, "the INT3 at the end");
            assert_eq!(m.reg(3), ROUNDS / 2 * 1001, "{first:#x} {second:#x}");
        }
    }
}

/// The bus look-ups in each further round of two switches.
fn lookups_a_round(bits: u64, first: u64, second: u64) -> u64 {
    let mut m = switching(bits, first, second);
    m.set_regs(|r| r.gpr[12] = 1 << 40);
    assert_eq!(m.run(2_000), Exit::Fuel);
    let (lookups, retired) = (m.memory.lookups, m.cpu.retired());
    assert_eq!(m.run(22_000), Exit::Fuel);
    let rounds = (m.cpu.retired() - retired) / 22;
    (m.memory.lookups - lookups) / rounds
}

#[test]
fn a_kept_address_space_costs_no_walk() {
    let all = lookups_a_round(CR4_PCIDE | CR4_PGE, 0x1005, TABLES | 7);
    let none = lookups_a_round(
        CR4_PCIDE | CR4_PGE,
        0x1005 | NO_FLUSH,
        TABLES | 7 | NO_FLUSH,
    );
    assert!(all >= 2 * 5, "{all}: at least its code, each time");
    assert_eq!(none, 0);
}
