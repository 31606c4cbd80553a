//! A thread that touches the memory of a new pool, from the first frame up.
//!
//! The first touch of host memory can cost many times the average, because the machine under us
//! backs it then. A vCPU should not wait for that in a fault, and a VMM that makes a VM of many
//! gigabytes should not wait for all of them. Frames are taken lowest first, so the thread is
//! mostly ahead of the guest; where it is not, the kernel backs the memory at the guest's touch.

use super::HUGE;
use lacuna_addr::{PAGE_SIZE, PageCount};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The most memory that is touched before the pool is used: it takes about ten milliseconds.
const AT_ONCE: PageCount = PageCount::from_bytes(32 << 20);
/// Bytes between two looks at whether the pool is still wanted.
const PIECE: usize = 4 * HUGE;
/// The time between two looks at the thread.
const LOOK: Duration = Duration::from_millis(1);

/// Memory that is being touched.
pub(super) struct Touching {
    thread: Option<JoinHandle<()>>,
    is_over: Arc<AtomicBool>,
}

/// An address that another thread may have.
struct Memory(NonNull<u8>);

// SAFETY: the address is only given to the kernel.
unsafe impl Send for Memory {}

impl Touching {
    /// Touches `frames` frames from `base` on. Their bytes stay as they are.
    ///
    /// # Safety
    /// The range is part of one anonymous mapping, readable and writable, and stays mapped until
    /// this is dropped.
    ///
    /// # Errors
    /// The kernel has no memory for a small pool. For a large one, a guest's touch finds it out.
    pub unsafe fn begin(base: NonNull<u8>, frames: usize) -> Result<Self, Errno> {
        let bytes = frames * PAGE_SIZE;
        let is_over = Arc::new(AtomicBool::new(false));
        let memory = Memory(base);
        let over = Arc::clone(&is_over);
        let touch_all = move || {
            let Memory(base) = { memory };
            let mut at = 0;
            while at < bytes && !over.load(Ordering::Relaxed) {
                let len = PIECE.min(bytes - at);
                // SAFETY: by the contract of `begin`; `drop` waits for this thread.
                if unsafe { touch(base.add(at), len) }.is_err() {
                    return;
                }
                at += len;
            }
        };
        let thread = match frames as u64 <= AT_ONCE.get() {
            true => None,
            false => {
                let named = thread::Builder::new().name("lacuna-prefault".into());
                named.spawn(touch_all).ok()
            }
        };
        if thread.is_none() {
            // SAFETY: by the contract.
            unsafe { touch(base, bytes) }?;
        }
        Ok(Self { thread, is_over })
    }

    /// Returns when all of the memory was touched.
    pub fn wait(&self) {
        while self.thread.as_ref().is_some_and(|t| !t.is_finished()) {
            thread::sleep(LOOK);
        }
    }
}

/// # Safety
/// The range is mapped, readable and writable.
unsafe fn touch(base: NonNull<u8>, bytes: usize) -> Result<(), Errno> {
    // SAFETY: the kernel makes the pages present, and changes no bytes.
    unsafe { madvise(base.as_ptr().cast(), bytes, Advice::LinuxPopulateWrite) }
}

impl Drop for Touching {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // It does not panic.
        self.thread.take().map(JoinHandle::join);
    }
}
