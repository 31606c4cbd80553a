//! Pairs the results of two commits by id and round.

use std::collections::BTreeMap;

use super::lab::Figure;
use super::stats::{self, Better, Interval, Verdict};

/// Which binary a slice runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Arm {
    /// The old commit.
    Old,
    /// The old commit again: its difference from [`Arm::Old`] is noise.
    Null,
    /// The new commit.
    New,
}

/// One round. The two slices of each arm have the same mean position in time for all arms, so a
/// linear drift of the machine cancels.
pub const ROUND: [Arm; 6] = [Arm::Old, Arm::Null, Arm::New, Arm::New, Arm::Null, Arm::Old];

/// A result of both commits, or of one.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    /// The result's id.
    pub id: String,
    /// Unit of its values.
    pub unit: String,
    /// Which direction is progress.
    pub better: Better,
    /// The finding of the rounds.
    pub found: Found,
}

/// The finding of the rounds about a result.
#[derive(Clone, PartialEq, Debug)]
pub enum Found {
    /// Both commits have it.
    Both(Pair),
    /// Only the old commit has it; its median.
    OnlyOld(f64),
    /// Only the new commit has it; its median.
    OnlyNew(f64),
    /// Both commits have it, but there is no ratio, for this reason.
    NoRatio(&'static str),
}

/// A result of both commits.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Pair {
    /// Median of the old commit.
    pub old: f64,
    /// Median of the new commit.
    pub new: f64,
    /// New over old, paired by round.
    pub ratio: Interval,
    /// Old over old, paired in the same way.
    pub null: Interval,
    /// The number of rounds in which every arm has it.
    pub rounds: usize,
    /// The judgement.
    pub verdict: Verdict,
}

/// The figures of all slices of one part.
#[derive(Default)]
pub struct Samples {
    results: Vec<Result>,
}

struct Result {
    id: String,
    unit: String,
    better: Better,
    /// The slices' values, by round and arm.
    values: BTreeMap<(usize, Arm), Vec<f64>>,
}

impl Samples {
    /// Adds the figures of one slice.
    pub fn add(&mut self, round: usize, arm: Arm, figures: Vec<Figure>) {
        for figure in figures {
            let known = self.results.iter().position(|known| known.id == figure.id);
            let index = known.unwrap_or_else(|| {
                self.results.push(Result {
                    id: figure.id,
                    unit: figure.unit,
                    better: figure.better,
                    values: BTreeMap::new(),
                });
                self.results.len() - 1
            });
            let values = &mut self.results[index].values;
            values.entry((round, arm)).or_default().push(figure.value);
        }
    }

    /// The results, in the lab's order.
    pub fn into_rows(self) -> Vec<Row> {
        let row = |result: Result| Row {
            found: result.found(),
            id: result.id,
            unit: result.unit,
            better: result.better,
        };
        self.results.into_iter().map(row).collect()
    }
}

impl Result {
    /// An arm's value in a round: the mean of its slices.
    fn value(&self, round: usize, arm: Arm) -> Option<f64> {
        let values = self.values.get(&(round, arm))?;
        Some(values.iter().sum::<f64>() / values.len() as f64)
    }

    fn median(&self, arm: Arm) -> Option<f64> {
        let of_arm = self.values.iter().filter(|((_, of), _)| *of == arm);
        let values: Vec<f64> = of_arm.flat_map(|(_, values)| values).copied().collect();
        Interval::of(&values).map(|interval| interval.median)
    }

    fn found(&self) -> Found {
        let has = |arm| self.values.keys().any(|(_, of)| *of == arm);
        match (has(Arm::Old) || has(Arm::Null), has(Arm::New)) {
            (true, false) => Found::OnlyOld(self.median(Arm::Old).unwrap_or(f64::NAN)),
            (false, _) => Found::OnlyNew(self.median(Arm::New).unwrap_or(f64::NAN)),
            (true, true) => self.pair(),
        }
    }

    fn pair(&self) -> Found {
        let rounds = self.values.keys().map(|(round, _)| *round).max();
        let (mut ratios, mut nulls) = (Vec::new(), Vec::new());
        for round in 0..=rounds.unwrap_or(0) {
            let value = |arm| self.value(round, arm);
            if let (Some(old), Some(null), Some(new)) =
                (value(Arm::Old), value(Arm::Null), value(Arm::New))
            {
                ratios.push(stats::ratio(old, new));
                nulls.push(stats::ratio(old, null));
            }
        }
        if ratios.is_empty() {
            return Found::NoRatio("no round has it in every arm");
        }
        let medians = self.median(Arm::Old).zip(self.median(Arm::New));
        let intervals = Interval::of(&ratios).zip(Interval::of(&nulls));
        let (Some((old, new)), Some((ratio, null))) = (medians, intervals) else {
            return Found::NoRatio("a value is not a number, or the old one is zero");
        };
        Found::Both(Pair {
            old,
            new,
            ratio,
            null,
            rounds: ratios.len(),
            verdict: stats::judge(ratio, null, self.better),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(id: &str, value: f64) -> Figure {
        Figure {
            id: id.into(),
            value,
            unit: "ns".into(),
            better: Better::Lower,
        }
    }

    /// Rounds of a palindrome. Time runs 1 % slower with each slice.
    fn drifting(new: f64) -> Row {
        let mut samples = Samples::default();
        for round in 0..7 {
            for (slice, arm) in (0..).zip(ROUND) {
                let cost = if arm == Arm::New { new } else { 100.0 };
                let drift = 1.0 + 0.01 * f64::from(slice);
                samples.add(round, arm, vec![figure("a.b", cost * drift)]);
            }
        }
        samples.into_rows().remove(0)
    }

    fn verdict(row: &Row) -> Verdict {
        match &row.found {
            Found::Both(pair) => pair.verdict,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_linear_drift_cancels() {
        let Found::Both(pair) = drifting(100.0).found else {
            panic!("both arms have it");
        };
        assert!((pair.ratio.median - 1.0).abs() < 1e-12);
        assert_eq!((pair.rounds, pair.verdict), (7, Verdict::Undecided));
    }

    #[test]
    fn a_difference_is_found_in_both_directions() {
        assert_eq!(verdict(&drifting(103.0)), Verdict::Slower);
        assert_eq!(verdict(&drifting(97.0)), Verdict::Faster);
    }

    #[test]
    fn what_one_commit_lacks_is_named() {
        let mut samples = Samples::default();
        for arm in ROUND {
            let mut figures = vec![figure("in.both", 2.0)];
            if arm == Arm::New {
                figures.push(figure("in.new", 3.0));
            } else {
                figures.push(figure("in.old", 4.0));
            }
            samples.add(0, arm, figures);
        }
        let rows = samples.into_rows();
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row.id.as_str(), &row.found))
            .collect();
        assert!(matches!(found[0], ("in.both", Found::Both(_))));
        assert_eq!(found[1], ("in.old", &Found::OnlyOld(4.0)));
        assert_eq!(found[2], ("in.new", &Found::OnlyNew(3.0)));
    }

    /// A slice that ended early lacks some results: they leave that round out.
    #[test]
    fn a_round_counts_only_if_every_arm_has_it() {
        let mut samples = Samples::default();
        for round in 0..3 {
            for arm in ROUND {
                if round != 1 || arm != Arm::New {
                    samples.add(round, arm, vec![figure("a.b", 5.0)]);
                }
            }
        }
        let row = samples.into_rows().remove(0);
        let Found::Both(pair) = row.found else {
            panic!("two rounds have it");
        };
        assert_eq!(pair.rounds, 2);
    }

    #[test]
    fn what_is_no_number_has_no_ratio() {
        let mut samples = Samples::default();
        for arm in ROUND {
            samples.add(0, arm, vec![figure("a.b", f64::NAN)]);
        }
        let found = &samples.into_rows()[0].found;
        assert!(matches!(found, Found::NoRatio(_)), "{found:?}");
    }
}
