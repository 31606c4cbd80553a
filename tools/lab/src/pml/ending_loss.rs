//! The ratio of two losses; the second may be zero.

use crate::stats::Summary;

/// The noise: the null's largest distance from zero.
fn noise(null: Summary) -> f64 {
    null.low.abs().max(null.high.abs())
}

/// Whether the loss is within the noise.
pub fn within_noise(loss: Summary, null: Summary) -> bool {
    loss.median <= noise(null)
}

/// `great` over `small`. If `small` is within the noise, the noise is the divisor. So the ratio
/// claims no more than was shown, and there is no division by something near zero. The ends of the
/// ratio are the opposite ends of the two intervals.
///
/// # Panics
/// If `small` and `null` are both exactly zero, which no measurement is.
pub fn over(great: Summary, small: Summary, null: Summary) -> Summary {
    let floor = noise(null);
    let by = |small: f64| small.max(floor);
    assert!(by(small.low) > 0.0, "a loss or noise is above zero");
    // The lower end has the larger divisor if the dividend is a loss, and the smaller one if it is
    // a gain.
    let low = (great.low / by(small.high)).min(great.low / by(small.low));
    let high = (great.high / by(small.low)).max(great.high / by(small.high));
    Summary {
        median: great.median / by(small.median),
        low,
        high,
        runs: great.runs.min(small.runs),
        // Both intervals have to hold.
        coverage: (great.coverage + small.coverage - 1.0).max(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(low: f64, median: f64, high: f64) -> Summary {
        Summary {
            median,
            low,
            high,
            runs: 10,
            coverage: 0.98,
        }
    }

    const NULL: Summary = Summary {
        median: 0.0,
        low: -2.0,
        high: 1.0,
        runs: 10,
        coverage: 0.98,
    };

    #[test]
    fn losses_divide_end_against_end() {
        let ratio = over(summary(40.0, 50.0, 60.0), summary(4.0, 5.0, 8.0), NULL);
        assert_eq!((ratio.low, ratio.median, ratio.high), (5.0, 10.0, 15.0));
        assert!((ratio.coverage - 0.96).abs() < 1e-12);
        assert!(!within_noise(summary(4.0, 5.0, 8.0), NULL));
    }

    #[test]
    fn what_is_noise_counts_as_large_as_noise() {
        let small = summary(-3.0, -1.0, 4.0);
        let ratio = over(summary(40.0, 50.0, 60.0), small, NULL);
        assert_eq!((ratio.low, ratio.median, ratio.high), (10.0, 25.0, 30.0));
        assert!(within_noise(small, NULL));
    }

    #[test]
    fn a_gain_is_no_great_loss() {
        let ratio = over(summary(-8.0, 1.0, 9.0), summary(1.0, 2.0, 4.0), NULL);
        assert!(ratio.low <= -4.0 && ratio.high >= 4.5);
    }
}
