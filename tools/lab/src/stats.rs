//! Interleaved runs, medians and their intervals.
//!
//! Machines drift: they warm up, another program starts, a frequency changes. So arms do not run
//! one after the other but in rounds, and a round is a palindrome. With two arms it is A B B A.
//! [`compare`] adds arm A once more under another name, the null:
//!
//! ```text
//! round      A  N  B  B  N  A        N runs exactly what A runs
//! drift      ───────────────▶        the two slices of an arm have the same mean place in time,
//!                                    so a drift that is linear over a round cancels
//! ratio      (B + B) / (A + A)       one paired estimate a round
//! null       (N + N) / (A + A)       what the method reports where nothing differs
//! ```
//!
//! The interval around a median comes from order statistics. The true median lies between the k-th
//! smallest and the k-th largest of n runs, with a probability that depends on n and k alone, for
//! every distribution. No random numbers are needed, so the same samples always give the same
//! interval. With fewer than six runs even the full range covers less than 95 %;
//! [`Summary::coverage`] has the true coverage.

use crate::experiment::{LabError, LabResult};
use crate::{interrupt, turns};
use std::time::{Duration, Instant};

/// Probability that an interval should cover the true median.
const CONFIDENCE: f64 = 0.95;

/// A median with its confidence interval.
#[must_use]
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Summary {
    /// The median of the runs.
    pub median: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// The number of runs behind it.
    pub runs: usize,
    /// Probability that `low..=high` covers the true median: at least 0.95 from six runs on.
    pub coverage: f64,
    /// How the runs lie; `None` of a figure that is computed from the summaries of several arms.
    pub spread: Option<Spread>,
}

/// The smallest run, the lower and the upper quartile, and the largest run.
pub type Spread = [f64; 4];

impl Summary {
    /// Summarises `samples`.
    ///
    /// # Panics
    /// If there is no sample, or one is not a number: both are errors of the experiment.
    pub fn of(samples: &[f64]) -> Self {
        assert!(!samples.is_empty(), "a summary of no runs");
        let mut sorted = samples.to_vec();
        sorted.sort_by(|a, b| a.partial_cmp(b).expect("a run that is not a number"));
        let n = sorted.len();
        let (skip, coverage) = interval(n);
        Self {
            median: f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]),
            low: sorted[skip],
            high: sorted[n - 1 - skip],
            runs: n,
            coverage,
            spread: Some([0, (n - 1) / 4, n - 1 - (n - 1) / 4, n - 1].map(|run| sorted[run])),
        }
    }

    /// A summary for tests.
    #[cfg(test)]
    pub fn example(low: f64, median: f64, high: f64) -> Self {
        Self {
            median,
            low,
            high,
            runs: 7,
            coverage: 0.98,
            spread: None,
        }
    }

    /// The summary of what `of` makes of each run. It rises or falls everywhere.
    pub fn map(self, of: impl Fn(f64) -> f64) -> Self {
        let [a, b] = [self.low, self.high].map(&of);
        Self {
            median: of(self.median),
            low: a.min(b),
            high: a.max(b),
            spread: self.spread.map(|spread| {
                let mut spread = spread.map(&of);
                spread.sort_by(f64::total_cmp);
                spread
            }),
            ..self
        }
    }

    /// The same summary in another unit: every figure times `factor`.
    pub fn scaled(self, factor: f64) -> Self {
        self.map(|figure| figure * factor)
    }

    /// The summary of the inverse ratio: `b / a` for `a / b`.
    ///
    /// # Panics
    /// If an end of the interval is not positive: the inverse would neither rise nor fall.
    pub fn inverse(self) -> Self {
        assert!(self.low > 0.0, "a ratio of costs or rates is positive");
        self.map(|ratio| 1.0 / ratio)
    }
}

/// The sample that a `share` (0 to 1) of the samples does not exceed.
///
/// # Panics
/// If there is no sample.
pub fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).ceil() as usize]
}

/// How many runs to leave out at each end of `n` sorted ones, and the coverage of the rest.
///
/// The number of runs below the true median is binomial(n, 1/2). Leaving out `skip` at each end
/// misses it when at most `skip` runs lie on one side: twice the lower tail.
fn interval(n: usize) -> (usize, f64) {
    // Logarithms, because 2^-n itself underflows from a thousand runs on.
    let mut term = n as f64 * 0.5_f64.ln();
    let mut tail = term.exp();
    let mut best = (0, (1.0 - 2.0 * tail).max(0.0));
    for skip in 1..n.div_ceil(2) {
        term += ((n - skip + 1) as f64 / skip as f64).ln();
        tail += term.exp();
        let coverage = 1.0 - 2.0 * tail;
        if coverage < CONFIDENCE {
            break;
        }
        best = (skip, coverage);
    }
    best
}

/// The result of [`compare`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Comparison {
    /// Arm A alone.
    pub a: Summary,
    /// Arm B alone.
    pub b: Summary,
    /// B over A, paired by round.
    pub ratio: Summary,
    /// A over A, in the same way: the noise of the method.
    pub null: Summary,
}

/// Runs two arms and a null, interleaved over `rounds` rounds.
///
/// An arm does one slice of its work and returns its measure: a rate or a cost per operation, the
/// same in both arms. The first round warms up the machine and is not counted.
///
/// # Errors
/// The first error of an arm, and [`interrupt`].
///
/// # Panics
/// If no round is counted.
pub fn compare(
    rounds: impl Into<Rounds>,
    mut a: impl FnMut() -> LabResult<f64>,
    mut b: impl FnMut() -> LabResult<f64>,
) -> LabResult<Comparison> {
    let runs = self::rounds(3, rounds, |arm| if arm == B { b() } else { a() })?;
    Ok(Comparison {
        a: Summary::of(&runs[A]),
        b: Summary::of(&runs[B]),
        ratio: paired(&runs[A], &runs[B]),
        null: paired(&runs[A], &runs[NULL]),
    })
}

const A: usize = 0;
const NULL: usize = 1;
const B: usize = 2;

/// How many rounds are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rounds {
    /// This number of rounds.
    Count(usize),
    /// As many rounds as begin within this time, and at least [`Rounds::LEAST`]. The end depends on
    /// the clock alone and never on what was measured, so it does not bias a median.
    Within(Duration),
}

impl Rounds {
    /// The fewest rounds whose full range covers a median with 95 %.
    pub const LEAST: usize = 6;

    /// Carries out as many rounds and returns their number.
    ///
    /// # Errors
    /// The first error of a round, and [`interrupt`].
    pub fn repeat(self, mut round: impl FnMut() -> LabResult) -> LabResult<usize> {
        let (began, mut done) = (Instant::now(), 0);
        while self.continues(done, began.elapsed()) {
            interrupt::check()?;
            round()?;
            done += 1;
        }
        Ok(done)
    }

    /// Whether another round is counted after `done` rounds, when `elapsed` time has passed.
    fn continues(self, done: usize, elapsed: Duration) -> bool {
        match self {
            Self::Count(count) => done < count,
            Self::Within(time) => done < Self::LEAST || elapsed < time,
        }
    }
}

impl From<usize> for Rounds {
    fn from(count: usize) -> Self {
        Self::Count(count)
    }
}

/// Runs `arms` arms interleaved and returns the runs of each: one figure for each round, the mean
/// of two slices. It is [`compare`] for any number of arms.
///
/// # Errors
/// The first error of a slice, and [`interrupt`].
pub fn rounds(
    arms: usize,
    rounds: impl Into<Rounds>,
    mut slice: impl FnMut(usize) -> LabResult<f64>,
) -> LabResult<Vec<Vec<f64>>> {
    let runs = measures(arms, rounds, |arm| slice(arm).map(|figure| [figure]))?;
    Ok(runs.into_iter().map(|[run]| run).collect())
}

/// [`rounds`] where one slice has several measures, such as the rates of two kinds of threads.
/// Returns each arm's runs, a list for each measure.
///
/// # Errors
/// The first error of a slice, and [`interrupt`].
pub fn measures<const M: usize>(
    arms: usize,
    rounds: impl Into<Rounds>,
    mut slice: impl FnMut(usize) -> LabResult<[f64; M]>,
) -> LabResult<Vec<[Vec<f64>; M]>> {
    collected(rounds, || {
        let mut means = vec![[0.0; M]; arms];
        turns::round(arms, 1, |arm, _| {
            interrupt::check()?;
            for (mean, figure) in means[arm].iter_mut().zip(slice(arm)?) {
                *mean += figure / 2.0;
            }
            Ok::<_, LabError>(())
        })?;
        Ok(means)
    })
}

/// Repeats `round`, which returns the measures of each arm. Returns each arm's runs, a list for
/// each measure. The first round warms up the machine and is not counted.
///
/// # Errors
/// The first error of a round, and [`interrupt`].
pub fn collected<const M: usize>(
    rounds: impl Into<Rounds>,
    mut round: impl FnMut() -> LabResult<Vec<[f64; M]>>,
) -> LabResult<Vec<[Vec<f64>; M]>> {
    let mut runs = vec![[const { Vec::new() }; M]; round()?.len()];
    rounds.into().repeat(|| {
        for (run, figure) in runs
            .iter_mut()
            .flatten()
            .zip(round()?.into_iter().flatten())
        {
            run.push(figure);
        }
        Ok(())
    })?;
    Ok(runs)
}

/// `b` over `a`, one ratio a round.
///
/// # Panics
/// If the arms have different numbers of runs.
pub fn paired(a: &[f64], b: &[f64]) -> Summary {
    assert_eq!(a.len(), b.len(), "arms have the same rounds");
    let ratios: Vec<f64> = a.iter().zip(b).map(|(a, b)| b / a).collect();
    Summary::of(&ratios)
}

/// One figure for each round: the mean over the shifts. `figures` has `rounds` rounds of each
/// shift, one shift after the other. Every VM has played every arm, so differences between VMs
/// cancel.
pub fn across_shifts(figures: &[f64], rounds: usize) -> Vec<f64> {
    let mean = |round: usize| {
        let all = figures.iter().skip(round).step_by(rounds);
        all.clone().sum::<f64>() / all.len() as f64
    };
    (0..rounds).map(mean).collect()
}

/// `b` over `a` in percent, the geometric mean [`across_shifts`].
pub fn percent_across(a: &[f64], b: &[f64], rounds: usize) -> Summary {
    let logs: Vec<f64> = a.iter().zip(b).map(|(a, b)| (b / a).ln()).collect();
    let means = across_shifts(&logs, rounds).into_iter();
    Summary::of(&means.map(|log| 100.0 * log.exp()).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    #[test]
    fn quantiles_are_samples() {
        let samples: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        let quantiles = [0.0, 0.5, 0.99, 1.0].map(|share| quantile(&samples, share));
        assert_eq!(quantiles, [0.0, 50.0, 99.0, 100.0]);
    }

    #[test]
    fn medians() {
        assert_eq!(Summary::of(&[3.0]).median, 3.0);
        assert_eq!(Summary::of(&[4.0, 1.0]).median, 2.5);
        assert_eq!(Summary::of(&[9.0, 1.0, 2.0]).median, 2.0);
        let five = Summary::of(&[5.0, 1.0, 4.0, 2.0, 3.0]);
        assert_eq!(five.spread, Some([1.0, 2.0, 4.0, 5.0]));
        let inverse = five.inverse().spread;
        assert_eq!(inverse, Some([0.2, 0.25, 0.5, 1.0]));
    }

    /// Published tables of the order-statistics interval (ranks counted from one).
    #[test]
    fn intervals_have_the_ranks_of_the_tables() {
        let ranks = [5, 6, 8, 9, 12, 15, 20, 25].map(|n| interval(n).0 + 1);
        assert_eq!(ranks, [1, 1, 1, 2, 3, 4, 6, 8]);
        assert!((interval(5).1 - 0.9375).abs() < 1e-12);
        assert!((interval(6).1 - 0.96875).abs() < 1e-12);
        assert_eq!(interval(1).1, 0.0);
        let (skip, coverage) = interval(2000);
        assert!(skip > 900 && coverage >= CONFIDENCE);
    }

    /// An exponential source: the interval must still cover its median as often as it says.
    #[test]
    fn coverage_holds_for_a_skewed_distribution() {
        let mut random = fastrand::Rng::with_seed(1);
        let true_median = 2.0_f64.ln();
        let trials = 2000;
        let covers = |_: &i32| {
            let runs: Vec<f64> = (0..15).map(|_| -(1.0 - random.f64()).ln()).collect();
            let summary = Summary::of(&runs);
            (summary.low..=summary.high).contains(&true_median)
        };
        let share = (0..trials).filter(covers).count() as f64 / f64::from(trials);
        let promised = interval(15).1;
        assert!(
            (share - promised).abs() < 0.015,
            "{share}, promised {promised}"
        );
    }

    #[test]
    fn rounds_are_palindromes_and_the_first_is_not_counted() {
        let order = RefCell::new(String::new());
        let note = |name, value| {
            order.borrow_mut().push(name);
            Ok::<_, LabError>(value)
        };
        let found = compare(2, || note('a', 2.0), || note('b', 3.0)).unwrap();
        assert_eq!(order.into_inner(), "aabbaa".repeat(3));
        assert_eq!((found.ratio.median, found.ratio.runs), (1.5, 2));
        assert_eq!(found.null.median, 1.0);
    }

    #[test]
    fn a_time_is_as_many_rounds_as_begin_in_it_and_at_least_six() {
        let time = Duration::from_secs(5);
        let rounds = Rounds::Within(time);
        assert!(rounds.continues(5, 2 * time) && !rounds.continues(6, 2 * time));
        assert!(rounds.continues(1000, time / 2));
        assert!(Rounds::Count(3).continues(2, time) && !Rounds::Count(3).continues(3, time));
        let found = compare(Rounds::Within(Duration::ZERO), || Ok(1.0), || Ok(2.0)).unwrap();
        assert_eq!(found.ratio.runs, Rounds::LEAST);
        assert!(found.ratio.coverage >= CONFIDENCE);
    }

    #[test]
    fn linear_drift_cancels() {
        let time = Cell::new(100.0);
        let drifting = |factor: f64| {
            time.set(time.get() + 1.0);
            Ok::<_, LabError>(factor * time.get())
        };
        let found = rounds(2, 4, |_| drifting(1.0)).unwrap();
        for (a, b) in found[0].iter().zip(&found[1]) {
            assert!((a - b).abs() < 1e-9);
        }
        let found = compare(4, || drifting(1.0), || drifting(2.0)).unwrap();
        assert!((found.null.median - 1.0).abs() < 1e-9);
        assert!((found.ratio.median - 2.0).abs() < 1e-9);
    }

    #[test]
    fn an_error_ends_the_experiment() {
        let calls = Cell::new(0);
        let failing = || {
            calls.set(calls.get() + 1);
            Err(LabError::Guest("no memory".into()))
        };
        let error = compare(3, failing, || Ok(1.0)).unwrap_err();
        assert_eq!(error.to_string(), "no memory");
        assert_eq!(calls.get(), 1);
    }

    #[test]
    fn measures_of_a_slice_stay_apart() {
        let found = measures(2, 3, |arm| Ok([arm as f64, 10.0 + arm as f64])).unwrap();
        assert_eq!(found[1], [vec![1.0; 3], vec![11.0; 3]]);
        assert_eq!(found[0], [vec![0.0; 3], vec![10.0; 3]]);
    }

    /// Two VMs, one half again as fast, and one arm does nine tenths of the other, then eight.
    #[test]
    fn what_a_vm_is_faster_cancels() {
        let a = [100.0, 100.0, 150.0, 150.0];
        let b = [150.0 * 0.9, 150.0 * 0.8, 100.0 * 0.9, 100.0 * 0.8];
        let found = percent_across(&a, &b, 2);
        assert!((found.low - 80.0).abs() < 1e-9 && (found.high - 90.0).abs() < 1e-9);
        assert_eq!(across_shifts(&[1.0, 10.0, 3.0, 30.0], 2), [2.0, 20.0]);
    }

    #[test]
    fn units_scale() {
        let summary = Summary::of(&[1.0, 2.0, 3.0]).scaled(1e3);
        assert_eq!((summary.low, summary.median, summary.high), (1e3, 2e3, 3e3));
    }
}
