//! The committed report: `docs/report/`, drawn from the runs.

use std::path::PathBuf;

use lacuna_report::{Figure, Run, drawings, html, overview, repeatable};

use serde_json::{Value, json};

use super::runs::Runs;

/// The folder, from the root of the workspace.
const FOLDER: &str = "docs/report";

/// The files of the report: paths from the root, and their texts.
pub fn files(runs: &Runs) -> Vec<(PathBuf, String)> {
    let [mut small, mut large] = ["2", "16"].map(|cores| run(runs, cores));
    small.about = vec![
        "The figures of `docs/figures.json`, each of the newest commit that has it. A range goes \
         from the lowest end of its runs' 95 % intervals to the highest. Its machine, and what \
         was measured since, is in `docs/figures.md`."
            .into(),
    ];
    small.command = "lacuna lab --full".into();
    large.command = small.command.clone();
    let pictures = drawings().into_iter();
    let pictures = pictures.map(|(name, svg)| (format!("{name}.svg"), svg));
    let mut files = vec![
        ("index.html".to_owned(), html(&small, Some(&large))),
        ("overview.svg".to_owned(), overview(&small, Some(&large))),
    ];
    files.extend(pictures);
    let in_folder = |(name, text)| (PathBuf::from(FOLDER).join(name), text);
    files.into_iter().map(in_folder).collect()
}

/// All figures of hosts with so many cores.
fn run(runs: &Runs, cores: &str) -> Run {
    let mut dates: Vec<String> = Vec::new();
    let figures = runs.ids("", cores).into_iter().filter_map(|id| {
        let one = runs.figure(id, cores)?;
        dates.push(one.date.clone());
        Some(Figure {
            id: id.to_owned(),
            value: one.value,
            min: one.low,
            max: one.high,
            runs: one.rounds,
            unit: one.unit,
            better: one.better,
            bar: one.bar,
            met: one.met,
            reference: one.reference,
            reference_source: one.reference_source,
            simulated: one.simulated,
            spread: None,
            arms: one.null.map(null).into_iter().collect(),
            // Some rows are of a page, and their command has a remark.
            command: repeatable(one.command.split(" (").next().unwrap_or_default()),
            measured: format!("{} {}", one.date, one.commit),
        })
    });
    let figures = figures.collect();
    dates.sort_unstable();
    let ends = [dates.first(), dates.last()].map(|date| date.map_or("", String::as_str));
    Run {
        name: format!("{cores} cores"),
        host: format!("virtual machines with {cores} cores"),
        date: format!("{} to {}", ends[0], ends[1]),
        figures,
        ..Run::default()
    }
}

/// The arm of a figure beside itself, in the lab's form.
fn null([min, max]: [f64; 2]) -> (String, Value) {
    ("null".into(), json!({"min": min, "max": max}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_has_the_numbers_of_the_runs() {
        let runs = Runs::parse(
            r#"{"runs":[{"commit":"abcdef1","date":"2026-11-24","host":"H, 2 cores, L",
            "command":"lacuna lab thp.call","results":[{"id":"thp.call.elsewhere","value":9.126,
            "min":8.8,"max":9.4,"runs":15,"unit":"x","bar":5.0,"met":true}]},
            {"commit":"abcdef2","date":"2026-11-25","host":"H, 16 cores, L",
            "command":"lacuna lab thp.call","results":[{"id":"thp.call.elsewhere","value":7.0,
            "min":6.0,"max":8.0,"runs":15,"unit":"x"}]}]}"#,
        )
        .unwrap();
        let files = files(&runs);
        assert_eq!(files[0].0, PathBuf::from("docs/report/index.html"));
        let page = &files[0].1;
        for text in [
            "<b>9.13 x</b> <span>8.80 .. 9.40</span>",
            "◇ <b>7.00 x</b> <span>6.00 .. 8.00</span> <b>differs</b>",
            "by <code>lacuna lab thp.call</code>, 2026-11-24 abcdef1",
        ] {
            assert!(page.contains(text), "{text}: {page}");
        }
        assert!(files[1].1.contains("9.13 x"));
    }
}
