//! A device made slow on purpose.

use super::{Reads, SwapEntry, SwapStore};
use crate::error::{SwapError, WriteFailed};
use crate::frames::StoreFrames;
use crate::pool::Page;
use lacuna_addr::PageCount;
use lacuna_sync::Dial;

/// Adds a latency to every operation of another device: an absolute deadline from submission, any
/// number of operations in parallel. It only states the time; the executor keeps it, without a
/// thread waiting for each.
pub struct Latency<S> {
    inner: S,
    dial: Dial,
}

impl<S: SwapStore> Latency<S> {
    /// `inner`, as far away as `dial` says.
    pub const fn new(inner: S, dial: Dial) -> Self {
        Self { inner, dial }
    }
}

impl<S: SwapStore> SwapStore for Latency<S> {
    fn describe(&self) -> String {
        let inner = self.inner.describe();
        match self.dial.ns() / 1000 {
            0 => inner,
            us => format!("{inner} with {us} us latency"),
        }
    }

    fn capacity(&self) -> PageCount {
        self.inner.capacity()
    }

    fn attach(&mut self, frames: StoreFrames) {
        self.inner.attach(frames);
    }

    fn read(&self, entry: SwapEntry, page: &mut Page) -> Result<(), SwapError> {
        self.inner.read(entry, page)
    }

    fn reads(&self) -> Reads<'_> {
        self.inner.reads()
    }

    fn write(&self, first: SwapEntry, pages: &[Page]) -> Result<(), WriteFailed> {
        self.inner.write(first, pages)
    }

    fn discard(&self, entry: SwapEntry) {
        self.inner.discard(entry);
    }

    fn is_cached(&self) -> bool {
        self.inner.is_cached()
    }

    fn latency_ns(&self) -> u64 {
        self.inner.latency_ns().saturating_add(self.dial.ns())
    }
}
