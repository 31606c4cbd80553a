//! TLB invalidations between processors, each on its own thread.
//!
//! One processor maps a shared address to one page after the other. Round `n` writes `n` into the
//! next page, maps it, invalidates the address on all processors, and then stores `n` as the round.
//! The other processor reads the round, and then the shared address. It must never find a value of
//! an earlier round: a stale translation would give one.

use crate::support;

use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_arm64::{Cpu, Exit, Fabric, Regs};
use lacuna_cpu::testing::Ram;
use lacuna_cpu::{Processor, Wake};
use lacuna_sync::{Qsbr, VcpuSlot, VirtualClock};
use std::sync::Arc;
use support::{CODE, DATA, EL1, SCTLR, TCR, TTBR0, write};

const ROUNDS: u64 = 20_000;
/// Table pages of levels 0 to 3.
const TABLES: u64 = DATA;
/// The round.
const ROUND: u64 = DATA + 0x5000;
/// Eight pages, so that a page of an earlier round keeps its value for a while.
const PAGES: u64 = DATA + 0x8000;
/// The remapped address.
const SHARED: u64 = 0x100_0000;
/// A valid page with its access flag, inner shareable.
const LEAF: u64 = 0x703;
const BLOCK: u64 = 0x701;

/// X0 is the descriptor, X1 [`LEAF`] at the first page, X3 the first page, X5 TLBI's operand, X6
/// the round, X7 the last one.
const MAP: &[u32] = &[
    0xd280_0028, // mov x8, #1
    0x9240_0909, // 1: and x9, x8, #7
    0xd374_cd29, // lsl x9, x9, #12
    0x8b09_006a, // add x10, x3, x9
    0xf900_0148, // str x8, [x10]
    0x8b09_002a, // add x10, x1, x9
    0xd503_3b9f, // dsb ish
    0xf900_000a, // str x10, [x0]
    0xd503_3a9f, // dsb ishst
    0xd508_8325, // tlbi vae1is, x5
    0xd503_3b9f, // dsb ish
    0xf900_00c8, // str x8, [x6]
    0x9100_0508, // add x8, x8, #1
    0xeb07_011f, // cmp x8, x7
    0x54ff_fe69, // b.ls 1b
    0x1400_0000, // b .
];

/// X0 is [`SHARED`]; X6 and X7 as above. X9 counts the values from stale translations.
const READ: &[u32] = &[
    0xd280_0009, // mov x9, #0
    0xf940_00c3, // 1: ldr x3, [x6]
    0xd503_39bf, // dmb ishld
    0xf940_0001, // ldr x1, [x0]
    0xeb03_003f, // cmp x1, x3
    0x9a89_2529, // cinc x9, x9, lo
    0xeb07_007f, // cmp x3, x7
    0x54ff_ff43, // b.lo 1b
    0x1400_0000, // b .
];

/// Wakes a processor like a hypervisor: by a request, so that it leaves its run loop.
struct Kicks(Arc<Qsbr>);

impl Wake for Kicks {
    fn wake(&self, index: usize) {
        self.0.vcpu(index).request(VcpuSlot::KICK);
    }
}

/// Code at [`CODE`], the tables, and the first mapping of [`SHARED`]. Code and data have an
/// identity map, by blocks of 2 MiB.
fn memory() -> Ram {
    let words: Vec<u32> = MAP.iter().chain(READ).copied().collect();
    let mut ram = support::memory(&words, 0x1_0000);
    for level in 0..2 {
        let table = TABLES + level * PAGE_SIZE as u64;
        write(&mut ram, table, (table + PAGE_SIZE as u64) | 3);
    }
    let level_2 = TABLES + 2 * PAGE_SIZE as u64;
    for block in [CODE, DATA] {
        write(&mut ram, level_2 + (block >> 21) * 8, block | BLOCK);
    }
    let level_3 = TABLES + 3 * PAGE_SIZE as u64;
    write(&mut ram, level_2 + (SHARED >> 21) * 8, level_3 | 3);
    write(&mut ram, level_3, PAGES | LEAF);
    ram
}

fn start(cpu: &mut Cpu, pc: u64, x: &[u64]) {
    let mut state = cpu.save().unwrap();
    state.system.insert(TTBR0, TABLES);
    state.system.insert(TCR, 16 | 16 << 16 | 2 << 30 | 5 << 32);
    *state.system.get_mut(&SCTLR).unwrap() |= 1;
    state.regs = Regs {
        pc,
        pstate: EL1,
        ..Regs::default()
    };
    state.regs.x[..x.len()].copy_from_slice(x);
    cpu.restore(&state).unwrap();
}

/// Runs to the `b .` at `end`. Returns how often DSB had to wait.
fn run(cpu: &mut Cpu, ram: &mut Ram, slot: &VcpuSlot, end: u64) -> u64 {
    let mut waits = 0;
    while cpu.regs().pc != end {
        match cpu.run(ram, slot, 10_000) {
            Exit::Fuel => {}
            Exit::Requested => {
                slot.take();
            }
            Exit::Stop(lacuna_cpu::Stop::Again) => {
                waits += 1;
                std::thread::yield_now();
            }
            exit => panic!("{exit:?} at {:#x}", cpu.regs().pc),
        }
    }
    waits
}

#[test]
fn no_stale_translation_after_dsb() {
    let qsbr = Arc::new(Qsbr::new(2));
    let fabric = Arc::new(Fabric::new(2, Arc::new(Kicks(Arc::clone(&qsbr)))));
    let ram = memory();
    let level_3 = TABLES + 3 * PAGE_SIZE as u64;
    let asid_0 = SHARED >> 12;
    let read = CODE + 4 * MAP.len() as u64;
    let programs = [
        (
            CODE,
            MAP,
            vec![level_3, PAGES | LEAF, 0, PAGES, 0, asid_0, ROUND, ROUNDS],
        ),
        (read, READ, vec![SHARED, 0, 0, 0, 0, 0, ROUND, ROUNDS]),
    ];
    let (waits, stale) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(&programs)
            .map(|(index, (pc, words, x))| {
                let (mut ram, qsbr) = (ram.clone(), &qsbr);
                let fabric = Arc::clone(&fabric);
                scope.spawn(move || {
                    let mut cpu = Cpu::new(index, fabric, Arc::new(VirtualClock::default()));
                    start(&mut cpu, *pc, x);
                    let end = pc + 4 * (words.len() as u64 - 1);
                    (
                        run(&mut cpu, &mut ram, qsbr.vcpu(index), end),
                        cpu.regs().x[9],
                    )
                })
            })
            .collect();
        let ends: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        (ends[0].0, ends[1].1)
    });
    assert_eq!(stale, 0, "values of earlier rounds");
    let round = ram.clone().add(Gpa::truncate(ROUND).gfn());
    assert_eq!(round.load_u64(ROUND as usize % PAGE_SIZE), ROUNDS);
    println!("DSB waited {waits} times in {ROUNDS} rounds");
}
