//! Bytes that outlive this process: a file, mapped shared.
//!
//! UNSAFETY: a mapping is made and removed. Its bytes are accessed by atomics alone, because other
//! processes may map the same file.

use rustix::fd::{AsFd as _, BorrowedFd};
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mlock, mmap, mmap_anonymous, munmap};
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

/// Mapped bytes. A store to the bytes of a file is in the file, also if this process is killed
/// right behind it.
#[derive(Debug)]
pub struct SharedBytes {
    at: NonNull<AtomicU8>,
    bytes: usize,
}

// SAFETY: 1. the mapping belongs to no thread, and its bytes are atomics.
unsafe impl Send for SharedBytes {}
// SAFETY: 1. as above.
unsafe impl Sync for SharedBytes {}

impl SharedBytes {
    /// `bytes` zeros of this process, at least one.
    ///
    /// # Errors
    /// As `mmap(2)`.
    pub fn anonymous(bytes: usize) -> Result<Self, Errno> {
        // SAFETY: 1. a new mapping, at an address that the kernel chooses, replaces none.
        let at = unsafe { mmap_anonymous(ptr::null_mut(), bytes, BOTH, MapFlags::PRIVATE) }?;
        let at = NonNull::new(at.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { at, bytes })
    }

    /// The first `bytes` bytes of `file`. If a process shortens the file later, an access kills
    /// this process by `SIGBUS`.
    ///
    /// # Errors
    /// As `mmap(2)`; `INVAL`: the file is shorter.
    pub fn of_file(file: BorrowedFd<'_>, bytes: usize) -> Result<Self, Errno> {
        if usize::try_from(fstat(file)?.st_size).unwrap_or(0) < bytes {
            return Err(Errno::INVAL);
        }
        let any = ptr::null_mut();
        // SAFETY: 1. as in `anonymous`.
        let at = unsafe { mmap(any, bytes, BOTH, MapFlags::SHARED, file.as_fd(), 0) }?;
        let at = NonNull::new(at.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { at, bytes })
    }

    /// Keeps the pages of the first `bytes` bytes in memory and mapped for writing. If the file is
    /// in tmpfs, a write to them never faults.
    ///
    /// # Errors
    /// As `mlock(2)`.
    pub fn keep_resident(&self, bytes: usize) -> Result<(), Errno> {
        let first = &self[..bytes];
        // SAFETY: 1. the range is in the mapping. 2. It changes no byte.
        unsafe { mlock(self.at.as_ptr().cast(), bytes) }?;
        // The kernel may have mapped the pages for reading alone.
        for byte in first.iter().step_by(lacuna_addr::PAGE_SIZE) {
            byte.fetch_or(0, Ordering::Relaxed);
        }
        Ok(())
    }
}

const BOTH: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Deref for SharedBytes {
    type Target = [AtomicU8];

    fn deref(&self) -> &[AtomicU8] {
        // SAFETY: 1. the mapping has these bytes as long as `self` lives. 2. Any byte is valid.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes) }
    }
}

impl Drop for SharedBytes {
    fn drop(&mut self) {
        // SAFETY: 1. the mapping is this value's own, and no reference to it is left.
        let unmapped = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_are_in_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(5000).unwrap();
        let refused = SharedBytes::of_file(file.as_fd(), 5001).unwrap_err();
        assert_eq!(refused, Errno::INVAL);
        let bytes = SharedBytes::of_file(file.as_fd(), 5000).unwrap();
        bytes.keep_resident(4097).unwrap();
        bytes[4999].store(7, Ordering::Relaxed);
        let mut read = Vec::new();
        std::io::Read::read_to_end(&mut file, &mut read).unwrap();
        assert_eq!((read.len(), read[4998], read[4999]), (5000, 0, 7));
        assert_eq!(SharedBytes::anonymous(3).unwrap().len(), 3);
    }
}
