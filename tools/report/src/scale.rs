//! The axis of a plot, and its ticks.

/// How much larger the largest value must be than the smallest for a logarithmic axis.
const LOG_FROM: f64 = 6.0;
/// The least range of an axis, as a part of its largest value.
const NARROW: f64 = 0.3;
/// Ticks at most: so many fit on the plot of a phone.
const TICKS: usize = 6;
/// Percent of the axis that stay free at either end.
const MARGIN: f64 = 5.0;

/// From values to positions in percent of the plot's width or height.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    low: f64,
    high: f64,
    log: bool,
}

impl Scale {
    /// The scale on which all finite `values` fit.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let finite = values.into_iter().filter(|value| value.is_finite());
        let ends = finite.fold(None, |ends: Option<(f64, f64)>, value| {
            let (low, high) = ends.unwrap_or((value, value));
            Some((low.min(value), high.max(value)))
        });
        let (low, high) = ends.unwrap_or((0.0, 1.0));
        let log = low > 0.0 && high / low >= LOG_FROM;
        // A narrow range is widened: a difference of some percent does not fill the axis.
        let least = NARROW * high.abs().max(low.abs()).max(f64::MIN_POSITIVE);
        let pad = (least - (high - low)).max(0.0) / 2.0;
        Self {
            low: low - pad,
            high: high + pad,
            log,
        }
    }

    /// The position of `value`; at an end if it is beyond it.
    pub fn at(self, value: f64) -> f64 {
        let part = if self.log {
            // Zero and below are beyond the low end.
            (value.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        MARGIN + part.clamp(-0.02, 1.02) * (100.0 - 2.0 * MARGIN)
    }

    /// Round values on the axis, ascending.
    pub fn ticks(self) -> Vec<f64> {
        let steps: &[&[f64]] = &[
            &[1.0, 1.5, 2.0, 3.0, 5.0, 7.0],
            &[1.0, 2.0, 5.0],
            &[1.0, 3.0],
            &[1.0],
        ];
        if self.log {
            let each = steps.iter().map(|steps| self.decades(steps, 1));
            let mut all = each.chain([2, 3].map(|apart| self.decades(&[1.0], apart)));
            return all.find(|ticks| ticks.len() <= TICKS).unwrap_or_default();
        }
        let rough = (self.high - self.low) / TICKS as f64;
        let size = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|factor| factor * size);
        let step = step
            .into_iter()
            .find(|step| *step >= rough)
            .unwrap_or(10.0 * size);
        let (first, last) = (
            (self.low / step).ceil() as i64,
            (self.high / step).floor() as i64,
        );
        (first..=last).map(|tick| tick as f64 * step).collect()
    }

    /// `steps` in each `apart`-th decade, as far as they are on the axis.
    fn decades(self, steps: &[f64], apart: i32) -> Vec<f64> {
        let decade = |value: f64| value.log10().floor() as i32;
        let decades = decade(self.low)..=decade(self.high);
        let decades = decades.filter(|decade| decade % apart == 0);
        let all =
            decades.flat_map(|decade| steps.iter().map(move |step| step * 10_f64.powi(decade)));
        all.filter(|tick| (self.low..=self.high).contains(tick))
            .collect()
    }
}

/// A tick's number, without zeros behind the point.
pub(crate) fn tick(value: f64) -> String {
    match value.abs() {
        size if size >= 1e6 => format!("{}M", (value / 1e4).round() / 100.0),
        size if size >= 1e4 => format!("{}k", (value / 10.0).round() / 100.0),
        _ => format!("{}", (value * 1e4).round() / 1e4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_stay_inside() {
        for values in [
            vec![1.0, 2.0],
            vec![0.01, 500.0],
            vec![-3.0, 4.0],
            vec![7.0],
            vec![],
        ] {
            let scale = Scale::of(values.iter().copied().chain([f64::NAN]));
            for value in values.into_iter().chain([f64::INFINITY, f64::NEG_INFINITY]) {
                let at = scale.at(value);
                assert!((0.0..=100.0).contains(&at), "{scale:?} {value} {at}");
            }
        }
        let scale = Scale::of([1.0, 100.0]);
        assert!((scale.at(10.0) - 50.0).abs() < 1e-9, "logarithmic");
    }

    #[test]
    fn ticks_are_few_and_round() {
        for (low, high) in [
            (1.0, 2.0),
            (0.01, 500.0),
            (-3.0, 4.0),
            (1.0, 7.0),
            (0.001, 1e9),
        ] {
            let ticks = Scale::of([low, high]).ticks();
            assert!((2..=7).contains(&ticks.len()), "{low} {high}: {ticks:?}");
            assert!(ticks.iter().all(|tick| (low..=high).contains(tick)));
        }
        assert_eq!(
            Scale::of([0.0, 100.0]).ticks(),
            [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
        );
        assert_eq!(Scale::of([0.9, 10.0]).ticks(), [1.0, 2.0, 5.0, 10.0]);
        assert_eq!(
            [0.5, 20_000.0, 2e6, -3.0].map(tick),
            ["0.5", "20k", "2M", "-3"]
        );
    }
}
