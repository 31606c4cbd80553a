//! Results that differ in one number, such as the number of vCPUs, as series.

use serde_json::Value;

use crate::run::Figure;

/// Points that a curve has at least.
const LEAST: usize = 3;

/// Figures of one measure at several points.
pub(crate) struct Series {
    /// The id, with `*` for the number.
    pub name: String,
    /// The unit of the number, such as `vcpu`; empty for a bare number.
    pub along: String,
    /// The number and the figure, by number.
    pub points: Vec<(f64, Figure)>,
}

/// All series among `figures`, and those among the arms of one figure.
pub(crate) fn series(figures: &[&Figure]) -> Vec<Series> {
    let mut found: Vec<Series> = Vec::new();
    let sweeps = figures.iter().flat_map(|figure| sweep(figure));
    let all = figures.iter().map(|figure| (*figure).clone()).chain(sweeps);
    for figure in all.filter(|figure| figure.value.is_finite()) {
        let Some((name, along, at)) = numbered(&figure.id) else {
            continue;
        };
        let mut known = found.iter_mut();
        match known.find(|one| one.name == name && one.along == along) {
            Some(series) => series.points.push((at, figure)),
            None => found.push(Series {
                name,
                along,
                points: vec![(at, figure)],
            }),
        }
    }
    found.retain(|series| series.points.len() >= LEAST);
    for series in &mut found {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    found
}

/// The points of a sweep, whose arms are named by a number and have several figures each.
fn sweep(figure: &Figure) -> Vec<Figure> {
    let arms = figure.arms.iter();
    let arms = arms.filter(|(arm, _)| arm.starts_with(|c: char| c.is_ascii_digit()));
    let arms = arms.filter_map(|(arm, found)| Some((arm, found.as_object()?)));
    let points = arms.flat_map(|(arm, found)| found.iter().map(move |one| (arm, one)));
    let point = |(arm, (name, one)): (&String, (&String, &Value))| {
        let number = |field: &str| one.get(field)?.as_f64();
        let unit = if name.ends_with("ratio") { "x" } else { "" };
        Some(Figure {
            id: format!("{}.{arm}.{name}", figure.id),
            value: number("value")?,
            min: number("min")?,
            max: number("max")?,
            unit: unit.into(),
            reference: None,
            arms: [].into(),
            ..figure.clone()
        })
    };
    points.filter_map(point).collect()
}

/// The id with `*` for its number, the number's unit, and the number. Times are in microseconds.
fn numbered(id: &str) -> Option<(String, String, f64)> {
    let words: Vec<&str> = id.split('.').collect();
    let (index, number, unit) = words.iter().enumerate().skip(1).find_map(|(index, word)| {
        let digits = word.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = word.split_at(digits);
        Some((index, number.parse::<f64>().ok()?, unit))
    })?;
    let (factor, along) = match unit {
        "us" => (1.0, "us"),
        "ms" => (1e3, "us"),
        "s" => (1e6, "us"),
        other => (1.0, other),
    };
    let name = words
        .iter()
        .enumerate()
        .map(|(at, word)| match at == index {
            true => format!("*{along}"),
            false => (*word).to_owned(),
        });
    Some((
        name.collect::<Vec<_>>().join("."),
        along.to_owned(),
        number * factor,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::example;

    #[test]
    fn a_number_in_an_id_makes_a_point() {
        let found = |id: &str| numbered(id).map(|(name, _, at)| (name, at));
        for (id, name, at) in [
            (
                "paging.exit.16vcpu.exitcost",
                "paging.exit.*vcpu.exitcost",
                16.0,
            ),
            (
                "postcopy.worker_ratio.5ms",
                "postcopy.worker_ratio.*us",
                5000.0,
            ),
            ("pager.p50_vs_simple.32", "pager.p50_vs_simple.*", 32.0),
        ] {
            assert_eq!(found(id), Some((name.to_owned(), at)));
        }
        assert_eq!(found("cpu.x86.minstr_per_s.alu"), None);
        assert_eq!(found("apf.worker_ratio.latency_1ms"), None);
    }

    #[test]
    fn three_points_make_a_series() {
        let run = example();
        let figures: Vec<&Figure> = run.figures.iter().collect();
        let found = series(&figures);
        assert_eq!(found.len(), 1);
        let points: Vec<f64> = found[0].points.iter().map(|point| point.0).collect();
        assert_eq!(points, [1.0, 2.0, 16.0]);
        assert!(series(&figures[..5]).is_empty());
    }

    #[test]
    fn the_arms_of_a_sweep_are_points() {
        let mut figure = example().figures[0].clone();
        for arm in ["00010us", "00100us", "10000us"] {
            let ratio = [("value", 2.0), ("min", 1.5), ("max", 2.5)];
            let ratio: Value = ratio.into_iter().collect();
            let points = [("worker_ratio", ratio), ("nulls", Value::Null)];
            figure.arms.insert(arm.into(), points.into_iter().collect());
        }
        let found = series(&[&figure]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, format!("{}.*us.worker_ratio", figure.id));
        let points: Vec<f64> = found[0].points.iter().map(|point| point.0).collect();
        assert_eq!(points, [10.0, 100.0, 10_000.0]);
    }
}
