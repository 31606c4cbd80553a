//! userfaultfd (`linux/userfaultfd.h`, `ioctl_userfaultfd(2)`), for anonymous memory and memory
//! files: missing pages, and writes recorded by the kernel.
//!
//! UNSAFETY: the ioctls fill pages, and `MOVE` also empties them. [`Userfaultfd::register`] is
//! unsafe: its caller promises that the bytes of the range may change at any time. The other calls
//! act on registered ranges, which the kernel checks. It does not check that the range was
//! registered with the *same* descriptor: each descriptor of a process fills all of them. The
//! kernel does not check the source of a move or of a copy. Their own contracts have the same
//! promise.

mod events;
mod place;
mod shared;

pub use events::{EVENT_BYTES, Event};
pub use place::{Partial, Waiters};
pub use shared::{Accesses, Minor, VmmMemory};

use crate::pagemap::Pagemap;
use lacuna_addr::{Access, Hva, HvaRange, PAGE_SIZE};
use rustix::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use rustix::fs::readlink;
use rustix::io;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::mm::UserfaultfdFlags;

/// The kernel's reason for a refusal.
pub type Errno = io::Errno;

const UFFD_API: u64 = 0xaa;
const TYPE: u8 = 0xaa;
const API: Opcode = opcode::read_write::<Api>(TYPE, 0x3f);
const REGISTER: Opcode = opcode::read_write::<Register>(TYPE, 0x00);
/// `_IOR`, although the ioctl only reads its argument.
const WAKE: Opcode = opcode::read::<Range>(TYPE, 0x02);
const COPY: Opcode = opcode::read_write::<Copy>(TYPE, 0x03);
const MOVE: Opcode = opcode::read_write::<Move>(TYPE, 0x05);
const WRITEPROTECT: Opcode = opcode::read_write::<WriteProtect>(TYPE, 0x06);
/// `UFFD_FEATURE_THREAD_ID`, since Linux 4.14.
const FEATURE_THREAD_ID: u64 = 1 << 8;
/// `UFFD_FEATURE_WP_ASYNC`, since Linux 6.7.
const FEATURE_WP_ASYNC: u64 = 1 << 15;
/// `UFFD_FEATURE_MOVE`, since Linux 6.8.
const FEATURE_MOVE: u64 = 1 << 16;
/// `UFFDIO_REGISTER_MODE_MISSING`.
const MODE_MISSING: u64 = 1;
/// `UFFDIO_REGISTER_MODE_WP`.
const MODE_WP: u64 = 2;
/// `UFFD_PAGEFAULT_FLAG_WRITE`.
const FLAG_WRITE: u64 = 1;
/// `UFFD_EVENT_PAGEFAULT`.
const EVENT_PAGEFAULT: u8 = 0x12;

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    done: i64,
}

/// `struct uffdio_move`.
#[repr(C)]
struct Move {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    done: i64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

// The sizes are part of the ioctls' numbers (linux/userfaultfd.h).
const _: () = assert!(size_of::<Api>() == 24 && size_of::<Range>() == 16);
const _: () = assert!(size_of::<Register>() == 32 && size_of::<WriteProtect>() == 24);
const _: () = assert!(size_of::<Copy>() == 40 && size_of::<Move>() == 40);

/// Bytes of a `struct uffd_msg`; its first byte is the event.
const MESSAGE: usize = 32;
/// Offsets in a page-fault message: of the flags and the address, both u64, and of the thread's
/// number, a u32.
const FLAGS_AT: usize = 8;
const ADDRESS_AT: usize = 16;
const THREAD_AT: usize = 24;

/// A thread waits for a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The page.
    pub page: Hva,
    /// A write, or any other access.
    pub access: Access,
    /// The waiting thread's number from `gettid(2)`. A kernel thread that acts for this process has
    /// a number too: its number in the initial PID namespace. In another PID namespace, a thread of
    /// this process may have the same number.
    pub thread: u32,
}

/// A userfaultfd. When it is closed, all waiting threads continue with zero-filled pages.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    /// The modes of a registration.
    modes: u64,
    /// Says what has become of a page whose move has failed. Only a descriptor that moves has it.
    pagemap: Option<Pagemap>,
}

impl Userfaultfd {
    /// A non-blocking descriptor for faults of user space and of the kernel, KVM included. It
    /// supports [`shift`](Self::shift).
    ///
    /// # Errors
    /// `PERM` without `CAP_SYS_PTRACE` (and `vm.unprivileged_userfaultfd` off); `NOSYS` if the
    /// kernel was built without userfaultfd; `INVAL` before Linux 6.8, which introduced moves of
    /// pages.
    pub fn open() -> io::Result<Self> {
        Self::with(FEATURE_MOVE | FEATURE_THREAD_ID, MODE_MISSING)
    }

    /// As [`open`](Self::open). For ranges registered with this descriptor the kernel also records
    /// which pages are written (`UFFD_FEATURE_WP_ASYNC`); [`Pagemap`](crate::Pagemap) reads the
    /// record and protects the pages again. A page copied or moved here counts as written. Do not
    /// [`shift`](Self::shift) a page away between two scans: the record of earlier writes to it
    /// would be lost.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_tracking() -> io::Result<Self> {
        let features = FEATURE_MOVE | FEATURE_THREAD_ID | FEATURE_WP_ASYNC;
        Self::with(features, MODE_MISSING | MODE_WP)
    }

    /// As [`open_tracking`](Self::open_tracking), for memory that has no missing pages: the kernel
    /// records writes, and fills a page with zeros at its first touch.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_recording() -> io::Result<Self> {
        Self::with(FEATURE_WP_ASYNC, MODE_WP)
    }

    fn with(features: u64, modes: u64) -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        Self::enable(place::descriptor(flags)?, features, modes)
    }

    fn enable(fd: OwnedFd, features: u64, modes: u64) -> io::Result<Self> {
        let pagemap = match features & FEATURE_MOVE {
            0 => None,
            _ => Some(Pagemap::open()?),
        };
        let this = Self { fd, modes, pagemap };
        let mut api = Api {
            api: UFFD_API,
            features,
            ioctls: 0,
        };
        // SAFETY: 1. UFFDIO_API reads and writes one `struct uffdio_api`, which `Api` is.
        unsafe { this.update::<{ API }, _>(&mut api) }?;
        Ok(this)
    }

    /// From now on, a thread that touches a missing page of `range` waits for this descriptor.
    ///
    /// # Safety
    /// `range` is private anonymous memory of the caller's, or a mapping of a memory file, and
    /// stays mapped while it is registered. All code accesses its bytes only through
    /// atomics, because pages come and go.
    ///
    /// # Errors
    /// `INVAL`: not anonymous memory; `BUSY`: registered with another descriptor.
    pub unsafe fn register(&self, range: HvaRange) -> io::Result<()> {
        // SAFETY: 1. this function's contract.
        unsafe { self.register_for(range, self.modes) }
    }

    /// From now on, [`shift`](Self::shift) may move pages to and from `range`, whose pages are
    /// never missing: a thread that touches one finds a page of zeros.
    ///
    /// # Safety
    /// As [`register`](Self::register), for private anonymous memory.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub unsafe fn register_for_moves(&self, range: HvaRange) -> io::Result<()> {
        // The kernel moves pages to memory of any registration. This one has no effect of its own,
        // because no page of the range is ever write-protected.
        // SAFETY: 1. this function's contract.
        unsafe { self.register_for(range, MODE_WP) }
    }

    /// # Safety
    /// As [`register`](Self::register).
    unsafe fn register_for(&self, range: HvaRange, mode: u64) -> io::Result<()> {
        let mut register = Register {
            range: all(range),
            mode,
            ioctls: 0,
        };
        // SAFETY: 1. UFFDIO_REGISTER takes a `struct uffdio_register`. 2. Its effect on the range
        // is what the caller has promised to allow.
        unsafe { self.update::<{ REGISTER }, _>(&mut register) }
    }

    /// Puts a page with `content` at the missing page `to`, and wakes the threads that wait for it.
    ///
    /// # Errors
    /// `EXIST`: the page is not missing; `NOENT`: not a registered page; `AGAIN`: the address space
    /// is changing, try again; `NOMEM`.
    pub fn copy(&self, content: &[u8; PAGE_SIZE], to: Hva) -> io::Result<()> {
        self.copy_at(content.as_ptr() as u64, to)
    }

    /// As [`copy`](Self::copy), from an address. The kernel checks it, and the bytes there may
    /// change.
    pub(crate) fn copy_at(&self, from: u64, to: Hva) -> io::Result<()> {
        let mut copy = Copy {
            dst: to.get(),
            src: from,
            len: PAGE_SIZE as u64,
            mode: 0,
            done: 0,
        };
        // SAFETY: 1. UFFDIO_COPY takes a `struct uffdio_copy`. 2. It fills only missing pages of
        // registered ranges, which may change by the contract of `register`.
        unsafe { self.update::<{ COPY }, _>(&mut copy) }
    }

    /// As [`copy`](Self::copy), with the content of the page at `from`.
    ///
    /// # Safety
    /// `from` is a page of memory, and no thread writes to it during the call.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub unsafe fn copy_from(&self, from: Hva, to: Hva) -> io::Result<()> {
        let content = std::ptr::with_exposed_provenance(from.get() as usize);
        // SAFETY: the contract.
        self.copy(unsafe { &*content }, to)
    }

    /// Moves the page at `from` to the missing page `to` without a copy: no thread sees it in both
    /// places, or half of it. Wakes the threads that wait at `to`. The page at `from` is missing
    /// then.
    ///
    /// Linux 6.17 and later may report `EEXIST` although it has moved the page. If the page's entry
    /// changes during the move, the kernel tries again, also after the attempt that succeeds, and
    /// finds the page at `to`. So this call looks whether a page is still at `from`. A thread that
    /// reads there meanwhile finds the kernel's page of zeros, and this call then reports `EXIST`:
    /// the moved page may itself be that page, as a huge page's pages of zeros are after a split.
    ///
    /// If the page is part of a huge page, the kernel splits that first.
    ///
    /// # Safety
    /// `from` lies in a range given to [`register`](Self::register) or
    /// [`register_for_moves`](Self::register_for_moves), of this or another descriptor.
    ///
    /// # Errors
    /// `BUSY`: pinned or shared; `NOENT`: nothing at `from`; `EXIST`:
    /// something at `to`; `AGAIN`: try again; `INVAL`: `to` is not registered, or the two mappings
    /// differ in protection.
    pub unsafe fn shift(&self, from: Hva, to: Hva) -> io::Result<()> {
        // SAFETY: 1. the contract.
        unsafe { self.shift_run(from, to, 1) }.map_err(|partial| partial.errno)
    }

    /// As [`shift`](Self::shift), for `pages` pages one after the other. The kernel moves a huge
    /// page as a whole if both addresses are multiples of its size, and no page table is at `to`.
    ///
    /// # Safety
    /// As [`shift`](Self::shift).
    ///
    /// # Errors
    /// As [`shift`](Self::shift), for the first page that was not moved.
    pub unsafe fn shift_run(&self, from: Hva, to: Hva, pages: usize) -> Result<(), Partial> {
        let mut done = 0;
        while done < pages {
            let offset = (done * PAGE_SIZE) as u64;
            let (from, to) = (Hva::new(from.get() + offset), Hva::new(to.get() + offset));
            let mut shift = Move {
                dst: to.get(),
                src: from.get(),
                len: ((pages - done) * PAGE_SIZE) as u64,
                mode: 0,
                done: 0,
            };
            // SAFETY: 1. UFFDIO_MOVE takes a `struct uffdio_move`. 2. The destination may change
            // by the contract of `register`, the source by this function's.
            let moved = unsafe { self.update::<{ MOVE }, _>(&mut shift) };
            let step = match moved {
                Ok(()) => Ok(pages - done),
                Err(_) if shift.done > 0 => Ok(shift.done as usize / PAGE_SIZE),
                Err(Errno::EXIST) if !self.has_page(from) => self.wake(to).map(|()| 1),
                Err(errno) => Err(errno),
            };
            done += step.map_err(|errno| Partial { done, errno })?;
        }
        Ok(())
    }

    fn has_page(&self, page: Hva) -> bool {
        let pagemap = self.pagemap.as_ref();
        pagemap.is_none_or(|pagemap| pagemap.has_page(page) != Ok(false))
    }

    /// Lets the threads that wait at `page` try again.
    ///
    /// # Errors
    /// `INVAL`: not an address of this process.
    pub fn wake(&self, page: Hva) -> io::Result<()> {
        self.wake_range(one(page))
    }

    /// As [`wake`](Self::wake), for the threads that wait at any page of `range`.
    ///
    /// # Errors
    /// As [`wake`](Self::wake).
    pub fn wake_all(&self, range: HvaRange) -> io::Result<()> {
        self.wake_range(all(range))
    }

    fn wake_range(&self, mut range: Range) -> io::Result<()> {
        // SAFETY: 1. UFFDIO_WAKE takes a `struct uffdio_range`. 2. It changes no memory.
        unsafe { self.update::<{ WAKE }, _>(&mut range) }
    }

    /// Makes the pages of `range` writable without a fault, as if all had been written.
    ///
    /// # Errors
    /// `NOENT`: not a range registered with a descriptor of [`open_tracking`](Self::open_tracking);
    /// `AGAIN`: the address space is changing, try again.
    pub fn unprotect(&self, range: HvaRange) -> io::Result<()> {
        let mut protect = WriteProtect {
            range: all(range),
            mode: 0,
        };
        // SAFETY: 1. UFFDIO_WRITEPROTECT takes a `struct uffdio_writeprotect`. 2. It changes no
        // byte, and clears only marks that this descriptor set.
        unsafe { self.update::<{ WRITEPROTECT }, _>(&mut protect) }
    }

    /// Appends the unread faults to `faults`, at most 64.
    ///
    /// # Errors
    /// As `read(2)`. If there is no unread fault, that is no error.
    pub fn faults(&self, faults: &mut Vec<Fault>) -> io::Result<()> {
        let mut bytes = [0; 64 * MESSAGE];
        let read = self.read(&mut bytes)?;
        faults.extend(bytes[..read].chunks_exact(MESSAGE).filter_map(fault));
        Ok(())
    }

    fn read(&self, bytes: &mut [u8; 64 * MESSAGE]) -> io::Result<usize> {
        match io::read(&self.fd, bytes) {
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            read => read,
        }
    }

    /// # Safety
    /// `OPCODE` takes a pointer to one `T`, and its effects are allowed.
    unsafe fn update<const OPCODE: Opcode, T>(&self, arg: &mut T) -> io::Result<()> {
        // SAFETY: 1. and 2. by this function's contract.
        unsafe { ioctl(&self.fd, Updater::<OPCODE, T>::new(arg)) }
    }
}

/// A descriptor that another process has sent, for a handler of that process's memory.
///
/// `INVAL`: not a userfaultfd. Other errors come from `readlink(2)`: without `/proc`, no
/// descriptor is accepted.
impl TryFrom<OwnedFd> for Userfaultfd {
    type Error = Errno;

    /// The calls of this type send ioctls, whose numbers mean something else for other descriptors.
    fn try_from(fd: OwnedFd) -> io::Result<Self> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let name = readlink(link, Vec::new())?;
        match name.as_bytes() {
            b"anon_inode:[userfaultfd]" => Ok(Self {
                fd,
                modes: MODE_MISSING,
                pagemap: None,
            }),
            _ => Err(Errno::INVAL),
        }
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn all(range: HvaRange) -> Range {
    Range {
        start: range.start().get(),
        len: range.pages() * PAGE_SIZE as u64,
    }
}

fn one(page: Hva) -> Range {
    Range {
        start: page.page().get(),
        len: PAGE_SIZE as u64,
    }
}

/// The fault in one message; `None` if it is another event.
fn fault(message: &[u8]) -> Option<Fault> {
    let word = |at: usize| {
        Some(u64::from_ne_bytes(
            message.get(at..at + 8)?.try_into().ok()?,
        ))
    };
    let thread = message.get(THREAD_AT..THREAD_AT + 4)?.try_into().ok()?;
    let fault = Fault {
        page: Hva::new(word(ADDRESS_AT)?).page(),
        access: match word(FLAGS_AT)? & FLAG_WRITE {
            0 => Access::Read,
            _ => Access::Write,
        },
        thread: u32::from_ne_bytes(thread),
    };
    (message[0] == EVENT_PAGEFAULT).then_some(fault)
}
