//! The latencies of a busy disk: most are short, and a few are long.

use std::time::Duration;

/// A log-normal distribution of latencies, cut off at both ends.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LogNormal {
    /// No latency is shorter.
    pub shortest: Duration,
    /// No latency is longer.
    pub longest: Duration,
    /// The mean of the truncated distribution.
    pub mean: Duration,
    /// The standard deviation of the logarithms before truncation.
    pub sigma: f64,
}

/// Points of the numerical integral over the logarithms.
const POINTS: u32 = 2000;

impl LogNormal {
    /// `number` independent latencies, which depend on `seed` alone.
    ///
    /// # Panics
    /// If `mean` does not lie between the ends, or `sigma` is not positive.
    pub fn sequence(&self, seed: u64, number: usize) -> Vec<Duration> {
        assert!(self.sigma > 0.0, "no spread");
        assert!(
            self.shortest < self.mean && self.mean < self.longest,
            "the mean is outside of the ends"
        );
        let (mu, mut rng) = (self.mu(), fastrand::Rng::with_seed(seed));
        let mut draw = || loop {
            let latency = (mu + self.sigma * standard_normal(&mut rng)).exp();
            let latency = Duration::from_secs_f64(latency);
            if (self.shortest..=self.longest).contains(&latency) {
                break latency;
            }
        };
        (0..number).map(|_| draw()).collect()
    }

    /// The mean of the logarithms for which the truncated distribution has the wanted mean.
    ///
    /// The truncated mean grows with the mean of the logarithms, so bisection finds it.
    fn mu(&self) -> f64 {
        let wanted = self.mean.as_secs_f64();
        // Far enough that the mean is near one end.
        let far = 40.0 * self.sigma.max(1.0);
        let (mut low, mut high) = (wanted.ln() - far, wanted.ln() + far);
        for _ in 0..100 {
            let middle = f64::midpoint(low, high);
            if self.mean_at(middle) < wanted {
                low = middle;
            } else {
                high = middle;
            }
        }
        high
    }

    /// The mean in seconds of the truncated distribution. Before truncation, the mean of the
    /// logarithms is `mu`.
    fn mean_at(&self, mu: f64) -> f64 {
        let [from, to] = [self.shortest, self.longest].map(|end| end.as_secs_f64().ln());
        // The exponent is relative to the largest one, because all may be too small for a float.
        let exponent = |log: f64| -((log - mu) / self.sigma).powi(2) / 2.0;
        let largest = exponent(mu.clamp(from, to));
        let (mut weights, mut sum) = (0.0, 0.0);
        for point in 0..POINTS {
            let log = from + (to - from) * (f64::from(point) + 0.5) / f64::from(POINTS);
            let weight = (exponent(log) - largest).exp();
            weights += weight;
            sum += weight * log.exp();
        }
        sum / weights
    }
}

/// The Box-Muller method.
fn standard_normal(rng: &mut fastrand::Rng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.f64()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.f64()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cover letter of the arm64 series reports these values for its disk: the shortest and the
    /// longest of 7,555 swap-ins, and 12.7 s for all of them.
    const DISK: LogNormal = LogNormal {
        shortest: Duration::from_nanos(36_200),
        longest: Duration::from_micros(55_700),
        mean: Duration::from_micros(1680),
        sigma: 1.0,
    };

    fn mean(latencies: &[Duration]) -> Duration {
        latencies.iter().sum::<Duration>() / latencies.len() as u32
    }

    #[test]
    fn the_mean_and_the_ends_are_those_that_were_asked_for() {
        for sigma in [0.3, 1.0, 2.0] {
            let disk = LogNormal { sigma, ..DISK };
            let drawn = disk.sequence(1, 400_000);
            assert!(
                drawn
                    .iter()
                    .all(|l| (disk.shortest..=disk.longest).contains(l))
            );
            // Four standard errors, for a deviation of three times the mean.
            let off = mean(&drawn).as_secs_f64() / disk.mean.as_secs_f64() - 1.0;
            assert!(off.abs() < 4.0 * 3.0 / 400_000_f64.sqrt(), "{sigma}: {off}");
        }
    }

    /// With this deviation, as many draws as in the letter reach about as far as its swap-ins.
    #[test]
    fn seven_thousand_draws_have_both_ends() {
        for seed in 0..20 {
            let drawn = DISK.sequence(seed, 7555);
            let (least, most) = (drawn.iter().min().unwrap(), drawn.iter().max().unwrap());
            assert!(*least < Duration::from_micros(90), "{least:?}");
            assert!(*most > Duration::from_millis(18), "{most:?}");
        }
    }

    /// The share of latencies below a point is the distribution's.
    #[test]
    fn half_are_shorter_than_the_median() {
        let drawn = DISK.sequence(3, 100_000);
        let median = Duration::from_secs_f64(DISK.mu().exp());
        let below = drawn.iter().filter(|l| **l < median).count();
        assert!((49_000..51_000).contains(&below), "{below}");
        let deviation = Duration::from_secs_f64((DISK.mu() + 1.0).exp());
        let below = drawn.iter().filter(|l| **l < deviation).count();
        assert!((83_500..84_800).contains(&below), "{below}");
    }

    #[test]
    fn the_seed_decides() {
        assert_eq!(DISK.sequence(7, 100), DISK.sequence(7, 200)[..100]);
        assert_ne!(DISK.sequence(7, 100), DISK.sequence(8, 100));
    }
}
