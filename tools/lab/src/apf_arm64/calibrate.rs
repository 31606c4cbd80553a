//! Calibrates the work of the memory-bound thread. Alone and without asynchronous faults, the
//! thread then waits for pages 30 % of its time.

use super::disk;
use crate::apf::alone::{Round, Rounds};
use crate::experiment::{LabError, Options};
use crate::session::Guest;
use lacuna_soft::{Apf, LatencySetting};

/// The wanted share of the time that the thread waits, as the cover letter's did.
pub const SHARE: f64 = 0.30;
/// The largest deviation from it.
pub const TOLERANCE: f64 = 0.02;
/// The work with which the search begins.
const FIRST_GUESS: u32 = 100_000;
/// Tries at most.
const TRIES: usize = 6;

/// Rounds of the program in a try. One round does not show the share: the page order of a round
/// decides how many of its accesses find no page, and neighbouring rounds differ by a third.
const fn rounds_of_a_try(options: &Options) -> usize {
    if options.quick { 2 } else { 4 }
}

/// The result of the search.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// Steps of computing on each page.
    pub work: u32,
    /// The share of the time that the threads then waited.
    pub share: f64,
}

impl Found {
    fn off(&self) -> f64 {
        (self.share - SHARE).abs()
    }

    /// Why it does not suit the experiment.
    pub fn refused(&self) -> Option<String> {
        let percent = 100.0 * self.share;
        (self.off() > TOLERANCE).then(|| {
            format!(
                "no work was found: alone, the thread waited {percent:.1} % of its time, not 30 %"
            )
        })
    }
}

/// Sets the work of the guest and returns it. The latency's sequence begins anew for each try.
pub fn calibrate(
    rounds: &mut Rounds<'_>,
    guest: &Guest<'_>,
    latency: &LatencySetting,
    vcpus: usize,
    options: &Options,
) -> Result<Found, LabError> {
    // The first round touches fresh memory, which should not wait. The second begins with pages of
    // the first in swap.
    guest.set(1)?;
    rounds.next(Apf::Off)?;
    rounds.next(Apf::Off)?;
    let mut work = FIRST_GUESS;
    let mut best: Option<Found> = None;
    for _ in 0..TRIES {
        guest.set(work)?;
        disk::begin(latency, 0);
        let (mut seconds, mut stalled) = (0.0, 0.0);
        for _ in 0..rounds_of_a_try(options) {
            let round = rounds.next(Apf::Off)?;
            seconds += round.seconds();
            stalled += round.stalled();
        }
        let share = stalled / (seconds * vcpus as f64);
        let found = Found { work, share };
        if best.is_none_or(|best| found.off() < best.off()) {
            best = Some(found);
        }
        if found.off() < TOLERANCE / 2.0 {
            break;
        }
        work = better(work, share);
    }
    let best = best.expect("at least one try");
    guest.set(best.work)?;
    Ok(best)
}

/// The share of the vCPUs' time in which they waited.
pub fn share(round: &Round, vcpus: usize) -> f64 {
    round.stalled() / (round.seconds() * vcpus as f64)
}

/// The work with which the share becomes [`SHARE`]: the waits stay, and the rest is proportional to
/// the work.
fn better(work: u32, share: f64) -> u32 {
    let share = share.clamp(0.001, 0.999);
    let factor = share / (1.0 - share) * (1.0 - SHARE) / SHARE;
    (f64::from(work) * factor).clamp(1.0, f64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits of 3 s and work of 7 s: 30 %.
    #[test]
    fn the_next_try_has_the_wanted_share() {
        for computing in [0.5, 7.0, 100.0] {
            let (waits, work) = (3.0, 1_000_000);
            let next = better(work, waits / (waits + computing));
            let computing = computing * f64::from(next) / f64::from(work);
            let share = waits / (waits + computing);
            assert!((share - SHARE).abs() < 1e-4, "{share}");
        }
    }

    #[test]
    fn a_share_beside_the_tolerance_is_refused() {
        for (share, refused) in [(0.27, true), (0.285, false), (0.319, false), (0.33, true)] {
            let found = Found { work: 1, share };
            assert_eq!(found.refused().is_some(), refused, "{share}");
        }
    }
}
