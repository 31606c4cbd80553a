//! The window: the memory that a guest sees, if not all of its pages may be resident.
//!
//! ```text
//! frames of the host manager     f f f f f f f      in the budget, swapped out by the manager
//!                                 │ ▲
//!      map: UFFDIO_COPY (or MOVE) ▼ │               invalidate, age: UFFDIO_MOVE back
//! window, in KVM's slots         . p . . p . . .    a touch of a missing page is a fault
//! ```
//! The window is to KVM what stage 2 is to the soft backend: a page is *mapped* while its bytes are
//! here, and those in its frame do not count. The host manager decides which page is in which
//! frame, and calls [`MmuNotifier`] before it takes a frame. The move back is atomic: a thread
//! writes before it, or faults and waits. Linux notifies KVM of each move by KVM's own MMU
//! notifier. So no write is lost.
//!
//! A copy flushes no TLB, and a move out of a frame does. The frames of copied pages are emptied
//! [`COPIED_MAX`] at a time, with one flush: only so many pages take memory twice. If frames may be
//! huge pages of Linux, a page is moved out of its frame.
//!
//! Linux shows a process no accessed bits of KVM's tables. So a page counts as accessed if it is
//! mapped, and aging unmaps it. If it is touched until the clock hand comes again, a short fault
//! maps it, and the hand's next turns spare it; otherwise it goes to swap.
//!
//! A compound page is mapped and unmapped as a whole. The kernel moves it as one entry of 2 MiB if
//! it is a huge page of Linux, and its new place has no page table. So the window asks Linux to
//! make it a huge page, and drops the table. KVM then maps the 2 MiB by one entry too. Nothing
//! depends on that: the kernel moves 512 small pages otherwise. When the manager splits a compound
//! page, it is unmapped, and its pages are then mapped one by one.
//!
//! The lock excludes a copy into the window from a move out of it. A page is resolved under the
//! lock. Either the manager has already begun to take the page, and then the resolution takes the
//! page back; or it calls this notifier afterwards, and the page moves back to its frame.
//!
//! UNSAFETY: pages are moved by address, between the window and the manager's frames. Both mappings
//! live as long as the `Window` and its caller, and all code accesses them by atomics alone.

mod table;

pub use self::table::Page;
use self::table::{BLOCK, Entry, Stream, Table};
use crate::error::KvmError;
use crate::mapping::{Mapping, collapse, drop_bytes, drop_pages, populate};
use lacuna_addr::{
    Access, BackingAddr, BackingRange, Hva, HvaRange, Level, PAGE_SIZE, PageCount, Pfn,
};
use lacuna_host::{Host, HugePages, MmuNotifier, PerCpuPages, Resolution};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use lacuna_sys::{Errno, Userfaultfd};
use std::ops::Range;
use std::sync::Arc;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;
use tracing::trace_span;

/// The pause between two attempts to unmap a page that must be unmapped.
const PAUSE: Duration = Duration::from_millis(1);

/// How often a thread tries to move a page before it gives up for a while.
const ATTEMPTS: usize = 20;

/// Copied pages whose frames are emptied together.
const COPIED_MAX: usize = 64;

/// The most pages that are mapped ahead of a guest that touches its memory in order.
const AHEAD_MAX: Page = 15;

/// A guest's window over its pages.
pub struct Window {
    mapping: Mapping,
    /// The manager's frames.
    frames: HvaRange,
    uffd: Arc<Userfaultfd>,
    /// The manager's number of the first page.
    first: OnceLock<BackingAddr>,
    table: Mutex<Table, lock_order::KvmWindow>,
    /// Single pages are mapped by copies. If frames may be huge pages of Linux, they are moved:
    /// Linux keeps all of a huge page until its last page is emptied.
    copies: bool,
}

/// The result of an attempt to map a page.
#[derive(Debug)]
pub enum Mapped {
    /// The page is mapped, and the threads that wait for it are woken.
    Yes,
    /// Linux cannot map the page now: it is pinned, the address space is changing, or memory is
    /// short.
    Later(Errno),
    /// The page is not in a frame.
    No(Resolution),
    /// Linux refuses.
    Refused(Errno),
}

impl Window {
    /// A window for `pages` pages, over the frames of `host`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new(host: &Host, pages: PageCount) -> Result<Self, KvmError> {
        let refused = |step| move |errno| KvmError::Userfaultfd { step, errno };
        let mapping = Mapping::new(pages).map_err(refused("map memory"))?;
        let uffd = Userfaultfd::open().map_err(refused("open"))?;
        let frames = host.frames_to_move()?;
        // SAFETY: 1. the window is this value's own; the frames are the manager's, whose notifier
        // this is. Both stay mapped while they are used here. 2. They are accessed by atomics only.
        let registered = unsafe {
            let window = uffd.register(mapping.range());
            let both = window.and_then(|()| uffd.register_for_moves(frames));
            // If this process locks its memory, all pages are there at once, and none is missing.
            both.and_then(|()| drop_bytes(mapping.range()))
        };
        registered.map_err(refused("register memory"))?;
        Ok(Self {
            mapping,
            frames,
            uffd: Arc::new(uffd),
            first: OnceLock::new(),
            table: Mutex::new(Table::new(pages)),
            copies: host.huge_pages() == HugePages::Never,
        })
    }

    /// Sets the manager's number of the first page, once.
    pub fn set_first(&self, first: BackingAddr) {
        let set = self.first.set(first);
        debug_assert!(set.is_ok(), "a window has one region");
    }

    /// Its addresses.
    pub fn range(&self) -> HvaRange {
        self.mapping.range()
    }

    /// Where the faults of its missing pages are read.
    pub fn userfaultfd(&self) -> &Arc<Userfaultfd> {
        &self.uffd
    }

    /// Ends the window, because the VM ends: threads that wait find zeros.
    pub fn close(&self) {
        self.table().is_closed = true;
        let unregistered = self.uffd.unregister(self.range());
        debug_assert!(unregistered.is_ok(), "{unregistered:?}");
    }

    /// Maps the page at `index`, which is the manager's page `addr`, if it is in a frame. KVM does
    /// not say whether a guest writes to a page, so a mapped page counts as written.
    pub fn map(
        &self,
        host: &Host,
        (index, addr): (Page, BackingAddr),
        cache: &mut PerCpuPages,
    ) -> Mapped {
        let mut table = self.table();
        if table.is_closed {
            return Mapped::Yes;
        }
        let is_first = host.is_untouched(addr, cache);
        let resolution = host.resolve(addr, Access::Write, Level::L2M, cache);
        let mapped = match resolution {
            Resolution::Ready(frame) => {
                if frame.level == Level::L2M {
                    self.put_block(&mut table, index, frame.pfn);
                }
                self.put(&mut table, index, frame.pfn)
            }
            other => Mapped::No(other),
        };
        if is_first && matches!(mapped, Mapped::Yes) {
            self.map_ahead(&mut table, host, (index, addr), cache);
        }
        drop(table);
        cache.unpin_all();
        mapped
    }

    /// Maps pages of the same block that no thread has touched, after the page at `index` was
    /// touched first. The next block may become a huge page.
    fn map_ahead(
        &self,
        table: &mut Table,
        host: &Host,
        (index, addr): (Page, BackingAddr),
        cache: &mut PerCpuPages,
    ) {
        let ahead = match table.stream.next == index {
            true => (2 * table.stream.ahead + 1).min(AHEAD_MAX),
            false => 0,
        };
        let mut next = index + 1;
        let end = table.entries.len() as Page;
        while next <= index + ahead && next < end && !next.is_multiple_of(BLOCK) {
            let addr = addr.checked_add_pages(u64::from(next - index));
            let Some(addr) = addr.filter(|addr| host.is_untouched(*addr, cache)) else {
                break;
            };
            let Resolution::Ready(frame) = host.resolve(addr, Access::Write, Level::L4K, cache)
            else {
                break;
            };
            if !matches!(self.put(table, next, frame.pfn), Mapped::Yes) {
                break;
            }
            next += 1;
        }
        table.stream = Stream { next, ahead };
    }

    fn put(&self, table: &mut Table, index: Page, frame: Pfn) -> Mapped {
        let entry = &mut table.entries[index as usize];
        if entry.frame().is_some() {
            // The page was mapped with its block, or while the fault was being reported.
            return match self.uffd.wake(self.page(index)) {
                Ok(()) => Mapped::Yes,
                Err(errno) => Mapped::Refused(errno),
            };
        }
        let (from, to) = (self.frame(frame), self.page(index));
        // SAFETY: 1. both mappings are registered. 2. The lock is held, and the page was resolved
        // under it: the frame has the page's bytes, and no thread writes there. Only reclaim may
        // read the frame afterwards.
        let mapped = unsafe {
            match self.copies {
                true => self.uffd.copy_from(from, to),
                false => self.shift_soon(from, to),
            }
        };
        match mapped {
            Ok(()) => {
                *entry = entry.mapped(frame);
                if self.copies {
                    self.empty_later(table, index);
                }
                Mapped::Yes
            }
            Err(errno @ (Errno::AGAIN | Errno::BUSY | Errno::NOMEM)) => Mapped::Later(errno),
            Err(errno) => Mapped::Refused(errno),
        }
    }

    /// Moves a page. A read from swap keeps the frame pinned for a moment after it is done.
    ///
    /// # Safety
    /// As [`Userfaultfd::shift`].
    unsafe fn shift_soon(&self, from: Hva, to: Hva) -> Result<(), Errno> {
        for _ in 0..ATTEMPTS {
            // SAFETY: the contract.
            match unsafe { self.uffd.shift(from, to) } {
                Err(Errno::BUSY | Errno::AGAIN) => thread::yield_now(),
                // Only the page itself can be at `to`: Linux has moved it, and reclaim has read
                // zeros in the empty frame since.
                Err(Errno::EXIST) => return self.uffd.wake(to),
                moved => return moved,
            }
        }
        Err(Errno::BUSY)
    }

    /// Empties the frame of the copied page with others, if they are still mapped: each flush of
    /// other processors' TLBs costs as much as the copies of many pages.
    fn empty_later(&self, table: &mut Table, index: Page) {
        table.copied.push(index);
        if table.copied.len() < COPIED_MAX {
            return;
        }
        let mapped = |index| table.entries[index as usize].frame();
        let frames = table.copied.iter().filter_map(|index| mapped(*index));
        let frames: Vec<_> = frames.map(|frame| self.frame(frame)).collect();
        // SAFETY: the lock is held, so these pages are in the window, and their frames have no
        // bytes that count.
        let dropped = unsafe { drop_pages(&frames) };
        debug_assert!(dropped.is_ok(), "{dropped:?}");
        table.copied.clear();
    }

    /// Maps the block of the page at `index`, which is in `frame`, if none of its pages is mapped.
    /// The pages after one that cannot be moved stay unmapped.
    fn put_block(&self, table: &mut Table, index: Page, frame: Pfn) {
        let entry = table.entries[index as usize];
        let at = index - index % BLOCK;
        let entries = table.block(at);
        if entries.iter().any(|entry| entry.frame().is_some()) {
            return;
        }
        let first = frame.get() - frame.get() % u64::from(BLOCK);
        let frames = self.frame(Pfn::new(first as u32));
        // Linux collapses no page of zeros that all processes share. Errors only make moves slower.
        let _ = populate(frames, u64::from(BLOCK)).and_then(|()| collapse(block(frames)));
        // SAFETY: 1. both mappings are registered. 2. The lock is held, and the block was resolved
        // under it: the frames have its bytes, and the window has none.
        let moved = unsafe { self.shift_block(frames, self.page(at)) };
        for (entry_of, frame) in entries[..moved].iter_mut().zip(first as u32..) {
            *entry_of = entry.mapped(Pfn::new(frame));
        }
    }

    /// Moves the block that begins at `at` back to its frames, if it is mapped as a whole, and
    /// returns whether it was. The entries of the moved pages are then `entry`. A block that this
    /// turn of the clock hand spares is not aged.
    fn unmap_block(&self, at: Page, entry: Entry) -> bool {
        let mut table = self.table();
        let is_spared = entry == Entry::AGED && table.entries[at as usize].turns() != 0;
        let Some(frame) = table.frames_of(at).filter(|_| !is_spared) else {
            return false;
        };
        // SAFETY: 1. both mappings are registered. 2. The lock is held, so the block is in the
        // window, and its frames have no bytes that count.
        let moved = unsafe { self.shift_block(self.page(at), self.frame(frame)) };
        table.block(at)[..moved].fill(entry);
        moved > 0
    }

    /// Moves a block, and returns the number of moved pages. Page tables and zeros at `to` would
    /// prevent the move of a huge page.
    ///
    /// # Safety
    /// As [`Userfaultfd::shift`]. `to` has no bytes that count.
    unsafe fn shift_block(&self, from: Hva, to: Hva) -> usize {
        // SAFETY: the contract.
        unsafe {
            // If this fails, the move does.
            let _ = drop_bytes(block(to));
            let moved = self.uffd.shift_run(from, to, BLOCK as usize);
            moved.map_or_else(|partial| partial.done, |()| BLOCK as usize)
        }
    }

    /// Whether the page counts as accessed. If no turn spares it, it is unmapped. A pinned page
    /// stays.
    fn age_page(&self, index: Page) -> bool {
        let mut table = self.table();
        let entry = &mut table.entries[index as usize];
        match entry.frame() {
            None => false,
            Some(_) if entry.is_spared() => true,
            Some(frame) => {
                let is_open = !table.is_closed;
                if is_open && self.take_back(index, frame).is_ok() {
                    table.entries[index as usize] = Entry::AGED;
                }
                is_open
            }
        }
    }

    /// Moves the page back to its frame, if it is mapped.
    fn unmap(&self, index: Page) -> Result<(), Errno> {
        let mut table = self.table();
        if let Some(frame) = table.entries[index as usize].frame()
            && !table.is_closed
        {
            self.take_back(index, frame)?;
        }
        table.entries[index as usize] = Entry::default();
        Ok(())
    }

    /// Moves a page from the window to `frame`. The caller has the lock.
    fn take_back(&self, index: Page, frame: Pfn) -> Result<(), Errno> {
        let frame = self.frame(frame);
        loop {
            // SAFETY: 1. both mappings are registered. 2. The lock is held, so the page is in the
            // window, and its frame has no bytes that count.
            match unsafe { self.uffd.shift(self.page(index), frame) } {
                Ok(()) => return Ok(()),
                // Reclaim has read the empty frame, before it saw that the page was taken back.
                Err(Errno::EXIST) => {
                    let frame = HvaRange::new(frame, 1).expect("a frame is a page");
                    // SAFETY: as above.
                    unsafe { drop_bytes(frame) }?;
                }
                // The address space is changing.
                Err(Errno::AGAIN) => thread::yield_now(),
                Err(errno) => return Err(errno),
            }
        }
    }

    fn page(&self, index: Page) -> Hva {
        at(self.mapping.range(), u64::from(index))
    }

    fn frame(&self, frame: Pfn) -> Hva {
        at(self.frames, frame.get())
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no panic under this lock")
    }

    /// The indices of the pages of `range`.
    fn pages(&self, range: BackingRange) -> Range<Page> {
        let first = self.first.get().map_or(0, |first| first.get());
        let start = (range.start().get() - first) / PAGE_SIZE as u64;
        start as Page..(start + range.pages()) as Page
    }

    /// Unmaps the blocks wholly inside `pages` that are mapped as a whole: see
    /// [`Self::unmap_block`]. Returns whether there was one.
    fn unmap_blocks(&self, pages: &Range<Page>, entry: Entry) -> bool {
        let mut at = pages.start.next_multiple_of(BLOCK);
        let mut any = false;
        while at + BLOCK <= pages.end {
            any |= self.unmap_block(at, entry);
            at += BLOCK;
        }
        any
    }
}

/// The addresses of a block that begins at `start`.
fn block(start: Hva) -> HvaRange {
    HvaRange::new(start, u64::from(BLOCK)).expect("a block is a range")
}

/// The address of page `index` of `range`.
fn at(range: HvaRange, index: u64) -> Hva {
    Hva::new(range.start().get() + index * PAGE_SIZE as u64)
}

impl MmuNotifier for Window {
    /// Waits for a page that a device has pinned.
    fn invalidate(&self, ranges: &[BackingRange]) {
        let pages = || BackingRange::pages_in(ranges);
        let _span = trace_span!(target: "lacuna::mmu", "invalidate", pages = pages());
        for pages in ranges.iter().map(|range| self.pages(*range)) {
            self.unmap_blocks(&pages, Entry::default());
            for index in pages {
                while self.unmap(index).is_err() {
                    thread::sleep(PAUSE);
                }
            }
        }
    }

    fn try_invalidate(&self, ranges: &[BackingRange], kept: &mut Vec<BackingAddr>) {
        let pages = || BackingRange::pages_in(ranges);
        let _span = trace_span!(target: "lacuna::mmu", "invalidate", pages = pages());
        for range in ranges {
            let pages = self.pages(*range);
            self.unmap_blocks(&pages, Entry::default());
            for (page, index) in (0..).zip(pages) {
                if self.unmap(index).is_err() {
                    kept.extend(range.start().checked_add_pages(page));
                }
            }
        }
    }

    fn age(&self, ranges: &[BackingRange], young: &mut [bool]) {
        let _span =
            trace_span!(target: "lacuna::mmu", "age", pages = BackingRange::pages_in(ranges));
        for (range, young) in ranges.iter().zip(young) {
            let pages = self.pages(*range);
            *young |= self.unmap_blocks(&pages, Entry::AGED);
            for index in pages {
                *young |= self.age_page(index);
            }
        }
    }

    /// Unmaps the pages, because a page counts as accessed while it is mapped.
    fn split_huge(&self, range: BackingRange) {
        self.try_invalidate(&[range], &mut Vec::new());
    }

    /// Linux has flushed each page that was moved.
    fn end_of_aging(&self) {}
}

#[cfg(test)]
mod tests;
