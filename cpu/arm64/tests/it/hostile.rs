//! Random programs with random system registers, page tables and interrupts: the processor answers
//! each with an architectural exception or an exit, and never panics. Every run ends within its
//! fuel.

use crate::support::{CNTKCTL, ELR, SCTLR, SPSR, TCR, TTBR0, TTBR1, VBAR};
use lacuna_a64::{DSB, ERET, HVC, SVC, WFI};
use lacuna_addr::{Gfn, PAGE_SIZE};
use lacuna_arm64::gic::Line;
use lacuna_arm64::psci::PowerState;
use lacuna_arm64::{Cpu, Exit, Fabric, Own, Regs};
use lacuna_cpu::testing::{Ram, Wakes};
use lacuna_cpu::{Event, Processor};
use lacuna_sync::{Qsbr, VirtualClock};
use std::sync::Arc;

const SEEDS: u64 = 300;
/// Pages of memory.
const PAGES: u64 = 24;
const VBAR_PAGE: u64 = 8;

/// Encodings of system instructions, so that random words meet them more often.
fn word(rng: &mut fastrand::Rng) -> u32 {
    match rng.u32(0..8) {
        0..=2 => rng.u32(..),
        // MSR, MRS, SYS of registers that exist in greater numbers.
        3 => 0xd518_0000 | rng.u32(..) & 0x0027_ffff,
        4 => 0xd508_0000 | rng.u32(..) & 0x0003_ffff,
        5 => 0xd500_401f | rng.u32(..) & 0x0007_0fe0,
        6 => [ERET, SVC, HVC, WFI, DSB][rng.usize(0..5)],
        // Loads and stores.
        _ => 0x3800_0000 | rng.u32(..) & 0xc7ff_ffff,
    }
}

/// A value that is often an address, a descriptor, or nearly a good value.
fn value(rng: &mut fastrand::Rng) -> u64 {
    let page = rng.u64(0..PAGES) * PAGE_SIZE as u64;
    match rng.u32(0..6) {
        0 => rng.u64(..),
        1 => page | rng.u64(0..4096),
        2 => page | 0x743 | rng.u64(..) & 0x0078_0000_0000_0000,
        3 => page | 3,
        4 => 1 << rng.u32(0..64),
        _ => 0x0800_0000 + rng.u64(0..0x14_0000),
    }
}

fn state(rng: &mut fastrand::Rng, cpu: &mut Cpu) {
    let mut saved = cpu.save().expect("no device waits for an answer");
    saved.regs = Regs {
        x: std::array::from_fn(|_| value(rng)),
        sp_el0: value(rng),
        sp_el1: value(rng),
        pc: rng.u64(0..PAGES) * PAGE_SIZE as u64 + rng.u64(0..1024) * 4,
        pstate: [0, 4, 5][rng.usize(0..3)] | rng.u64(..) & (0xf << 28 | 0xf << 6 | 1 << 22),
    };
    let sys = &mut saved.system;
    sys.insert(VBAR, VBAR_PAGE * PAGE_SIZE as u64);
    sys.insert(ELR, value(rng));
    sys.insert(SPSR, [0, 4, 5, rng.u64(0..32)][rng.usize(0..4)]);
    sys.insert(TTBR0, value(rng) & !1);
    sys.insert(TTBR1, value(rng) & !1);
    sys.insert(
        TCR,
        rng.u64(16..40) | rng.u64(16..40) << 16 | 5 << 32 | rng.u64(0..32) << 36,
    );
    sys.insert(CNTKCTL, rng.u64(0..1024));
    *sys.get_mut(&SCTLR).unwrap() |=
        rng.u64(0..2) | rng.u64(..) & (1 << 9 | 1 << 14 | 1 << 15 | 1 << 19 | 1 << 26);
    saved.gic.asleep = false;
    saved.gic.private.enabled = rng.u32(..);
    saved.gic.private.group = rng.u32(..);
    saved.gic.cpu.pmr = 0xf8;
    saved.gic.cpu.enabled = [rng.bool(), rng.bool()];
    cpu.restore(&saved).expect("these values are possible");
}

fn machine(rng: &mut fastrand::Rng) -> (Vec<Cpu>, Ram, Arc<VirtualClock>) {
    let fabric = Arc::new(Fabric::new(2, Arc::new(Wakes::default())));
    let clock = Arc::new(VirtualClock::default());
    let mut ram = Ram::default();
    for page in 0..PAGES {
        let page = ram.add(Gfn::new(page).unwrap());
        for at in (0..PAGE_SIZE).step_by(8) {
            let words = u64::from(word(rng)) << 32 | u64::from(word(rng));
            page.store_u64(at, if rng.u8(0..8) == 0 { value(rng) } else { words });
        }
    }
    let mut cpus: Vec<Cpu> = (0..2)
        .map(|index| Cpu::new(index, Arc::clone(&fabric), clock.clone()))
        .collect();
    cpus.iter_mut().for_each(|cpu| state(rng, cpu));
    (cpus, ram, clock)
}

/// A hypervisor's work between two runs.
fn answer(rng: &mut fastrand::Rng, cpu: &mut Cpu, exit: Exit) {
    match exit {
        Exit::MmioRead { .. } => cpu.complete_read(rng.u64(..)),
        Exit::Halt => cpu.unhalt(),
        Exit::Own(Own::Hypercall(call)) => {
            let index = rng.usize(0..2);
            if cpu.fabric().power.call(index, &call).is_none() {
                cpu.complete_hypercall(call.architecture().map_or([0; 4], |x0| [x0, 0, 0, 0]));
            }
            cpu.fabric().power.set(index, PowerState::On);
        }
        Exit::Own(Own::Exception(_)) => cpu.reset(),
        // No other vCPU runs here to end a wait.
        Exit::Stop(_) if cpu.save().is_some() => state(rng, cpu),
        _ => {}
    }
    if rng.u8(0..16) == 0 && cpu.is_interruptible() {
        let address = rng.u64(..);
        cpu.inject(Event::AsyncFault { address })
            .expect("the processor has this event");
    }
}

#[test]
fn random_guests() {
    let qsbr = Qsbr::new(2);
    let (mut retired, mut exceptions) = (0, 0);
    for seed in 0..SEEDS {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut cpus, mut ram, clock) = machine(&mut rng);
        for _ in 0..60 {
            let index = rng.usize(0..2);
            let cpu = &mut cpus[index];
            clock.advance(rng.u64(0..100_000));
            let gic = &cpu.fabric().gic;
            let line = if rng.bool() { Line::High } else { Line::Low };
            gic.set_ppi(index, rng.u32(16..32), line);
            gic.set_spi(rng.u32(32..140), line);
            let exit = match rng.u8(0..32) {
                0 => cpu.run_exclusive(&mut ram, qsbr.vcpu(index)),
                _ => cpu.run(&mut ram, qsbr.vcpu(index), 200),
            };
            answer(&mut rng, cpu, exit);
            exceptions += u64::from(cpu.system().esr != 0);
            assert!(cpu.next_deadline().is_none_or(|at| at.0 > 0));
        }
        retired += cpus.iter().map(Cpu::retired).sum::<u64>();
    }
    // The programs do make progress.
    assert!(retired > 100_000, "{retired} instructions");
    assert!(exceptions > SEEDS, "{exceptions} runs after an exception");
}
