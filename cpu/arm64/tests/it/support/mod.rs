//! Processors with stage 1 off, on memory without a hypervisor, alone or on threads.
#![allow(dead_code)] // Each test file uses a part.

use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_arm64::{Cpu, Exit, Fabric, Regs};
use lacuna_cpu::Processor;
use lacuna_cpu::testing::{Ram, Wakes};
use lacuna_state::arm64::SysReg;
use lacuna_sync::{Qsbr, VirtualClock};
use std::sync::{Arc, RwLock};

pub const CODE: u64 = 0x40_0000;
pub const DATA: u64 = 0x80_0000;
/// Bytes between two places of data in different cache lines.
pub const STRIDE: u64 = 128;
/// EL1h, interrupts masked.
pub const EL1: u64 = 0x3c5;

pub const SCTLR: SysReg = SysReg::new([3, 0, 1, 0, 0]);
pub const TTBR0: SysReg = SysReg::new([3, 0, 2, 0, 0]);
pub const TTBR1: SysReg = SysReg::new([3, 0, 2, 0, 1]);
pub const TCR: SysReg = SysReg::new([3, 0, 2, 0, 2]);
pub const SPSR: SysReg = SysReg::new([3, 0, 4, 0, 0]);
pub const ELR: SysReg = SysReg::new([3, 0, 4, 0, 1]);
pub const VBAR: SysReg = SysReg::new([3, 0, 12, 0, 0]);
pub const CNTKCTL: SysReg = SysReg::new([3, 0, 14, 1, 0]);

pub fn read(ram: &mut Ram, at: u64) -> u64 {
    let page = ram.add(Gpa::new(at).unwrap().gfn());
    page.load_u64(at as usize % PAGE_SIZE)
}

pub fn write(ram: &mut Ram, at: u64, value: u64) {
    let page = ram.add(Gpa::new(at).unwrap().gfn());
    page.store_u64(at as usize % PAGE_SIZE, value);
}

/// Memory with `words` at [`CODE`], and `bytes` of zeros at [`DATA`].
pub fn memory(words: &[u32], bytes: u64) -> Ram {
    let mut ram = Ram::default();
    for at in (DATA..DATA + bytes).step_by(PAGE_SIZE) {
        ram.add(Gpa::new(at).unwrap().gfn());
    }
    for (n, pair) in words.chunks(2).enumerate() {
        let high = pair.get(1).copied().unwrap_or(0);
        let pair = u64::from(high) << 32 | u64::from(pair[0]);
        write(&mut ram, CODE + 8 * n as u64, pair);
    }
    ram
}

/// A processor at [`CODE`] with `x` in X0 and so on.
pub fn processor(x: &[u64]) -> Cpu {
    let fabric = Arc::new(Fabric::new(1, Arc::new(Wakes::default())));
    let mut cpu = Cpu::new(0, fabric, Arc::new(VirtualClock::default()));
    let mut regs = Regs {
        pc: CODE,
        pstate: EL1,
        ..Regs::default()
    };
    regs.x[..x.len()].copy_from_slice(x);
    cpu.set_regs(&regs);
    cpu
}

/// Runs until the processor is at its final `b .`, `words` behind [`CODE`]. Each run has `fuel`
/// instructions. Exclusive exits are counted.
pub fn run_to_end(cpu: &mut Cpu, ram: &mut Ram, words: usize, fuel: u64) -> u64 {
    let (qsbr, end) = (Qsbr::new(1), CODE + 4 * (words as u64 - 1));
    let mut exclusive = 0;
    for _ in 0..10_000_000 {
        if cpu.regs().pc == end {
            return exclusive;
        }
        match cpu.run(ram, qsbr.vcpu(0), fuel) {
            Exit::Fuel => {}
            Exit::Exclusive => {
                exclusive += 1;
                assert_eq!(cpu.run_exclusive(ram, qsbr.vcpu(0)), Exit::Fuel);
            }
            exit => panic!("{exit:?} at {:#x}", cpu.regs().pc),
        }
    }
    panic!("no end: {:x?}", cpu.regs());
}

/// Runs each processor on its own thread, from its registers to the end of its program,
/// `(registers, words)`. They start together. An exclusive access stops the others.
pub fn run_on_threads(ram: &Ram, programs: &[(Vec<u64>, &[u32])]) {
    let (qsbr, start) = (
        Qsbr::new(programs.len()),
        std::sync::Barrier::new(programs.len()),
    );
    let running = RwLock::new(());
    std::thread::scope(|scope| {
        for (index, (x, words)) in programs.iter().enumerate() {
            let mut ram = ram.clone();
            let (qsbr, start, running) = (&qsbr, &start, &running);
            scope.spawn(move || {
                let mut cpu = processor(x);
                let code = CODE + 0x1000 * index as u64;
                let mut regs = cpu.regs();
                regs.pc = code;
                cpu.set_regs(&regs);
                let end = code + 4 * (words.len() as u64 - 1);
                start.wait();
                while cpu.regs().pc != end {
                    let exit = {
                        let _running = running.read().unwrap();
                        cpu.run(&mut ram, qsbr.vcpu(index), 1000)
                    };
                    match exit {
                        Exit::Fuel => {}
                        Exit::Exclusive => {
                            let _alone = running.write().unwrap();
                            assert_eq!(cpu.run_exclusive(&mut ram, qsbr.vcpu(index)), Exit::Fuel);
                        }
                        exit => panic!("{exit:?} at {:#x}", cpu.regs().pc),
                    }
                }
            });
        }
    });
}

/// Memory for [`run_on_threads`]: each program in its own page.
pub fn memory_of(programs: &[(Vec<u64>, &[u32])], bytes: u64) -> Ram {
    let mut ram = memory(&[], bytes);
    for (index, (_, words)) in programs.iter().enumerate() {
        for (n, &word) in words.iter().enumerate() {
            let at = CODE + 0x1000 * index as u64 + 4 * n as u64;
            let page = ram.add(Gpa::new(at).unwrap().gfn());
            page.store_u32(at as usize % PAGE_SIZE, word);
        }
    }
    ram
}
