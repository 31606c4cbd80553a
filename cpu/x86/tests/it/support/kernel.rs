//! A minimal kernel: segments, a TSS, and an IDT to put handlers into.

use super::{CODE, DATA, Machine, STACK, assemble};
use iced_x86::code_asm::*;
use lacuna_cpu::Processor;
use lacuna_x86::{Exit, Table};

pub const GDT: u64 = DATA + 0x10_0000;
pub const IDT: u64 = GDT + 0x1000;
pub const TSS: u64 = GDT + 0x2000;
pub const HANDLERS: u64 = CODE + 0x10_0000;
pub const USER: u64 = CODE + 0x20_0000;
pub const USER_STACK: u64 = DATA + 0x20_0000;

/// A machine with flat segments (kernel 8/0x10, user 0x1b/0x23), a TSS and an empty IDT.
pub fn kernel(program: impl FnOnce(&mut CodeAssembler)) -> Machine {
    let mut m = Machine::with(32 << 20, program);
    for (i, descriptor) in [
        0,
        0x00af_9a00_0000_ffff,
        0x00cf_9200_0000_ffff,
        0x00cf_f200_0000_ffff,
        0x00af_fa00_0000_ffff,
    ]
    .into_iter()
    .enumerate()
    {
        m.memory.write_u64(GDT + 8 * i as u64, descriptor);
    }
    m.memory.write_u64(TSS + 4, STACK + 0x4000);
    let mut system = m.cpu.system().clone();
    system.gdtr = Table {
        base: GDT,
        limit: 0x27,
        selector: 0,
    };
    system.idtr = Table {
        base: IDT,
        limit: 0xfff,
        selector: 0,
    };
    system.tr = Table {
        base: TSS,
        limit: 0x67,
        selector: 0x28,
    };
    system.selectors = [0, 8, 0x10, 0, 0, 0];
    system.efer |= 1;
    system.star = (0x10 << 48) | (8 << 32);
    system.lstar = HANDLERS;
    system.fmask = 0x200;
    m.cpu.set_system(system);
    m
}

/// Installs a handler, reachable from user level.
pub fn handle(m: &mut Machine, vector: u64, program: impl FnOnce(&mut CodeAssembler)) {
    let at = HANDLERS + vector * 0x100;
    let code = assemble(at, program);
    m.memory.write(at, &code);
    let low = (at & 0xffff) | (8 << 16) | (0xee00 << 32) | ((at >> 16 & 0xffff) << 48);
    m.memory.write_u64(IDT + vector * 16, low);
    m.memory.write_u64(IDT + vector * 16 + 8, at >> 32);
}

/// Goes to user level at [`USER`], interrupts on.
pub fn enter_user(a: &mut CodeAssembler) {
    for value in [0x1b, USER_STACK as i32, 0x202, 0x23, USER as i32] {
        a.push(value).unwrap();
    }
    a.iretq().unwrap();
}

/// Enables the APIC, in x2APIC mode, by guest code. All registers are as before.
pub fn start_apic(m: &mut Machine) {
    write_msrs(m, &[(0x1b, 0xfee0_0c00), (0x80f, 0x1ff)]);
}

/// Enables the APIC and starts its timer, one shot on vector 0x40 after `nanoseconds`.
pub fn start_timer(m: &mut Machine, nanoseconds: u32) {
    start_apic(m);
    write_msrs(m, &[(0x832, 0x40), (0x83e, 0xb), (0x838, nanoseconds)]);
}

/// Writes MSRs at CPL 0 with interrupts off, by code behind the user's.
fn write_msrs(m: &mut Machine, msrs: &[(u32, u32)]) {
    let at = USER + 0x1000;
    let code = assemble(at, |a| {
        for &(msr, value) in msrs {
            a.mov(ecx, msr).unwrap();
            a.mov(eax, value).unwrap();
            a.xor(edx, edx).unwrap();
            a.wrmsr().unwrap();
        }
        a.hlt().unwrap();
    });
    m.memory.write(at, &code);
    m.cpu.drop_all_code();
    let (regs, system) = (m.cpu.regs(), m.cpu.system().clone());
    let mut kernel = system.clone();
    kernel.cpl = 0;
    m.cpu.set_system(kernel);
    m.set_regs(|r| (r.rip, r.rflags) = (at, 2));
    assert_eq!(m.run(100), Exit::Halt);
    m.cpu.set_system(system);
    m.cpu.set_regs(&regs);
}
