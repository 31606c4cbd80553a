//! A guest of the common processor model moves from its backend to soft and back.

use std::time::Duration;

use fastrand::Rng;
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use lacuna_addr::Gpa;
use lacuna_machine::x86::cpuid::Common;
use lacuna_machine::{
    Apf, Arch, CpuModel, Ending, GuestMemory as _, PlatformDevices, SaveRestore as _, Vm as _,
};

use super::Outcome;
use super::devices::device_moves;
use super::interrupts::in_flight;
use super::nmi::nmis_in_flight;
use super::state::{next_told, registers, small};
use crate::backend::{Backend, Lacks, Made, Request};
use crate::kvm::Kvm;
use crate::moving::{move_at_least, move_to, run_for};
use crate::program::{Code, REPORT_PORT, X2APIC_EOI, assemble_x86, image, msr, take_interrupts};
use crate::running::{guest, within};
use crate::soft::Soft;

/// How often a guest moves to the other backend and back.
const ROUND_TRIPS: usize = 3;
/// Each seed has its own save points.
const SEEDS: u64 = 2;

/// The common model with the frequency that `/dev/kvm` gives a TSC here: most hosts have no other.
fn common() -> Result<CpuModel, Lacks> {
    let mut made = Kvm::default().make_bare(&small())?;
    let state = made.vcpus[0].save().expect("a fresh vCPU");
    let tsc_khz = Some(registers(&state).tsc.khz);
    Ok(CpuModel::Common { tsc_khz })
}

/// Runs `body` with this backend, which runs x86-64 guests, and soft.
macro_rules! with_soft {
    ($backend:expr, $body:expr) => {{
        let backend = $backend.clone();
        within(move || $body(&backend, &Soft::default()))
    }};
}

/// On either backend, `verify` finds its memory unchanged.
pub fn verify_goes_to_the_other_backend_and_back<B: Backend>(backend: &B) -> Outcome {
    with_soft!(backend, |here: &_, there: &_| {
        let request = Request::new(8, 6, 2, "rounds=30 pages=600");
        round_trips(here, there, request, "verify")
    })
}

/// `bm` with asynchronous page faults: pages on their way stay behind, and are requested again.
pub fn bm_goes_to_the_other_backend_and_back<B: Backend>(backend: &B) -> Outcome {
    with_soft!(backend, |here: &_, there: &_| {
        let request = Request {
            apf: Apf::On,
            latency: Duration::from_micros(200),
            ..Request::new(16, 8, 2, "faulters=4 workers=2 accesses=800 populate=1")
        };
        round_trips(here, there, request, "bm")
    })
}

fn round_trips<A: Backend, B: Backend>(
    first: &A,
    second: &B,
    request: Request,
    name: &str,
) -> Outcome {
    let cpu = common()?;
    // kvm_pvm executes SYSCALL without leaving CPL 3, so on such a host the kvm backend's guests
    // call their kernel by UD2. A guest from soft must do the same.
    let command_line = format!("syscall=ud2 {}", request.command_line);
    let request = Request {
        cpu,
        command_line,
        ..request
    };
    for seed in 1..=SEEDS {
        move_at_least(1, &request, |request| {
            round_trips_of(first, second, request, name, seed)
        })?;
    }
    Ok(())
}

/// How often a guest moved to the other backend and back, or ended there.
fn round_trips_of<A: Backend, B: Backend>(
    first: &A,
    second: &B,
    request: &Request,
    name: &str,
    seed: u64,
) -> Result<usize, Lacks> {
    let (mut rng, mut trips) = (Rng::with_seed(seed), 0);
    let mut time = || Duration::from_micros(rng.u64(2_000..30_000));
    let devices = PlatformDevices::of(Arch::X86_64, |_: &str| ());
    let mut here = first.make(request, &guest(Arch::X86_64, name))?;
    while trips < ROUND_TRIPS {
        run_for(&mut here, &devices, time());
        if devices.ending().is_some() {
            break;
        }
        let mut there = move_to(second, request, here, &devices)?;
        run_for(&mut there, &devices, time());
        here = move_to(first, request, there, &devices)?;
        trips += 1;
    }
    if devices.ending().is_none() {
        run_for(&mut here, &devices, Duration::MAX);
    }
    let ending = devices.ending();
    let is_passed = matches!(ending, Some(Ending::Exited(0)));
    assert!(is_passed, "{name}, seed {seed}: {ending:?} after {trips}");
    Ok(trips)
}

/// The address of the handlers' counters.
const COUNTS: u64 = 0x30_3000;
const IPI: u32 = 0x40;
const TIMER: u32 = 0x41;
/// The value that the program reports when a register has changed.
const WRONG: u32 = 0xbad;
const X2APIC_LVT_TIMER: u32 = 0x832;
const X2APIC_SELF_IPI: u32 = 0x83f;
const TSC_DEADLINE: u32 = 0x6e0;
/// Some milliseconds, at any frequency that a TSC has.
const SOON: i32 = 40_000_000;

/// Requests an interrupt and arms the timer with interrupts off, and reports its round. The test
/// moves the guest there. Then both interrupts must arrive, with all registers unchanged.
fn waiting() -> Code {
    assemble_x86(|a| {
        let (mut ipi, mut timer) = (a.create_label(), a.create_label());
        let (mut round, mut wait, mut wrong) =
            (a.create_label(), a.create_label(), a.create_label());
        take_interrupts(a, &[(IPI, ipi), (TIMER, timer)])?;
        msr(a, X2APIC_LVT_TIMER, TIMER | 2 << 17)?;
        a.xor(ebx, ebx)?;
        a.set_label(&mut round)?;
        a.mov(rdi, COUNTS)?;
        a.mov(dword_ptr(rdi), 0)?;
        a.mov(dword_ptr(rdi + 4), 0)?;
        msr(a, X2APIC_SELF_IPI, IPI)?;
        a.rdtsc()?;
        a.add(eax, SOON)?;
        a.adc(edx, 0)?;
        a.mov(ecx, TSC_DEADLINE)?;
        a.wrmsr()?;
        for (n, register) in (1..).zip([r8, r9, r10, r11, r12, r13, r14, r15, rbp, rsi]) {
            a.mov(register, 0x0123_4567_89ab_cdef_u64.rotate_left(n))?;
        }
        a.inc(ebx)?;
        a.mov(eax, ebx)?;
        a.out(i32::from(REPORT_PORT), eax)?;
        a.sti()?;
        a.set_label(&mut wait)?;
        a.pause()?;
        a.cmp(dword_ptr(rdi), 0)?;
        a.je(wait)?;
        a.cmp(dword_ptr(rdi + 4), 0)?;
        a.je(wait)?;
        a.cli()?;
        for (n, register) in (1..).zip([r8, r9, r10, r11, r12, r13, r14, r15, rbp, rsi]) {
            a.mov(rax, 0x0123_4567_89ab_cdef_u64.rotate_left(n))?;
            a.cmp(register, rax)?;
            a.jne(wrong)?;
        }
        // Each interrupt arrived once.
        a.cmp(dword_ptr(rdi), 1)?;
        a.jne(wrong)?;
        a.cmp(dword_ptr(rdi + 4), 1)?;
        a.je(round)?;
        a.set_label(&mut wrong)?;
        a.mov(eax, WRONG)?;
        a.out(i32::from(REPORT_PORT), eax)?;
        a.hlt()?;
        handler(a, &mut ipi, 0)?;
        handler(a, &mut timer, 4)
    })
}

/// Counts, and ends the interrupt.
fn handler(a: &mut CodeAssembler, label: &mut CodeLabel, at: i32) -> Result<(), IcedError> {
    a.set_label(label)?;
    a.push(rax)?;
    a.push(rcx)?;
    a.push(rdx)?;
    a.inc(dword_ptr(rdi + at))?;
    msr(a, X2APIC_EOI, 0)?;
    a.pop(rdx)?;
    a.pop(rcx)?;
    a.pop(rax)?;
    a.iretq()
}

/// A requested interrupt, an armed timer and the registers move with the guest.
pub fn interrupts_and_registers_go_to_the_other_backend_and_back<B: Backend>(
    backend: &B,
) -> Outcome {
    with_soft!(backend, |here: &_, there: &_| wait_in_turns(here, there))
}

fn wait_in_turns<A: Backend, B: Backend>(first: &A, second: &B) -> Outcome {
    let request = Request {
        cpu: common()?,
        ..small()
    };
    let code = waiting();
    let devices = PlatformDevices::of(Arch::X86_64, |_: &str| ());
    let mut here = first.make(&request, &image(&code))?;
    for trip in 0..ROUND_TRIPS as u32 {
        assert_eq!(next_told::<A>(&here.vm, &mut here.vcpus[0]), 2 * trip + 1);
        let mut there = move_to(second, &request, here, &devices)?;
        assert_eq!(next_told::<B>(&there.vm, &mut there.vcpus[0]), 2 * trip + 2);
        here = move_to(first, &request, there, &devices)?;
    }
    Ok(())
}

/// Interrupts of devices that are requested or in service move with the guest.
pub fn interrupts_of_devices_go_to_the_other_backend_and_back<B: Backend>(backend: &B) -> Outcome {
    with_soft!(backend, |here: &_, there: &_| {
        let request = Request {
            cpu: common()?,
            ..small()
        };
        in_flight(here, there, &request)?;
        in_flight(there, here, &request)?;
        nmis_in_flight(here, there, &request)?;
        nmis_in_flight(there, here, &request)
    })
}

/// A device's state and its line move with the guest.
pub fn a_device_goes_to_the_other_backend_and_back<B: Backend>(backend: &B) -> Outcome {
    with_soft!(backend, |here: &_, there: &_| {
        let request = Request {
            cpu: common()?,
            ..small()
        };
        device_moves(here, there, &request)?;
        device_moves(there, here, &request)
    })
}

/// CPUID of the common model is its table, at CPL 0.
pub fn the_common_model_has_its_cpuid<B: Backend>(backend: &B) -> Outcome {
    const ANSWERS: u64 = 0x30_0000;
    backend.x86_only("its processors have ID registers in place of CPUID")?;
    let backend = backend.clone();
    within(move || {
        let request = Request {
            cpu: common()?,
            ..small()
        };
        let CpuModel::Common { tsc_khz: Some(khz) } = request.cpu else {
            unreachable!("as asked for");
        };
        let model = Common {
            index: 0,
            vcpus: 1,
            tsc_khz: khz,
            apf: request.apf,
        };
        let leaves = model.leaves();
        let code = assemble_x86(|a| {
            let mut end = a.create_label();
            a.mov(rdi, ANSWERS)?;
            for leaf in &leaves {
                a.mov(eax, leaf.function)?;
                a.mov(ecx, leaf.index)?;
                a.cpuid()?;
                for (at, register) in (0..).step_by(4).zip([eax, ebx, ecx, edx]) {
                    a.mov(dword_ptr(rdi + at), register)?;
                }
                a.add(rdi, 16)?;
            }
            a.set_label(&mut end)?;
            a.mov(eax, 1)?;
            a.out(i32::from(REPORT_PORT), eax)?;
            a.jmp(end)
        });
        let Made { vm, mut vcpus, .. } = backend.make(&request, &image(&code))?;
        assert_eq!(next_told::<B>(&vm, &mut vcpus[0]), 1);
        for (n, leaf) in (0..).zip(&leaves) {
            let mut bytes = [0; 16];
            let at = Gpa::truncate(ANSWERS + n * 16);
            vm.read(at, &mut bytes).expect("guest memory");
            let (words, _) = bytes.as_chunks::<4>();
            let answer: Vec<_> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
            if answer != leaf.answer && B::Vm::BACKEND == lacuna_machine::Backend::Kvm {
                let function = leaf.function;
                return Err(Lacks::because(format!(
                    "this KVM answers CPUID {function:#x} by itself, whatever the VMM has set"
                )));
            }
            assert_eq!(answer, leaf.answer, "{leaf:x?}");
        }
        Ok(())
    })
}
