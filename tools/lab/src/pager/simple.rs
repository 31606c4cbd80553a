//! A page-fault handler as simple as Firecracker's example: the baseline.

use lacuna_sys::{Errno, FileArea, MissingArea};
use rustix::event::{PollFd, PollFlags, poll};
use std::os::unix::net::UnixStream;

/// `UFFD_EVENT_PAGEFAULT` of `linux/userfaultfd.h`.
const FAULT: u8 = 0x12;
/// Bytes of a `struct uffd_msg`, and where it has a fault's address.
const MESSAGE: usize = 32;
const ADDRESS: usize = 16;
const PAGE: u64 = 4096;

/// Answers the faults of `memory` from `file`, until `vm` is closed: one event a read, one page an
/// event. Page n of the memory is page n of the file.
///
/// # Errors
/// An error of a call, which the example ends at.
pub fn serve(memory: &MissingArea, file: &FileArea, vm: &UnixStream) -> Result<(), Errno> {
    let uffd = memory.userfaultfd();
    let start = memory.range().start().get();
    loop {
        let mut fds = [
            PollFd::new(vm, PollFlags::IN),
            PollFd::new(uffd, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
            polled => polled?,
        };
        let [is_over, has_event] = [0, 1].map(|at| !fds[at].revents().is_empty());
        if is_over {
            return Ok(());
        }
        if !has_event {
            continue;
        }
        let mut message = [0; MESSAGE];
        match rustix::io::read(uffd, &mut message) {
            Ok(_) if message[0] == FAULT => {}
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => continue,
            Err(errno) => return Err(errno),
        }
        let address = u64::from_ne_bytes(*message[ADDRESS..].first_chunk().expect("a word"));
        let index = (address - start) / PAGE;
        match file.copy_page(index, uffd, memory.page(index)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
}
