//! The time-stamp counter: a rate and an offset over the processor's clock, which counts
//! nanoseconds.

use lacuna_sync::Nanos;
use std::num::NonZeroU32;

/// Fractional bits of [`TscRate`]'s multiplier.
const FRACTION: u32 = 32;
const KHZ_PER_GHZ: u128 = 1_000_000;

/// How fast a TSC counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TscRate {
    khz: NonZeroU32,
    /// Ticks for each nanosecond, as a 32.32 fixed-point number.
    ticks: u64,
}

impl TscRate {
    /// One tick for each nanosecond, exactly.
    pub const GIGAHERTZ: Self = Self::new(NonZeroU32::new(1_000_000).unwrap());

    /// A rate in kHz. The multiplier is rounded: the TSC deviates by less than 1 kHz / 4 million.
    pub const fn new(khz: NonZeroU32) -> Self {
        let scaled = (khz.get() as u128) << FRACTION;
        Self {
            khz,
            ticks: ((scaled + KHZ_PER_GHZ / 2) / KHZ_PER_GHZ) as u64,
        }
    }

    /// The frequency in kHz.
    pub const fn khz(self) -> u32 {
        self.khz.get()
    }

    /// Ticks in the time since the clock read zero.
    const fn ticks(self, now: Nanos) -> u64 {
        ((now.0 as u128 * self.ticks as u128) >> FRACTION) as u64
    }

    /// When the clock has made `ticks`.
    fn time(self, ticks: u128) -> Nanos {
        let time = (ticks << FRACTION).div_ceil(self.ticks.into());
        Nanos(u64::try_from(time).unwrap_or(u64::MAX))
    }
}

/// A time-stamp counter. It counts while the clock runs, also when its processor does not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tsc {
    rate: TscRate,
    /// The TSC's value when the clock read zero.
    offset: u64,
}

impl Tsc {
    /// A TSC with the value `offset` when the clock reads zero.
    pub const fn new(rate: TscRate, offset: u64) -> Self {
        Self { rate, offset }
    }

    /// How fast it counts.
    pub const fn rate(&self) -> TscRate {
        self.rate
    }

    /// The value of RDTSC at `now`.
    pub const fn at(&self, now: Nanos) -> u64 {
        self.rate.ticks(now).wrapping_add(self.offset)
    }

    /// Counts from `value` from now on.
    pub(crate) const fn set(&mut self, value: u64, now: Nanos) {
        self.offset = value.wrapping_sub(self.rate.ticks(now));
    }

    /// The first time from `now` on when the TSC has `value` or more.
    pub(crate) fn when(&self, value: u64, now: Nanos) -> Nanos {
        let left = value.saturating_sub(self.at(now));
        let ticks = u128::from(self.rate.ticks(now)) + u128::from(left);
        self.rate.time(ticks).max(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tsc(khz: u32, offset: u64) -> Tsc {
        Tsc::new(TscRate::new(NonZeroU32::new(khz).unwrap()), offset)
    }

    #[test]
    fn at_one_gigahertz_it_counts_nanoseconds() {
        let tsc = Tsc::new(TscRate::GIGAHERTZ, 5);
        for now in [0, 1, 999, u64::MAX - 5] {
            assert_eq!(tsc.at(Nanos(now)), now + 5);
        }
        assert_eq!(tsc.when(1005, Nanos(10)), Nanos(1000));
    }

    #[test]
    fn an_hour_has_as_many_ticks_as_the_frequency_says() {
        for khz in [1, 999, 1_000_001, 2_596_136, 4_200_000] {
            let ticks = tsc(khz, 0).at(Nanos(3_600_000_000_000));
            let exact = u64::from(khz) * 3_600_000;
            assert!(ticks.abs_diff(exact) <= 900, "{khz}: {ticks}, {exact}");
        }
    }

    #[test]
    fn a_deadline_is_the_first_nanosecond_at_which_it_is_reached() {
        for khz in [1, 333_333, 1_000_000, 2_596_136, u32::MAX] {
            let tsc = tsc(khz, 77);
            for now in [0, 1, 12_345_678] {
                let now = Nanos(now);
                for more in [0, 1, 2, 1000, 123_456_789] {
                    let value = tsc.at(now) + more;
                    let due = tsc.when(value, now);
                    assert!(tsc.at(due) >= value, "{khz} kHz: not yet");
                    let before = Nanos(due.0.saturating_sub(1));
                    let early = due > now && tsc.at(before) >= value;
                    assert!(!early, "{khz} kHz: too late");
                }
            }
        }
        assert_eq!(tsc(1, 0).when(u64::MAX, Nanos(7)), Nanos(u64::MAX));
    }

    #[test]
    fn a_value_that_was_set_counts_on() {
        let mut tsc = tsc(2_000_000, 0);
        tsc.set(3, Nanos(100));
        assert_eq!((tsc.at(Nanos(100)), tsc.at(Nanos(101))), (3, 5));
    }
}
