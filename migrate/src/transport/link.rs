//! The shared state of one migration's connections: the patience with a silent peer, and counters.

use lacuna_sync::{Mutex, MutexGuard, lock, lock_order};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a peer may be silent. After that the connection counts as cut.
const SILENCE: Duration = Duration::from_secs(30);
/// How long this side waits for the peer, in all, after the migration was cancelled.
const HURRIED: Duration = Duration::from_secs(1);
/// How often a waiting socket checks its [`Link`].
pub(super) const LOOK: Duration = Duration::from_millis(100);
/// The shortest time over which a rate is taken.
const WINDOW: Duration = Duration::from_millis(500);

/// The shared state of one migration's connections. Any thread may call its methods.
pub struct Link {
    /// When the migration was cancelled.
    hurried: Mutex<Option<Instant>, lock_order::MigrationLink>,
    /// A thread of this process has ended all waiting.
    cut: AtomicBool,
    /// A signal has ended all waiting, unless `outlives_signals`.
    interrupted: Arc<AtomicBool>,
    outlives_signals: AtomicBool,
    /// When waiting for a peer to connect ends.
    deadline: Mutex<Option<Instant>, lock_order::MigrationLink>,
    sent: AtomicU64,
    received: AtomicU64,
    meter: Mutex<Meter, lock_order::MigrationLink>,
}

/// Bytes at two moments of the past.
struct Meter {
    before: (Instant, u64),
    last: (Instant, u64),
}

impl Link {
    /// The link of a source.
    pub fn of_source() -> Self {
        Self::of_destination(Arc::default())
    }

    /// The link of a destination. Every wait ends when a signal sets `interrupted`, until
    /// [`Link::outlive_signals`].
    pub fn of_destination(interrupted: Arc<AtomicBool>) -> Self {
        let now = (Instant::now(), 0);
        Self {
            hurried: Mutex::new(None),
            cut: AtomicBool::new(false),
            interrupted,
            outlives_signals: AtomicBool::new(false),
            deadline: Mutex::new(None),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            meter: Mutex::new(Meter {
                before: now,
                last: now,
            }),
        }
    }

    /// The migration is no longer wanted: all waiting for the peer ends after a second.
    pub fn hurry(&self) {
        self.hurry_since(Instant::now());
    }

    fn hurry_since(&self, cancelled: Instant) {
        self.hurried().get_or_insert(cancelled);
    }

    fn hurried(&self) -> MutexGuard<'_, Option<Instant>> {
        lock(&self.hurried)
    }

    /// Ends all waiting on these connections and for others, with an error.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }

    /// As a new link, for another guest. The counters continue.
    pub fn begin_again(&self) {
        self.renew();
        *self.deadline() = None;
        self.outlives_signals.store(false, Ordering::Relaxed);
    }

    /// Takes [`Link::cut`] and [`Link::hurry`] back, for new connections.
    pub fn renew(&self) {
        self.cut.store(false, Ordering::Relaxed);
        *self.hurried() = None;
    }

    /// After `deadline`, this side does not wait for a peer to connect. It still waits for a
    /// connected peer.
    pub fn wait_until(&self, deadline: Instant) {
        *self.deadline() = Some(deadline);
    }

    /// Whether a peer may still connect.
    pub fn is_open(&self) -> bool {
        !self.is_cut() && self.deadline().is_none_or(|end| Instant::now() < end)
    }

    /// From now on a signal does not end a wait: it ends the guest first.
    pub fn outlive_signals(&self) {
        self.outlives_signals.store(true, Ordering::Relaxed);
    }

    fn is_cut(&self) -> bool {
        let is_interrupted = || self.interrupted.load(Ordering::Relaxed);
        let outlives_signals = self.outlives_signals.load(Ordering::Relaxed);
        self.cut.load(Ordering::Relaxed) || (!outlives_signals && is_interrupted())
    }

    fn deadline(&self) -> MutexGuard<'_, Option<Instant>> {
        lock(&self.deadline)
    }

    /// Sent and received bytes, including the transport's own.
    pub fn bytes(&self) -> u64 {
        self.sent.load(Ordering::Relaxed) + self.received.load(Ordering::Relaxed)
    }

    /// Bytes a second, lately.
    pub fn rate(&self) -> f64 {
        let now = (Instant::now(), self.bytes());
        let mut meter = lock(&self.meter);
        if now.0 - meter.last.0 >= WINDOW {
            (meter.before, meter.last) = (meter.last, now);
        }
        let time = (now.0 - meter.before.0).as_secs_f64();
        (now.1 - meter.before.1) as f64 / time.max(WINDOW.as_secs_f64())
    }

    pub(super) fn has_sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn has_received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Whether a call that has waited for `silent` may keep waiting.
    pub(super) fn check(&self, silent: Duration) -> io::Result<()> {
        if self.is_cut() {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "this process has ended it",
            ));
        }
        // After a cancel, a peer that sends a byte now and then gets no more time.
        let is_late = self.hurried().is_some_and(|at| at.elapsed() > HURRIED);
        let text = if is_late {
            format!("the other side did not end it within {HURRIED:?}")
        } else if silent > SILENCE {
            format!("the other side was silent for {SILENCE:?}")
        } else {
            return Ok(());
        };
        Err(io::Error::new(io::ErrorKind::TimedOut, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_waited_for_as_long_as_it_is_wanted() {
        let link = Link::of_source();
        link.check(SILENCE).unwrap();
        let error = link.check(SILENCE * 2).unwrap_err().to_string();
        assert!(error.contains("silent for 30s"), "{error}");
        let cancelled = Instant::now() - HURRIED * 2;
        link.hurry_since(cancelled);
        link.check(Duration::ZERO).unwrap_err();
        link.hurry();
        link.check(Duration::ZERO).unwrap_err();
        link.cut();
        link.check(Duration::ZERO).unwrap_err();
        assert!(!link.is_open());
        link.renew();
        link.check(HURRIED * 2).unwrap();
        assert!(link.is_open());
        link.wait_until(Instant::now());
        assert!(!link.is_open(), "no new connection");
        link.check(Duration::ZERO).unwrap();
    }
}
