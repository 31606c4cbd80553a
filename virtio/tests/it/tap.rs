//! The network device on a tap, in a network namespace of its own. Linux is at the other end of the
//! wire, with a UDP socket.

use crate::driver::{Driver, HANG, WRITE};
use lacuna_virtio::Net;
use std::net::UdpSocket;
use std::process::Command;
use std::thread;

const AT: u64 = 0x30_0000;
/// The address of the guest's card, and of Linux's end.
const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 7];
const LINUX: [u8; 6] = [2, 0, 0, 0, 0, 1];
const GUEST_IP: [u8; 4] = [10, 0, 0, 2];
const LINUX_IP: [u8; 4] = [10, 0, 0, 1];
const IPV4: [u8; 2] = [8, 0];
const GUEST_PORT: u16 = 4000;
/// The header of virtio before each packet, and a driver's buffer for a packet.
const HEADER: usize = 12;
const ROOM: u32 = 1526;
/// The headers of Ethernet, IPv4 and UDP.
const HEADERS: usize = 14 + 20 + 8;

/// `ip` with these words.
fn ip(words: &str) {
    match Command::new("ip").args(words.split(' ')).output() {
        Err(error) => lacuna_skip::skip_test(format!("no command ip: {error}")),
        Ok(done) => assert!(done.status.success(), "ip {words}: {done:?}"),
    }
}

fn checksum(header: &[u8]) -> u16 {
    let (words, _) = header.as_chunks();
    let sum: u32 = words
        .iter()
        .map(|word| u32::from(u16::from_be_bytes(*word)))
        .sum();
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// An Ethernet frame of the guest with a UDP packet for `port`.
fn frame(port: u16, payload: &[u8]) -> Vec<u8> {
    let udp_bytes = (8 + payload.len()) as u16;
    let mut ip = [0; 20];
    ip[..2].copy_from_slice(&[0x45, 0]);
    ip[2..4].copy_from_slice(&(20 + udp_bytes).to_be_bytes());
    // Time to live, UDP.
    ip[8..10].copy_from_slice(&[64, 17]);
    ip[12..16].copy_from_slice(&GUEST_IP);
    ip[16..].copy_from_slice(&LINUX_IP);
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let udp = [GUEST_PORT, port, udp_bytes, 0].map(u16::to_be_bytes);
    let (ethernet, udp) = ([LINUX, GUEST], udp.as_flattened());
    [ethernet.as_flattened(), &IPV4, &ip, udp, payload].concat()
}

fn exchange() {
    if let Err(error) = lacuna_sys::new_network_namespace() {
        lacuna_skip::skip_test(format!("no network namespace: {error}"));
    }
    let tap = match lacuna_sys::tap("tap0") {
        Ok(tap) => tap,
        Err(error) => lacuna_skip::skip_test(format!("no tap: {error}")),
    };
    ip("link set tap0 address 02:00:00:00:00:01 up");
    ip("address add 10.0.0.1/24 dev tap0");
    ip("neigh add 10.0.0.2 lladdr 02:00:00:00:00:07 dev tap0");
    let linux = UdpSocket::bind("10.0.0.1:0").expect("a socket");
    linux.set_read_timeout(Some(HANG)).expect("a time");
    let port = linux.local_addr().expect("its address").port();

    let driver = Driver::ready(Net::new(tap, GUEST).expect("a card"));
    let _listening = driver.device.listen().expect("a thread");
    let packet = [&[0; HEADER][..], &frame(port, b"ping")].concat();
    driver.put(AT, &packet);
    assert_eq!(driver.request(1, &[(AT, packet.len() as u32, 0)]), 0);
    let mut payload = [0; 64];
    let (bytes, from) = linux.recv_from(&mut payload).expect("a packet");
    assert_eq!(&payload[..bytes], b"ping");
    assert_eq!(from, (GUEST_IP, GUEST_PORT).into());

    linux.send_to(b"pong", from).expect("a neighbour");
    // Linux also sends packets of its own, by IPv6.
    let got = loop {
        let bytes = driver.request(0, &[(AT, ROOM, WRITE)]) as usize;
        let got = driver.take(AT + HEADER as u64, bytes - HEADER);
        if got[12..14] == IPV4 {
            break got;
        }
    };
    assert_eq!(got[..12], *[GUEST, LINUX].as_flattened());
    assert_eq!(got[HEADERS..], *b"pong");
}

/// A thread of its own: no other test may get its namespace.
#[lacuna_skip::test]
fn a_tap_carries_packets_both_ways() {
    let name = thread::current().name().unwrap_or("tap").to_owned();
    let thread = thread::Builder::new().name(name).spawn(exchange);
    let joined = thread.expect("a thread").join();
    joined.unwrap_or_else(|skip_or_failure| std::panic::resume_unwind(skip_or_failure));
}
