//! How objects are read.

use std::time::Duration;

/// How objects are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Bytes of one request, a multiple of 4 KiB.
    pub chunk: usize,
    /// Bytes of each object's cache in memory.
    pub cache: usize,
    /// The most requests in flight.
    pub parallel: usize,
    /// How long a thread waits for a failing or silent store; `Duration::MAX`: for ever. The
    /// requests of a page source have a [`Policy`](lacuna_source::Policy) of their own.
    pub patience: Duration,
}

impl Default for Options {
    /// Chunks of 1 MiB, 64 of them in memory, 16 requests at a time, ten seconds.
    fn default() -> Self {
        Self {
            chunk: 1 << 20,
            cache: 64 << 20,
            parallel: 16,
            patience: Duration::from_secs(10),
        }
    }
}
