//! A latency that can be changed while things run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How slow a device is made; a clone turns the same knob. May be turned while the device works:
/// what is already on its way keeps its deadline.
#[derive(Clone, Debug, Default)]
pub struct Dial(Arc<AtomicU64>);

impl Dial {
    /// A knob of its own, at `latency`.
    pub fn new(latency: Duration) -> Self {
        let dial = Self::default();
        dial.set(latency);
        dial
    }

    /// Every operation submitted from now on takes `latency` at least.
    pub fn set(&self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.0.store(ns, Ordering::Relaxed);
    }

    /// Where it is, in nanoseconds.
    pub fn ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
