//! Writes of a guest that signal an eventfd.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use iced_x86::code_asm::*;
use lacuna_addr::{GfnRange, Gpa};
use lacuna_machine::{
    Arch, Exit, GuestWrite, IoAddress, IoEventFd, IoEventFdError, Kick as _, MemorySlots as _,
    PlatformDevices, SaveRestore as _, SlotFlags, SlotId, Vcpu as _, Vm as _, Width, WriteMatch,
};
use rustix::event::{EventfdFlags, eventfd};

use super::Outcome;
use super::state::small;
use crate::backend::{Backend, Made, VcpuOf};
use crate::moving::move_to;
use crate::program::{
    Code, DEVICE, LATER, REPORT_PORT, Reg, assemble, assemble_x86, gpa, image, reported,
};
use crate::running::within;

const WIDTHS: [Width; 4] = [Width::Byte, Width::Word, Width::Long, Width::Quad];
/// What the guest writes, once in each width.
const VALUES: [u64; 2] = [0x1122_3344_5566_7781, 0x1122_3344_5566_7782];
const PORT: u16 = 0x1230;

/// An eventfd of the VMM.
struct Eventfd(File);

impl Eventfd {
    fn new() -> Self {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Self(fd.expect("an eventfd").into())
    }

    fn fd(&self) -> OwnedFd {
        self.0.try_clone().expect("a descriptor").into()
    }

    /// Its count since the last call.
    fn take(&self) -> u64 {
        let mut count = [0; 8];
        match (&self.0).read_exact(&mut count) {
            Ok(()) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }

    /// As an eventfd for `write`.
    fn on<B: Backend>(&self, vm: &Arc<B::Vm>, write: GuestWrite) -> IoEventFd {
        vm.ioeventfd(write, self.fd()).expect("writes to a device")
    }
}

const fn memory(address: u64) -> IoAddress {
    IoAddress::Memory(Gpa::truncate(address))
}

const fn writes(address: IoAddress, matches: WriteMatch) -> GuestWrite {
    GuestWrite { address, matches }
}

/// 4-byte writes to `address`.
const fn long(address: u64) -> GuestWrite {
    writes(memory(address), WriteMatch::Width(Width::Long))
}

/// An access that reached the VMM, or would have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Seen {
    Write(IoAddress, Width, u64),
    Read(IoAddress, Width),
}

/// The accesses of one pass that reach the VMM. A pass ends with a report.
fn pass<B: Backend>(vcpu: &mut VcpuOf<B>) -> Vec<Seen> {
    let mut seen = Vec::new();
    loop {
        let exit = vcpu.run().expect("a vCPU that can continue");
        if reported(&exit).is_some() {
            return seen;
        }
        let write = |at, width: Width, value| Seen::Write(at, width, value & width.ones());
        seen.push(match exit {
            Exit::MmioWrite { gpa, width, value } => write(IoAddress::Memory(gpa), width, value),
            Exit::IoOut { port, width, value } => write(IoAddress::Port(port), width, value.into()),
            Exit::MmioRead { gpa, width } => Seen::Read(IoAddress::Memory(gpa), width),
            Exit::IoIn { port, width } => Seen::Read(IoAddress::Port(port), width),
            Exit::Interrupted => continue,
            other => panic!("{other:?}"),
        });
        vcpu.complete_read(0);
    }
}

/// Each eventfd counts its writes, and exactly the other accesses reach the VMM. `code` reads the
/// word at `address` in each pass, and then writes each value in each width.
fn signals<B: Backend>(
    backend: &B,
    code: &Code,
    address: IoAddress,
    widths: &'static [Width],
) -> Outcome {
    let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(code))?;
    let vcpu = &mut vcpus[0];
    let all: Vec<_> = (widths.iter())
        .flat_map(|width| VALUES.map(|value| (*width, value & width.ones())))
        .collect();
    let read = Seen::Read(address, Width::Long);
    let expected = |eventfds: &[GuestWrite]| {
        let reach = |(width, value): &&(Width, u64)| {
            let mut eventfds = eventfds.iter();
            !eventfds.any(|write| write.contains(address, *width, *value))
        };
        let writes = all.iter().filter(reach);
        let writes = writes.map(|(width, value)| Seen::Write(address, *width, *value));
        std::iter::once(read).chain(writes).collect::<Vec<_>>()
    };
    assert_eq!(pass::<B>(vcpu), expected(&[]));
    let each_width = widths.iter().map(|width| WriteMatch::Width(*width));
    let each_value = all
        .iter()
        .map(|(width, value)| WriteMatch::Value(*width, *value));
    let others = [WriteMatch::Value(Width::Long, 1), WriteMatch::AnyWidth];
    let each: Vec<_> = each_width.chain(each_value.clone()).chain(others).collect();
    for matches in each {
        let (write, eventfd) = (writes(address, matches), Eventfd::new());
        let connected = eventfd.on::<B>(&vm, write);
        let (mut seen, mut reach) = (pass::<B>(vcpu), expected(&[write]));
        let count = all.len() + 1 - reach.len();
        if matches == WriteMatch::AnyWidth {
            // On KVM a read may match too.
            seen.retain(|access| *access != read);
            reach.remove(0);
            assert!((count..=count + 1).contains(&(eventfd.take() as usize)));
        } else {
            assert_eq!(eventfd.take(), count as u64, "{write}");
        }
        assert_eq!(seen, reach, "{write}");
        drop(connected);
        assert_eq!(pass::<B>(vcpu), expected(&[]), "without {write}");
        assert_eq!(eventfd.take(), 0, "{write}");
    }
    // One for each write.
    let each: Vec<_> = each_value.map(|matches| writes(address, matches)).collect();
    let eventfds: Vec<_> = each.iter().map(|_| Eventfd::new()).collect();
    let pairs = eventfds.iter().zip(&each);
    let connected: Vec<_> = pairs.map(|(one, write)| one.on::<B>(&vm, *write)).collect();
    assert_eq!(pass::<B>(vcpu), [read]);
    assert!(eventfds.iter().all(|eventfd| eventfd.take() == 1));
    drop(connected);
    Ok(())
}

/// Writes of each width to device memory: each width, value, and all.
pub fn writes_to_memory_signal<B: Backend>(backend: &B) -> Outcome {
    let code = assemble(backend.arch(), |a| {
        a.set(Reg::A, DEVICE);
        let again = a.here();
        a.load(Width::Long, Reg::C, Reg::A, 0);
        for width in WIDTHS {
            for value in VALUES {
                a.set(Reg::B, value);
                a.store(width, Reg::A, 0, Reg::B);
            }
        }
        a.report(Reg::A);
        a.jump(again);
    });
    let backend = backend.clone();
    within(move || signals(&backend, &code, memory(DEVICE), &WIDTHS))
}

/// The same with a port.
pub fn writes_to_ports_signal<B: Backend>(backend: &B) -> Outcome {
    backend.x86_only("its processors have no ports")?;
    let code = assemble_x86(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.mov(dx, u32::from(PORT))?;
        a.in_(eax, dx)?;
        for value in VALUES {
            a.mov(eax, value as u32)?;
            a.out(dx, al)?;
        }
        for value in VALUES {
            a.mov(eax, value as u32)?;
            a.out(dx, ax)?;
        }
        for value in VALUES {
            a.mov(eax, value as u32)?;
            a.out(dx, eax)?;
        }
        a.out(i32::from(REPORT_PORT), eax)?;
        a.jmp(again)
    });
    let backend = backend.clone();
    within(move || signals(&backend, &code, IoAddress::Port(PORT), &WIDTHS[..3]))
}

/// Each write of a running guest is counted once: by the eventfd or by the VMM. After the drop of a
/// handle its eventfd has no more of them.
pub fn an_eventfd_goes_while_the_guest_writes<B: Backend>(backend: &B) -> Outcome {
    const TIMES: usize = 40;
    // The write of number n has the value n.
    let code = assemble(backend.arch(), |a| {
        a.set(Reg::A, DEVICE);
        a.set(Reg::B, 0);
        let again = a.here();
        a.add_immediate(Reg::B, 1);
        a.store(Width::Long, Reg::A, 0, Reg::B);
        a.jump(again);
    });
    let backend = backend.clone();
    within(move || {
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let (exits, last) = (AtomicU64::new(0), AtomicU64::new(0));
        let is_over = AtomicBool::new(false);
        let drive = |vcpu: &mut VcpuOf<B>| {
            while !is_over.load(Ordering::SeqCst) {
                if let Exit::MmioWrite { value, .. } = vcpu.run().expect("a running vCPU") {
                    last.store(value & Width::Long.ones(), Ordering::SeqCst);
                    exits.fetch_add(1, Ordering::SeqCst);
                }
            }
        };
        let mut signals = 0;
        thread::scope(|scope| {
            let runner = scope.spawn(|| drive(&mut vcpus[0]));
            let alive = || assert!(!runner.is_finished(), "the vCPU has failed");
            for _ in 0..TIMES {
                let eventfd = Eventfd::new();
                let connected = eventfd.on::<B>(&vm, long(DEVICE));
                let mut count = eventfd.take();
                while count == 0 {
                    alive();
                    thread::yield_now();
                    count = eventfd.take();
                }
                drop(connected);
                signals += count + eventfd.take();
                let before = exits.load(Ordering::SeqCst);
                while exits.load(Ordering::SeqCst) < before + 2 {
                    alive();
                    thread::yield_now();
                }
                assert_eq!(eventfd.take(), 0, "its handle was dropped");
            }
            is_over.store(true, Ordering::SeqCst);
        });
        let exits = exits.load(Ordering::SeqCst);
        assert_eq!(signals + exits, last.load(Ordering::SeqCst));
        Ok(())
    })
}

/// Writes the word at `address` once in each pass.
fn writer(arch: Arch, address: u64) -> Code {
    assemble(arch, |a| {
        a.set(Reg::A, address);
        a.set(Reg::B, 7);
        let again = a.here();
        a.store(Width::Long, Reg::A, 0, Reg::B);
        a.report(Reg::B);
        a.jump(again);
    })
}

/// An eventfd keeps its writes when a vCPU is saved and restored. A fresh VM with that state has no
/// eventfd.
pub fn an_eventfd_stays_with_its_vm<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = writer(backend.arch(), DEVICE);
        let mut made = backend.make(&small(), &image(&code))?;
        let eventfd = Eventfd::new();
        let connected = eventfd.on::<B>(&made.vm, long(DEVICE));
        let vcpu = &mut made.vcpus[0];
        assert_eq!(pass::<B>(vcpu), []);
        made.vm.kick(0);
        assert_eq!(vcpu.run(), Ok(Exit::Interrupted));
        let state = vcpu.save().expect("between two instructions");
        vcpu.restore(&state).expect("its own state");
        assert_eq!(pass::<B>(vcpu), []);
        assert_eq!(eventfd.take(), 2);
        let devices = PlatformDevices::of(backend.arch(), |_: &str| ());
        let mut made = move_to(&backend, &small(), made, &devices)?;
        let reaches = [Seen::Write(memory(DEVICE), Width::Long, 7)];
        assert_eq!(pass::<B>(&mut made.vcpus[0]), reaches);
        // The first VM has ended.
        drop(connected);
        let connected = eventfd.on::<B>(&made.vm, long(DEVICE));
        assert_eq!(pass::<B>(&mut made.vcpus[0]), []);
        assert_eq!(eventfd.take(), 1);
        drop(connected);
        Ok(())
    })
}

/// Nothing reads the eventfd, whose counter is full. It is a blocking one.
pub fn a_full_eventfd_delays_no_vcpu<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = writer(backend.arch(), DEVICE);
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let eventfd = Eventfd(
            eventfd(0, EventfdFlags::CLOEXEC)
                .expect("an eventfd")
                .into(),
        );
        let filled = (&eventfd.0).write_all(&(u64::MAX - 1).to_ne_bytes());
        filled.expect("an empty counter");
        let connected = eventfd.on::<B>(&vm, long(DEVICE));
        for _ in 0..3 {
            assert_eq!(pass::<B>(&mut vcpus[0]), []);
        }
        drop(connected);
        assert!(eventfd.take() >= u64::MAX - 1);
        Ok(())
    })
}

/// Writes to memory signal nothing; writes to read-only memory, and after the memory, do.
pub fn slots_decide_whether_writes_signal<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = writer(backend.arch(), LATER);
        let Made { vm, mut vcpus, .. } = backend.make(&small(), &image(&code))?;
        let vcpu = &mut vcpus[0];
        let eventfd = Eventfd::new();
        let connected = eventfd.on::<B>(&vm, long(LATER));
        let signals = |vcpu: &mut VcpuOf<B>| {
            assert_eq!(pass::<B>(vcpu), []);
            eventfd.take()
        };
        assert_eq!(signals(vcpu), 1);
        let gfns = GfnRange::new(Gpa::truncate(LATER).gfn(), 1).expect("one page");
        let id = SlotId(9);
        vm.add_memory(id, gfns, SlotFlags::empty()).expect("a slot");
        assert_eq!(signals(vcpu), 0);
        vm.set_slot_flags(id, SlotFlags::READONLY).expect("a flag");
        assert_eq!(signals(vcpu), 1);
        drop(connected);
        let reaches = [Seen::Write(memory(LATER), Width::Long, 7)];
        assert_eq!(pass::<B>(vcpu), reaches);
        let connected = eventfd.on::<B>(&vm, long(LATER));
        vm.remove_slot(id).expect("its slot");
        assert_eq!(signals(vcpu), 1);
        drop(connected);
        Ok(())
    })
}

/// Two eventfds for one write; writes that never leave the guest; a file.
pub fn eventfds_that_cannot_be_are_refused<B: Backend>(backend: &B) -> Outcome {
    let arch = backend.arch();
    let vm = backend.build(&small())?.vm;
    let refused = |write| vm.ioeventfd(write, Eventfd::new().fd()).err();
    let impossible = |write| {
        let refused = refused(write);
        let is_impossible = matches!(refused, Some(IoEventFdError::Impossible { .. }));
        assert!(is_impossible, "{write}: {refused:?}");
    };
    let eventfd = Eventfd::new();
    let any = writes(memory(DEVICE), WriteMatch::AnyWidth);
    let seven = writes(memory(DEVICE), WriteMatch::Value(Width::Long, 7));
    for (first, second) in [(any, long(DEVICE)), (long(DEVICE), seven), (seven, any)] {
        let connected = eventfd.on::<B>(&vm, first);
        for write in [first, second] {
            assert_eq!(refused(write), Some(IoEventFdError::InUse(write)));
        }
        drop(connected);
        drop(eventfd.on::<B>(&vm, second));
    }
    impossible(writes(
        memory(DEVICE),
        WriteMatch::Value(Width::Byte, 0x100),
    ));
    impossible(writes(
        IoAddress::Memory(gpa(arch, 0)),
        WriteMatch::AnyWidth,
    ));
    let controller = match arch {
        Arch::Arm64 => 0x0800_0000,
        _ => 0xfec0_0000,
    };
    impossible(long(controller));
    let ports = match arch {
        Arch::X86_64 => vec![(PORT, Width::Quad), (0x20, Width::Byte)],
        _ => vec![(PORT, Width::Byte)],
    };
    for (port, width) in ports {
        impossible(writes(IoAddress::Port(port), WriteMatch::Width(width)));
    }
    let file = tempfile::tempfile().expect("a file");
    let refused = vm.ioeventfd(any, file.try_clone().expect("a descriptor").into());
    assert_eq!(refused.err(), Some(IoEventFdError::NotEventFd));
    assert_eq!(file.metadata().expect("a file").len(), 0);
    Ok(())
}
