//! Pages that the kernel takes away: a memory error, `UFFDIO_POISON`, a shortened memory file, no
//! huge page left. The next access gets `SIGBUS`, whose default action ends the process.
//!
//! ```text
//! access -> SIGBUS -> the page's bit, then the count, then a new page of zeros -> access again
//!                                           |
//! owner of the range: TakenPages::count, TakenPages::take
//! ```
//! [`TakenPages`] watches a range of addresses. The handler puts a page of zeros at the address,
//! and the access finds that page. Only the count tells a thread that it may have read these zeros.
//! The handler increments the count *before* it maps the zeros. So if a thread reads the count
//! after its accesses and finds the old value, it has read no such zeros.
//!
//! If a thread blocks `SIGBUS`, the kernel ends the process at the thread's failed access. So each
//! thread calls [`TakenPages::unblock_signal`] before it accesses such a range.
//!
//! Every other `SIGBUS` goes to the handler installed before this one, or to the default action if
//! there was none. The handler is installed once and stays. A handler installed later has to call
//! this one, as is usual for synchronous signals.
//!
//! UNSAFETY: a signal handler that replaces mappings. It may interrupt any code, so it allocates
//! nothing, takes no lock and calls only system calls. It finds the ranges in a table of atomics.
//! An entry is freed when no thread is inside the handler.

use crate::Errno;
use crate::signals::unblock;
use lacuna_addr::{HvaRange, PAGE_SIZE};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::io;
use std::ptr::{null, null_mut, with_exposed_provenance_mut};
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::thread::yield_now;

/// Pages of a huge page of 2 MiB.
const HUGE: usize = (2 << 20) / PAGE_SIZE;
/// The most ranges watched at once.
const RANGES: usize = 1024;
/// Watched ranges. A null pointer is a free entry.
static TABLE: [AtomicPtr<Record>; RANGES] = [const { AtomicPtr::new(null_mut()) }; RANGES];
/// The number of threads inside the handler, which may use entries of the table.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// The previous action of `SIGBUS`.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());

/// A watched range.
struct Record {
    start: usize,
    pages: usize,
    /// How often a page was replaced.
    count: AtomicU64,
    /// One bit for each page: it was replaced, and the owner has not taken the bit yet.
    taken: Box<[AtomicU64]>,
}

/// Watches a range of addresses for pages that the kernel takes away.
#[derive(Debug)]
pub struct TakenPages {
    record: *mut Record,
    entry: usize,
}

// SAFETY: 1. the record is on the heap until drop, and all that changes in it is atomic.
unsafe impl Send for TakenPages {}
// SAFETY: 1. as above.
unsafe impl Sync for TakenPages {}

impl TakenPages {
    /// From now on, an access to a page of `range` that the kernel has taken away, before or after
    /// this call, finds zeros, and the page is recorded. Installs the handler of `SIGBUS` if this
    /// process has not yet done so.
    ///
    /// # Safety
    /// The range is memory of the caller's, readable and writable. It stays mapped while this value
    /// lives. Its bytes may change at any time: all code accesses them through atomics.
    ///
    /// # Errors
    /// `NOSPC`: too many ranges are watched. The errors of `sigaction(2)`.
    pub unsafe fn watch(range: HvaRange) -> Result<Self, Errno> {
        install()?;
        let pages = range.pages() as usize;
        let words = pages.div_ceil(u64::BITS as usize);
        let record = Box::into_raw(Box::new(Record {
            start: range.start().get() as usize,
            pages,
            count: AtomicU64::new(0),
            taken: (0..words).map(|_| AtomicU64::new(0)).collect(),
        }));
        let entered = TABLE.iter().position(|entry| {
            let entered =
                entry.compare_exchange(null_mut(), record, Ordering::SeqCst, Ordering::Relaxed);
            entered.is_ok()
        });
        match entered {
            Some(entry) => Ok(Self { record, entry }),
            None => {
                // SAFETY: 1. made above, and no other code has the pointer.
                drop(unsafe { Box::from_raw(record) });
                Err(Errno::NOSPC)
            }
        }
    }

    /// Unblocks `SIGBUS` for the calling thread: its creator may have blocked the signal. Only the
    /// first call of each thread makes a system call.
    #[inline]
    pub fn unblock_signal() {
        thread_local! {
            static UNBLOCKED: Cell<bool> = const { Cell::new(false) };
        }
        if !UNBLOCKED.replace(true) {
            unblock(libc::SIGBUS);
        }
    }

    fn record(&self) -> &Record {
        // SAFETY: 1. the record lives until this value is dropped.
        unsafe { &*self.record }
    }

    /// How often a page of the range was replaced. After a thread has read the zeros of a replaced
    /// page, it finds a greater number.
    #[inline]
    pub fn count(&self) -> u64 {
        // Acquire: the caller then finds the recorded pages, too.
        self.record().count.load(Ordering::Acquire)
    }

    /// Calls `each` with the number, in the range, of each page that was replaced since the last
    /// call.
    pub fn take(&self, mut each: impl FnMut(u64)) {
        for (word, taken) in (0..).zip(&self.record().taken) {
            if taken.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = taken.swap(0, Ordering::AcqRel);
            while bits != 0 {
                each(word * u64::from(u64::BITS) + u64::from(bits.trailing_zeros()));
                bits &= bits - 1;
            }
        }
    }
}

impl Drop for TakenPages {
    fn drop(&mut self) {
        TABLE[self.entry].store(null_mut(), Ordering::SeqCst);
        // All accesses of the handler are SeqCst too: a thread that has found the record is counted
        // here, and a later one finds the entry free.
        while INSIDE.load(Ordering::SeqCst) != 0 {
            yield_now();
        }
        // SAFETY: 1. made by `watch`. 2. No handler uses it, and this value was its only owner.
        drop(unsafe { Box::from_raw(self.record) });
    }
}

impl Record {
    /// Puts zeros in place of the page at `address`, which lies in the range.
    fn replace(&self, address: usize) -> bool {
        let page = (address - self.start) / PAGE_SIZE;
        // A huge page of hugetlbfs is replaced as a whole. The kernel refuses a part of it.
        let put_huge = |pages: usize| {
            let first = address / PAGE_SIZE / pages * pages;
            let first = first.checked_sub(self.start / PAGE_SIZE);
            let first = first.filter(|first| first + pages <= self.pages);
            first.is_some_and(|first| self.put_zeros(first, pages))
        };
        self.put_zeros(page, 1)
            || put_huge(HUGE)
            || put_huge(HUGE * HUGE)
            // The process may have no mapping left to split. A mapping of the whole range needs
            // none; all pages of the range are lost then.
            || self.put_zeros(0, self.pages)
    }

    fn put_zeros(&self, first: usize, pages: usize) -> bool {
        for page in first..first + pages {
            let bit = 1 << (page % u64::BITS as usize);
            self.taken[page / u64::BITS as usize].fetch_or(bit, Ordering::SeqCst);
        }
        self.count.fetch_add(1, Ordering::SeqCst);
        let at = with_exposed_provenance_mut::<c_void>(self.start + first * PAGE_SIZE);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: 1. the pages lie in the range, whose bytes may change at any time by the contract
        // of `watch`; they stay readable and writable. 2. It is a system call.
        unsafe { mmap_anonymous(at, pages * PAGE_SIZE, prot, flags) }.is_ok()
    }
}

/// Replaces the page at `address` if it is in a watched range.
fn replace(address: usize) -> bool {
    INSIDE.fetch_add(1, Ordering::SeqCst);
    let replaced = TABLE.iter().any(|entry| {
        let record = entry.load(Ordering::SeqCst);
        // SAFETY: 1. a record in the table is freed only when no thread is inside.
        let record = unsafe { record.as_ref() };
        record.is_some_and(|record| {
            let within = address.wrapping_sub(record.start) / PAGE_SIZE;
            within < record.pages && record.replace(address)
        })
    });
    INSIDE.fetch_sub(1, Ordering::SeqCst);
    replaced
}

fn install() -> Result<(), Errno> {
    static ONCE: Once = Once::new();
    let mut result = Ok(());
    ONCE.call_once(|| result = install_now());
    match PREVIOUS.load(Ordering::Acquire).is_null() {
        true => result.and(Err(Errno::INVAL)),
        false => Ok(()),
    }
}

fn install_now() -> Result<(), Errno> {
    // SAFETY: 1. all zeros is a valid `sigaction`.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: 1. the kernel writes one `sigaction`.
    check(unsafe { libc::sigaction(libc::SIGBUS, null(), &raw mut previous) })?;
    PREVIOUS.store(Box::into_raw(Box::new(previous)), Ordering::Release);
    // SAFETY: 1. all zeros is a valid `sigaction` with an empty mask.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = on_sigbus as extern "C" fn(_, _, _) as usize;
    // Use the thread's alternate stack, if it has one: the previous handler may need it.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: 1. the handler has the signature that `SA_SIGINFO` asks for, and is
    // async-signal-safe.
    let installed = check(unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, null_mut()) });
    if installed.is_err() {
        PREVIOUS.store(null_mut(), Ordering::Release);
    }
    installed
}

fn check(result: c_int) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}

/// Whether there is no page at the signal's address, or a damaged one. With `BUS_MCEERR_AO` no
/// access has failed yet: the kernel reports damage early if the process asks for it
/// (`PR_MCE_KILL`, `vm.memory_failure_early_kill`).
fn is_page_taken(code: c_int) -> bool {
    matches!(
        code,
        libc::BUS_ADRERR | libc::BUS_OBJERR | libc::BUS_MCEERR_AR | libc::BUS_MCEERR_AO
    )
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: 1. the C library has one `errno` a thread, and this function puts it back.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: 1. the kernel passes a valid `siginfo_t`. 2. The address is valid for the tested
    // codes.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr()) };
    if !(is_page_taken(code) && replace(address.expose_provenance())) {
        pass_on(signal, info, context);
    }
    // SAFETY: 1. as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Passes the signal to the previous handler, or does its default action.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: 1. set before the handler was installed, and never freed.
    let Some(previous) = (unsafe { previous.as_ref() }) else {
        return;
    };
    // SAFETY: 1. the kernel passes a valid `siginfo_t`.
    let by_kernel = unsafe { (*info).si_code } > 0;
    match previous.sa_sigaction {
        libc::SIG_IGN if !by_kernel => {}
        // The kernel ends a process that ignores the failure of its own access.
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: 1. all zeros is a valid `sigaction`: the default action. 2. Both calls are
            // async-signal-safe. The signal is delivered when this handler returns.
            unsafe {
                let default: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, &raw const default, null_mut());
                libc::raise(signal);
            }
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: 1. the flag says that the handler has this signature.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: 1. without the flag the handler has this signature.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}
