//! A device with an added latency.

use crate::entry::SwapEntry;
use crate::error::{SwapError, WriteFailed};
use crate::page::Page;
use crate::store::StoreFrames;
use crate::store::{Reads, SwapStore};
use lacuna_addr::PageCount;
use lacuna_sync::LatencySetting;
use std::sync::Arc;

/// Adds a latency to every operation of another device. It is the same for all, or each read takes
/// the next one of a sequence ([`LogNormal`](crate::LogNormal) makes one). The latency counts from
/// submission, so any number of operations wait in parallel. This type only states the latency; the
/// executor delays the completions, and no thread waits for a single operation.
pub struct Latency<S> {
    inner: S,
    latency: LatencySetting,
}

impl<S: SwapStore> Latency<S> {
    /// `inner` with `latency` added to each operation.
    pub const fn new(inner: S, latency: LatencySetting) -> Self {
        Self { inner, latency }
    }
}

impl<S: SwapStore> SwapStore for Latency<S> {
    fn describe(&self) -> String {
        let inner = self.inner.describe();
        match self.latency.ns() / 1000 {
            0 => inner,
            us => format!("{inner} with {us} us latency"),
        }
    }

    fn capacity(&self) -> PageCount {
        self.inner.capacity()
    }

    fn attach(&mut self, frames: Arc<dyn StoreFrames>) {
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
        self.inner.latency_ns().saturating_add(self.latency.ns())
    }

    fn read_latency_ns(&self) -> u64 {
        let inner = self.inner.read_latency_ns();
        inner.saturating_add(self.latency.read_ns())
    }
}
