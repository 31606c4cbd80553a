//! Basic blocks: their ends, their removal, and repeated instructions.

use crate::support;

use lacuna_addr::{Access, Gpa};
use lacuna_arm64::Exit;
use lacuna_cpu::testing::Ram;
use lacuna_cpu::{Processor, Stop};
use lacuna_sync::Qsbr;
use support::{CODE, DATA, memory, processor, read, run_to_end, write};

fn gpa(at: u64) -> Gpa {
    Gpa::new(at).unwrap()
}

/// ```text
///    mov x9, #3              1: add x10, x10, #1
///    bl 1f                      ret
///    add x10, x10, #100      2: mov x13, x30
///    adr x11, 2f                add x10, x10, #10
///    blr x11                    ret x13
///    add x10, x10, #1000     3: b .
///    adr x12, 3f
///    br x12
///    udf #0
/// ```
#[test]
fn calls_and_returns() {
    let program = [
        0xd2800069, 0x94000008, 0x9101914a, 0x1000010b, 0xd63f0160, 0x910fa14a, 0x1000010c,
        0xd61f0180, 0x00000000, 0x9100054a, 0xd65f03c0, 0xaa1e03ed, 0x9100294a, 0xd65f01a0,
        0x14000000,
    ];
    for fuel in [1, 100] {
        let mut ram = memory(&program, 4096);
        let mut cpu = processor(&[]);
        run_to_end(&mut cpu, &mut ram, program.len(), fuel);
        let regs = cpu.regs();
        assert_eq!((regs.x[10], regs.x[30]), (1111, CODE + 4 * 5));
    }
}

/// `str w1, [x0]; add x2, x2, #1; b .`: the store replaces the instruction behind it, in the same
/// basic block.
#[test]
fn a_store_to_the_next_instruction_is_seen() {
    let program = [0xb9000001, 0x91000442, 0x14000000];
    let mut ram = memory(&program, 4096);
    // add x2, x2, #2
    let mut cpu = processor(&[CODE + 4, 0x91000842]);
    run_to_end(&mut cpu, &mut ram, program.len(), 100);
    assert_eq!(cpu.regs().x[2], 2);
    assert_eq!(ram.code_written, [gpa(CODE).gfn()]);
}

/// Four additions, two in each page.
#[test]
fn a_basic_block_ends_at_the_end_of_its_page() {
    let mut ram = memory(&[], 4096);
    write(&mut ram, CODE + 0xff8, 0x91000800_91000400);
    write(&mut ram, CODE + 0x1000, 0x91002000_91001000);
    write(&mut ram, CODE + 0x1008, 0x14000000);
    let mut cpu = processor(&[]);
    let mut regs = cpu.regs();
    regs.pc = CODE + 0xff8;
    cpu.set_regs(&regs);
    run_to_end(&mut cpu, &mut ram, 0x1008 / 4 + 1, 3);
    assert_eq!(cpu.regs().x[0], 15);
}

/// Address, bytes, and the value of a store.
type DeviceAccess = (u64, u8, Option<u64>);

/// Runs on a machine without memory at `device`. Returns the accesses there. A load gives 0x80 plus
/// its number.
fn with_device(program: &[u32], x: &[u64]) -> (Vec<u64>, Vec<DeviceAccess>) {
    let mut ram = memory(program, 4096);
    let mut cpu = processor(x);
    let (qsbr, mut accesses) = (Qsbr::new(1), Vec::new());
    while cpu.regs().pc != CODE + 4 * (program.len() as u64 - 1) {
        match cpu.run(&mut ram, qsbr.vcpu(0), 1) {
            Exit::Fuel => {}
            Exit::MmioRead { gpa, size } => {
                cpu.complete_read(0x80 + accesses.len() as u64);
                accesses.push((gpa.get(), size, None));
            }
            Exit::MmioWrite { gpa, size, value } => accesses.push((gpa.get(), size, Some(value))),
            exit => panic!("{exit:?}"),
        }
    }
    (cpu.regs().x.to_vec(), accesses)
}

const DEVICE: u64 = 0x1000_0000;

/// `ldrsb x1, [x0], #1; ldp w2, w3, [x4, #8]!; ldr x5, [x6, x7, lsl #3]`: each access is made once,
/// and each base is changed once.
#[test]
fn loads_from_devices() {
    let program = [0x38801401, 0x29c10c82, 0xf86778c5, 0x14000000];
    let (x, accesses) = with_device(&program, &[DEVICE, 0, 0, 0, DEVICE, 0, DEVICE, 2]);
    let expected = [(0, 1), (8, 4), (12, 4), (16, 8)];
    assert_eq!(
        accesses,
        expected.map(|(at, size)| (DEVICE + at, size, None))
    );
    assert_eq!((x[0], x[1]), (DEVICE + 1, 0x80_u8 as i8 as u64));
    assert_eq!(x[2..6], [0x81, 0x82, DEVICE + 8, 0x83]);
}

/// `strh w1, [x0], #2; stp x2, x3, [x4, #-16]!; str wzr, [x5]`.
#[test]
fn stores_to_devices() {
    let program = [0x78002401, 0xa9bf0c82, 0xb90000bf, 0x14000000];
    let (x, accesses) = with_device(&program, &[DEVICE, 0x12345, 2, 3, DEVICE + 32, DEVICE + 64]);
    let expected = [(0, 2, 0x2345), (16, 8, 2), (24, 8, 3), (64, 4, 0)];
    assert_eq!(
        accesses,
        expected.map(|(at, size, value)| (DEVICE + at, size, Some(value)))
    );
    assert_eq!((x[0], x[4]), (DEVICE + 2, DEVICE + 16));
}

/// `ldr x1, [x0], #8; ldp x2, x3, [x0], #16; stp x2, x3, [x4], #16`: the pairs cross into
/// swapped-out pages. Until these are resident, nothing changes.
#[test]
fn an_instruction_that_waits_has_changed_nothing() {
    let program = [0xf8408401, 0xa8c10c02, 0xa8810c82, 0x14000000];
    let mut ram = memory(&program, 4 * 4096);
    let (first, second) = (DATA + 0xff0, DATA + 0x2ff8);
    for n in 0..3 {
        write(&mut ram, first + 8 * n, n + 1);
    }
    let absent = [DATA + 0x1000, DATA + 0x3000].map(|at| gpa(at).gfn());
    ram.swapped.extend(absent);
    let mut cpu = processor(&[first, 0, 0, 0, second]);
    let qsbr = Qsbr::new(1);
    let mut wait = |ram: &mut Ram, pc: u64, x: [u64; 5]| {
        for _ in 0..2 {
            assert_eq!(cpu.run(ram, qsbr.vcpu(0), 10), Exit::Stop(Stop::Wait));
            assert_eq!((cpu.regs().pc, &cpu.regs().x[..5]), (pc, &x[..]));
        }
    };
    wait(&mut ram, CODE + 4, [first + 8, 1, 0, 0, second]);
    ram.swapped.remove(&absent[0]);
    wait(&mut ram, CODE + 8, [first + 24, 1, 2, 3, second]);
    assert_eq!(read(&mut ram, second), 0, "the half that is resident");
    ram.swapped.remove(&absent[1]);
    run_to_end(&mut cpu, &mut ram, program.len(), 100);
    assert_eq!([second, second + 8].map(|at| read(&mut ram, at)), [2, 3]);
    assert_eq!(cpu.regs().x[4], second + 16);
}

/// `msr ttbr0_el1, x0; msr tcr_el1, x1; ldr x3, [x4]; msr sctlr_el1, x2; isb`: the load stops, and
/// then the walk for the fetch after the start of stage 1.
#[test]
fn a_stopped_walk_is_told_from_a_stopped_access() {
    let program = [0xd5182000, 0xd5182041, 0xf9400083, 0xd5181002, 0xd5033fdf];
    let mut ram = memory(&program, 2 * 4096);
    let (granule, sctlr) = (2 << 30 | 16 << 16 | 16, 0x30d0_0801);
    let absent = [DATA, DATA + 0x1000].map(|at| gpa(at).gfn());
    ram.swapped.extend(absent);
    let mut cpu = processor(&[DATA + 0x1000, granule, sctlr, 0, DATA]);
    let qsbr = Qsbr::new(1);
    let mut stopped_walk = |ram: &mut Ram| {
        assert_eq!(cpu.run(ram, qsbr.vcpu(0), 10), Exit::Stop(Stop::Wait));
        cpu.stopped_walk()
    };
    assert_eq!(stopped_walk(&mut ram), None);
    ram.swapped.remove(&absent[0]);
    assert_eq!(stopped_walk(&mut ram), Some(Access::Fetch));
}

/// `ldr x1, [x0]; stur w1, [x0, #7]; ldrh w2, [x3]; str x4, [x3]`, at odd addresses and across a
/// page's end.
#[test]
fn misaligned_accesses() {
    let program = [0xf9400001, 0xb8007001, 0x79400062, 0xf9000064, 0x14000000];
    let mut ram = memory(&program, 8192);
    write(&mut ram, DATA, 0x8877_6655_4433_2211);
    write(&mut ram, DATA + 0xff8, 0xab00_0000_0000_0000);
    write(&mut ram, DATA + 0x1000, 0xcd);
    let value = 0x1122_3344_5566_7788;
    let mut cpu = processor(&[DATA + 1, 0, 0, DATA + 0xfff, value]);
    run_to_end(&mut cpu, &mut ram, program.len(), 100);
    let regs = cpu.regs();
    assert_eq!((regs.x[1], regs.x[2]), (0x88_7766_5544_3322, 0xcdab));
    assert_eq!(read(&mut ram, DATA + 8), 0x5544_3322);
    assert_eq!(read(&mut ram, DATA + 0xff8), 0x8800_0000_0000_0000);
    assert_eq!(read(&mut ram, DATA + 0x1000), value >> 8);
}

/// SP may be misaligned as long as SCTLR_EL1.SA is clear. Then instructions are executed alone.
/// ```text
///    mov x9, sp              ldp x4, x5, [sp], #8
///    sub sp, sp, #8          add x6, sp, #0
///    str x1, [sp]            sub x7, x9, x6
///    str x2, [sp, #-8]!      and sp, x9, #-8
///    ldr x3, [sp], #8        mov sp, x9
/// ```
#[test]
fn a_misaligned_stack_pointer() {
    let program = [
        0x910003e9, 0xd10023ff, 0xf90003e1, 0xf81f8fe2, 0xf84087e3, 0xa8c097e4, 0x910003e6,
        0xcb060127, 0x927df13f, 0x9100013f, 0x14000000,
    ];
    for aligned in [0, 8] {
        let mut ram = memory(&program, 4096);
        let mut cpu = processor(&[0, 11, 22]);
        let mut regs = cpu.regs();
        regs.sp_el1 = DATA + 256 + aligned;
        cpu.set_regs(&regs);
        write(&mut ram, regs.sp_el1, 33);
        run_to_end(&mut cpu, &mut ram, program.len(), 100);
        let after = cpu.regs();
        assert_eq!(after.x[3..8], [22, 11, 33, regs.sp_el1, 0]);
        assert_eq!(after.sp_el1, regs.sp_el1);
    }
}
