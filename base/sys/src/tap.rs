//! Taps: network interfaces whose packets a process reads and writes.
//!
//! UNSAFETY: the ioctl writes the interface's name to its argument alone. The new namespace changes
//! no descriptor and no memory of this process.

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::{self, Errno};
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::thread::{UnshareFlags, unshare_unsafe};

const TUNSETIFF: Opcode = opcode::write::<i32>(b'T', 202);
const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;

/// `struct ifreq`.
#[repr(C)]
struct Ifreq {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

const _: () = assert!(size_of::<Ifreq>() == 40);

/// `TUNSETIFF`: the tap `name` in the network namespace of the calling thread, new or without a
/// process. Each read and write is one Ethernet frame. A new one ends with the descriptor.
///
/// # Errors
/// `PERM`: the caller may not administer the namespace; `BUSY`: another process has the tap;
/// `NAMETOOLONG`: `name` has more than 15 bytes; the errors of opening `/dev/net/tun`.
pub fn tap(name: &str) -> io::Result<OwnedFd> {
    let mut ifreq = Ifreq {
        name: [0; 16],
        flags: IFF_TAP | IFF_NO_PI,
        rest: [0; 22],
    };
    let place = ifreq.name[..15].get_mut(..name.len());
    let place = place.ok_or(Errno::NAMETOOLONG)?;
    place.copy_from_slice(name.as_bytes());
    let tun = open(
        "/dev/net/tun",
        OFlags::RDWR | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    // SAFETY: 1. TUNSETIFF reads and writes one `struct ifreq`, though its number says `int`.
    unsafe { ioctl(&tun, Updater::<TUNSETIFF, _>::new(&mut ifreq))? };
    Ok(tun)
}

/// Gives the calling thread, and the threads and processes that it starts, a network namespace
/// without other interfaces than an unused loopback. It ends with them.
///
/// # Errors
/// `PERM`: the caller may not make one.
pub fn new_network_namespace() -> io::Result<()> {
    // SAFETY: 1. the flag concerns interfaces and new sockets, and no existing descriptor.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
}
