//! Mutated ELF files and arm64 `Image`s: the loader must return a clear error, or the guest must
//! run for a while.

use crate::run::Run;
use crate::values;
use fastrand::Rng;
use lacuna_addr::PageCount;
use lacuna_machine::{Arch, Exit, Image, Kick, PlatformDevices, Vcpu as _, Vm as _};
use lacuna_soft::{Apf, Host, Step, Vcpu, Vm, VmBuilder, VmConfig, Wait};
use lacuna_sync::{Clock, VirtualClock};
use std::sync::Arc;

/// Images for each seed.
const IMAGES: u64 = 64;
/// Slices for the guest of an accepted image.
const SLICES: u64 = 40;
/// Instructions in a slice.
const SLICE: u64 = 2000;
/// Guest memory, in pages.
const MEMORY: u64 = 8 << 8;

/// Runs one seed: a host, and images for it. A build without guests still has the AArch64 images.
pub fn run(run: &mut Run<'_>) {
    let x86: Vec<_> = lacuna_guest::images().iter().collect();
    let arm64: Vec<_> = lacuna_guest::Arch::Arm64.images().iter().collect();
    let mut rng = Rng::with_seed(run.seed);
    let clock = Arc::new(VirtualClock::default());
    let builder = VmBuilder {
        apf: Apf::Off,
        seed: Some(run.seed),
        ..VmBuilder::new(PageCount::new(MEMORY), PageCount::new(1024))
    };
    let host = builder.host(Arc::clone(&clock) as Arc<dyn Clock>);
    let host = host.expect("a host");
    for _ in 0..IMAGES {
        let (format, guests) = match x86.is_empty() || rng.u8(..3) == 0 {
            true => (&ARM64_IMAGE, &arm64),
            false => (&ELF, &x86),
        };
        let image = values::pick(&mut rng, guests);
        let mut file = image.file.to_vec();
        for _ in 0..rng.u8(..6) {
            mutate(&mut file, format, &mut rng);
        }
        run.pulse.beat();
        run.tally.operations += 1;
        try_image(&file, &host, &clock, &mut rng, run);
    }
    host.verify();
}

/// Fields of the file header and the first program headers, by offset and size.
const FIELDS: &[(usize, usize)] = &[
    (0, 4),
    (4, 1),
    (5, 1),
    (6, 1),
    (16, 2),
    (18, 2),
    (20, 4),
    (24, 8),
    (32, 8),
    (40, 8),
    (52, 2),
    (54, 2),
    (56, 2),
    (58, 2),
    (60, 2),
    (62, 2),
];
/// Fields of a program header.
const SEGMENT_FIELDS: &[(usize, usize)] = &[
    (0, 4),
    (4, 4),
    (8, 8),
    (16, 8),
    (24, 8),
    (32, 8),
    (40, 8),
    (48, 8),
];
/// The fields of the header of an arm64 `Image`.
const IMAGE_FIELDS: &[(usize, usize)] = &[
    (0, 4),
    (4, 4),
    (8, 8),
    (16, 8),
    (24, 8),
    (32, 8),
    (40, 8),
    (48, 8),
    (56, 4),
    (60, 4),
];

/// The places of a file format's fields.
struct Format {
    fields: &'static [(usize, usize)],
    segment_fields: &'static [(usize, usize)],
}

const ELF: Format = Format {
    fields: FIELDS,
    segment_fields: SEGMENT_FIELDS,
};
const ARM64_IMAGE: Format = Format {
    fields: IMAGE_FIELDS,
    segment_fields: &[],
};

/// Bytes of the file header, and of a program header.
const HEADER: usize = 64;
const SEGMENT: usize = 56;

fn mutate(file: &mut Vec<u8>, format: &Format, rng: &mut Rng) {
    match rng.u8(..10) {
        0 => file.truncate(rng.usize(..=file.len())),
        1 if !file.is_empty() => {
            let at = rng.usize(..file.len());
            file[at] ^= 1 << rng.u32(..8);
        }
        2 => {
            let at = rng.usize(..HEADER + 8 * SEGMENT);
            if let Some(byte) = file.get_mut(at) {
                *byte = rng.u8(..);
            }
        }
        3 => {
            let at = rng.usize(..=file.len().min(4096));
            let bytes: Vec<u8> = (0..rng.usize(1..64)).map(|_| rng.u8(..)).collect();
            file.splice(at..at, bytes);
        }
        4 if file.len() > 256 => {
            let (from, to) = (rng.usize(..file.len() - 128), rng.usize(..file.len() - 128));
            file.copy_within(from..from + rng.usize(..128), to);
        }
        5 | 6 => {
            let (at, size) = values::pick(rng, format.fields);
            set(file, at, size, rng);
        }
        _ if format.segment_fields.is_empty() => {
            let (at, size) = values::pick(rng, format.fields);
            set(file, at, size, rng);
        }
        _ => {
            let (at, size) = values::pick(rng, format.segment_fields);
            let index = rng.usize(..6);
            set(file, HEADER + index * SEGMENT + at, size, rng);
        }
    }
}

/// Changes a field: to an edge value, or to one near its old value.
fn set(file: &mut [u8], at: usize, size: usize, rng: &mut Rng) {
    let Some(field) = file.get_mut(at..at + size) else {
        return;
    };
    let mut bytes = [0; 8];
    bytes[..size].copy_from_slice(field);
    let old = u64::from_le_bytes(bytes);
    let new = match rng.u8(..6) {
        0 => old.wrapping_add(rng.u64(..8)),
        1 => old.wrapping_sub(rng.u64(..8)),
        2 => old ^ 1 << rng.u32(..64),
        3 => values::pick(
            rng,
            &[0, 1, 4, 0x1000, 0xffff, MEMORY << 12, (MEMORY << 12) - 1],
        ),
        _ => values::number(rng),
    };
    field.copy_from_slice(&new.to_le_bytes()[..size]);
}

struct Deaf;

impl Kick for Deaf {
    fn kick(&self, _: usize) {}

    fn kick_all(&self) {}
}

fn try_image(
    file: &[u8],
    host: &Arc<Host>,
    clock: &Arc<VirtualClock>,
    rng: &mut Rng,
    run: &mut Run<'_>,
) {
    let image = match Image::parse(file) {
        Ok(image) => image,
        Err(error) => return refused(&error, run),
    };
    // Sometimes the VM has another architecture than the image.
    let arch = match rng.u8(..16) {
        0 => values::pick(rng, &[Arch::X86_64, Arch::Arm64]),
        _ => image.arch,
    };
    let config = VmConfig {
        arch,
        memory: PageCount::new(MEMORY),
        vcpus: 1,
        apf: Apf::On,
        ..VmConfig::default()
    };
    let time = Arc::clone(clock) as Arc<dyn Clock>;
    let vm = Vm::new(Arc::clone(host), time, config).expect("a VM");
    let words: String = (0..rng.usize(..40)).map(|_| rng.char(' '..='~')).collect();
    match vm.boot(&image, &words) {
        Ok(mut vcpus) => drive(&mut vcpus[0], arch, host, clock, run),
        Err(error) => refused(&error, run),
    }
    vm.mmu().verify();
}

/// Counts a refusal; the first words of its message are its kind.
fn refused(error: &dyn std::error::Error, run: &mut Run<'_>) {
    let text = error.to_string();
    assert!(text.len() > 8, "an error that says nothing: {text:?}");
    let kind: Vec<&str> = text
        .split(|c: char| !c.is_alphabetic())
        .filter(|word| word.len() > 2 && word.contains(|c: char| !c.is_ascii_hexdigit()))
        .filter(|word| !word.starts_with('x'))
        .take(6)
        .collect();
    run.tally.note("images refused", kind.join(" "));
}

/// Runs the guest until it ends or its slices are used up.
fn drive(vcpu: &mut Vcpu, arch: Arch, host: &Host, clock: &VirtualClock, run: &mut Run<'_>) {
    run.tally.note("images", format!("started, {arch}"));
    let devices = PlatformDevices::of(arch, |_: &str| ());
    for _ in 0..SLICES {
        let before = vcpu.retired();
        let step = vcpu.step(SLICE);
        run.tally.instructions += vcpu.retired() - before;
        clock.advance(vcpu.retired() - before + 50);
        host.poll(clock.now());
        match step {
            Step::Ran | Step::Wait(Wait::Busy) => {}
            Step::Wait(Wait::Halt(None)) => return run.tally.note("images", "halted"),
            Step::Wait(Wait::Halt(Some(until))) => clock.advance_to(until),
            Step::Wait(Wait::Page(ticket) | Wait::Provided(ticket)) => {
                host.wait(&ticket).expect("memory does not fail")
            }
            Step::Wait(Wait::Memory) => vcpu.reclaim().expect("budget enough"),
            Step::Exit(Exit::Shutdown(_) | Exit::PoweredOff | Exit::Reset) => {
                return run.tally.note("images", "shut down");
            }
            Step::Exit(exit) => {
                run.note_exit(&exit);
                match exit {
                    Exit::IoOut { port, width, value } => {
                        devices.write(port, width, value, 0, &Deaf)
                    }
                    Exit::IoIn { port, width } => {
                        vcpu.complete_read(devices.read(port, width, 0, &Deaf))
                    }
                    Exit::MmioRead { gpa, width } => {
                        vcpu.complete_read(devices.mmio_read(gpa, width, 0, &Deaf));
                    }
                    Exit::MmioWrite { gpa, width, value } => {
                        devices.mmio_write(gpa, width, value, 0, &Deaf);
                    }
                    _ => {}
                }
                if devices.ending().is_some() {
                    return run.tally.note("images", "exited");
                }
            }
            Step::Failed(error) => panic!("{error}"),
        }
    }
    run.tally.note("images", "ran on");
}
