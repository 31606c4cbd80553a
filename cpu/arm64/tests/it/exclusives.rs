//! The exclusive monitor: the reasons for a store-exclusive's failure, and its success in the end.

use crate::support;

use lacuna_addr::{Access, Gfn, Gpa};
use lacuna_arm64::{Cpu, Exit};
use lacuna_cpu::testing::Ram;
use lacuna_cpu::{Bus, HostPage, Processor, Stop};
use lacuna_sync::Qsbr;
use support::{CODE, DATA, memory, memory_of, processor, read, run_on_threads, run_to_end, write};

/// ```text
///    ldxr x1, [x0]
///    b 1f
/// 1: stxr w2, x3, [x0]
///    b .
/// ```
const APART: &[u32] = &[0xc85f7c01, 0x14000001, 0xc8027c03, 0x14000000];

/// ```text
/// 1: ldxr x1, [x0]
///    ldr x4, [x0, #8]
///    stxr w2, x3, [x0]
///    cbnz w2, 1b
///    b .
/// ```
const LOUD: &[u32] = &[0xc85f7c01, 0xf9400404, 0xc8027c03, 0x35ffffa2, 0x14000000];

/// ```text
/// 1: ldaxr x1, [x0]
///    add x1, x1, #1
///    stlxr w2, x1, [x0]
///    cbnz w2, 1b
///    subs x3, x3, #1
///    b.ne 1b
///    b .
/// ```
const COUNTER: &[u32] = &[
    0xc85ffc01, 0x91000421, 0xc802fc01, 0x35ffffa2, 0xf1000463, 0x54ffff61, 0x14000000,
];

/// ```text
/// 1: add x10, x0, #128
/// 2: ldaxp x1, x2, [x10]
///    add x1, x1, #1
///    add x2, x2, #2
///    stlxp w4, x1, x2, [x10]
///    cbnz w4, 2b
///    subs x3, x3, #1
///    b.ne 1b
///    b .
/// ```
const PAIR_COUNTER: &[u32] = &[
    0x9102000a, 0xc87f8941, 0x91000421, 0x91000842, 0xc8248941, 0x35ffff84, 0xf1000463, 0x54ffff21,
    0x14000000,
];

/// A list whose head is at x0: takes an element, counts in it, and puts it back.
/// ```text
/// 1: ldaxr x1, [x0]
///    cbz x1, 1b
///    ldr x2, [x1]
///    stxr w4, x2, [x0]
///    cbnz w4, 1b
///    ldr x5, [x1, #8]
///    add x5, x5, #1
///    str x5, [x1, #8]
/// 2: ldxr x2, [x0]
///    str x2, [x1]
///    stlxr w4, x1, [x0]
///    cbnz w4, 2b
///    subs x3, x3, #1
///    b.ne 1b
///    b .
/// ```
const LIST: &[u32] = &[
    0xc85ffc01, 0xb4ffffe1, 0xf9400022, 0xc8047c02, 0x35ffff84, 0xf9400425, 0x910004a5, 0xf9000425,
    0xc85f7c02, 0xf9000022, 0xc804fc01, 0x35ffffa4, 0xf1000463, 0x54fffe61, 0x14000000,
];

/// Executes the load-exclusive of [`APART`].
fn load_exclusive(ram: &mut Ram) -> Cpu {
    let mut cpu = processor(&[DATA, 0, 7, 55]);
    assert_eq!(cpu.run(ram, Qsbr::new(1).vcpu(0), 1), Exit::Fuel);
    assert_eq!(cpu.regs().pc, CODE + 8);
    cpu
}

/// Executes the rest of [`APART`]; returns the status.
fn store_exclusive(cpu: &mut Cpu, ram: &mut Ram) -> u64 {
    run_to_end(cpu, ram, APART.len(), 1);
    cpu.regs().x[2]
}

#[test]
fn a_store_between_makes_it_fail() {
    let mut ram = memory(APART, 4096);
    let mut cpu = load_exclusive(&mut ram);
    write(&mut ram, DATA, 1);
    assert_eq!(store_exclusive(&mut cpu, &mut ram), 1);
    assert_eq!(read(&mut ram, DATA), 1);
}

/// The value is the same again, but a store was made.
#[test]
fn two_stores_between_that_restore_the_value_make_it_fail() {
    let mut ram = memory(APART, 4096);
    let mut cpu = load_exclusive(&mut ram);
    write(&mut ram, DATA, 1);
    write(&mut ram, DATA, 0);
    assert_eq!(store_exclusive(&mut cpu, &mut ram), 1);
    assert_eq!(read(&mut ram, DATA), 0);
}

#[test]
fn without_a_store_between_it_succeeds() {
    let mut ram = memory(APART, 4096);
    let mut cpu = processor(&[DATA, 0, 7, 55]);
    assert_eq!(run_to_end(&mut cpu, &mut ram, APART.len(), 100), 0);
    assert_eq!((cpu.regs().x[2], read(&mut ram, DATA)), (0, 55));
}

#[test]
fn another_address_size_or_state_makes_it_fail() {
    // ldxr x1, [x0]; stxr w2, w3, [x0]      ldxr x1, [x0]; stxr w2, x3, [x4]
    // ldxr x1, [x0]; clrex; stxr w2, x3, [x0]      stxr w2, x3, [x0]
    let programs: [&[u32]; 4] = [
        &[0xc85f7c01, 0x88027c03, 0x14000000],
        &[0xc85f7c01, 0xc8027c83, 0x14000000],
        &[0xc85f7c01, 0xd5033f5f, 0xc8027c03, 0x14000000],
        &[0xc8027c03, 0x14000000],
    ];
    for program in programs {
        let mut ram = memory(program, 4096);
        let mut cpu = processor(&[DATA, 0, 7, 55, DATA + 8]);
        run_to_end(&mut cpu, &mut ram, program.len(), 100);
        assert_eq!(
            (cpu.regs().x[2], read(&mut ram, DATA)),
            (1, 0),
            "{program:x?}"
        );
    }
}

/// Memory with another vCPU that stores twice, at the first look-up of a page.
struct Racing {
    ram: Ram,
    page: Gfn,
    raced: bool,
    /// The stored values, in order.
    stores: [u64; 2],
}

// SAFETY: as for `Ram`.
unsafe impl Bus for Racing {
    fn page(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop> {
        if gfn == self.page && !std::mem::replace(&mut self.raced, true) {
            for value in self.stores {
                write(&mut self.ram, DATA, value);
            }
        }
        self.ram.page(gfn, access)
    }

    fn track_code(&mut self, gfn: Gfn) -> Result<(), Stop> {
        self.ram.track_code(gfn)
    }

    fn code_written(&mut self, gfn: Gfn) {
        self.ram.code_written(gfn);
    }
}

/// The two stores come during the processor's load in between. They restore the value.
#[test]
fn stores_during_an_access_between_make_it_fail() {
    // ldxr x1, [x0]; ldr x4, [x5]; stxr w2, x3, [x0]; b .
    let program = [0xc85f7c01, 0xf94000a4, 0xc8027c03, 0x14000000];
    let other = DATA + 4096;
    let mut bus = Racing {
        ram: memory(&program, 8192),
        page: Gpa::new(other).unwrap().gfn(),
        raced: false,
        stores: [1, 0],
    };
    let mut cpu = processor(&[DATA, 0, 7, 55, 0, other]);
    assert_eq!(cpu.run(&mut bus, Qsbr::new(1).vcpu(0), 4), Exit::Fuel);
    assert!(bus.raced);
    assert_eq!((cpu.regs().x[2], read(&mut bus.ram, DATA)), (1, 0));
}

/// The host keeps running while a pair runs alone. If the host changes the word, the pair fails,
/// and runs alone again.
#[test]
fn a_store_of_the_host_makes_a_pair_fail_that_runs_alone() {
    // 1: ldxr x1, [x0]; ldr x4, [x5]; stxr w2, x3, [x0]; cbnz w2, 1b; b .
    let program = [0xc85f7c01, 0xf94000a4, 0xc8027c03, 0x35ffffa2, 0x14000000];
    let other = DATA + 4096;
    let mut bus = Racing {
        ram: memory(&program, 8192),
        page: Gpa::new(other).unwrap().gfn(),
        raced: true,
        stores: [7, 8],
    };
    let mut cpu = processor(&[DATA, 0, 7, 55, 0, other]);
    let (qsbr, mut alone) = (Qsbr::new(1), 0);
    while cpu.regs().pc != CODE + 4 * 4 {
        if cpu.run(&mut bus, qsbr.vcpu(0), 1) == Exit::Exclusive {
            alone += 1;
            // Without its translations the load in between looks the page up, and the host stores.
            cpu.flush_tlb();
            bus.raced = alone > 1;
            assert_eq!(cpu.run_exclusive(&mut bus, qsbr.vcpu(0)), Exit::Fuel);
            assert_eq!(cpu.regs().x[2], u64::from(alone == 1));
        }
    }
    assert_eq!(
        (alone, cpu.regs().x[1], read(&mut bus.ram, DATA)),
        (2, 8, 55)
    );
}

/// A load in between makes the pair run alone, at its second try.
#[test]
fn a_pair_with_an_access_between_runs_alone() {
    let mut ram = memory(LOUD, 4096);
    let mut cpu = processor(&[DATA, 0, 7, 55]);
    assert_eq!(run_to_end(&mut cpu, &mut ram, LOUD.len(), 100), 1);
    assert_eq!((cpu.regs().x[2], read(&mut ram, DATA)), (0, 55));
}

/// A machine that lets the processor execute one basic block at a time.
#[test]
fn loops_end_whatever_the_fuel_is() {
    for fuel in [1, 2, 3, 100] {
        for program in [COUNTER, PAIR_COUNTER] {
            let mut ram = memory(program, 4096);
            let mut cpu = processor(&[DATA, 0, 0, 50]);
            run_to_end(&mut cpu, &mut ram, program.len(), fuel);
            let counts = read(&mut ram, DATA) + read(&mut ram, DATA + 128);
            assert_eq!(counts, 50, "fuel {fuel}");
        }
    }
}

#[test]
fn threads_lose_no_increment() {
    const COUNT: u64 = 20_000;
    let programs: Vec<_> = [COUNTER, COUNTER, PAIR_COUNTER, PAIR_COUNTER]
        .into_iter()
        .map(|program| (vec![DATA, 0, 0, COUNT], program))
        .collect();
    let mut ram = memory_of(&programs, 4096);
    run_on_threads(&ram, &programs);
    let counts = [0, 128, 136].map(|at| read(&mut ram, DATA + at));
    assert_eq!(counts, [2 * COUNT, 2 * COUNT, 4 * COUNT]);
}

/// An element may be taken and put back while another thread has loaded its successor.
#[test]
fn threads_lose_no_element_of_a_list() {
    const COUNT: u64 = 2000;
    const ELEMENTS: u64 = 4;
    let program = (vec![DATA, 0, 0, COUNT], LIST);
    let programs = [program.clone(), program.clone(), program];
    let mut ram = memory_of(&programs, 4096);
    let element = |n: u64| DATA + 128 * (n + 1);
    for n in 0..ELEMENTS {
        let next = if n + 1 < ELEMENTS { element(n + 1) } else { 0 };
        write(&mut ram, element(n), next);
    }
    write(&mut ram, DATA, element(0));
    run_on_threads(&ram, &programs);
    let (mut at, mut elements, mut counted) = (read(&mut ram, DATA), 0, 0);
    while at != 0 && elements <= ELEMENTS {
        elements += 1;
        counted += read(&mut ram, at + 8);
        at = read(&mut ram, at);
    }
    assert_eq!((elements, counted), (ELEMENTS, 3 * COUNT));
}
