//! Interrupts of devices: lines and messages.
//!
//! The guest obeys the test: at each question of its port it gets a number. `WINDOW` and `HALT`
//! let it take interrupts, `REPORT` makes it report `READY`, and every other number is a
//! register of the I/O APIC, whose new value is the next answer. A handler reports its vector, then
//! ends the interrupt.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;

use iced_x86::code_asm::*;
use lacuna_machine::{
    Arch, Exit, Input, InterruptError, Line, Msi, PlatformDevices, Vcpu as _, Vm as _,
};

use super::Outcome;
use super::state::small;
use crate::backend::{Backend, Lacks, Made, Request, VcpuOf};
use crate::moving::move_to;
use crate::program::{
    ASK_PORT, Code, REPORT_PORT, X2APIC_EOI, assemble_x86, image, is_question, msr, reported,
    take_interrupts,
};
use crate::running::within;

/// The guest enables interrupts for some instructions.
pub(super) const WINDOW: u32 = 0;
/// The guest halts until an interrupt.
pub(super) const HALT: u32 = 1;
/// The guest reports [`READY`].
pub(super) const REPORT: u32 = 2;
pub(super) const READY: u32 = 0x100;

const IO_APIC: u64 = 0xfec0_0000;
/// Bits of a redirection entry.
pub(super) const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;

/// What the handler of non-maskable interrupts reports.
pub(super) const NMI: u32 = 2;
pub(super) const NMI_END: u32 = 3;

/// The vectors with a handler.
const EDGE: u32 = 0x40;
pub(super) const HELD: u32 = 0x51;
const EDGE_PIN: u32 = 5;
pub(super) const HELD_PIN: u32 = 20;

/// Reports the vector, and ends the interrupt.
fn handler(a: &mut CodeAssembler, label: &mut CodeLabel, vector: u32) -> Result<(), IcedError> {
    a.set_label(label)?;
    a.push(rax)?;
    a.push(rcx)?;
    a.push(rdx)?;
    a.mov(eax, vector)?;
    a.out(i32::from(REPORT_PORT), eax)?;
    msr(a, X2APIC_EOI, 0)?;
    a.pop(rdx)?;
    a.pop(rcx)?;
    a.pop(rax)?;
    a.iretq()
}

/// Reports its begin and its end.
fn nmi_handler(a: &mut CodeAssembler, label: &mut CodeLabel) -> Result<(), IcedError> {
    a.set_label(label)?;
    a.push(rax)?;
    for report in [NMI, NMI_END] {
        a.mov(eax, report)?;
        a.out(i32::from(REPORT_PORT), eax)?;
    }
    a.pop(rax)?;
    a.iretq()
}

pub(super) fn guest() -> Code {
    assemble_x86(|a| {
        let (mut edge, mut held) = (a.create_label(), a.create_label());
        let mut nmi = a.create_label();
        let (mut again, mut halt, mut report) =
            (a.create_label(), a.create_label(), a.create_label());
        let (mut register, mut spin) = (a.create_label(), a.create_label());
        take_interrupts(a, &[(EDGE, edge), (HELD, held), (NMI, nmi)])?;
        a.mov(rdi, IO_APIC)?;
        a.set_label(&mut again)?;
        a.in_(eax, i32::from(ASK_PORT))?;
        a.cmp(eax, HALT as i32)?;
        a.je(halt)?;
        a.cmp(eax, REPORT as i32)?;
        a.je(report)?;
        a.ja(register)?;
        // kvm_pvm emulates a guest's kernel, and looks for interrupts every 1,024 instructions.
        a.mov(ecx, 10_000)?;
        a.sti()?;
        a.set_label(&mut spin)?;
        a.dec(ecx)?;
        a.jne(spin)?;
        a.cli()?;
        a.jmp(again)?;
        a.set_label(&mut halt)?;
        a.sti()?;
        a.hlt()?;
        a.cli()?;
        a.jmp(again)?;
        a.set_label(&mut report)?;
        a.mov(eax, READY)?;
        a.out(i32::from(REPORT_PORT), eax)?;
        a.jmp(again)?;
        a.set_label(&mut register)?;
        a.mov(dword_ptr(rdi), eax)?;
        a.in_(eax, i32::from(ASK_PORT))?;
        a.mov(dword_ptr(rdi + 0x10), eax)?;
        a.jmp(again)?;
        handler(a, &mut edge, EDGE)?;
        handler(a, &mut held, HELD)?;
        nmi_handler(a, &mut nmi)
    })
}

/// Runs until the next report; `None` when the guest asks.
pub(super) fn next<B: Backend>(vcpu: &mut VcpuOf<B>) -> Option<u32> {
    loop {
        let exit = vcpu.run().expect("a vCPU that can continue");
        match (reported(&exit), is_question(&exit)) {
            (Some(value), _) => return Some(value),
            (_, true) => return None,
            _ => assert_eq!(exit, Exit::Interrupted),
        }
    }
}

/// Answers the guest's question. Returns its reports until the next question, and calls `each` in
/// the middle of each.
pub(super) fn obey<B: Backend>(
    vcpu: &mut VcpuOf<B>,
    command: u32,
    mut each: impl FnMut(u32),
) -> Vec<u32> {
    vcpu.complete_read(command.into());
    let reports = std::iter::from_fn(|| next::<B>(vcpu));
    reports.inspect(|report| each(*report)).collect()
}

/// The interrupts that the guest takes.
fn window<B: Backend>(vcpu: &mut VcpuOf<B>) -> Vec<u32> {
    obey::<B>(vcpu, WINDOW, |_| ())
}

/// The words that write the entry of `pin`.
pub(super) fn entry(pin: u32, entry: u64) -> [u32; 4] {
    let register = 0x10 + 2 * pin;
    [register + 1, (entry >> 32) as u32, register, entry as u32]
}

fn program<B: Backend>(vcpu: &mut VcpuOf<B>, pin: u32, value: u64) {
    for word in entry(pin, value) {
        assert_eq!(obey::<B>(vcpu, word, |_| ()), [0_u32; 0]);
    }
}

/// A VM whose vCPUs ask for the first time.
pub(super) fn make<B: Backend>(backend: &B, request: &Request) -> Result<Made<B>, Lacks> {
    let mut made = backend.make(request, &image(&guest()))?;
    for vcpu in &mut made.vcpus {
        assert_eq!(next::<B>(vcpu), None);
    }
    Ok(made)
}

pub(super) fn line<B: Backend>(vm: &Arc<B::Vm>, number: u32) -> Line {
    vm.interrupts().line(number).expect("a line of this VM")
}

pub(super) fn x86_only(backend: &impl Backend) -> Result<(), Lacks> {
    backend.x86_only("its controller is no I/O APIC")
}

/// A line that stays high is one edge. An edge on a masked pin is lost.
pub fn an_edge_is_one_interrupt_and_lost_if_masked<B: Backend>(backend: &B) -> Outcome {
    x86_only(backend)?;
    let backend = backend.clone();
    within(move || {
        let Made { vm, mut vcpus, .. } = make(&backend, &small())?;
        let vcpu = &mut vcpus[0];
        let line = line::<B>(&vm, EDGE_PIN);
        program::<B>(vcpu, EDGE_PIN, EDGE.into());
        assert_eq!(window::<B>(vcpu), [0_u32; 0]);
        line.pulse();
        assert_eq!(window::<B>(vcpu), [EDGE]);
        line.raise();
        line.raise();
        assert_eq!(window::<B>(vcpu), [EDGE]);
        assert_eq!(window::<B>(vcpu), [0_u32; 0]);
        line.lower();
        program::<B>(vcpu, EDGE_PIN, u64::from(EDGE) | MASKED);
        line.raise();
        program::<B>(vcpu, EDGE_PIN, EDGE.into());
        assert_eq!(window::<B>(vcpu), [0_u32; 0]);
        drop(line);
        self::line::<B>(&vm, EDGE_PIN).pulse();
        assert_eq!(window::<B>(vcpu), [EDGE], "the handle lowered its line");
        Ok(())
    })
}

/// Interrupts of a level-triggered line after its handler has lowered it. kvm_pvm (seen on Linux
/// 6.18) ends an interrupt when it delivers it, so the next one is requested before its handler
/// runs.
fn late<B: Backend>() -> usize {
    match B::Vm::BACKEND {
        lacuna_machine::Backend::Kvm => 1,
        lacuna_machine::Backend::Soft => 0,
    }
}

/// A high level-triggered line interrupts after each EOI, also if it became high while it was
/// masked.
pub fn a_level_comes_again_until_it_is_low<B: Backend>(backend: &B) -> Outcome {
    x86_only(backend)?;
    let backend = backend.clone();
    within(move || {
        let Made { vm, mut vcpus, .. } = make(&backend, &small())?;
        let vcpu = &mut vcpus[0];
        let line = line::<B>(&vm, HELD_PIN);
        let held = u64::from(HELD) | LEVEL;
        for first in [held, held | MASKED] {
            program::<B>(vcpu, HELD_PIN, first);
            line.raise();
            program::<B>(vcpu, HELD_PIN, held);
            let mut left = 3;
            let taken = obey::<B>(vcpu, WINDOW, |_| {
                left -= 1;
                if left == 0 {
                    line.lower();
                }
            });
            assert!((3..=3 + late::<B>()).contains(&taken.len()), "{taken:x?}");
            assert!(taken.iter().all(|vector| *vector == HELD), "{taken:x?}");
            assert_eq!(window::<B>(vcpu), [0_u32; 0]);
        }
        // Lowered before it is taken: the request stays, as in hardware.
        line.raise();
        line.lower();
        assert_eq!(window::<B>(vcpu), [HELD]);
        Ok(())
    })
}

/// A message for a vCPU.
fn to(vcpu: u64, data: u32) -> Msi {
    Msi {
        address: 0xfee0_0000 | vcpu << 12,
        data,
    }
}

/// A message interrupts the vCPU of its address, and no other.
pub fn a_message_reaches_its_vcpu<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let request = Request {
            vcpus: 2,
            ..small()
        };
        if backend.arch() != Arch::X86_64 {
            let vm = backend.build(&request)?.vm;
            let refused = vm.interrupts().signal_msi(to(0, EDGE));
            assert_eq!(refused, Err(InterruptError::NoMessages(backend.arch())));
            return Ok(());
        }
        let Made { vm, mut vcpus, .. } = make(&backend, &request)?;
        let interrupts = vm.interrupts();
        for (target, other) in [(0, 1), (1, 0)] {
            interrupts.signal_msi(to(target, EDGE)).expect("an APIC");
            interrupts.signal_msi(to(target, HELD)).expect("an APIC");
            assert_eq!(window::<B>(&mut vcpus[other as usize]), [0_u32; 0]);
            assert_eq!(window::<B>(&mut vcpus[target as usize]), [HELD, EDGE]);
        }
        let lost = interrupts.signal_msi(to(7, EDGE));
        assert_eq!(lost, Ok(()), "there is no such vCPU");
        let elsewhere = Msi {
            address: 0xfed0_0000,
            data: EDGE,
        };
        let refused = interrupts.signal_msi(elsewhere);
        assert_eq!(refused, Err(InterruptError::Address(0xfed0_0000)));
        Ok(())
    })
}

/// Interrupts that are requested, and one in service, move to a fresh VM. A line is high there
/// until its device lowers it.
pub fn interrupts_in_flight_move<B: Backend>(backend: &B) -> Outcome {
    x86_only(backend)?;
    let backend = backend.clone();
    within(move || in_flight(&backend, &backend, &small()))
}

pub(super) fn in_flight<A: Backend, B: Backend>(
    first: &A,
    second: &B,
    request: &Request,
) -> Outcome {
    let devices = PlatformDevices::of(Arch::X86_64, |_: &str| ());
    for in_service in [false, true] {
        let mut made = make(first, request)?;
        let vcpu = &mut made.vcpus[0];
        program::<A>(vcpu, EDGE_PIN, EDGE.into());
        program::<A>(vcpu, HELD_PIN, u64::from(HELD) | LEVEL);
        vcpu.complete_read(REPORT.into());
        assert_eq!(next::<A>(vcpu), Some(READY));
        line::<A>(&made.vm, EDGE_PIN).pulse();
        let held = line::<A>(&made.vm, HELD_PIN);
        held.raise();
        if in_service {
            assert_eq!(next::<A>(vcpu), None);
            vcpu.complete_read(WINDOW.into());
            assert_eq!(next::<A>(vcpu), Some(HELD));
        }
        let mut made = move_to(second, request, made, &devices)?;
        let vcpu = &mut made.vcpus[0];
        if !in_service {
            assert_eq!(next::<B>(vcpu), None);
            vcpu.complete_read(WINDOW.into());
            assert_eq!(next::<B>(vcpu), Some(HELD));
        }
        assert_eq!(next::<B>(vcpu), Some(HELD), "the line is high");
        line::<B>(&made.vm, HELD_PIN).lower();
        let rest: Vec<_> = std::iter::from_fn(|| next::<B>(vcpu)).collect();
        let held = rest.iter().filter(|vector| **vector == HELD).count();
        assert!(held <= late::<B>(), "{rest:x?}");
        assert_eq!(rest[held..], [EDGE]);
        // The pin still works.
        line::<B>(&made.vm, HELD_PIN).pulse();
        assert_eq!(window::<B>(vcpu), [HELD]);
    }
    Ok(())
}

/// Another owner of an eventfd, as a device in another process.
fn device(eventfd: impl AsFd) -> File {
    let fd = eventfd.as_fd().try_clone_to_owned();
    fd.expect("a descriptor").into()
}

fn signal(mut eventfd: &File) {
    let written = eventfd.write_all(&1_u64.to_ne_bytes());
    written.expect("an eventfd is never full of ones");
}

/// Each write ends a halt. After the drop of an eventfd its line is free.
pub fn eventfds_interrupt_until_they_are_dropped<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let message = Input::Msi(to(0, HELD));
        if backend.arch() != Arch::X86_64 {
            let vm = backend.build(&small())?.vm;
            let refused = vm.interrupts().eventfd(message).err();
            let expected = InterruptError::NoMessages(backend.arch());
            assert_eq!(refused, Some(expected));
            return Ok(());
        }
        let Made { vm, mut vcpus, .. } = make(&backend, &small())?;
        let vcpu = &mut vcpus[0];
        program::<B>(vcpu, EDGE_PIN, EDGE.into());
        let interrupts = vm.interrupts();
        let eventfd = |input| interrupts.eventfd(input).expect("an input of this VM");
        let (edge, held) = (eventfd(Input::Line(EDGE_PIN)), eventfd(message));
        let (edges, messages) = (device(&edge), device(&held));
        for _ in 0..HALTS / 10 {
            signal(&edges);
            assert_eq!(obey::<B>(vcpu, HALT, |_| ()), [EDGE]);
            signal(&messages);
            assert_eq!(obey::<B>(vcpu, HALT, |_| ()), [HELD]);
        }
        drop((edge, held));
        signal(&edges);
        signal(&messages);
        assert_eq!(window::<B>(vcpu), [0_u32; 0]);
        line::<B>(&vm, EDGE_PIN).pulse();
        assert_eq!(window::<B>(vcpu), [EDGE]);
        let _more: Vec<_> = (0..20)
            .map(|vector| eventfd(Input::Msi(to(0, vector + 0x60))))
            .collect();
        let again = eventfd(message);
        signal(&device(&again));
        assert_eq!(obey::<B>(vcpu, HALT, |_| ()), [HELD]);
        Ok(())
    })
}

/// A write to an eventfd before the save is an interrupt of the moved guest.
pub fn writes_to_eventfds_move<B: Backend>(backend: &B) -> Outcome {
    x86_only(backend)?;
    let backend = backend.clone();
    within(move || {
        let devices = PlatformDevices::of(Arch::X86_64, |_: &str| ());
        let mut made = make(&backend, &small())?;
        program::<B>(&mut made.vcpus[0], EDGE_PIN, EDGE.into());
        for _ in 0..20 {
            let vcpu = &mut made.vcpus[0];
            vcpu.complete_read(REPORT.into());
            assert_eq!(next::<B>(vcpu), Some(READY));
            let interrupts = made.vm.interrupts();
            let inputs = [Input::Line(EDGE_PIN), Input::Msi(to(0, HELD))];
            let eventfds = inputs.map(|input| interrupts.eventfd(input).expect("an input"));
            eventfds.iter().for_each(|eventfd| signal(&device(eventfd)));
            made = move_to(&backend, &small(), made, &devices)?;
            let vcpu = &mut made.vcpus[0];
            assert_eq!(next::<B>(vcpu), None);
            assert_eq!(window::<B>(vcpu), [HELD, EDGE]);
        }
        Ok(())
    })
}

/// Halts of the guest that one edge ends, and edges beside a guest that halts between them.
const HALTS: usize = 2_000;
const EDGES: usize = 1_000_000;

/// No wake-up is lost: neither if each halt has one edge, nor in a storm. If one is, the guest
/// halts for ever.
pub fn an_interrupt_wakes_a_halted_vcpu_each_time<B: Backend>(backend: &B) -> Outcome {
    x86_only(backend)?;
    let backend = backend.clone();
    within(move || {
        let Made { vm, mut vcpus, .. } = make(&backend, &small())?;
        let vcpu = &mut vcpus[0];
        let (edge, held) = (line::<B>(&vm, EDGE_PIN), line::<B>(&vm, HELD_PIN));
        program::<B>(vcpu, EDGE_PIN, EDGE.into());
        program::<B>(vcpu, HELD_PIN, u64::from(HELD) | LEVEL);
        thread::scope(|scope| {
            let (halt, halts) = std::sync::mpsc::channel();
            scope.spawn({
                let edge = &edge;
                move || halts.iter().for_each(|()| edge.pulse())
            });
            for _ in 0..HALTS {
                halt.send(()).expect("a receiver");
                assert_eq!(obey::<B>(vcpu, HALT, |_| ()), [EDGE]);
            }
        });
        thread::scope(|scope| {
            scope.spawn(|| {
                (0..EDGES).for_each(|_| edge.pulse());
                held.raise();
            });
            let mut edges = 0;
            let mut is_over = false;
            while !is_over {
                let taken = obey::<B>(vcpu, HALT, |vector| {
                    if vector == HELD {
                        held.lower();
                        is_over = true;
                    }
                });
                edges += taken.iter().filter(|vector| **vector == EDGE).count();
            }
            assert!((1..=EDGES).contains(&edges), "{edges}");
        });
        Ok(())
    })
}
