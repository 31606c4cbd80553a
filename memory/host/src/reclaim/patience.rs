//! How long a thread in direct reclaim waits after a sweep that freed nothing.
//!
//! Reads and writes in flight complete, and the thread that isolated a frame releases it. As long
//! as there are any, a reclaiming thread waits without a limit, however slow the device.
//!
//! Otherwise either every page is pinned by an instruction in progress, or the swap device has
//! refused the writes. Both may pass: the instruction ends, or the device gets room. Both may also
//! last: the vCPU may be stopped inside the instruction. So this wait has a limit.
//!
//! If the last write failed and no operation is in flight, the limit holds even while a frame is
//! isolated.

use std::time::{Duration, Instant};

/// The first pause; each later pause is twice as long.
const FIRST: Duration = Duration::from_millis(1);
/// The longest pause. A freed frame or a completed operation ends a pause early. An event without
/// notification, such as the end of an instruction, is seen up to this much later.
const LONGEST: Duration = Duration::from_millis(32);
/// Limit on the time in pauses during which nothing was in progress; then the thread gives up.
const LIMIT: Duration = Duration::from_secs(2);

/// What was in progress when a sweep freed nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outlook {
    /// An operation completed during the sweep: sweep again after a short pause.
    Moving,
    /// An operation is in flight, or a frame is isolated.
    Pending,
    /// Nothing; or the last write failed, and no operation is in flight.
    Quiet,
}

/// The waits of one thread since a frame was last freed.
#[derive(Default)]
pub(crate) struct Patience {
    /// The last pause.
    pause: Duration,
    /// The beginning of the last pause, if it followed [`Outlook::Quiet`].
    began: Option<Instant>,
    /// Time in the pauses after [`Outlook::Quiet`].
    quiet: Duration,
}

impl Patience {
    /// How long to wait from `now` until the next sweep; `None` when [`LIMIT`] is reached.
    pub fn after(&mut self, outlook: Outlook, now: Instant) -> Option<Duration> {
        if let Some(began) = self.began.take() {
            // Another thread's refused write ends a pause early, so only the actual time of a pause
            // counts. It counts at most as long as planned: a process that was stopped meanwhile
            // (SIGSTOP) has not tried again.
            self.quiet += now.duration_since(began).min(self.pause);
        }
        self.pause = match outlook {
            Outlook::Moving => FIRST,
            Outlook::Pending | Outlook::Quiet => (2 * self.pause).clamp(FIRST, LONGEST),
        };
        self.began = (outlook == Outlook::Quiet).then_some(now);
        (self.quiet < LIMIT).then_some(self.pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_only_when_nothing_is_on_its_way() {
        let mut patience = Patience::default();
        let mut now = Instant::now();
        for outlook in [Outlook::Pending, Outlook::Moving] {
            for _ in 0..10_000 {
                let pause = patience.after(outlook, now);
                now += pause.expect("no limit");
            }
        }
    }

    /// The time until a thread gives up. `took` returns the actual time of a pause.
    fn time_to_give_up(took: fn(Duration) -> Duration) -> Duration {
        let mut patience = Patience::default();
        let start = Instant::now();
        let mut now = start;
        while let Some(pause) = patience.after(Outlook::Quiet, now) {
            now += took(pause);
        }
        now.duration_since(start)
    }

    #[test]
    fn a_pause_counts_as_long_as_it_takes_and_at_most_as_planned() {
        let limit = LIMIT..LIMIT + LONGEST;
        assert!(limit.contains(&time_to_give_up(|pause| pause)));
        assert!(limit.contains(&time_to_give_up(|pause| pause / 100)));
        assert!(time_to_give_up(|pause| 100 * pause) >= 100 * LIMIT);
    }
}
