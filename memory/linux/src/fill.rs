//! Puts pages in place, and wakes the threads that sleep for them.

use crate::memory::LinuxMemory;
use crate::shared_file::SharedFill;
use lacuna_addr::{HvaRange, PAGE_SIZE};
use lacuna_sys::{Errno, Waiters};
use std::ops::Range;
use std::slice::from_ref;

/// The most tries of a fill while the kernel returns `EAGAIN`.
const ATTEMPTS: usize = 1 << 16;

const ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// The result of a fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placed {
    /// This thread's content is in place.
    Here,
    /// Another thread was first.
    Before,
}

impl LinuxMemory {
    /// Puts `content`, a page or a unit, in place at `index` of the region, unless it is there.
    pub fn fill(&self, index: u64, content: &[[u8; PAGE_SIZE]]) -> Result<Placed, Errno> {
        let filled = self.fill_silently(index, content);
        // Also after EEXIST: the other thread's fill may not have woken the sleeping threads.
        self.wake_touching(index..index + content.len() as u64);
        filled
    }

    /// Puts a page of zeros in place, if the page is not there.
    pub fn fill_with_zeros(&self, index: u64) -> Result<Placed, Errno> {
        match self.fill(index, from_ref(&ZEROS)) {
            // A discarded page has left the userfaultfd: Linux fills it with zeros.
            Err(Errno::NOENT) if self.outside.is_some() => Ok(Placed::Before),
            filled => filled,
        }
    }

    /// Whether the file has no page at `index` of the region, where one was put in place. If it has
    /// one, it is mapped.
    pub fn is_removed(&self, index: u64) -> bool {
        let Some((parts, shared)) = self.parts.as_ref().zip(self.backing.shared()) else {
            return false;
        };
        let unit = shared.page_size().pages();
        let unit = HvaRange::new(self.hva(index - index % unit), unit);
        let unit = unit.expect("in the region");
        parts.of(index).resume(unit, Waiters::LeaveAsleep) == Err(Errno::FAULT)
    }

    fn fill_silently(&self, index: u64, content: &[[u8; PAGE_SIZE]]) -> Result<Placed, Errno> {
        let Some(uffd) = self.uffd_of(index) else {
            // Only a region with a userfaultfd has missing pages.
            return Ok(Placed::Before);
        };
        let page = self.hva(index);
        for _ in 0..ATTEMPTS {
            match uffd.place(content, page, self.waiters()) {
                Ok(()) => return Ok(Placed::Here),
                Err(partial) => match partial.errno {
                    Errno::EXIST => {
                        self.map_from_file(index)?;
                        if self.waiters() == Waiters::Wake {
                            uffd.wake(page)?;
                        }
                        return Ok(Placed::Before);
                    }
                    // The address space of this process is changing.
                    Errno::AGAIN => std::thread::yield_now(),
                    errno => return Err(errno),
                },
            }
        }
        Err(Errno::AGAIN)
    }

    /// Poisons the missing page or unit at `index` of the region, where the kernel supports that.
    /// Threads that sleep for a page would find zeros, so their memory is not poisoned.
    pub fn poison(&self, index: u64) {
        if self.waiters() == Waiters::Wake {
            return;
        }
        let page = HvaRange::new(self.hva(index), self.unit());
        if let (Some(parts), Some(page)) = (&self.parts, page) {
            let _ = parts.of(index).poison(page);
        }
    }

    /// Takes a huge page of zeros for the unit at `index`, where the file has none. An access maps
    /// it, because only pages that the file lacks are missing.
    pub fn allocate_unit(&self, index: u64) -> Result<(), Errno> {
        let Some(shared) = self.backing.shared() else {
            return Ok(());
        };
        let page = PAGE_SIZE as u64;
        shared.allocate((shared.first + index) * page, shared.page_size().bytes())
    }

    /// Maps the page that a fill has found, where the kernel does not.
    pub fn map_from_file(&self, index: u64) -> Result<(), Errno> {
        let Some((parts, shared)) = self.parts.as_ref().zip(self.backing.shared()) else {
            return Ok(());
        };
        if shared.fill == SharedFill::CopiedIn {
            return Ok(());
        }
        let page = HvaRange::new(self.hva(index), 1).expect("in the region");
        loop {
            match parts.of(index).resume(page, Waiters::LeaveAsleep) {
                Ok(_) | Err(Errno::EXIST) => return Ok(()),
                Err(Errno::AGAIN) => std::thread::yield_now(),
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Wakes the threads that sleep for one of `pages`, which the caller has filled.
    pub fn wake_touching(&self, pages: Range<u64>) {
        let Some(outside) = self.outside.as_ref().filter(|outside| outside.is_touched()) else {
            return;
        };
        // Threads touch a unit at its first page.
        for index in pages.step_by(self.unit() as usize) {
            // It fails only for an address outside of this process's memory.
            let woken = outside.userfaultfd(index).wake(self.hva(index));
            debug_assert!(woken.is_ok(), "{woken:?}");
        }
    }
}
