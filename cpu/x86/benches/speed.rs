//! Guest instructions a second. The programs: an arithmetic loop; random increments over 256 KiB,
//! 64 MiB and 1 GiB (the last two also with 2 MiB pages); and 100 KiB of generated code with
//! data-dependent branches. The bus of these programs costs nothing; a stage-2 walk would come on
//! top. `cargo bench -p lacuna-x86 [NAME]` prints the best of several runs. docs/speed-x86.md
//! explains them.

#[path = "../tests/it/support/mod.rs"]
mod support;

use iced_x86::code_asm::*;
use lacuna_cpu::Processor;
use support::{DATA, Leaf, Machine};

const RUNS: usize = 5;

fn main() {
    let only = std::env::args().skip(1).find(|a| !a.starts_with('-'));
    type Guest = fn() -> Machine;
    let benches: [(&str, Guest); 7] = [
        ("alu", alu),
        ("mem256k", || increments(256 << 10)),
        ("mem64m", || increments(64 << 20)),
        ("mem64m-2m", || increments_by_blocks(64 << 20)),
        ("mem1g", || increments(1 << 30)),
        ("mem1g-2m", || increments_by_blocks(1 << 30)),
        ("branchy", branchy),
    ];
    for (name, machine) in benches {
        if only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        let mut machine = machine();
        let _ = machine.run(5_000_000);
        let best = (0..RUNS).map(|_| rate(&mut machine)).fold(0.0, f64::max);
        println!("{name:10} {best:7.1} million guest instructions a second");
    }
}

fn rate(machine: &mut Machine) -> f64 {
    let before = machine.cpu.retired();
    let start = processor_time();
    let exit = machine.run(60_000_000);
    let time = processor_time() - start;
    assert_eq!(exit, lacuna_x86::Exit::Fuel);
    (machine.cpu.retired() - before) as f64 / time / 1e6
}

/// Processor time of this thread in seconds; the host may be busy with other threads.
fn processor_time() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn alu() -> Machine {
    Machine::with(16 << 20, |a| {
        let mut top = a.create_label();
        a.mov(rcx, 0x1234_5678_9abc_u64).unwrap();
        a.set_label(&mut top).unwrap();
        a.mov(rdx, rax).unwrap();
        a.shl(rdx, 13).unwrap();
        a.xor(rax, rdx).unwrap();
        a.lea(rbx, rbx + rax * 4 + 7).unwrap();
        a.add(rsi, rbx).unwrap();
        a.mov(edi, esi).unwrap();
        a.and(edi, 0xffff).unwrap();
        a.sub(r8, rdi).unwrap();
        a.add(rax, 0x1235).unwrap();
        a.cmp(rcx, r9).unwrap();
        a.jne(top).unwrap();
    })
}

/// `span` bytes, accessed at random by a linear congruential generator.
fn increments(span: u64) -> Machine {
    let mut machine = Machine::with(DATA + span + (2 << 20), |a| {
        let mut top = a.create_label();
        a.mov(r10, 6364136223846793005_u64).unwrap();
        a.mov(r11, DATA).unwrap();
        a.set_label(&mut top).unwrap();
        a.imul_2(rax, r10).unwrap();
        a.add(rax, 0x3039).unwrap();
        a.mov(rdx, rax).unwrap();
        a.shr(rdx, 33).unwrap();
        a.and(edx, (span / 8 - 1) as u32).unwrap();
        a.add(qword_ptr(r11 + rdx * 8), 1).unwrap();
        a.dec(rcx).unwrap();
        a.jne(top).unwrap();
    });
    machine.set_regs(|r| r.gpr[1] = u64::MAX);
    machine
}

fn increments_by_blocks(span: u64) -> Machine {
    let mut machine = increments(span);
    machine.by_blocks(Leaf::Block);
    machine
}

/// Basic blocks of a few instructions. Each ends in a branch that depends on a random word of data.
fn branchy() -> Machine {
    let mut rng = fastrand::Rng::with_seed(7);
    let mut machine = Machine::with(64 << 20, |a| {
        const BLOCKS: usize = 3600;
        let mut labels: Vec<CodeLabel> = (0..=BLOCKS).map(|_| a.create_label()).collect();
        a.mov(r15, DATA).unwrap();
        for i in 0..BLOCKS {
            a.set_label(&mut labels[i]).unwrap();
            a.mov(rax, qword_ptr(r15 + rbx * 8)).unwrap();
            for _ in 0..rng.u32(1..5) {
                match rng.u32(..4) {
                    0 => a.add(rcx, rax).unwrap(),
                    1 => a.lea(rdx, rcx + rax * 2).unwrap(),
                    2 => a.xor(esi, edx).unwrap(),
                    _ => a
                        .mov(dword_ptr(r15 + rng.i32(0..512) * 8 + 0x10000), esi)
                        .unwrap(),
                }
            }
            a.lea(ebx, rbx + 1).unwrap();
            a.and(ebx, 0x1fff).unwrap();
            let target = (i + 1 + rng.usize(1..4)).min(BLOCKS);
            if rng.bool() {
                a.test(eax, 1 << rng.u32(..16)).unwrap();
                a.jne(labels[target]).unwrap();
            } else {
                a.cmp(rax, rng.i32(0..i32::MAX)).unwrap();
                a.jb(labels[target]).unwrap();
            }
        }
        a.set_label(&mut labels[BLOCKS]).unwrap();
        a.jmp(labels[0]).unwrap();
    });
    for i in 0..0x2000 {
        machine.memory.write_u64(DATA + i * 8, rng.u64(..) >> 33);
    }
    machine
}
