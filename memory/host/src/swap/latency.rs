//! A device made slow on purpose.

use super::{Slot, SwapStore};
use crate::error::{SwapError, WriteFailed};
use crate::frames::StoreFrames;
use crate::pool::Page;
use lacuna_addr::PageCount;

/// Adds a latency to every operation of another device: an absolute deadline from submission, any
/// number of operations in parallel. It only states the time; the executor keeps it, without a
/// thread waiting for each.
pub struct Latency<S> {
    inner: S,
    ns: u64,
}

impl<S: SwapStore> Latency<S> {
    /// `inner`, `ns` nanoseconds away.
    pub const fn new(inner: S, ns: u64) -> Self {
        Self { inner, ns }
    }
}

impl<S: SwapStore> SwapStore for Latency<S> {
    fn describe(&self) -> String {
        format!(
            "{} with {} us latency",
            self.inner.describe(),
            self.ns / 1000
        )
    }

    fn capacity(&self) -> PageCount {
        self.inner.capacity()
    }

    fn attach(&mut self, frames: StoreFrames) {
        self.inner.attach(frames);
    }

    fn read(&self, slot: Slot, page: &mut Page) -> Result<(), SwapError> {
        self.inner.read(slot, page)
    }

    fn write(&self, first: Slot, pages: &[Page]) -> Result<(), WriteFailed> {
        self.inner.write(first, pages)
    }

    fn discard(&self, slot: Slot) {
        self.inner.discard(slot);
    }

    fn is_cached(&self) -> bool {
        self.inner.is_cached()
    }

    fn latency_ns(&self) -> u64 {
        self.inner.latency_ns().saturating_add(self.ns)
    }
}
