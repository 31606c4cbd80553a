//! The swap device of the cover letter, as far as the letter describes it: its swap-in times.

use lacuna_soft::{LatencySetting, LogNormal};
use std::time::Duration;

/// The letter's shortest and longest swap-in, and the mean: 12.7 s for 7,555 of them. The deviation
/// is not published. With this one, 7,555 draws reach about as far as the letter's swap-ins.
pub const TIMES: LogNormal = LogNormal {
    shortest: Duration::from_nanos(36_200),
    longest: Duration::from_micros(55_700),
    mean: Duration::from_micros(1680),
    sigma: 1.0,
};

/// [`TIMES`] for people.
pub const ABOUT: &str = "36.2 us to 55.7 ms (injected: log-normal, sigma 1, mean 1.68 ms)";

/// The seed of the sequence.
pub const SEED: u64 = 2020;
/// Its length.
const NUMBER: usize = 1 << 16;
/// How many swap-ins lie between the places at which two rounds of an experiment begin.
const APART: u64 = 4096;

/// The sequence, the same for all VMs of the experiment.
pub fn latency() -> LatencySetting {
    LatencySetting::sequence(&TIMES.sequence(SEED, NUMBER))
}

/// Begins the sequence for a slice of `round`, at the same place for all arms.
pub fn begin(latency: &LatencySetting, round: u64) {
    latency.begin(round * APART);
}
