//! The part of the pool's addresses that is Linux memory: adds and removes its mappings.
//!
//! # Unsafe
//! Each call changes a mapping of the pool, or its bytes. All code accesses those bytes through
//! [`FramePtr`](super::FramePtr), because no frame of Linux memory is ever free.

use super::{Pool, READ_WRITE, bytes_of};
use lacuna_addr::{PAGE_SIZE, Pfn};
use lacuna_sys::{TakenPages, Userfaultfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, madvise, mmap, mmap_anonymous, munmap};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::ptr;

impl Pool {
    /// Advises the kernel about Linux memory: its pages are filled and dropped one by one, and no
    /// child of this process shares them.
    pub fn advise_linux(&self, first: Pfn, pages: usize) -> Result<(), Errno> {
        let range = self.range(first, pages);
        assert!(self.linux().contains(&first.index()), "not Linux memory");
        for advice in [Advice::LinuxNoHugepage, Advice::LinuxDontFork] {
            // SAFETY: the range lies inside the mapping; both advices keep the bytes.
            match unsafe { madvise(self.at(first).as_ptr().cast(), bytes_of(range), advice) } {
                // A kernel without transparent huge pages makes none.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Makes the pages missing, which are not there yet: see [`Userfaultfd::register`].
    pub fn register_linux(
        &self,
        first: Pfn,
        pages: usize,
        uffd: &Userfaultfd,
    ) -> Result<(), Errno> {
        let range = self.range(first, pages);
        assert!(self.linux().contains(&first.index()), "not Linux memory");
        // SAFETY: the range is memory of the pool, anonymous or a shared memory file. The kernel
        // ends the registration when another mapping replaces it, or when the pool is unmapped. All
        // accesses go through `FramePtr`, which uses atomics, except the load of a touch.
        unsafe { uffd.register(range) }
    }

    /// Discards the bytes of Linux memory: they read as zeros, or are missing if a userfaultfd is
    /// registered for them. Also where this process has locked its memory (`mlockall(2)`).
    pub fn drop_linux(&self, first: Pfn, pages: usize) -> Result<(), Errno> {
        let range = self.range(first, pages);
        assert!(self.linux().contains(&first.index()), "not Linux memory");
        let at = self.at(first).as_ptr().cast();
        // SAFETY: the range lies inside the mapping, and its bytes may change at any time: all code
        // accesses them through `FramePtr`, because no frame of it is ever free.
        match unsafe { madvise(at, bytes_of(range), Advice::LinuxDontneedLocked) } {
            // Linux before 5.18.
            // SAFETY: as above.
            Err(Errno::INVAL) => unsafe { madvise(at, bytes_of(range), Advice::LinuxDontNeed) },
            dropped => dropped,
        }
    }

    /// Asks Linux to page these pages out: to swap, or a clean page of a file by dropping it. Linux
    /// keeps a page that it has no place for, that other processes map, or that is pinned.
    pub fn page_out_linux(&self, first: Pfn, pages: usize) -> Result<(), Errno> {
        let range = self.range(first, pages);
        assert!(self.linux().contains(&first.index()), "not Linux memory");
        let at = self.at(first).as_ptr().cast();
        // SAFETY: the range lies inside the mapping, and the advice keeps the bytes.
        unsafe { madvise(at, bytes_of(range), Advice::LinuxPageOut) }
    }

    /// Advises the kernel to read only the touched page of a file here, and no neighbours with it.
    pub fn read_singly(&self, first: Pfn, pages: usize) -> Result<(), Errno> {
        let range = self.range(first, pages);
        assert!(self.linux().contains(&first.index()), "not Linux memory");
        let at = self.at(first).as_ptr().cast();
        // SAFETY: the range lies inside the mapping, and the advice keeps the bytes.
        unsafe { madvise(at, bytes_of(range), Advice::Random) }
    }

    /// Whether a new mapping has all of its pages at once, because this process locks new mappings
    /// (`mlockall(2)` with `MCL_FUTURE`). The kernel does not report that for a mapping of
    /// hugetlbfs, so this maps and asks one private page.
    pub fn locks_new_mappings() -> Result<bool, Errno> {
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let probe =
            unsafe { mmap_anonymous(ptr::null_mut(), PAGE_SIZE, READ_WRITE, MapFlags::PRIVATE) }?;
        // SAFETY: the mapping is this function's own, and no code reads its bytes.
        let dropped = unsafe { madvise(probe, PAGE_SIZE, Advice::LinuxDontNeed) };
        // SAFETY: as above, and no pointer to it is left.
        unsafe { munmap(probe, PAGE_SIZE) }?;
        Ok(dropped == Err(Errno::INVAL))
    }

    /// Whether the page is present: an access from user space would not wait for it. Asks by a
    /// system call, which a userfaultfd for user space alone does not block.
    pub fn is_present(&self, pfn: Pfn) -> bool {
        assert!(self.linux().contains(&pfn.index()), "not Linux memory");
        let at = self.at(pfn).as_ptr().cast();
        // SAFETY: the page lies inside the mapping, and its bytes do not change.
        unsafe { madvise(at, PAGE_SIZE, Advice::LinuxPopulateRead) }.is_ok()
    }

    /// Maps the pages of `file` from byte `offset` on in place of Linux memory. With
    /// [`MapFlags::SHARED`] in `sharing` writes change the file, with [`MapFlags::PRIVATE`] they do
    /// not. If this is refused, the Linux memory is still there.
    pub fn map_linux(
        &self,
        first: Pfn,
        pages: usize,
        (file, offset): (BorrowedFd<'_>, u64),
        sharing: MapFlags,
    ) -> Result<(), Errno> {
        let range = self.range(first, pages);
        assert!(self.linux().contains(&first.index()), "not Linux memory");
        let (at, bytes) = (self.at(first).as_ptr().cast(), bytes_of(range));
        // A mapping at a fixed address removes the old mapping before it finds that hugetlbfs has
        // too few pages. Then any other mapping of this process may be placed there. So the file is
        // first mapped elsewhere: the pages stay reserved for the file. SAFETY: a new mapping, at
        // an address that the kernel chooses.
        let trial = unsafe { mmap(ptr::null_mut(), bytes, READ_WRITE, sharing, file, offset) }?;
        // SAFETY: the mapping is this function's own, and no pointer to it is left.
        unsafe { munmap(trial, bytes) }?;
        let flags = sharing | MapFlags::FIXED;
        // SAFETY: as in `renew_linux`. If the file becomes shorter, an access finds zeros, because
        // `taken` watches the range.
        unsafe { mmap(at, bytes, READ_WRITE, flags, file, offset) }.map(|_| ())
    }

    /// As [`Pool::drop_linux`], for a shared memory file: also removes the bytes from the file.
    pub fn punch_linux(&self, first: Pfn, pages: usize) -> Result<(), Errno> {
        let range = self.range(first, pages);
        assert!(self.linux().contains(&first.index()), "not Linux memory");
        let at = self.at(first).as_ptr().cast();
        // SAFETY: as in `drop_linux`.
        unsafe { madvise(at, bytes_of(range), Advice::LinuxRemove) }
    }

    /// Replaces Linux memory by new memory of zeros, without advice and without a userfaultfd.
    pub fn renew_linux(&self, first: Pfn, pages: usize) -> Result<(), Errno> {
        let range = self.range(first, pages);
        assert!(self.linux().contains(&first.index()), "not Linux memory");
        let at = self.at(first).as_ptr().cast();
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range lies inside the mapping, and its bytes may change at any time: as in
        // `drop_linux`. It stays readable and writable at each moment.
        unsafe { mmap_anonymous(at, bytes_of(range), READ_WRITE, flags) }.map(|_| ())
    }

    /// Takes Linux memory away so that each access gets `SIGBUS`: maps an empty memory file there.
    pub fn break_linux(&self, first: Pfn, pages: usize) -> Result<(), Errno> {
        let file = memfd_create("lacuna-no-memory", MemfdFlags::CLOEXEC)?;
        self.map_linux(first, pages, (file.as_fd(), 0), MapFlags::SHARED)
    }

    /// How often the kernel has taken a page of Linux memory away.
    #[inline]
    pub fn taken_count(&self) -> u64 {
        self.taken.as_ref().map_or(0, TakenPages::count)
    }

    /// Calls `each` with the frame number of each page of Linux memory that the kernel has taken
    /// away since the last call.
    pub fn take_taken(&self, mut each: impl FnMut(Pfn)) {
        let first = self.linux().start as u32;
        if let Some(taken) = &self.taken {
            taken.take(|page| each(Pfn::new(first + page as u32)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::ftruncate;

    /// After a refused mapping the pool keeps the addresses: no other mapping can be placed there.
    #[lacuna_skip::test]
    fn a_file_that_is_refused_leaves_the_memory() {
        const PAGES: usize = 4 << 20 >> 12;
        // More huge pages than the machine has.
        let huge = 1_u64 << 46;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = match memfd_create("lacuna-test", flags) {
            Ok(file) => file,
            Err(errno) => lacuna_skip::skip_test(format!("no huge pages: {errno}")),
        };
        ftruncate(&file, huge).unwrap();
        // The file has all free huge pages reserved, if there are any.
        let free = free_huge_pages();
        if free > 0 {
            // SAFETY: a new mapping, at an address that the kernel chooses. It stays for the rest
            // of the process.
            let taken = unsafe {
                let flags = MapFlags::SHARED;
                mmap(ptr::null_mut(), free << 21, READ_WRITE, flags, &file, 0)
            };
            taken.unwrap();
        }
        let pool = Pool::new(512, PAGES).unwrap();
        let first = Pfn::new(pool.linux().start as u32);
        let refused = pool.map_linux(first, PAGES, (file.as_fd(), huge / 2), MapFlags::SHARED);
        assert_eq!(refused, Err(Errno::NOMEM));
        // `madvise` is refused where nothing is mapped.
        assert_eq!(pool.drop_linux(first, PAGES), Ok(()));
        assert!(pool.is_present(first));
    }

    fn free_huge_pages() -> usize {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix("HugePages_Free:"));
        line.map_or(0, |pages| pages.trim().parse().unwrap())
    }
}
