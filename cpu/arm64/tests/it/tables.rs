//! Hostile translation tables. Descriptors are random, or lead back into their own tables, into a
//! device, into the interrupt controller, beyond the address size, or into swapped-out pages. They
//! change during the walk. Whatever they say, an access ends, and reaches only a frame that the
//! descriptors named during the access.

use crate::support;

use fastrand::Rng;
use lacuna_addr::{Access, Gfn, Gpa, PAGE_SIZE};
use lacuna_arm64::gic::DISTRIBUTOR;
use lacuna_arm64::{Cpu, Exit, Fabric, Regs};
use lacuna_cpu::testing::{Ram, Wakes};
use lacuna_cpu::{Bus, HostPage, Processor, Stop};
use lacuna_sync::{Qsbr, VirtualClock};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use support::{EL1, SCTLR, TCR, TTBR0, TTBR1, VBAR, read, write};

/// Frames of the hostile tables, for TTBR0, and of data pages.
const TABLES: std::ops::Range<u64> = 0x100..0x106;
const DATA_PAGES: std::ops::Range<u64> = 0x200..0x204;
/// The kernel's tables, for TTBR1, and its code.
const KERNEL_TABLES: u64 = 0x300;
const CODE: u64 = 0x310;
/// A frame without memory.
const DEVICE: u64 = 0x5_0000;

const VALID: u64 = 1;
const TABLE: u64 = 2;
const READ_ONLY: u64 = 1 << 7;
const AF: u64 = 1 << 10;
const DBM: u64 = 1 << 51;
const FRAME: u64 = 0x0000_ffff_ffff_f000;
const KERNEL: u64 = 0xffff << 48;

/// The instructions: `ldr x1, [x0]`, `str x1, [x0]`, `ldxr x1, [x0]`, `ldadd x1, x2, [x0]`,
/// `dc zva, x0`, `at s1e1r, x0`, `ldp x1, x2, [x0]`, each followed by `b .`.
const INSTRUCTIONS: [u32; 7] = [
    0xf9400001, 0xf9000001, 0xc85f7c01, 0xf8210002, 0xd50b7420, 0xd5087800, 0xa9400801,
];
const STAY: u32 = 0x1400_0000;

/// An address of memory.
type At = u64;

/// Memory with changing tables.
struct Hostile {
    ram: Ram,
    rng: Rng,
    /// The values of each changed word of the tables since the instruction began.
    history: BTreeMap<At, BTreeSet<u64>>,
    /// A change comes before one in this many look-ups.
    changes: u32,
    lookups: u32,
}

fn gfn(n: u64) -> Gfn {
    Gfn::new(n).unwrap()
}

/// A descriptor of any kind.
fn descriptor(rng: &mut Rng) -> u64 {
    let frame = match rng.u32(..16) {
        0 => DEVICE,
        1 => DISTRIBUTOR.get() >> 12,
        2 => rng.u64(..1 << 36),
        3..=10 => rng.u64(TABLES),
        _ => rng.u64(DATA_PAGES),
    };
    let kind = [VALID | TABLE, VALID | TABLE, VALID | TABLE, VALID, 0][rng.usize(..5)];
    let bits = rng.u64(..) & (READ_ONLY | DBM | 1 << 6 | 1 << 11 | 0xf << 55);
    let limits = if rng.u32(..6) == 0 {
        rng.u64(..) & 15 << 59
    } else {
        0
    };
    let accessed = if rng.u32(..3) == 0 { 0 } else { AF };
    frame << 12 | kind | bits | limits | accessed
}

/// An index into a table: mostly one of two, so that addresses share descriptors.
fn index(rng: &mut Rng) -> u64 {
    match rng.u32(..8) {
        0 => rng.u64(..512),
        _ => rng.u64(..2),
    }
}

/// An address in the lower half.
fn address(rng: &mut Rng) -> u64 {
    let indices = [39, 30, 21, 12].map(|shift| index(rng) << shift);
    indices.iter().sum::<u64>() + 8 * rng.u64(..512)
}

impl Hostile {
    /// Changes a descriptor.
    fn change(&mut self) {
        let index = index(&mut self.rng);
        let at = (self.rng.u64(TABLES) << 12) + 8 * index;
        let old = read(&mut self.ram, at);
        let new = match self.rng.u32(..4) {
            0 => 0,
            1 => old ^ 1 << [0, 1, 7, 10, 51][self.rng.usize(..5)],
            _ => descriptor(&mut self.rng),
        };
        self.history.entry(at).or_default().extend([old, new]);
        write(&mut self.ram, at, new);
    }

    /// The values of a descriptor so far.
    fn values(&mut self, at: At) -> Vec<u64> {
        let now = read(&mut self.ram, at);
        let mut all = self.history.get(&at).cloned().unwrap_or_default();
        all.insert(now);
        all.into_iter().collect()
    }

    /// The frames to which `va` may have led since the instruction began, from the table `table` of
    /// `level` on.
    fn reachable(&mut self, va: u64, table: u64, level: u32, into: &mut BTreeSet<u64>) {
        if !TABLES.contains(&table) {
            // Data pages have no valid descriptors.
            return;
        }
        let shift = 39 - 9 * level;
        let at = (table << 12) + 8 * (va >> shift & 511);
        for value in self.values(at) {
            let leaf = value & TABLE == 0 || level == 3;
            let (frame, below) = ((value & FRAME) >> 12, (1 << (shift - 12)) - 1);
            match value & VALID {
                0 => {}
                _ if leaf => _ = into.insert(frame & !below | va >> 12 & below),
                _ => self.reachable(va, frame, level + 1, into),
            }
        }
    }
}

// SAFETY: as for `Ram`.
unsafe impl Bus for Hostile {
    fn page(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop> {
        self.lookups += 1;
        assert!(self.lookups < 400, "an instruction without end");
        if self.rng.u32(..self.changes) == 0 {
            self.change();
        }
        if TABLES.contains(&gfn.get()) && self.rng.u32(..64) == 0 {
            return Err(Stop::Wait);
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

/// The content of a data page: no valid descriptor.
fn filling(frame: u64) -> u64 {
    frame << 48 | 0xdada_dada_dad0
}

fn memory(rng: &mut Rng) -> Ram {
    let mut ram = Ram::default();
    for frame in TABLES {
        let page = ram.add(gfn(frame));
        for at in (0..PAGE_SIZE).step_by(8) {
            page.store_u64(at, descriptor(rng));
        }
    }
    for frame in DATA_PAGES {
        let page = ram.add(gfn(frame));
        (0..PAGE_SIZE)
            .step_by(8)
            .for_each(|at| page.store_u64(at, filling(frame)));
    }
    // The kernel's address is its frame; AF, and global.
    for level in 0..3 {
        let table = KERNEL_TABLES + level;
        let index = CODE >> (27 - 9 * level) & 511;
        write(&mut ram, (table << 12) + 8 * index, (table + 1) << 12 | 3);
    }
    let leaf = ((KERNEL_TABLES + 3) << 12) + 8 * (CODE & 511);
    write(&mut ram, leaf, CODE << 12 | 3 | AF | READ_ONLY);
    for (n, &word) in INSTRUCTIONS.iter().enumerate() {
        write(
            &mut ram,
            (CODE << 12) + 8 * n as u64,
            u64::from(STAY) << 32 | u64::from(word),
        );
    }
    // The vector of a synchronous exception of EL1.
    write(&mut ram, (CODE << 12) + 0xa00, STAY.into());
    ram
}

fn processor() -> Cpu {
    let fabric = Arc::new(Fabric::new(1, Arc::new(Wakes::default())));
    let mut cpu = Cpu::new(0, fabric, Arc::new(VirtualClock::default()));
    let mut state = cpu.save().unwrap();
    state.system.insert(TTBR0, TABLES.start << 12);
    state.system.insert(TTBR1, KERNEL_TABLES << 12);
    // 48 bits in both halves, 4 KiB; 36 bits of physical address; HA and HD.
    state
        .system
        .insert(TCR, 16 | 16 << 16 | 2 << 30 | 1 << 32 | 3 << 39);
    state.system.insert(VBAR, KERNEL | CODE << 12 | 0x800);
    *state.system.get_mut(&SCTLR).unwrap() |= 1;
    cpu.restore(&state).unwrap();
    cpu
}

/// How an instruction ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Complete,
    Exception,
    /// It waits for a page or a device.
    Waits,
}

/// Executes instruction `n` on `va` once.
fn execute(cpu: &mut Cpu, memory: &mut Hostile, n: usize, va: u64) -> End {
    let qsbr = Qsbr::new(1);
    let start = KERNEL + (CODE << 12) + 8 * n as u64;
    let mut x = [0; 31];
    x[0] = va;
    cpu.set_regs(&Regs {
        x,
        pc: start,
        pstate: EL1,
        ..Regs::default()
    });
    for _ in 0..8 {
        memory.lookups = 0;
        let exit = cpu.run(memory, qsbr.vcpu(0), 1);
        match cpu.regs().pc - (KERNEL | CODE << 12) {
            at if at == 8 * n as u64 + 4 => return End::Complete,
            0xa00 => return End::Exception,
            at => assert_eq!(at, 8 * n as u64, "{exit:?}"),
        }
        match exit {
            Exit::Fuel | Exit::Stop(Stop::Wait | Stop::Again) => {}
            Exit::MmioRead { gpa, .. } | Exit::MmioWrite { gpa, .. } => {
                assert!(
                    memory.ram.page(gpa.gfn(), Access::Read).is_err(),
                    "{gpa:?} is memory"
                );
                // The exit has no answer, so the instruction begins again.
                cpu.reset();
                *cpu = processor();
                return End::Waits;
            }
            exit => panic!("{exit:?}"),
        }
    }
    End::Waits
}

/// The tables must explain the values that `ldr` and its like have loaded, and the changes by `str`
/// and its like.
fn check(cpu: &Cpu, memory: &mut Hostile, n: usize, va: u64, end: End) {
    let mut frames = BTreeSet::new();
    memory.reachable(va, TABLES.start, 0, &mut frames);
    let x1 = cpu.regs().x[1];
    if end == End::Complete && matches!(n, 0 | 2 | 6) {
        let from = DATA_PAGES.into_iter().find(|&frame| x1 == filling(frame));
        let explained = from.is_none_or(|frame| frames.contains(&frame));
        assert!(explained, "{n} at {va:#x} has loaded {x1:#x}: {frames:x?}");
    }
    for frame in DATA_PAGES {
        let page = memory.ram.add(gfn(frame));
        for at in (0..PAGE_SIZE).step_by(8) {
            if page.load_u64(at) != filling(frame) {
                let stores = matches!(n, 1 | 3 | 4) && end != End::Exception;
                let explained = stores && frames.contains(&frame);
                assert!(
                    explained,
                    "{n} at {va:#x} has changed {frame:#x} at {at:#x}"
                );
                page.store_u64(at, filling(frame));
            }
        }
    }
}

#[test]
fn hostile_tables_lead_nowhere_else() {
    let mut ends = [0; 3];
    for seed in 0..40 {
        let mut rng = Rng::with_seed(seed);
        let ram = memory(&mut rng);
        let changes = [2, 8, 64, 1 << 30][seed as usize % 4];
        let mut memory = Hostile {
            ram,
            rng,
            history: BTreeMap::new(),
            changes,
            lookups: 0,
        };
        let mut cpu = processor();
        for _ in 0..400 {
            memory.history.clear();
            cpu.flush_tlb();
            let n = memory.rng.usize(..INSTRUCTIONS.len());
            let va = address(&mut memory.rng);
            let end = execute(&mut cpu, &mut memory, n, va);
            ends[end as usize] += 1;
            check(&cpu, &mut memory, n, va, end);
            if memory.rng.u32(..8) == 0 {
                memory.change();
            }
        }
        let distributor = Gpa::new(DISTRIBUTOR.get()).unwrap();
        assert_eq!(
            cpu.fabric().gic.mmio_read(distributor, 4) & 3,
            0,
            "no walk reached it"
        );
    }
    println!("complete, exception, waits: {ends:?}");
    assert!(ends.iter().all(|&n| n > 100), "{ends:?}");
}

/// The tables are in missing or swapped-out pages: the instruction waits, and continues when they
/// are resident.
#[test]
fn tables_that_are_swapped_out() {
    let mut rng = Rng::with_seed(1);
    let mut ram = memory(&mut rng);
    for (level, table) in TABLES.take(4).enumerate() {
        let next = if level == 3 {
            DATA_PAGES.start
        } else {
            table + 1
        };
        write(&mut ram, table << 12, next << 12 | 3 | AF);
    }
    let mut cpu = processor();
    let qsbr = Qsbr::new(1);
    cpu.set_regs(&Regs {
        pc: KERNEL | CODE << 12,
        pstate: EL1,
        ..Regs::default()
    });
    ram.swapped.extend(TABLES.chain(DATA_PAGES).map(gfn));
    for frame in TABLES.take(4).chain([DATA_PAGES.start]) {
        assert_eq!(cpu.run(&mut ram, qsbr.vcpu(0), 1), Exit::Stop(Stop::Wait));
        ram.swapped.remove(&gfn(frame));
    }
    assert_eq!(cpu.run(&mut ram, qsbr.vcpu(0), 1), Exit::Fuel);
    assert_eq!(cpu.regs().x[1], filling(DATA_PAGES.start));
}
