//! A latency that can be changed while a device works.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The latency that is added to each operation of a device. Clones share one value. It may change
/// while the device works: an operation in flight keeps its deadline.
#[derive(Clone, Debug, Default)]
pub struct LatencySetting(Arc<AtomicU64>);

impl LatencySetting {
    /// A new setting of `latency`, shared with its clones only.
    pub fn new(latency: Duration) -> Self {
        let setting = Self::default();
        setting.set(latency);
        setting
    }

    /// Each operation submitted from now on takes at least `latency`.
    pub fn set(&self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.0.store(ns, Ordering::Relaxed);
    }

    /// The latency in nanoseconds.
    pub fn ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
