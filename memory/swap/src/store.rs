//! What a swap device does.

use crate::entry::SwapEntry;
use crate::error::{SwapError, WriteFailed};
use crate::page::Page;
use lacuna_addr::{PageCount, Pfn};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// How the entries of a swap device are read.
#[derive(Clone, Copy, Debug)]
pub enum Reads<'a> {
    /// [`SwapStore::read`] waits for something.
    Blocking,
    /// [`SwapStore::read`] does not wait: handing it to another thread would cost more.
    Immediate,
    /// As `Blocking`; or, without the device's help, from this file: an entry is the page at
    /// [`SwapEntry::offset`], and reading it leaves nothing in the page cache.
    File(BorrowedFd<'a>),
}

/// Frames of a budget, for a device that keeps pages in memory. Each is as large as a page, and is
/// charged to the budget while the device has it.
pub trait StoreFrames: Send + Sync {
    /// Frames of the whole budget at present.
    fn budget(&self) -> usize;

    /// Reserves the last `frames` free frames for the device.
    fn reserve(&self, frames: usize);

    /// Takes a frame, also from the reserve. `None` when no frame is free.
    fn take(&self) -> Option<Pfn>;

    /// Gives a taken frame back.
    fn give(&self, frame: Pfn);

    /// Reads bytes of a taken frame, from its byte `offset` on.
    fn read(&self, frame: Pfn, offset: usize, into: &mut [u8]);

    /// Writes bytes of a taken frame, from its byte `offset` on.
    fn write(&self, frame: Pfn, offset: usize, bytes: &[u8]);
}

/// A swap device. Several threads may call it at once, but not for the same entry.
pub trait SwapStore: Send + Sync {
    /// Its name in error messages, such as `swap file in /tmp`.
    fn describe(&self) -> String;

    /// Its number of entries. It may be full earlier, and then reports that.
    fn capacity(&self) -> PageCount;

    /// Called once, before all other calls: frames of the budget, for a device that keeps pages in
    /// memory.
    fn attach(&mut self, frames: Arc<dyn StoreFrames>) {
        drop(frames);
    }

    /// Reads the written `entry` over the whole of `page`.
    fn read(&self, entry: SwapEntry, page: &mut Page) -> Result<(), SwapError>;

    /// How its entries are read; this never changes.
    fn reads(&self) -> Reads<'_> {
        Reads::Blocking
    }

    /// Writes `pages` to `first` and the entries after it.
    fn write(&self, first: SwapEntry, pages: &[Page]) -> Result<(), WriteFailed>;

    /// Called when the content of `entry` is no longer needed.
    fn discard(&self, entry: SwapEntry);

    /// Whether the host's page cache may hold stored pages. Such memory is outside the budget.
    fn is_cached(&self) -> bool {
        false
    }

    /// The least time in nanoseconds from an operation's submission to its completion; the mean, if
    /// the latencies of reads differ.
    fn latency_ns(&self) -> u64 {
        0
    }

    /// The latency of a read submitted now. Called once for each read.
    fn read_latency_ns(&self) -> u64 {
        self.latency_ns()
    }
}

impl<S: SwapStore + ?Sized> SwapStore for Box<S> {
    fn describe(&self) -> String {
        (**self).describe()
    }

    fn capacity(&self) -> PageCount {
        (**self).capacity()
    }

    fn attach(&mut self, frames: Arc<dyn StoreFrames>) {
        (**self).attach(frames);
    }

    fn read(&self, entry: SwapEntry, page: &mut Page) -> Result<(), SwapError> {
        (**self).read(entry, page)
    }

    fn reads(&self) -> Reads<'_> {
        (**self).reads()
    }

    fn write(&self, first: SwapEntry, pages: &[Page]) -> Result<(), WriteFailed> {
        (**self).write(first, pages)
    }

    fn discard(&self, entry: SwapEntry) {
        (**self).discard(entry);
    }

    fn is_cached(&self) -> bool {
        (**self).is_cached()
    }

    fn latency_ns(&self) -> u64 {
        (**self).latency_ns()
    }

    fn read_latency_ns(&self) -> u64 {
        (**self).read_latency_ns()
    }
}
