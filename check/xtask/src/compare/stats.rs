//! Medians of ratios, their intervals, and the rule by which a difference counts.
//!
//! The lab's `stats` computes the same interval. This crate imports nothing of the workspace, so
//! that it also works if the workspace does not compile.

/// Probability that an interval should cover the true median.
pub const CONFIDENCE: f64 = 0.95;

/// A median with an interval from order statistics.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Interval {
    /// The median of the samples.
    pub median: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Probability that the interval covers the true median: 95 % or more from six samples on.
    pub coverage: f64,
}

impl Interval {
    /// The interval of `samples`; `None` if there are no samples, or one of them is NaN.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        if sorted.is_empty() || sorted.iter().any(|sample| sample.is_nan()) {
            return None;
        }
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let (skip, coverage) = order_statistics(n);
        Some(Self {
            median: f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]),
            low: sorted[skip],
            high: sorted[n - 1 - skip],
            coverage,
        })
    }
}

/// The number of `n` sorted samples to leave out at each end, and the coverage of the rest.
///
/// The number of samples below the true median is binomial(n, 1/2). An interval that leaves out
/// `skip` samples at each end misses the median with twice the lower tail.
fn order_statistics(n: usize) -> (usize, f64) {
    let mut term = 0.5_f64.powi(n.min(1000) as i32);
    let mut tail = term;
    let mut best = (0, (1.0 - 2.0 * tail).max(0.0));
    for skip in 1..n.div_ceil(2) {
        term *= (n - skip + 1) as f64 / skip as f64;
        tail += term;
        if 1.0 - 2.0 * tail < CONFIDENCE {
            break;
        }
        best = (skip, 1.0 - 2.0 * tail);
    }
    best
}

/// `new` over `old`. Two zeros are equal; a zero in `old` alone has no ratio.
pub fn ratio(old: f64, new: f64) -> f64 {
    if old == 0.0 && new == 0.0 {
        1.0
    } else if old == 0.0 {
        f64::NAN
    } else {
        new / old
    }
}

/// Which direction is progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Better {
    /// More is better: a rate.
    Higher,
    /// Less is better: a cost.
    Lower,
}

/// The judgement of a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The new commit is worse, by more than the null's noise.
    Slower,
    /// The new commit is better, by more than the null's noise.
    Faster,
    /// The interval includes 1, or meets the null's interval, or there are too few samples.
    Undecided,
}

impl Verdict {
    /// The word for the verdict in the table.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Slower => "slower",
            Self::Faster => "faster",
            Self::Undecided => "undecided",
        }
    }
}

/// Judges `ratio`, the new commit over the old, by `null`, the old commit over itself.
pub fn judge(ratio: Interval, null: Interval, better: Better) -> Verdict {
    if ratio.coverage < CONFIDENCE {
        return Verdict::Undecided;
    }
    let above = ratio.low > null.high.max(1.0);
    let below = ratio.high < null.low.min(1.0);
    match (above, below, better) {
        (true, _, Better::Lower) | (_, true, Better::Higher) => Verdict::Slower,
        (true, _, Better::Higher) | (_, true, Better::Lower) => Verdict::Faster,
        _ => Verdict::Undecided,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(low: f64, high: f64) -> Interval {
        Interval {
            median: f64::midpoint(low, high),
            low,
            high,
            coverage: 0.98,
        }
    }

    /// Table values of the binomial: 7 samples keep their full range, 9 leave out one at each end.
    #[test]
    fn intervals_are_order_statistics() {
        let seven = Interval::of(&[7.0, 1.0, 3.0, 2.0, 6.0, 5.0, 4.0]).unwrap();
        assert_eq!((seven.low, seven.median, seven.high), (1.0, 4.0, 7.0));
        assert_eq!(seven.coverage, 1.0 - 2.0 / 128.0);
        let nine: Vec<f64> = (1..=9).map(f64::from).collect();
        let nine = Interval::of(&nine).unwrap();
        assert_eq!((nine.low, nine.median, nine.high), (2.0, 5.0, 8.0));
        assert_eq!(nine.coverage, 1.0 - 2.0 * 10.0 / 512.0);
        let two = Interval::of(&[1.0, 2.0]).unwrap();
        assert_eq!((two.median, two.coverage), (1.5, 0.5));
        assert_eq!(Interval::of(&[1.0]).unwrap().coverage, 0.0);
        assert_eq!(Interval::of(&[]), None);
        assert_eq!(Interval::of(&[1.0, f64::NAN]), None);
    }

    #[test]
    fn ratios_of_zeros() {
        assert_eq!(ratio(2.0, 3.0), 1.5);
        assert_eq!(ratio(0.0, 0.0), 1.0);
        assert!(ratio(0.0, 1.0).is_nan());
    }

    #[test]
    fn a_difference_counts_outside_of_the_null() {
        let null = interval(0.98, 1.03);
        let judge = |low, high, better| judge(interval(low, high), null, better);
        assert_eq!(judge(1.04, 1.10, Better::Lower), Verdict::Slower);
        assert_eq!(judge(1.04, 1.10, Better::Higher), Verdict::Faster);
        assert_eq!(judge(0.90, 0.97, Better::Lower), Verdict::Faster);
        assert_eq!(judge(0.90, 0.97, Better::Higher), Verdict::Slower);
        // Beyond 1 but inside of the noise; and around 1.
        assert_eq!(judge(1.01, 1.10, Better::Lower), Verdict::Undecided);
        assert_eq!(judge(0.90, 1.10, Better::Lower), Verdict::Undecided);
        assert_eq!(judge(0.985, 0.99, Better::Lower), Verdict::Undecided);
    }

    #[test]
    fn few_samples_decide_nothing() {
        let of = |value| Interval::of(&[value; 5]).unwrap();
        assert_eq!(judge(of(2.0), of(1.0), Better::Lower), Verdict::Undecided);
        let of = |value| Interval::of(&[value; 6]).unwrap();
        assert_eq!(judge(of(2.0), of(1.0), Better::Lower), Verdict::Slower);
    }

    /// If the null's interval lies on one side of 1, a small difference on the other side is still
    /// undecided.
    #[test]
    fn one_is_always_part_of_the_noise() {
        let null = interval(1.02, 1.05);
        let equal = interval(0.99, 1.01);
        assert_eq!(judge(equal, null, Better::Lower), Verdict::Undecided);
    }
}
