//! Descriptors that also report removed pages and writes.

use super::{
    EVENT_PAGEFAULT, FEATURE_THREAD_ID, Fault, MESSAGE, MODE_MISSING, MODE_WP, Userfaultfd,
    WRITEPROTECT, WriteProtect, all, fault,
};
use lacuna_addr::{Hva, HvaRange, PAGE_SIZE};
use rustix::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use rustix::io::{self, Errno};
use std::sync::atomic::{AtomicU8, Ordering};

/// Bytes of 64 events.
pub const EVENT_BYTES: usize = 64 * MESSAGE;
/// `UFFD_FEATURE_PAGEFAULT_FLAG_WP`, since Linux 5.7.
const FEATURE_FLAG_WP: u64 = 1;
/// `UFFD_FEATURE_EVENT_REMOVE`, since Linux 4.11.
pub(super) const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
/// `UFFD_EVENT_FORK`.
const EVENT_FORK: u8 = 0x13;
/// `UFFD_EVENT_REMAP`.
const EVENT_REMAP: u8 = 0x14;
/// `UFFD_EVENT_REMOVE`.
const EVENT_REMOVE: u8 = 0x15;
/// `UFFD_EVENT_UNMAP`.
const EVENT_UNMAP: u8 = 0x16;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const PROTECT: u64 = 1;
/// Offsets of the words of a message. A removal and an unmapping have the start and the end, a move
/// has the old start, the new start and the length, all u64. A fork has a descriptor, a u32.
const FIRST_AT: usize = 8;
const SECOND_AT: usize = 16;
const THIRD_AT: usize = 24;

/// An event of a descriptor. A descriptor that another process has made may report any of them.
#[derive(Debug)]
pub enum Event {
    /// A thread waits for a page.
    Fault(Fault),
    /// A thread takes these pages away (`MADV_DONTNEED`, `MADV_REMOVE`), and waits until this event
    /// is read. Until then every fill fails with `AGAIN`. The reader has to answer a later fault
    /// there with zeros. That fault may be read before this event.
    Removed(HvaRange),
    /// As [`Event::Removed`], by `munmap(2)`.
    Unmapped(HvaRange),
    /// A thread has moved this mapping by `mremap(2)`. It waits until this event is read.
    Moved {
        /// The old addresses.
        from: HvaRange,
        /// The new start.
        to: Hva,
    },
    /// The process has forked. This is the userfaultfd of the child's copy of the memory.
    Forked(OwnedFd),
    /// The kernel's number of an unknown event.
    Other(u8),
}

impl Userfaultfd {
    /// As [`open_user`](Self::open_user), and it reports removed pages. A thread that removes pages
    /// waits until the event is read, so the descriptor needs a reader.
    ///
    /// # Errors
    /// As [`open_user`](Self::open_user).
    pub fn open_user_with_removals() -> io::Result<Self> {
        Self::user_with(FEATURE_THREAD_ID | FEATURE_EVENT_REMOVE, MODE_MISSING)
    }

    /// As [`open_user`](Self::open_user), and a write to a [protected](Self::protect) page waits as
    /// for a missing page.
    ///
    /// # Errors
    /// As [`open_user`](Self::open_user); `INVAL` before Linux 5.7.
    pub fn open_protecting() -> io::Result<Self> {
        let modes = MODE_MISSING | MODE_WP;
        Self::user_with(FEATURE_THREAD_ID | FEATURE_FLAG_WP, modes)
    }

    /// A write to a page of `range` waits from now on, until [`unprotect`](Self::unprotect).
    /// Missing pages are not protected.
    ///
    /// # Errors
    /// As [`unprotect`](Self::unprotect), for descriptors of
    /// [`open_protecting`](Self::open_protecting).
    pub fn protect(&self, range: HvaRange) -> io::Result<()> {
        let mut protect = WriteProtect {
            range: all(range),
            mode: PROTECT,
        };
        // SAFETY: 1. UFFDIO_WRITEPROTECT takes a `struct uffdio_writeprotect`. 2. It changes no
        // byte.
        unsafe { self.update::<{ WRITEPROTECT }, _>(&mut protect) }
    }

    /// Appends the unread events to `events`, in the kernel's order, as many as `buffer` has room
    /// for. It never waits for one: before Linux 6.10 only as long as the descriptor has
    /// `O_NONBLOCK`, which each process with a copy of the descriptor can clear.
    ///
    /// The kernel writes the events to `buffer`, and each removing thread continues with the read.
    /// If `buffer` outlives this process, [`Event::changes`] finds the events there.
    ///
    /// # Errors
    /// As `read(2)`. If there is no unread event, that is no error.
    pub fn events(&self, buffer: &[AtomicU8], events: &mut Vec<Event>) -> io::Result<()> {
        let read = self.read_now(buffer)?;
        // SAFETY: 1. the kernel has just written the messages, and each is decoded once.
        events.extend(messages(&buffer[..read]).filter_map(|message| unsafe { event(&message) }));
        Ok(())
    }

    /// The flag `O_NONBLOCK` belongs to all copies of the descriptor, so it does not suffice.
    fn read_now(&self, buffer: &[AtomicU8]) -> io::Result<usize> {
        let (fd, bytes) = (self.fd.as_raw_fd(), buffer.len());
        let at = buffer.as_ptr().cast_mut().cast();
        let whole = libc::iovec {
            iov_base: at,
            iov_len: bytes,
        };
        // SAFETY: 1. the kernel writes to the buffer, whose bytes are atomics.
        let mut read = unsafe { libc::preadv2(fd, &raw const whole, 1, -1, libc::RWF_NOWAIT) };
        // Before Linux 6.10.
        if read < 0 && matches!(last_error(), Errno::OPNOTSUPP | Errno::NOSYS) {
            // SAFETY: 1. as above.
            read = unsafe { libc::read(fd, at, bytes) };
        }
        match usize::try_from(read).map_err(|_| last_error()) {
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            read => read,
        }
    }
}

impl Event {
    /// The removals, unmappings and moves in a buffer of [`Userfaultfd::events`]: of the last read
    /// into it, and of earlier ones that had more events.
    pub fn changes(buffer: &[AtomicU8]) -> impl Iterator<Item = Self> {
        let is_change = |message: &Message| {
            let kind = message[0];
            kind == EVENT_REMOVE || kind == EVENT_UNMAP || kind == EVENT_REMAP
        };
        // SAFETY: 1. no such message has a descriptor.
        messages(buffer)
            .filter(is_change)
            .filter_map(|message| unsafe { event(&message) })
    }
}

type Message = [u8; MESSAGE];

fn messages(buffer: &[AtomicU8]) -> impl Iterator<Item = Message> {
    let chunks = buffer.as_chunks().0.iter();
    chunks.map(|message: &[AtomicU8; MESSAGE]| {
        std::array::from_fn(|at| message[at].load(Ordering::Relaxed))
    })
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// # Safety
/// A descriptor in the message has no other owner.
unsafe fn event(message: &[u8]) -> Option<Event> {
    let word = |at: usize| {
        let bytes = message.get(at..at + 8)?.try_into().ok()?;
        Some(u64::from_ne_bytes(bytes))
    };
    let pages = |start: u64, bytes: u64| HvaRange::new(Hva::new(start), bytes / PAGE_SIZE as u64);
    let range = || {
        let (start, end) = (word(FIRST_AT)?, word(SECOND_AT)?);
        pages(start, end.checked_sub(start)?)
    };
    match *message.first()? {
        EVENT_PAGEFAULT => fault(message).map(Event::Fault),
        EVENT_REMOVE => range().map(Event::Removed),
        EVENT_UNMAP => range().map(Event::Unmapped),
        EVENT_REMAP => Some(Event::Moved {
            from: pages(word(FIRST_AT)?, word(THIRD_AT)?)?,
            to: Hva::new(word(SECOND_AT)?),
        }),
        EVENT_FORK => {
            let bytes = message.get(FIRST_AT..FIRST_AT + 4)?.try_into().ok()?;
            // SAFETY: 1. the contract.
            Some(Event::Forked(unsafe {
                OwnedFd::from_raw_fd(i32::from_ne_bytes(bytes))
            }))
        }
        other => Some(Event::Other(other)),
    }
}
