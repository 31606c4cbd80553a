//! Edges and levels, masks, the EOI of a local APIC, messages, and the registers.

use super::*;
use crate::apic::tests::{Wakes, set, x2};
use crate::apic::{ApicBus, Lapic};
use crate::tsc::{Tsc, TscRate};
use lacuna_sync::Nanos;
use std::sync::Arc;

const EOI: u32 = 0x80b;
/// A logical destination.
const LOGICAL: u64 = 1 << 11;

fn machine(vcpus: usize) -> (Arc<ApicBus>, Vec<Lapic>, Arc<Wakes>) {
    let (apics, wakes) = x2(vcpus);
    (apics[0].bus.clone(), apics, wakes)
}

/// Writes the entry of `pin`, as a guest does.
fn program(bus: &ApicBus, pin: u8, entry: u64) {
    for (half, value) in [(1, entry >> 32), (0, entry)] {
        bus.io_apic_write(SELECT, u32::from(ENTRIES + 2 * pin + half));
        bus.io_apic_write(WINDOW, value as u32);
    }
}

fn entry(bus: &ApicBus, pin: u8) -> u64 {
    let half = |half: u8| {
        bus.io_apic_write(SELECT, u32::from(ENTRIES + 2 * pin + half));
        u64::from(bus.io_apic_read(WINDOW))
    };
    half(0) | half(1) << 32
}

/// The next interrupt, taken into service.
fn next(apic: &mut Lapic) -> Option<u8> {
    let vector = apic.pending()?;
    apic.accept(vector);
    Some(vector)
}

/// The next interrupt, from delivery to EOI.
fn take(apic: &mut Lapic) -> Option<u8> {
    let vector = next(apic)?;
    set(apic, EOI, 0);
    Some(vector)
}

#[test]
fn an_edge_is_one_interrupt_and_lost_if_masked() {
    let (bus, mut apics, wakes) = machine(2);
    program(&bus, 5, 0x45 | 1 << 56);
    bus.set_pin(5, true);
    bus.set_pin(5, true);
    assert_eq!(wakes.take(), [1]);
    assert_eq!(
        (take(&mut apics[0]), take(&mut apics[1])),
        (None, Some(0x45))
    );
    assert_eq!(take(&mut apics[1]), None, "the line stays high");
    bus.set_pin(5, false);
    program(&bus, 5, 0x45 | 1 << 56 | MASKED);
    bus.set_pin(5, true);
    program(&bus, 5, 0x45 | 1 << 56);
    assert_eq!((wakes.take(), take(&mut apics[1])), (vec![], None));
    bus.set_pin(5, false);
    bus.set_pin(5, true);
    assert_eq!(take(&mut apics[1]), Some(0x45));
    bus.set_pin(PINS, true);
    bus.set_pin(usize::MAX, true);
}

#[test]
fn a_level_comes_again_after_each_eoi_until_the_line_is_low() {
    let (bus, mut apics, _) = machine(1);
    let apic = &mut apics[0];
    program(&bus, 20, 0x61 | LEVEL);
    bus.set_pin(20, true);
    for _ in 0..3 {
        assert_eq!(next(apic), Some(0x61));
        assert_eq!(entry(&bus, 20) & REMOTE_IRR, REMOTE_IRR);
        assert_eq!(apic.rdmsr(0x81b, Nanos(0)), Ok(2), "TMR");
        assert_eq!(next(apic), None, "not before its EOI");
        set(apic, EOI, 0);
    }
    assert_eq!(next(apic), Some(0x61));
    bus.set_pin(20, false);
    set(apic, EOI, 0);
    assert_eq!((next(apic), entry(&bus, 20) & REMOTE_IRR), (None, 0));
    // A level on a masked pin waits.
    program(&bus, 20, 0x61 | LEVEL | MASKED);
    bus.set_pin(20, true);
    assert_eq!(next(apic), None);
    program(&bus, 20, 0x61 | LEVEL);
    assert_eq!(next(apic), Some(0x61));
    // Edge-triggered for a moment: as an EOI.
    program(&bus, 20, 0x61 | MASKED);
    program(&bus, 20, 0x62 | LEVEL);
    assert_eq!(
        next(apic),
        None,
        "the same class as 0x61, which is in service"
    );
    set(apic, EOI, 0);
    assert_eq!(next(apic), Some(0x62));
}

#[test]
fn a_level_without_an_apic_waits_for_one() {
    let (bus, mut apics, _) = machine(1);
    set(&mut apics[0], 0x80f, 0xff);
    program(&bus, 3, 0x70 | LEVEL);
    bus.set_pin(3, true);
    assert_eq!(entry(&bus, 3) & REMOTE_IRR, 0);
    set(&mut apics[0], 0x80f, 0x1ff);
    bus.set_pin(3, true);
    assert_eq!(next(&mut apics[0]), Some(0x70));
}

#[test]
fn destinations_and_modes() {
    let (bus, mut apics, wakes) = machine(3);
    let pulse = |bits: u64| {
        program(&bus, 0, 0x40 | bits);
        bus.set_pin(0, true);
        bus.set_pin(0, false);
        wakes.take()
    };
    assert_eq!(pulse(LOGICAL | 0b101 << 56), [0, 2]);
    assert_eq!(apics.iter_mut().filter_map(take).count(), 2);
    assert_eq!(pulse(1 << 8 | LOGICAL | 0b110 << 56), [1]);
    assert_eq!(take(&mut apics[1]), Some(0x40));
    assert_eq!(pulse(0xff << 56), [0, 1, 2]);
    assert_eq!(pulse(9 << 56), [], "there is no such APIC");
    assert_eq!(pulse(5 << 8), [], "INIT is not delivered");
    assert_eq!(pulse(4 << 8 | 1 << 56), [1]);
    assert!(apics[1].has_nmi());
}

#[test]
fn messages_of_devices() {
    let (bus, mut apics, wakes) = machine(3);
    bus.signal_msi(0xfee0_2000, 0x51);
    assert_eq!((wakes.take(), take(&mut apics[2])), (vec![2], Some(0x51)));
    bus.signal_msi(0xfee0_3004, 0x52);
    assert_eq!(wakes.take(), [0, 1]);
    bus.signal_msi(0xfee0_600c, 0x53);
    assert_eq!(wakes.take(), [1], "with the redirection hint one APIC");
    bus.signal_msi(0xfee0_2000, 1 << 15 | 0x60);
    assert_eq!(apics[2].rdmsr(0x81b, Nanos(0)), Ok(1), "TMR");
    bus.signal_msi(0xfee0_2000, 0x60);
    assert_eq!(apics[2].rdmsr(0x81b, Nanos(0)), Ok(0), "TMR");
    wakes.take();
    for ignored in [0x0f, 5 << 8 | 0x51, 7 << 8 | 0x51] {
        bus.signal_msi(0xfeef_f000, ignored);
    }
    assert_eq!(wakes.take(), []);
    bus.signal_msi(0xfeef_f000, 4 << 8);
    assert_eq!(wakes.take(), [0, 1, 2], "NMI");
}

/// In x2APIC mode 0xff is vCPU 255, if there is one; otherwise a broadcast.
#[test]
fn the_last_of_256_vcpus_is_addressed() {
    let (bus, mut apics, wakes) = machine(256);
    bus.signal_msi(0xfeef_f000, 0x51);
    assert_eq!(wakes.take(), [255]);
    program(&bus, 4, 0xff << 56 | 0x52);
    bus.set_pin(4, true);
    assert_eq!((wakes.take(), entry(&bus, 4) >> 56), (vec![255], 0xff));
    bus.signal_msi(0xfeef_f004, 0x53);
    assert_eq!(wakes.take(), [0, 1, 2, 3, 4, 5, 6, 7], "logical: a cluster");
    bus.post(255, 0x54);
    set(&mut apics[0], 0x830, 255 << 32 | 0x55);
    assert_eq!(wakes.take(), [255, 255]);
    set(&mut apics[255], 0x830, 3 << 18 | 0x56);
    assert_eq!(wakes.take(), Vec::from_iter(0..255), "all but itself");
    let (bus, _, wakes) = machine(255);
    bus.signal_msi(0xfeef_f000, 0x51);
    assert_eq!(wakes.take(), Vec::from_iter(0..255));
}

#[test]
fn registers_read_back() {
    let (bus, _, _) = machine(1);
    assert_eq!(entry(&bus, 23), MASKED);
    program(&bus, 23, u64::MAX);
    assert_eq!(
        entry(&bus, 23),
        WRITABLE,
        "remote IRR and status are read-only"
    );
    let register = |number, value| {
        bus.io_apic_write(SELECT, number);
        bus.io_apic_write(WINDOW, value);
        bus.io_apic_read(WINDOW)
    };
    assert_eq!(register(0, u32::MAX), 0x0f00_0000);
    assert_eq!(register(1, 0), 0x0017_0011);
    assert_eq!(register(2, 0), 0x0f00_0000);
    assert_eq!(register(0x40, 0), u32::MAX);
    assert_eq!(
        (bus.io_apic_read(SELECT), bus.io_apic_read(0x20)),
        (0x40, 0)
    );
    assert_eq!(io_apic_offset(Gpa::truncate(0xfec0_0010)), Some(WINDOW));
    assert_eq!(io_apic_offset(Gpa::truncate(0xfec0_0100)), None);
}

/// A request and an interrupt in service move with the registers of both APICs.
#[test]
fn interrupts_in_flight_are_saved() {
    let now = Nanos(0);
    for in_service in [false, true] {
        let (bus, mut apics, _) = machine(1);
        program(&bus, 7, 0x61 | LEVEL);
        program(&bus, 8, 0x40);
        bus.set_pin(7, true);
        bus.set_pin(8, true);
        if in_service {
            assert_eq!(next(&mut apics[0]), Some(0x61));
        }
        let (io, local) = (bus.io_apic(), apics[0].registers(now));
        let (bus, mut apics, _) = machine(1);
        let apic = &mut apics[0];
        bus.set_io_apic(&io);
        assert_eq!(crate::apic::check(&local, 0), Ok(()));
        apic.set_registers(&local, Tsc::new(TscRate::GIGAHERTZ, 0), now);
        if !in_service {
            assert_eq!(next(apic), Some(0x61));
        }
        assert_eq!(next(apic), None);
        set(apic, EOI, 0);
        assert_eq!(next(apic), Some(0x61), "the line is high");
        bus.set_pin(7, false);
        set(apic, EOI, 0);
        assert_eq!((take(apic), take(apic)), (Some(0x40), None));
    }
}
