//! Pages of another process go to swap.
//!
//! UNSAFETY: a system call that has no safe form.

use crate::Errno;
use lacuna_addr::{HvaRange, PAGE_SIZE};
use rustix::fd::{AsRawFd as _, BorrowedFd};
use std::ptr;

/// Moves the pages of `range` of the process behind a pidfd to swap, by `MADV_PAGEOUT`, since Linux
/// 5.10. Pages that other mappings share stay. No content changes: the next access reads a page
/// back.
///
/// # Errors
/// `PERM`: without `CAP_SYS_NICE`, or the process may not be traced; `INVAL`: a part is locked, or
/// in huge pages of hugetlbfs; `NOMEM`: a part is not mapped; `SRCH`: the process has ended.
pub fn page_out(process: BorrowedFd<'_>, range: HvaRange) -> Result<(), Errno> {
    let range = libc::iovec {
        iov_base: ptr::without_provenance_mut(range.start().get() as usize),
        iov_len: range.pages() as usize * PAGE_SIZE,
    };
    // SAFETY: 1. the kernel reads one `iovec`. 2. The advice changes no byte of the process.
    let result = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.as_raw_fd(),
            &raw const range,
            1,
            libc::MADV_PAGEOUT,
            0,
        )
    };
    match usize::try_from(result) {
        Ok(bytes) if bytes == range.iov_len => Ok(()),
        // The kernel stops at the first part that it does not advise.
        Ok(_) => Err(Errno::INVAL),
        Err(_) => {
            let error = std::io::Error::last_os_error();
            Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
        }
    }
}
