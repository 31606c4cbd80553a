//! Swap devices: they store the pages that reclaim evicts.
//!
//! A device is synchronous and knows entries and bytes only. Other files decide which thread calls
//! it and when its completion is delivered (`io`), and which entries are in use (`map`).

pub(crate) mod entry;
mod faulty;
mod file;
mod latency;
mod log_normal;
mod map;
mod memory;

pub use entry::SwapEntry;
pub use faulty::{Fault, FaultyStore};
pub use file::FileStore;
pub use latency::Latency;
pub use log_normal::LogNormal;
pub(crate) use map::{Run, SwapMap, SwapSpace};
pub use memory::MemoryStore;

use crate::error::{SwapError, WriteFailed};
use crate::frames::StoreFrames;
use crate::frames::pool::Page;
use lacuna_addr::PageCount;
use std::os::fd::BorrowedFd;

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

/// A swap device. Several threads may call it at once, but not for the same entry.
pub trait SwapStore: Send + Sync {
    /// Its name in error messages, such as `swap file in /tmp`.
    fn describe(&self) -> String;

    /// Its number of entries. It may be full earlier, and then reports that.
    fn capacity(&self) -> PageCount;

    /// Called once, before all other calls: frames of the budget, for a device that keeps pages in
    /// memory.
    fn attach(&mut self, frames: StoreFrames) {
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

    fn attach(&mut self, frames: StoreFrames) {
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
