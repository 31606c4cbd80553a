//! The network device. Its wire is a pair of UNIX datagram sockets.

use crate::driver::{Driver, WRITE, access, line, wait};
use lacuna_machine::{Device, Width};
use lacuna_virtio::{Mmio, Net};
use std::os::unix::net::UnixDatagram;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_CONFIG;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MAC;

const AT: u64 = 0x30_0000;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
/// The header before each packet.
const HEADER: usize = 12;
/// A driver's buffer for a packet.
const ROOM: u32 = 1526;

/// A card, and the other end of its wire.
fn card() -> (Net, UnixDatagram) {
    let (wire, other) = UnixDatagram::pair().expect("sockets");
    (Net::new(wire.into(), MAC).expect("a card"), other)
}

fn with_header(packet: &[u8], buffers: u8) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    bytes[10] = buffers;
    bytes.extend(packet);
    bytes
}

#[test]
fn the_driver_finds_its_address() {
    let driver = Driver::ready(card().0);
    assert_eq!(driver.offered() >> VIRTIO_NET_F_MAC & 1, 1);
    let config = u64::from(VIRTIO_MMIO_CONFIG);
    let bytes = (0..6).map(|at| driver.device.read(access(config + at, Width::Byte)) as u8);
    assert!(bytes.eq(MAC));
}

#[test]
fn packets_leave() {
    let (net, other) = card();
    let driver = Driver::ready(net);
    driver.put(AT, &with_header(b"ping", 0));
    // In two buffers.
    assert_eq!(driver.request(1, &[(AT, 14, 0), (AT + 14, 2, 0)]), 0);
    let mut packet = [0; 64];
    assert_eq!(other.recv(&mut packet).expect("a packet"), 4);
    assert_eq!(packet[..4], *b"ping");
}

/// The wire takes no more: packets are lost, and the device still answers each request.
#[test]
fn a_full_wire_does_not_hold_the_driver() {
    let (net, other) = card();
    let driver = Driver::ready(net);
    driver.put(AT, &with_header(&[7; 1000], 0));
    for _ in 0..2000 {
        assert_eq!(driver.request(1, &[(AT, 1012, 0)]), 0);
    }
    drop(other);
    assert_eq!(driver.request(1, &[(AT, 1012, 0)]), 0);
}

/// A buffer before the packet, and a packet before the buffer. The driver does not notify the queue
/// in between.
#[test]
fn packets_come() {
    let (net, other) = card();
    let driver = Driver::ready(net);
    let _listening = driver.device.listen().expect("a thread");
    driver.submit(0, &[(AT, ROOM, WRITE)]);
    other.send(b"one").expect("room");
    assert_eq!(driver.used_after(0, 0) as usize, HEADER + 3);
    assert_eq!(driver.take(AT, HEADER + 3), with_header(b"one", 1));
    other.send(b"two").expect("room");
    other.send(b"three").expect("room");
    for (used, packet) in [(1, &b"two"[..]), (2, b"three")] {
        driver.submit(0, &[(AT, ROOM, WRITE)]);
        let bytes = driver.used_after(0, used) as usize;
        assert_eq!(driver.take(AT, bytes), with_header(packet, 1));
    }
}

#[test]
fn a_packet_longer_than_the_buffer_is_dropped() {
    let (net, other) = card();
    let driver = Driver::ready(net);
    let _listening = driver.device.listen().expect("a thread");
    let longest = ROOM as usize - HEADER;
    other.send(&vec![1; longest + 1]).expect("room");
    other.send(&vec![2; longest]).expect("room");
    driver.submit(0, &[(AT, ROOM, WRITE)]);
    assert_eq!(driver.used_after(0, 0), ROOM);
    assert_eq!(
        driver.take(AT, ROOM as usize),
        with_header(&vec![2; longest], 1)
    );
}

/// A packet that comes during the pause reaches the device that takes over.
#[test]
fn a_card_moves_to_another_process_with_its_wire() {
    let (here, other) = UnixDatagram::pair().expect("sockets");
    let wire = here.try_clone().expect("a descriptor");
    let net = Net::new(here.into(), MAC).expect("a card");
    let mut driver = Driver::ready(net);
    let listening = driver.device.listen().expect("a thread");
    driver.submit(0, &[(AT, ROOM, WRITE)]);
    driver.device.pause();
    other.send(b"late").expect("room");
    let state = driver.device.state();
    drop(listening);
    let fresh = Net::new(wire.into(), MAC).expect("a card");
    driver.device = Mmio::new(&driver.vm, line(&driver.vm), fresh).expect("a thread");
    let _listening = driver.device.listen().expect("a thread");
    driver.device.set_state(&state).expect("a good state");
    driver.device.resume();
    assert_eq!(driver.used_after(0, 0) as usize, HEADER + 4);
    assert_eq!(driver.take(AT, HEADER + 4), with_header(b"late", 1));
}

#[test]
fn a_driver_that_breaks_the_rules_needs_a_reset() {
    for (queue, buffer) in [
        (0, (AT, ROOM - 1, WRITE)),
        (1, (AT, HEADER as u32 - 1, 0)),
        (1, (AT, 1 << 20, 0)),
    ] {
        let driver = Driver::ready(card().0);
        driver.submit(queue, &[buffer]);
        driver.broken();
    }
}

/// Also if the driver has no buffer, and the other end of the wire is closed.
#[test]
fn the_thread_ends() {
    let (net, other) = card();
    let driver = Driver::ready(net);
    let listening = driver.device.listen().expect("a thread");
    other.send(b"nothing takes this").expect("room");
    drop(other);
    drop(listening);
    let listening = driver.device.listen().expect("a thread");
    driver.submit(0, &[(AT, ROOM, WRITE)]);
    wait(|| driver.used_index(0) == 1);
    drop(driver);
    drop(listening);
}
