//! A latency that can be changed while a device works.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The latency added to each operation of a device. Clones share one value. If it changes while the
/// device works, an operation in flight keeps its deadline.
///
/// Reads may take a sequence of latencies instead ([`LatencySetting::sequence`]). The caller gives
/// the sequence, so two measurements can have the same latencies in the same order.
#[derive(Clone, Debug, Default)]
pub struct LatencySetting(Arc<SharedLatency>);

#[derive(Debug, Default)]
struct SharedLatency {
    ns: AtomicU64,
    /// Whether reads take their latencies from `sequence`.
    in_sequence: AtomicBool,
    /// The start index in `sequence` plus the number of reads that have taken a latency since.
    place: AtomicU64,
    sequence: Box<[u64]>,
}

fn to_ns(latency: Duration) -> u64 {
    u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX)
}

impl LatencySetting {
    /// A new setting of `latency`, shared with its clones only.
    pub fn new(latency: Duration) -> Self {
        let setting = Self::default();
        setting.set(latency);
        setting
    }

    /// A new setting without latency, until [`LatencySetting::begin`] starts the sequence
    /// `latencies`.
    ///
    /// # Panics
    /// If `latencies` is empty.
    pub fn sequence(latencies: &[Duration]) -> Self {
        assert!(!latencies.is_empty(), "a sequence of no latencies");
        Self(Arc::new(SharedLatency {
            sequence: latencies.iter().copied().map(to_ns).collect(),
            ..SharedLatency::default()
        }))
    }

    /// Each operation submitted from now on takes at least `latency`.
    pub fn set(&self, latency: Duration) {
        self.0.ns.store(to_ns(latency), Ordering::Relaxed);
        self.0.in_sequence.store(false, Ordering::Relaxed);
    }

    /// From now on the n-th read takes the latency at `place` + n of the sequence. After its last
    /// latency the sequence begins again. Writes take the mean.
    ///
    /// # Panics
    /// If the setting has no sequence.
    pub fn begin(&self, place: u64) {
        let SharedLatency { sequence, .. } = &*self.0;
        assert!(!sequence.is_empty(), "the setting has no sequence");
        let sum: u128 = sequence.iter().map(|&ns| u128::from(ns)).sum();
        let mean = (sum / sequence.len() as u128) as u64;
        self.0.ns.store(mean, Ordering::Relaxed);
        self.0.place.store(place, Ordering::Relaxed);
        self.0.in_sequence.store(true, Ordering::Relaxed);
    }

    /// The latency in nanoseconds; of a sequence, the mean.
    pub fn ns(&self) -> u64 {
        self.0.ns.load(Ordering::Relaxed)
    }

    /// The latency in nanoseconds of a read submitted now. A sequence advances by one.
    pub fn read_ns(&self) -> u64 {
        let SharedLatency {
            in_sequence, place, ..
        } = &*self.0;
        if !in_sequence.load(Ordering::Relaxed) {
            return self.ns();
        }
        let place = place.fetch_add(1, Ordering::Relaxed);
        self.0.sequence[(place % self.0.sequence.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn reads_take_a_sequence_from_the_place_where_it_begins() {
        let setting = LatencySetting::sequence(&[US, 2 * US, 6 * US]);
        let clone = setting.clone();
        assert_eq!((setting.ns(), setting.read_ns()), (0, 0));
        for _ in 0..2 {
            setting.begin(1);
            let reads: Vec<_> = (0..4).map(|_| clone.read_ns()).collect();
            assert_eq!(reads, [2000, 6000, 1000, 2000]);
            assert_eq!(clone.ns(), 3000, "the mean, for writes");
        }
        setting.set(5 * US);
        assert_eq!((clone.ns(), clone.read_ns()), (5000, 5000));
    }

    #[test]
    #[should_panic(expected = "no sequence")]
    fn a_sequence_that_does_not_exist_cannot_begin() {
        LatencySetting::new(US).begin(0);
    }
}
