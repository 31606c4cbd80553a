//! A guest that reads a sector of its disk through virtio-mmio. The test lays out the rings, and
//! the guest writes the registers.

use std::io::Write as _;
use std::sync::Arc;

use iced_x86::code_asm::*;
use lacuna_machine::{
    Arch, GuestMemory as _, PlatformDevices, Vcpu as _, Vm as _, Width, dispatch,
};
use lacuna_source::Zeros;
use lacuna_virtio::{Block, Mmio};

use super::Outcome;
use super::state::small;
use crate::backend::{Backend, Made, Missing, Origin, Request};
use crate::program::{
    Code, Condition, DEVICE, REPORT_PORT, Reg, X2APIC_EOI, assemble, assemble_x86, gpa, image, msr,
    ram, reported, take_interrupts,
};
use crate::running::within;

/// Registers of virtio-mmio.
const INTERRUPT_STATUS: u32 = 0x60;
const INTERRUPT_ACK: u32 = 0x64;

/// Offsets in the VM's memory: the rings, and the parts of the request.
const DESCRIPTORS: u64 = 0x40_0000;
const AVAILABLE: u64 = 0x40_1000;
const USED: u64 = 0x40_2000;
const HEADER: u64 = 0x40_3000;
const STATUS: u64 = 0x40_4000;
const DATA: u64 = 0x40_5000;

/// The sector that the guest reads, and its bytes.
const SECTOR: u64 = 3;
const WORD: u32 = 0xfeed_0003;

const VECTOR: u32 = 0x51;
const LINE_X86: u32 = 20;
const LINE_ARM64: u32 = 40;

/// What a driver writes, in this order: the device gets its queue, and a request.
fn registers(arch: Arch) -> Vec<(u32, u32)> {
    let mut writes = vec![
        (0x70, 3),  // Status: ACKNOWLEDGE, DRIVER
        (0x24, 1),  // DriverFeaturesSel
        (0x20, 1),  // DriverFeatures: VIRTIO_F_VERSION_1
        (0x70, 11), // Status: FEATURES_OK
        (0x38, 4),  // QueueNum
    ];
    for (register, ring) in [(0x80, DESCRIPTORS), (0x90, AVAILABLE), (0xa0, USED)] {
        let at = ram(arch, ring);
        writes.extend([(register, at as u32), (register + 4, (at >> 32) as u32)]);
    }
    // QueueReady, Status: DRIVER_OK, QueueNotify.
    writes.extend([(0x44, 1), (0x70, 15), (0x50, 0)]);
    writes
}

/// Rings with one request: a header, a sector's room, and a status byte.
fn rings(arch: Arch) -> [(u64, Vec<u8>); 4] {
    let descriptor = |offset: u64, bytes: u32, flags: u16, next: u16| {
        let (at, bytes) = (ram(arch, offset).to_le_bytes(), bytes.to_le_bytes());
        [&at[..], &bytes, &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    };
    let chain = [
        descriptor(HEADER, 16, 1, 1),
        descriptor(DATA, 512, 3, 2),
        descriptor(STATUS, 1, 2, 0),
    ];
    let header = [0u64.to_le_bytes(), SECTOR.to_le_bytes()].concat();
    [
        (DESCRIPTORS, chain.concat()),
        (AVAILABLE, vec![0, 0, 1, 0, 0, 0]),
        (HEADER, header),
        (STATUS, vec![0xff]),
    ]
}

/// Polls InterruptStatus, reports it, and reports the first word of the sector.
fn polling(arch: Arch) -> Code {
    assemble(arch, |a| {
        a.set(Reg::A, DEVICE);
        a.set(Reg::C, 0);
        for (register, value) in registers(arch) {
            a.set(Reg::B, value.into());
            a.store(Width::Long, Reg::A, register, Reg::B);
        }
        let again = a.here();
        a.load(Width::Long, Reg::B, Reg::A, INTERRUPT_STATUS);
        a.branch(Condition::Equal, Reg::B, Reg::C, again);
        a.report(Reg::B);
        a.store(Width::Long, Reg::A, INTERRUPT_ACK, Reg::B);
        a.set(Reg::D, ram(arch, DATA));
        a.load(Width::Long, Reg::B, Reg::D, 0);
        a.report(Reg::B);
        a.halt();
    })
}

/// The same, in the handler of the device's interrupt.
fn interrupted() -> Code {
    assemble_x86(|a| {
        let (mut handler, mut again) = (a.create_label(), a.create_label());
        take_interrupts(a, &[(VECTOR, handler)])?;
        a.mov(rdi, 0xfec0_0000u64)?;
        // The entry of the line in the I/O APIC: level-triggered, to vCPU 0.
        for (register, value) in [(0x11, 0), (0x10, 1 << 15 | VECTOR)] {
            a.mov(dword_ptr(rdi), register + 2 * LINE_X86)?;
            a.mov(dword_ptr(rdi + 0x10), value)?;
        }
        a.mov(rbx, DEVICE)?;
        for (register, value) in registers(Arch::X86_64) {
            a.mov(dword_ptr(rbx + register), value)?;
        }
        a.set_label(&mut again)?;
        a.sti()?;
        a.hlt()?;
        a.cli()?;
        a.jmp(again)?;
        a.set_label(&mut handler)?;
        a.mov(eax, dword_ptr(rbx + INTERRUPT_STATUS))?;
        a.out(i32::from(REPORT_PORT), eax)?;
        a.mov(dword_ptr(rbx + INTERRUPT_ACK), eax)?;
        a.mov(eax, dword_ptr(DATA))?;
        a.out(i32::from(REPORT_PORT), eax)?;
        msr(a, X2APIC_EOI, 0)?;
        a.iretq()
    })
}

/// The first two reports of a guest with a disk.
fn run<B: Backend>(backend: &B, request: &Request, code: &Code) -> Outcome {
    let arch = backend.arch();
    let Made { vm, mut vcpus, .. } = backend.make(request, &image(code))?;
    for (offset, bytes) in rings(arch) {
        vm.write(gpa(arch, offset), &bytes).expect("guest memory");
    }
    let mut disk = tempfile::tempfile().expect("a file");
    for sector in 0..2 * SECTOR as u32 {
        let word = WORD - SECTOR as u32 + sector;
        disk.write_all(&word.to_le_bytes().repeat(128))
            .expect("room");
    }
    let number = match arch {
        Arch::Arm64 => LINE_ARM64,
        _ => LINE_X86,
    };
    let line = vm.interrupts().line(number).expect("a line of this VM");
    let block = Block::new(disk).expect("its size");
    let block = Arc::new(Mmio::new(&vm, line, block).expect("a thread"));
    let devices = PlatformDevices::of(arch, |_: &str| ());
    let at = lacuna_addr::Gpa::truncate(DEVICE);
    let added = devices.add_mmio("disk0", at, Mmio::<Block>::BYTES, block.clone());
    added.expect("a free address");
    let vcpu = &mut vcpus[0];
    let mut reports = Vec::new();
    while reports.len() < 2 {
        let exit = vcpu.run();
        match exit.as_ref().ok().and_then(reported) {
            Some(value) => reports.push(value),
            None => drop(dispatch(vcpu, exit, &devices, &*vm)),
        }
        assert_eq!(devices.ending(), None);
        assert_eq!(block.fault(), None);
    }
    assert_eq!(reports, [1, WORD]);
    let mut status = [0xff];
    vm.read(gpa(arch, STATUS), &mut status)
        .expect("guest memory");
    assert_eq!(status, [0]);
    Ok(())
}

/// A guest reads a sector, and polls for the end of its request. Then all of its memory is missing,
/// and a source provides what the device needs.
pub fn a_guest_reads_its_disk<B: Backend>(backend: &B) -> Outcome {
    let backend = backend.clone();
    within(move || {
        let code = polling(backend.arch());
        run(&backend, &small(), &code)?;
        let origin = Origin {
            source: Arc::new(Zeros),
            missing: Missing::Waits,
        };
        let request = Request {
            origin: Some(origin),
            ..small()
        };
        run(&backend, &request, &code)
    })
}

/// A guest halts until the interrupt of its disk.
pub fn a_disk_interrupts_its_guest<B: Backend>(backend: &B) -> Outcome {
    backend.x86_only("its controller is no I/O APIC")?;
    let backend = backend.clone();
    within(move || run(&backend, &small(), &interrupted()))
}
