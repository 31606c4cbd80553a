//! Behaviour around single instructions: basic blocks, self-modifying code, page crossings,
//! restarts, devices, repeated strings, interrupts.

use crate::support;

use iced_x86::code_asm::*;
use lacuna_addr::Gpa;
use lacuna_cpu::{Processor, Stop};
use lacuna_x86::{Exception, Exit, Own};
use support::{CODE, DATA, Machine, STACK, assemble};

const SIZE: u64 = 16 << 20;

#[test]
fn a_loop_runs_and_retires_exactly_its_instructions() {
    let mut m = Machine::with(SIZE, |a| {
        let mut top = a.create_label();
        a.mov(ecx, 1000).unwrap();
        a.set_label(&mut top).unwrap();
        a.add(rax, rcx).unwrap();
        a.mov(rdx, rax).unwrap();
        a.shl(rdx, 3).unwrap();
        a.dec(ecx).unwrap();
        a.jne(top).unwrap();
        a.hlt().unwrap();
    });
    assert_eq!(m.run(1_000_000), Exit::Halt);
    assert_eq!(m.reg(0), 500_500);
    assert_eq!(m.reg(2), 500_500 * 8);
    assert_eq!(m.cpu.retired(), 1 + 5000 + 1);
}

#[test]
fn fuel_in_any_portions_gives_the_same_state() {
    let program = |a: &mut CodeAssembler| {
        let (mut top, mut f) = (a.create_label(), a.create_label());
        a.mov(r15, DATA).unwrap();
        a.set_label(&mut top).unwrap();
        a.imul_3(rax, rax, 0x1_0dcd).unwrap();
        a.add(rax, 0x3039).unwrap();
        a.movzx(edx, ah).unwrap();
        a.add(qword_ptr(r15 + rdx * 8), rax).unwrap();
        a.call(f).unwrap();
        a.jmp(top).unwrap();
        a.set_label(&mut f).unwrap();
        a.push(rdx).unwrap();
        a.xor(rbx, rdx).unwrap();
        a.pop(rdx).unwrap();
        a.ret().unwrap();
    };
    let (mut whole, mut parts) = (Machine::with(SIZE, program), Machine::with(SIZE, program));
    assert_eq!(whole.run(100_000), Exit::Fuel);
    for fuel in 1.. {
        let left = whole.cpu.retired() - parts.cpu.retired();
        if left == 0 {
            break;
        }
        assert_eq!(parts.run(fuel.min(left)), Exit::Fuel);
    }
    assert_eq!(whole.cpu.regs(), parts.cpu.regs());
    assert_eq!(whole.cpu.retired(), parts.cpu.retired());
}

#[test]
fn code_that_rewrites_its_next_instruction_runs_the_new_one() {
    let mut m = Machine::with(SIZE, |a| {
        let (mut patch, mut top) = (a.create_label(), a.create_label());
        a.mov(ecx, 3).unwrap();
        a.set_label(&mut top).unwrap();
        a.lea(rdi, ptr(patch)).unwrap();
        a.inc(byte_ptr(rdi + 1)).unwrap();
        a.set_label(&mut patch).unwrap();
        a.mov(eax, 7).unwrap();
        a.add(ebx, eax).unwrap();
        a.dec(ecx).unwrap();
        a.jne(top).unwrap();
        a.hlt().unwrap();
    });
    assert_eq!(m.run(1000), Exit::Halt);
    assert_eq!(m.reg(3), 8 + 9 + 10);
    assert!(!m.memory.code_writes.is_empty());
}

#[test]
fn code_written_by_others_runs_after_it_was_dropped() {
    let mut m = Machine::with(SIZE, |a| {
        a.mov(eax, 1).unwrap();
        a.hlt().unwrap();
    });
    assert_eq!(m.run(1000), Exit::Halt);
    m.memory.write(CODE + 1, &[2]);
    m.cpu.drop_code(Gpa::truncate(CODE).gfn());
    m.set_regs(|r| r.rip = CODE);
    resume(&mut m);
    assert_eq!(m.run(1000), Exit::Halt);
    assert_eq!(m.reg(0), 2);
}

/// Ends the halt.
fn resume(m: &mut Machine) {
    let mut system = m.cpu.system().clone();
    system.halted = false;
    m.cpu.set_system(system);
}

#[test]
fn an_instruction_across_two_pages_is_fetched_from_both() {
    let mut m = Machine::new(SIZE);
    let code = assemble(CODE + 0xffb, |a| {
        let mut top = a.create_label();
        a.set_label(&mut top).unwrap();
        a.mov(rax, 0x1122_3344_5566_7788_u64).unwrap();
        a.dec(ecx).unwrap();
        a.jne(top).unwrap();
        a.hlt().unwrap();
    });
    m.memory.write(CODE + 0xffb, &code);
    m.set_regs(|r| (r.rip, r.gpr[1]) = (CODE + 0xffb, 10));
    assert_eq!(m.run(1000), Exit::Halt);
    assert_eq!(m.reg(0), 0x1122_3344_5566_7788);
    // Only the second page is rewritten. The writer need not notify this processor, because no code
    // was decoded there.
    m.memory.write(CODE + 0x1000, &[0x99]);
    m.cpu.drop_code(Gpa::truncate(CODE + 0x1000).gfn());
    m.set_regs(|r| (r.rip, r.gpr[1]) = (CODE + 0xffb, 1));
    resume(&mut m);
    assert_eq!(m.run(1000), Exit::Halt);
    assert_eq!(m.reg(0) >> 24 & 0xff, 0x99);
}

#[test]
fn endless_new_code_does_not_grow_the_cache() {
    let mut m = Machine::with(SIZE, |a| {
        let (mut top, mut sub) = (a.create_label(), a.create_label());
        a.set_label(&mut top).unwrap();
        a.mov(rdi, DATA).unwrap();
        a.inc(esi).unwrap();
        a.mov(dword_ptr(rdi + 1), esi).unwrap();
        a.mov(byte_ptr(rdi), 0xb8).unwrap();
        a.mov(byte_ptr(rdi + 5), 0xc3).unwrap();
        a.call(rdi).unwrap();
        a.cmp(eax, esi).unwrap();
        a.jne(sub).unwrap();
        a.cmp(esi, 100_000).unwrap();
        a.jne(top).unwrap();
        a.set_label(&mut sub).unwrap();
        a.hlt().unwrap();
    });
    assert_eq!(m.run(10_000_000), Exit::Halt);
    assert_eq!(m.reg(0), 100_000);
}

#[test]
fn accesses_across_pages_are_whole_or_not_at_all() {
    let program = |a: &mut CodeAssembler| {
        a.mov(rdi, DATA + 0x1ffd).unwrap();
        a.mov(rax, 0x1122_3344_5566_7788_u64).unwrap();
        a.mov(qword_ptr(rdi), rax).unwrap();
        a.add(qword_ptr(rdi), 1).unwrap();
        a.mov(rbx, qword_ptr(rdi)).unwrap();
        a.hlt().unwrap();
    };
    let mut m = Machine::with(SIZE, program);
    // The second page is missing: the store must not change the first.
    m.memory.absent[((DATA + 0x2000) >> 12) as usize] = true;
    assert_eq!(m.run(100), Exit::Stop(Stop::Wait));
    assert_eq!(m.memory.read(DATA + 0x1ffd, 3), [0, 0, 0]);
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(m.reg(3), 0x1122_3344_5566_7789);
    assert_eq!(m.memory.read_u64(DATA + 0x1ff8) >> 40, 0x66_7789);
}

#[test]
fn every_page_may_be_missing_once() {
    let program = |a: &mut CodeAssembler| {
        let mut f = a.create_label();
        a.mov(rsi, DATA + 0x1ff9).unwrap();
        a.mov(rdi, DATA + 0x3ffb).unwrap();
        a.mov(ecx, 0x2345).unwrap();
        a.mov(eax, 0x77).unwrap();
        a.mov(rbp, STACK - 0x3000).unwrap();
        a.push(rcx).unwrap();
        a.rep().stosb().unwrap();
        a.pop(rcx).unwrap();
        a.mov(rdi, DATA + 0x7003).unwrap();
        a.rep().movsb().unwrap();
        a.xadd(qword_ptr(DATA as i32 + 0x9fff), rax).unwrap();
        a.call(f).unwrap();
        a.hlt().unwrap();
        a.set_label(&mut f).unwrap();
        a.add(qword_ptr(rsp), 0).unwrap();
        a.enter(32, 3).unwrap();
        a.leave().unwrap();
        a.ret().unwrap();
    };
    let (mut plain, mut holes) = (Machine::with(SIZE, program), Machine::with(SIZE, program));
    holes.memory.absent.fill(true);
    assert_eq!(plain.run(100_000), Exit::Halt);
    assert_eq!(holes.run_through(100_000), Exit::Halt);
    assert_eq!(plain.cpu.regs(), holes.cpu.regs());
    let len = 0xc000;
    assert_eq!(plain.memory.read(DATA, len), holes.memory.read(DATA, len));
}

#[test]
fn repeated_strings_against_their_definition() {
    let mut rng = fastrand::Rng::with_seed(3);
    for _ in 0..300 {
        let (width, down) = (1_u64 << rng.u32(..4), rng.bool());
        let (count, span) = (rng.u64(..3000), 0x6000);
        let (from, to) = (
            DATA + 0x9000 + rng.u64(..span),
            DATA + 0x9000 + rng.u64(..span),
        );
        let mut m = Machine::with(SIZE, |a| {
            if down { a.std() } else { a.cld() }.unwrap();
            match width {
                1 => a.rep().movsb().unwrap(),
                2 => a.rep().movsw().unwrap(),
                4 => a.rep().movsd().unwrap(),
                _ => a.rep().movsq().unwrap(),
            }
            a.hlt().unwrap();
        });
        let mut model: Vec<u8> = (0..0x20000).map(|_| rng.u8(..)).collect();
        m.memory.write(DATA, &model);
        m.set_regs(|r| (r.gpr[1], r.gpr[6], r.gpr[7]) = (count, from, to));
        assert_eq!(m.run(1_000_000), Exit::Halt);
        let (mut s, mut d) = ((from - DATA) as usize, (to - DATA) as usize);
        for _ in 0..count {
            model.copy_within(s..s + width as usize, d);
            let step = if down {
                usize::MAX - width as usize + 1
            } else {
                width as usize
            };
            (s, d) = (s.wrapping_add(step), d.wrapping_add(step));
        }
        assert_eq!(m.memory.read(DATA, model.len()), model);
        assert_eq!((m.reg(1), m.reg(6)), (0, DATA.wrapping_add(s as u64)));
        assert_eq!(m.reg(7), DATA.wrapping_add(d as u64));
    }
}

#[test]
fn scans_and_compares_stop_where_they_should() {
    let mut m = Machine::with(SIZE, |a| {
        a.mov(rdi, DATA).unwrap();
        a.mov(ecx, 100).unwrap();
        a.mov(al, 5).unwrap();
        a.repne().scasb().unwrap();
        a.mov(rbx, rdi).unwrap();
        a.mov(rsi, DATA).unwrap();
        a.mov(rdi, DATA + 0x1000).unwrap();
        a.mov(ecx, 100).unwrap();
        a.repe().cmpsb().unwrap();
        a.setb(dl).unwrap();
        a.hlt().unwrap();
    });
    m.memory.write(DATA, &[1, 2, 3, 4, 5, 6]);
    m.memory.write(DATA + 0x1000, &[1, 2, 3, 9]);
    assert_eq!(m.run(1000), Exit::Halt);
    assert_eq!(m.reg(3), DATA + 5);
    assert_eq!((m.reg(6), m.reg(1), m.reg(2) & 0xff), (DATA + 4, 96, 1));
}

#[test]
fn devices_are_asked_in_order_and_once() {
    let mut m = Machine::with(SIZE, |a| {
        a.mov(eax, dword_ptr(rdi + 4)).unwrap();
        a.add(dword_ptr(rdi + 8), eax).unwrap();
        a.in_(al, dx).unwrap();
        a.out(0x80, eax).unwrap();
        a.hlt().unwrap();
    });
    let device = m.device();
    let at = |offset| Gpa::truncate(device.get() + offset);
    m.set_regs(|r| r.gpr[7] = device.get());
    assert_eq!(
        m.run(100),
        Exit::MmioRead {
            gpa: at(4),
            size: 4
        }
    );
    m.cpu.complete_read(0x1111);
    assert_eq!(
        m.run(100),
        Exit::MmioRead {
            gpa: at(8),
            size: 4
        }
    );
    m.cpu.complete_read(0x2222);
    assert_eq!(
        m.run(100),
        Exit::MmioWrite {
            gpa: at(8),
            size: 4,
            value: 0x3333
        }
    );
    assert_eq!(m.run(100), Exit::Own(Own::IoIn { port: 0, size: 1 }));
    m.cpu.complete_read(0xab);
    assert_eq!(
        m.run(100),
        Exit::Own(Own::IoOut {
            port: 0x80,
            size: 4,
            value: 0x11ab
        })
    );
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(m.cpu.retired(), 5);
}

#[test]
fn a_locked_access_that_is_not_aligned_asks_for_exclusion() {
    let mut m = Machine::with(SIZE, |a| {
        a.lock().add(qword_ptr(rdi), rax).unwrap();
        a.hlt().unwrap();
    });
    m.set_regs(|r| (r.gpr[0], r.gpr[7]) = (3, DATA + 0xffc));
    assert_eq!(m.run(100), Exit::Exclusive);
    assert_eq!(m.run_exclusive(), Exit::Fuel);
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(m.memory.read(DATA + 0xffc, 2), [3, 0]);
    assert_eq!(m.cpu.retired(), 2);
}

#[test]
fn without_handlers_every_fault_is_a_shutdown() {
    type Program = fn(&mut CodeAssembler);
    let cases: [(Exception, Program); 5] = [
        (Exception::UD, |a| a.ud2().unwrap()),
        (Exception::UD, |a| a.movaps(xmm0, xmm1).unwrap()),
        (Exception::DE, |a| a.div(rbx).unwrap()),
        (Exception::GP0, |a| a.mov(rax, qword_ptr(r8)).unwrap()),
        (Exception::with_error(12, 0), |a| {
            a.mov(rax, qword_ptr(rbp)).unwrap()
        }),
    ];
    for (first, program) in cases {
        let mut m = Machine::with(SIZE, program);
        m.set_regs(|r| (r.gpr[5], r.gpr[8]) = (1 << 50, 1 << 50));
        let Exit::Own(Own::Shutdown(shutdown)) = m.run(100) else {
            panic!("no shutdown")
        };
        assert_eq!((shutdown.rip, shutdown.first), (CODE, first));
    }
}

#[test]
fn a_poke_is_seen_inside_an_endless_loop_and_a_long_string() {
    let endless: [fn(&mut CodeAssembler); 2] = [
        |a| {
            let mut top = a.create_label();
            a.set_label(&mut top).unwrap();
            a.jmp(top).unwrap();
        },
        |a| {
            a.mov(rcx, u64::MAX).unwrap();
            a.rep().lodsb().unwrap();
        },
    ];
    for program in endless {
        let mut m = Machine::with(SIZE, program);
        m.set_regs(|r| r.gpr[6] = DATA);
        assert_eq!(m.run(1000), Exit::Fuel);
        m.slots.vcpu(0).request(2);
        assert_eq!(m.run(1000), Exit::Requested);
    }
}

#[test]
fn high_bytes_and_partial_registers() {
    let mut m = Machine::with(SIZE, |a| {
        a.mov(rax, 0x1111_2222_3333_4444_u64).unwrap();
        a.mov(ah, 0x99).unwrap();
        a.mov(rbx, rax).unwrap();
        a.mov(bl, ah).unwrap();
        a.mov(rcx, rax).unwrap();
        a.mov(cx, 7).unwrap();
        a.mov(rdx, rax).unwrap();
        a.mov(edx, edx).unwrap();
        a.hlt().unwrap();
    });
    assert_eq!(m.run(100), Exit::Halt);
    assert_eq!(m.reg(0), 0x1111_2222_3333_9944);
    assert_eq!(m.reg(3), 0x1111_2222_3333_9999);
    assert_eq!(m.reg(1), 0x1111_2222_3333_0007);
    assert_eq!(m.reg(2), 0x3333_9944);
    assert_eq!(m.reg(4), STACK);
}
