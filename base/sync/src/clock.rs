//! The injected time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Nanoseconds since the clock's own start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// `self + ns`, saturating: the result of an overflow is never reached.
    pub const fn after(self, ns: u64) -> Self {
        Self(self.0.saturating_add(ns))
    }

    /// The time from `now` until `self`; zero if that is past.
    pub const fn since(self, now: Self) -> u64 {
        self.0.saturating_sub(now.0)
    }
}

/// The source of the time.
pub trait Clock: Send + Sync {
    /// The time now; never goes back.
    fn now(&self) -> Nanos;
}

/// The host's monotonic clock.
pub struct HostClock(Instant);

impl Default for HostClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for HostClock {
    fn now(&self) -> Nanos {
        Nanos(u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

/// A clock that only its caller moves, for seeded runs and tests.
#[derive(Default)]
pub struct VirtualClock(AtomicU64);

impl VirtualClock {
    /// Moves time forward by `ns`, saturating. Only one thread moves it.
    pub fn advance(&self, ns: u64) {
        self.advance_to(self.now().after(ns));
    }

    /// Moves time forward to `at`; a time already past changes nothing.
    pub fn advance_to(&self, at: Nanos) {
        self.0.fetch_max(at.0, Ordering::Relaxed);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Nanos {
        Nanos(self.0.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_time_never_goes_back() {
        let clock = VirtualClock::default();
        clock.advance(7);
        clock.advance_to(Nanos(5));
        assert_eq!(clock.now(), Nanos(7));
        clock.advance_to(Nanos(u64::MAX - 1));
        clock.advance(50);
        assert_eq!(clock.now(), Nanos(u64::MAX));
    }
}
