//! A VMM's devices.

use lacuna_addr::{Gfn, GfnRange, Gpa, PageCount};
use lacuna_machine::{
    Access, Arch, Device, DeviceError, Ending, Kick, Layout, MemorySlot, PlatformDevices,
    SlotFlags, SlotId, Width, port,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Keeps the last write, and ends the run on a write of 99.
#[derive(Default)]
struct Latch {
    last: AtomicU64,
    writes: Mutex<Vec<Access>>,
}

impl Device for Latch {
    fn read(&self, access: Access) -> u64 {
        self.last.load(Ordering::Relaxed) + access.offset
    }

    fn write(&self, access: Access, value: u64) -> Option<Ending> {
        self.writes.lock().unwrap().push(access);
        self.last.store(value, Ordering::Relaxed);
        (value == 99).then_some(Ending::Exited(9))
    }
}

#[derive(Default)]
pub struct Kicks(AtomicUsize);

impl Kicks {
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Kick for Kicks {
    fn kick(&self, _: usize) {}

    fn kick_all(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

const BASE: Gpa = Gpa::truncate(0xd000_0000);

fn with_latch() -> (PlatformDevices, Arc<Latch>) {
    let devices = PlatformDevices::new(|_: &str| ());
    let latch = Arc::<Latch>::default();
    let ports = devices.add_ports("ports", 0x600..=0x603, latch.clone());
    ports.unwrap();
    let mmio = devices.add_mmio("mmio", BASE, 0x100, latch.clone());
    mmio.unwrap();
    (devices, latch)
}

#[test]
fn a_device_gets_the_accesses_of_its_range_by_their_offset() {
    let (devices, latch) = with_latch();
    let kicks = Kicks::default();
    devices.write(0x602, Width::Byte, 5, 3, &kicks);
    devices.mmio_write(Gpa::truncate(BASE.get() + 0xf8), Width::Quad, 7, 0, &kicks);
    let access = |offset, width, vcpu| Access {
        offset,
        width,
        vcpu,
    };
    let seen = latch.writes.lock().unwrap().clone();
    let expected = [access(2, Width::Byte, 3), access(0xf8, Width::Quad, 0)];
    assert_eq!(seen, expected);
    assert_eq!(devices.read(0x601, Width::Byte, 0, &kicks), 8);
    assert_eq!(devices.mmio_read(BASE, Width::Long, 0, &kicks), 7);
    assert_eq!(kicks.count(), 0);
}

#[test]
fn an_access_outside_or_across_the_end_reads_as_ones() {
    let (devices, latch) = with_latch();
    let end = Gpa::truncate(BASE.get() + 0xfc);
    let kicks = &Kicks::default();
    let empty = Gpa::truncate(0x1000);
    assert_eq!(devices.mmio_read(end, Width::Quad, 0, kicks), u64::MAX);
    assert_eq!(devices.mmio_read(empty, Width::Byte, 0, kicks), 0xff);
    assert_eq!(devices.read(0x603, Width::Word, 0, kicks), 0xffff);
    devices.mmio_write(end, Width::Quad, 1, 0, kicks);
    assert!(latch.writes.lock().unwrap().is_empty());
}

#[test]
fn a_device_ends_the_run() {
    let (devices, _) = with_latch();
    let kicks = Kicks::default();
    devices.mmio_write(BASE, Width::Byte, 99, 0, &kicks);
    assert!(matches!(devices.ending(), Some(Ending::Exited(9))));
    assert_eq!(kicks.count(), 1);
}

#[test]
fn devices_do_not_overlap() {
    let (devices, latch) = with_latch();
    for ports in [
        0x5ff..=0x600,
        0x603..=0x700,
        port::EXIT..=port::EXIT,
        0x3f0..=0x3f8,
    ] {
        let refused = devices.add_ports("more", ports, latch.clone());
        assert!(matches!(refused, Err(DeviceError::Overlap { .. })));
    }
    let inside = Gpa::truncate(BASE.get() + 0xff);
    let refused = devices.add_mmio("more", inside, 1, latch.clone());
    assert!(matches!(refused, Err(DeviceError::Overlap { .. })));
    let refused = devices.add_mmio("more", BASE, 0, latch.clone());
    assert!(matches!(refused, Err(DeviceError::Range { .. })));
    devices.add_ports("more", 0x604..=0x604, latch).unwrap();
}

#[test]
fn an_interrupt_controller_keeps_its_range() {
    let (devices, latch) = with_latch();
    for (start, bytes, taken) in [
        (0xfebf_ff00, 0x100, false),
        (0xfebf_ff00, 0x101, true),
        (0xfec0_00ff, 1, true),
        (0xfec0_0100, 0x100, false),
        (0xfedf_f000, 0x1001, true),
        (0xfee0_0fff, 1, true),
        (0xfee0_1000, 0x1000, false),
    ] {
        let added = devices.add_mmio(
            &format!("{start:x}"),
            Gpa::truncate(start),
            bytes,
            latch.clone(),
        );
        let refused = matches!(added, Err(DeviceError::InterruptController { .. }));
        assert_eq!(refused, taken, "{start:#x} {added:?}");
        assert_eq!(added.is_ok(), !taken, "{start:#x} {added:?}");
    }
    for ports in [0x1f..=0x20, 0x21..=0x21, 0xa0..=0xa0, 0x4d1..=0x4d2] {
        let refused = devices.add_ports("more", ports, latch.clone());
        assert!(matches!(
            refused,
            Err(DeviceError::InterruptController { .. })
        ));
    }
    devices.add_ports("more", 0x22..=0x9f, latch).unwrap();
}

fn slot(first: u64, pages: u64) -> MemorySlot {
    MemorySlot {
        id: SlotId(3),
        gfns: GfnRange::new(Gfn::new(first).unwrap(), pages).unwrap(),
        flags: SlotFlags::empty(),
    }
}

#[test]
fn a_device_over_memory_is_found() {
    let (devices, _) = with_latch();
    let base = BASE.get() / 0x1000;
    let (from, to) = (BASE.get(), BASE.get() + 0xff);
    let beside = [slot(0, base), slot(base + 1, 16)];
    assert_eq!(devices.check_memory(&beside), Ok(()));
    for over in [slot(base, 1), slot(0, base + 1), slot(base - 1, 16)] {
        let found = devices.check_memory(&[slot(0, 1), over]);
        assert_eq!(found, Err(DeviceError::Memory { from, to }), "{over:?}");
    }
}

/// The addresses named in the error are free, whatever the size of the memory.
#[test]
fn a_device_fits_where_the_error_says() {
    let text = DeviceError::Memory { from: 0, to: 0 }.to_string();
    for (arch, named, start, end) in [
        (
            Arch::X86_64,
            "0xc000_0000 to 0xfebf_ffff",
            0xc000_0000,
            0xfec0_0000,
        ),
        (
            Arch::Arm64,
            "0x0a00_0000 to 0x3dff_ffff",
            0x0a00_0000,
            0x3e00_0000,
        ),
    ] {
        assert!(text.contains(named), "{text}");
        let devices = PlatformDevices::of(arch, |_: &str| ());
        let latch = Arc::<Latch>::default();
        let added = devices.add_mmio("all", Gpa::truncate(start), end - start, latch);
        assert_eq!(added, Ok(()), "{arch:?}");
        let layout = Layout::of(arch, PageCount::from_bytes(64 << 40)).unwrap();
        let slot = |&gfns: &GfnRange| MemorySlot { gfns, ..slot(0, 1) };
        let slots: Vec<_> = layout.ranges().iter().map(slot).collect();
        assert_eq!(devices.check_memory(&slots), Ok(()), "{arch:?}");
    }
}

/// A panicking console loses its line, and the serial line keeps working.
#[test]
fn a_console_may_panic() {
    let lines = Arc::<Mutex<Vec<String>>>::default();
    let sink = Arc::clone(&lines);
    let devices = PlatformDevices::new(move |line: &str| match line {
        "bad" => panic!("the console's own"),
        line => sink.lock().unwrap().push(line.to_owned()),
    });
    let print = |text: &str| {
        for byte in text.bytes() {
            devices.write(port::SERIAL, Width::Byte, byte.into(), 0, &Kicks::default());
        }
    };
    let bad = catch_unwind(AssertUnwindSafe(|| print("bad\n")));
    assert!(bad.is_err());
    print("good\nunfinished");
    let status = devices.read(port::SERIAL + 5, Width::Byte, 0, &Kicks::default());
    assert_eq!(status & 0x20, 0x20);
    devices.flush();
    assert_eq!(*lines.lock().unwrap(), ["good", "unfinished"]);
}
