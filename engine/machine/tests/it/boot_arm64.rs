//! AArch64 guests: Linux's `Image`, the address of memory, the device tree, and the devices.

use lacuna_addr::{Gpa, PageCount};
use lacuna_machine::boot::arm64::{Boot, Machine};
use lacuna_machine::{
    Access, Arch, BootError, Device, DeviceError, Ending, GuestMemory, Image, ImageError, Kick,
    Layout, MemoryError, PlatformDevices, Width, mmio,
};
use proptest::prelude::*;
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

const MIB: u64 = 1 << 20;
const START: u64 = 1 << 30;
const RNG_SEED: [u8; 32] = *b"abcdefghijklmnopqrstuvwxyz012345";

/// An `Image` with this text offset, image size and flags, and 128 bytes.
fn image(text_offset: u64, image_size: u64, flags: u64) -> Vec<u8> {
    let mut out = vec![0; 8];
    for word in [text_offset, image_size, flags, 0, 0, 0] {
        out.extend(word.to_le_bytes());
    }
    out.extend(b"ARM\x64");
    out.resize(128, 0x5a);
    out
}

/// The writes, in order.
#[derive(Default)]
struct Written(RefCell<Vec<(u64, Vec<u8>)>>);

impl GuestMemory for Written {
    fn write(&self, gpa: Gpa, bytes: &[u8]) -> Result<(), MemoryError> {
        self.0.borrow_mut().push((gpa.get(), bytes.to_vec()));
        Ok(())
    }

    fn read(&self, gpa: Gpa, _: &mut [u8]) -> Result<(), MemoryError> {
        Err(MemoryError::NoSlot(gpa))
    }

    fn peek(&self, _: Gpa, _: &mut [u8]) -> bool {
        false
    }
}

fn layout(mib: u64) -> Layout {
    Layout::of(Arch::Arm64, PageCount::from_bytes(mib * MIB)).unwrap()
}

fn load(file: &[u8], mib: u64, command_line: &str) -> (Result<Boot, BootError>, Written) {
    let memory = Written::default();
    let machine = Machine {
        vcpus: 2,
        command_line,
        rng_seed: RNG_SEED,
    };
    let image = Image::parse(file).unwrap();
    (Boot::load(&image, &layout(mib), &machine, &memory), memory)
}

#[test]
fn memory_is_one_range_from_one_gigabyte_on() {
    let layout = layout(5 << 10);
    let ranges = layout.ranges();
    assert_eq!(ranges.len(), 1);
    assert_eq!(ranges[0].start().gpa().get(), START);
    assert_eq!(ranges[0].end_raw() << 12, 6 << 30);
}

#[test]
fn an_image_is_loaded_at_its_text_offset_with_a_device_tree() {
    let file = image(0x8_0000, MIB, 0b1010);
    let (boot, memory) = load(&file, 16, "smp=2");
    let boot = boot.unwrap();
    let entry = START + 2 * MIB + 0x8_0000;
    assert_eq!(boot.entry.get(), entry);
    let written = memory.0.borrow();
    let at = |gpa: u64| &written.iter().find(|(at, _)| *at == gpa).unwrap().1;
    assert_eq!(*at(entry), file);
    let tree = at(boot.device_tree.get());
    assert_eq!(tree[..4], 0xd00d_feed_u32.to_be_bytes());
    assert!(tree.len() < 2 << 20 && boot.device_tree.get() % 8 == 0);
    let has = |bytes: &[u8]| tree.windows(bytes.len()).any(|part| part == bytes);
    for text in [
        "smp=2\0",
        "memory@40000000\0",
        "cpu@1\0",
        "arm,gic-v3\0",
        "arm,armv8-timer\0",
        "arm,psci-1.0\0",
        "arm,pl011\0",
        "lacuna,host\0",
    ] {
        assert!(has(text.as_bytes()), "{text:?}");
    }
    assert!(has(b"rng-seed\0") && has(&RNG_SEED));
    assert!(!has(b"cpu@2\0"));
    let reg: Vec<u8> = [START, 16 * MIB]
        .iter()
        .flat_map(|n| n.to_be_bytes())
        .collect();
    assert!(has(&reg));
}

#[test]
fn an_old_kernel_without_an_image_size_has_the_old_text_offset() {
    let file = image(0, 0, 0);
    let image = Image::parse(&file).unwrap();
    assert_eq!((image.arch, image.segments.len()), (Arch::Arm64, 1));
    assert_eq!(image.entry.get(), START + 2 * MIB + 0x8_0000);
    assert_eq!(image.segments[0].size, file.len() as u64);
}

#[test]
fn kernels_that_no_vcpu_can_run_are_refused() {
    let error = |file: &[u8]| Image::parse(file).unwrap_err();
    assert_eq!(error(&image(0, MIB, 1)), ImageError::BigEndian);
    assert_eq!(error(&image(0, MIB, 2 << 1)), ImageError::Granule(16));
    assert_eq!(error(&image(0, MIB, 3 << 1)), ImageError::Granule(64));
    let offset = 2 * MIB;
    assert_eq!(
        error(&image(offset, MIB, 0)),
        ImageError::TextOffset(offset)
    );
    let endless = error(&image(0, u64::MAX, 0));
    assert!(
        matches!(endless, ImageError::BadAddress { .. }),
        "{endless}"
    );
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let (refused, memory) = load(&image(0, 8 * MIB, 0), 8, "");
    let text = refused.unwrap_err().to_string();
    assert!(
        text.contains("the guest needs at least 10M of memory"),
        "{text}"
    );
    assert!(memory.0.borrow().is_empty());
    let (refused, memory) = load(&image(0, MIB, 0), 8, "a\0b");
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("zero byte"), "{text}");
    assert!(memory.0.borrow().is_empty());
    let (refused, _) = load(&image(0, MIB, 0), 8, &"x".repeat(4096));
    assert_eq!(refused, Err(BootError::CommandLine(4096)));
}

#[test]
fn the_image_of_another_architecture_is_refused() {
    let file = image(0, MIB, 0);
    let image = Image::parse(&file).unwrap();
    let x86 = Layout::of(Arch::X86_64, PageCount::from_bytes(8 * MIB)).unwrap();
    let memory = Written::default();
    let refused = lacuna_machine::Boot::load(&image, &x86, "", &memory).unwrap_err();
    let text = refused.to_string();
    assert!(text.starts_with("the image is for AArch64"), "{text}");
    assert!(memory.0.borrow().is_empty());
}

struct NoKick;

impl Kick for NoKick {
    fn kick(&self, _: usize) {}

    fn kick_all(&self) {}
}

struct Nothing;

impl Device for Nothing {
    fn read(&self, _: Access) -> u64 {
        7
    }

    fn write(&self, _: Access, _: u64) -> Option<Ending> {
        None
    }
}

fn at(start: Gpa, offset: u64) -> Gpa {
    Gpa::truncate(start.get() + offset)
}

#[test]
fn the_guest_prints_announces_its_status_page_and_ends() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&lines);
    let console = move |line: &str| seen.lock().unwrap().push(line.to_owned());
    let devices = PlatformDevices::of(Arch::Arm64, console);
    for byte in b"one\r\ntwo" {
        devices.mmio_write(mmio::UART, Width::Long, u64::from(*byte), 0, &NoKick);
    }
    devices.flush();
    assert_eq!(*lines.lock().unwrap(), ["one", "two"]);
    let flags = devices.mmio_read(at(mmio::UART, 0x18), Width::Long, 0, &NoKick);
    assert_eq!(flags, 0x90, "both FIFOs are empty");
    let status = at(mmio::HOST, mmio::HOST_STATUS);
    devices.mmio_write(status, Width::Word, 5, 0, &NoKick);
    assert_eq!(devices.status_page(), None, "the register takes 32 bits");
    devices.mmio_write(status, Width::Long, 0x40123, 0, &NoKick);
    assert_eq!(devices.status_page().unwrap().get(), 0x40123);
    assert_eq!(devices.ending(), None);
    let exit = at(mmio::HOST, mmio::HOST_EXIT);
    devices.mmio_write(exit, Width::Long, 3, 0, &NoKick);
    assert_eq!(devices.ending(), Some(Ending::Exited(3)));
}

#[test]
fn an_x86_guest_has_none_of_these_devices() {
    let devices = PlatformDevices::new(|_: &str| panic!("a line"));
    devices.mmio_write(mmio::UART, Width::Long, 10, 0, &NoKick);
    devices.mmio_write(mmio::HOST, Width::Long, 1, 0, &NoKick);
    assert_eq!(devices.ending(), None);
    assert_eq!(devices.mmio_read(mmio::UART, Width::Byte, 0, &NoKick), 0xff);
    let refused = devices.check_arch(Arch::Arm64).unwrap_err().to_string();
    assert!(refused.contains("PlatformDevices::of"), "{refused}");
    assert_eq!(devices.check_arch(Arch::X86_64), Ok(()));
}

#[test]
fn a_device_of_the_vmm_lies_beside_those_of_the_guest() {
    let devices = PlatformDevices::of(Arch::Arm64, |_: &str| ());
    let add = |start: Gpa, bytes| {
        devices.add_mmio(
            &format!("{:x}", start.get()),
            start,
            bytes,
            Arc::new(Nothing),
        )
    };
    for taken in [
        at(mmio::DISTRIBUTOR, 0xffff),
        at(mmio::REDISTRIBUTORS, 0xf5_ffff),
        at(mmio::REDISTRIBUTORS_2, 0x109_ffff),
    ] {
        let refused = add(taken, 1);
        let controller = matches!(refused, Err(DeviceError::InterruptController { .. }));
        assert!(controller, "{taken} {refused:?}");
    }
    for taken in [mmio::UART, at(mmio::HOST, 0xfff)] {
        let refused = add(taken, 1);
        assert!(
            matches!(refused, Err(DeviceError::Overlap { .. })),
            "{refused:?}"
        );
    }
    let free = Gpa::truncate(0x0a00_0000);
    assert_eq!(add(free, 0x100), Ok(()));
    // The local APIC of x86-64 guests is memory here.
    assert_eq!(add(Gpa::truncate(0xfee0_0000), 0x100), Ok(()));
    assert_eq!(devices.mmio_read(free, Width::Byte, 0, &NoKick), 7);
}

proptest! {
    /// Any header is loaded or refused.
    #[test]
    fn hostile_headers_never_panic(
        words in proptest::array::uniform3(any::<u64>()),
        small in any::<bool>(),
    ) {
        let [offset, size, flags] = words;
        let file = match small {
            true => image(offset % (3 * MIB), size % (64 * MIB), flags % 16),
            false => image(offset, size, flags),
        };
        if let Ok(image) = Image::parse(&file) {
            let machine = Machine { vcpus: 1, command_line: "", rng_seed: RNG_SEED };
            let _ = Boot::load(&image, &layout(16), &machine, &Written::default());
        }
    }
}
