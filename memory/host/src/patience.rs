//! How long a thread waits for a frame when nothing promises one.
//!
//! What is in flight, or isolated by another thread, comes to rest by itself: a reason to wait,
//! however slow the device. When there is nothing of that, all pages are held by instructions in
//! progress, or the device has refused what it was given. An instruction ends soon, but its vCPU
//! may have been stopped before; and room on a device may come back.

use std::time::Duration;

/// The first pause; each is twice as long as the one before.
const FIRST: Duration = Duration::from_millis(1);
/// The longest. Whatever settles ends a pause: only what ends without notice is seen this late.
const LONGEST: Duration = Duration::from_millis(32);
/// After so much time, in all, of nothing on its way, nothing will come.
const LIMIT: Duration = Duration::from_secs(2);

/// What a thread that found no frame can expect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outlook {
    /// Something came to rest while it looked.
    Moving,
    /// Something is on its way.
    Pending,
    /// Nothing is.
    Quiet,
}

/// What one thread has waited since a frame was freed.
#[derive(Default)]
pub(crate) struct Patience {
    pause: Duration,
    quiet: Duration,
}

impl Patience {
    /// How long to wait before the next look; `None` when there is nothing to wait for.
    pub fn after(&mut self, outlook: Outlook) -> Option<Duration> {
        self.pause = match outlook {
            Outlook::Moving => FIRST,
            Outlook::Pending | Outlook::Quiet => (2 * self.pause).clamp(FIRST, LONGEST),
        };
        if outlook == Outlook::Quiet {
            self.quiet += self.pause;
        }
        (self.quiet < LIMIT).then_some(self.pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_only_when_nothing_is_on_its_way() {
        let mut patience = Patience::default();
        let mut quiet = || {
            let pauses = std::iter::from_fn(|| patience.after(Outlook::Quiet));
            pauses.sum::<Duration>()
        };
        assert!((LIMIT - LONGEST..LIMIT).contains(&quiet()));
        let mut patience = Patience::default();
        for outlook in [Outlook::Pending, Outlook::Moving] {
            for _ in 0..10_000 {
                assert_ne!(patience.after(outlook), None);
            }
        }
    }
}
