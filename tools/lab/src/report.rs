//! The table on stdout, and progress on stderr.

use std::borrow::Cow;
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
pub(crate) use lacuna_report::digits as figure;

use crate::experiment::LabResult;
use crate::interrupt;
use crate::result::{Better, Measurement, Report};

/// Columns of a paragraph.
const WIDTH: usize = 100;

/// The report for people: paragraphs, a table with one line for each result, the skipped results,
/// the details, and the machine.
pub fn table(report: &Report) -> String {
    let header = [
        "result",
        "value",
        "95 % interval",
        "runs",
        "bar",
        "wanted",
        "",
    ];
    let mut rows = vec![header.map(str::to_owned)];
    rows.extend(report.results.iter().map(row));
    let mut text = String::new();
    for paragraph in &report.about {
        let _ = writeln!(text, "{}\n", wrap(paragraph));
    }
    text.push_str(&align(&rows));
    for skipped in &report.skipped {
        let _ = writeln!(text, "{}  skipped: {}", skipped.id, skipped.why);
    }
    if let Some(why) = &report.ended_early {
        let _ = writeln!(text, "ended early: {why}; results after that are missing");
    }
    for detail in &report.details {
        let _ = write!(text, "\n{detail}");
    }
    let _ = writeln!(text, "\n{}", report.host);
    text
}

fn row(result: &Measurement) -> [String; 7] {
    let sign = match result.better {
        Better::Higher => ">=",
        Better::Lower => "<=",
    };
    let bound = |bound: Option<f64>| {
        bound.map_or(String::new(), |bound| format!("{sign} {}", figure(bound)))
    };
    let verdict = match (result.met, result.runs) {
        (None, _) if result.bar.is_some() => "undecided",
        // So few runs have no 95 % interval.
        (Some(_), 2..=4) => "undecided",
        (Some(true), _) if result.simulated => "ok, simulated",
        (Some(false), _) if result.simulated => "MISSED, simulated",
        (Some(true), _) => "ok",
        (Some(false), _) => "MISSED",
        (None, _) => "",
    };
    [
        result.id.clone(),
        format!("{} {}", figure(result.value), result.unit),
        format!("{} .. {}", figure(result.min), figure(result.max)),
        result.runs.to_string(),
        bound(result.bar),
        bound(result.wanted),
        verdict.to_owned(),
    ]
}

/// `paragraph` in lines of at most [`WIDTH`] columns.
pub(crate) fn wrap(paragraph: &str) -> String {
    let mut text = String::new();
    let mut column = 0;
    for word in paragraph.split_whitespace() {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > WIDTH {
            text.push('\n');
            column = 0;
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += width;
    }
    text
}

/// `1234567` as `1.2M`, for rates.
pub fn short(value: f64) -> String {
    let (value, unit) = match value {
        v if v >= 1e9 => (v / 1e9, "G"),
        v if v >= 1e6 => (v / 1e6, "M"),
        v if v >= 1e4 => (v / 1e3, "k"),
        v => return format!("{v:.0}"),
    };
    let decimals = if value >= 100.0 { 0 } else { 1 };
    format!("{value:.decimals$}{unit}")
}

/// `1500` ns as `1.5 us`.
pub fn time(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

/// `rows` in columns, two spaces apart. The first and the last column are flush left, the others
/// flush right.
pub(crate) fn align<R: AsRef<[String]>>(rows: &[R]) -> String {
    let mut widths = Vec::new();
    for row in rows {
        widths.resize(row.as_ref().len(), 0);
        for (width, cell) in widths.iter_mut().zip(row.as_ref()) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, &width)) in row.as_ref().iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let _ = if column == 0 || column == widths.len() - 1 {
                write!(line, "{gap}{cell:<width$}")
            } else {
                write!(line, "{gap}{cell:>width$}")
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Whether a command shows progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verbosity {
    /// Progress on stderr, if stderr is a terminal.
    Normal,
    /// Only the result.
    Quiet,
}

/// A line on stderr that says what is being measured. It is not shown if stderr is no terminal,
/// because it would only fill a log.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Progress over `steps` steps.
    pub fn new(steps: u64, verbosity: Verbosity) -> Self {
        if verbosity == Verbosity::Quiet || !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(steps);
        let style = ProgressStyle::with_template("{spinner} [{pos}/{len}] {msg} ({elapsed})");
        bar.set_style(style.expect("the template is well formed"));
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    /// Begins again, with `steps` steps.
    pub fn begin(&self, steps: u64) {
        self.0.reset();
        self.0.set_length(steps);
    }

    /// Begins a step.
    ///
    /// # Errors
    /// The user asked for the end: [`crate::interrupt`].
    pub fn step(&self, what: impl Into<Cow<'static, str>>) -> LabResult {
        interrupt::check()?;
        self.0.inc(1);
        self.0.set_message(what);
        Ok(())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Summary;

    #[test]
    fn words_come_before_the_table_and_details_after_it() {
        let mut report = Report::new("lacuna lab");
        report.say("word ".repeat(30));
        report.detail("more\n");
        let text = table(&report);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], ["word"; 20].join(" "));
        assert_eq!(lines[1], ["word"; 10].join(" "));
        assert!(lines[3].starts_with("result"), "{text}");
        assert_eq!(lines[5], "more");
    }

    #[test]
    fn rates_and_times_are_short() {
        let rates = [640.0, 12_500.0, 2e6, 3.2e11].map(short);
        assert_eq!(rates, ["640", "12.5k", "2.0M", "320G"]);
        let times = [900, 61_500, 2_500_000].map(time);
        assert_eq!(times, ["900 ns", "61.5 us", "2.5 ms"]);
    }

    #[test]
    fn a_table_is_aligned_and_names_what_was_missed_or_skipped() {
        let mut report = Report::new("lacuna lab base");
        report.host.date = "2026-01-31T00:00:00Z".into();
        let summary = Summary::example(0.36, 0.38, 0.41);
        let fault = Measurement::new("fault.soft_vs_host", "x", Better::Lower, summary);
        let rate = Measurement::new(
            "cpu.x86.minstr_per_s.alu",
            "M/s",
            Better::Higher,
            summary.scaled(1000.0),
        );
        report.push(fault.bar(0.5).wanted(0.4));
        report.push(rate.bar(600.0));
        report.skip("cpu.x86.vs_qemu_tcg.mem64m", "no QEMU");
        let text = table(&report);
        let lines: Vec<&str> = text.lines().collect();
        let expected = [
            "result                      value   95 % interval  runs       bar    wanted",
            "fault.soft_vs_host        0.380 x  0.360 .. 0.410     7  <= 0.500  <= 0.400  ok",
            "cpu.x86.minstr_per_s.alu  380 M/s      360 .. 410     7    >= 600            MISSED",
            "cpu.x86.vs_qemu_tcg.mem64m  skipped: no QEMU",
        ];
        assert_eq!(lines[..4], expected);
        assert_eq!(report.missed().count(), 1);
    }
}
