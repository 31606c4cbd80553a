//! Results that differ in one number, such as that of vCPUs, as series.

use crate::run::Figure;

/// Points that a curve has at least.
const LEAST: usize = 3;

/// Figures of one measure at several points.
pub(crate) struct Series<'r> {
    /// The id, with `*` for the number.
    pub name: String,
    /// The unit of the number, such as `vcpu`; empty for a bare number.
    pub along: String,
    /// The number and the figure, by number.
    pub points: Vec<(f64, &'r Figure)>,
}

/// All series among `figures`.
pub(crate) fn series<'r>(figures: &[&'r Figure]) -> Vec<Series<'r>> {
    let mut found: Vec<Series<'r>> = Vec::new();
    for figure in figures.iter().filter(|figure| figure.value.is_finite()) {
        let Some((name, along, at)) = numbered(&figure.id) else {
            continue;
        };
        match found
            .iter_mut()
            .find(|one| one.name == name && one.along == along)
        {
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
}
