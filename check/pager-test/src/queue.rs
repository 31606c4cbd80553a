//! Whether the other side has read what was sent.
//!
//! UNSAFETY: one ioctl that rustix lacks.

use rustix::fd::AsFd;
use rustix::io;
use rustix::ioctl::{Getter, Opcode, ioctl};
use std::os::raw::c_int;
use std::time::Duration;

/// The time between two tries for something that another process or thread does.
pub const LOOK: Duration = Duration::from_millis(1);

/// `SIOCOUTQ` (`asm-generic/ioctls.h` has the same number under the name `TIOCOUTQ`).
const OUT_QUEUE: Opcode = 0x5411;

/// Whether the other side of a UNIX socket has bytes of this side that it has not read: not 0. The
/// number includes the kernel's own bytes for each message.
///
/// # Errors
/// As `ioctl(2)`.
pub fn unread(socket: &impl AsFd) -> io::Result<c_int> {
    // SAFETY: 1. SIOCOUTQ writes one `int`.
    unsafe { ioctl(socket, Getter::<OUT_QUEUE, c_int>::new()) }
}
