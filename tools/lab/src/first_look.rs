//! The first look: `lacuna` alone, or `lacuna lab` without a name.
//!
//! Every mechanism is measured once, without it and with it, in turns, in less than a minute. The
//! five systems are in the order of their years. The sixth row is the engine's fault, under all of
//! them. The result is one row for each:
//!
//! ```text
//! heading    the mechanism: what is measured, what *without* means, the time that moves the ratio
//! figures    without, with, ratio, its 95 % interval, the null's interval, the published figure
//! ```
//! The speed of the vCPU is no gain of a mechanism. It is a line of its own, beside native speed.
//!
//! The rows are measurements of the experiments ([`crate::apf`], [`crate::thp`], [`crate::pml`],
//! [`crate::paging`], [`crate::base`]), with the same ids and fewer rounds. Each row has a time. A
//! round counts if it begins within that time. At least six rounds count, because with fewer an
//! interval does not cover 95 %.
//!
//! A row is *undecided* if its interval includes 1.0, or if it has fewer than six rounds.

use crate::experiment::{LabResult, Options};
use crate::report::{align, figure, wrap};
use crate::result::{Measurement, Report};
use crate::stats::{Rounds, Summary};
use crate::{apf, base, paging, pml, thp};
use lacuna::Arch;
use std::fmt::Write;
use std::time::Duration;

/// Lines that [`FirstLook::text`] prints at most.
pub const LINES: usize = 40;

/// One mechanism, or one figure of the engine under all of them.
#[derive(Clone, Debug)]
pub struct Row {
    /// The mechanism.
    pub system: &'static str,
    /// What is measured, and what *without* means.
    pub what: &'static str,
    /// The figure without the mechanism, with its unit.
    pub without: String,
    /// The figure with it.
    pub with: String,
    /// How many times better the second figure is than the first.
    pub ratio: Summary,
    /// The same ratio where nothing differs.
    pub null: Summary,
    /// The published figure with its source, or `none`.
    pub published: &'static str,
}

impl Row {
    fn is_decided(&self) -> bool {
        let Summary { low, high, .. } = self.ratio;
        self.ratio.runs >= Rounds::LEAST && !(low..=high).contains(&1.0)
    }

    /// Its cells, under [`HEADER`].
    fn figures(&self) -> [String; 8] {
        let range = |s: &Summary| format!("{} .. {}", figure(s.low), figure(s.high));
        let verdict = if self.is_decided() { "" } else { "undecided" };
        [
            "  ".into(),
            self.without.clone(),
            self.with.clone(),
            format!("{}x", figure(self.ratio.median)),
            range(&self.ratio),
            verdict.into(),
            range(&self.null),
            self.published.into(),
        ]
    }
}

/// What one experiment adds to the first look: its row, and the measurements behind it.
pub struct Found {
    /// The row.
    pub row: Row,
    /// For the JSON form.
    pub results: Vec<Measurement>,
}

/// A first look at this machine.
pub struct FirstLook {
    /// Its JSON form.
    pub report: Report,
    /// Each with the times that move its ratio, in words.
    rows: Vec<(Row, String)>,
    /// The speed of the vCPU, beside native speed.
    speed: Option<Row>,
}

/// What is measured, the processor of its guest, its time in seconds, and how it is measured.
type Part = (
    &'static str,
    Arch,
    u64,
    fn(&Options, Rounds) -> LabResult<Found>,
);

const X86: Arch = Arch::X86_64;
const PARTS: [Part; 7] = [
    ("x86 async page faults, 2010", X86, 9, apf::first_look),
    ("huge pages, 2012", X86, 4, thp::first_look),
    ("page-modification logging, 2015", X86, 7, pml::first_look),
    ("arm64 async page faults, 2020", Arch::Arm64, 9, arm64_apf),
    ("missing memory, 2023", X86, 8, paging::first_look),
    ("resident fault", X86, 4, base::fault_first_look),
    (SPEED, X86, 4, base::vcpu_first_look),
];
/// The part without a row.
const SPEED: &str = "vCPU";

/// The experiment of the x86 row, with arm64 guests. The published figure is for a memory-bound
/// thread with other swap-in times. Measuring that takes minutes: `lacuna lab apf-arm64`.
fn arm64_apf(options: &Options, rounds: Rounds) -> LabResult<Found> {
    let Found { row, results } = apf::first_look(options, rounds)?;
    let published = "1.178x of another load (RFCv2)";
    let row = Row { published, ..row };
    Ok(Found { row, results })
}

/// The times among `results`, such as the shoot-down in a call. They move the ratio of a row.
fn beside(results: &[Measurement]) -> String {
    let times = results.iter().filter(|result| result.unit == "us");
    let words = times.filter_map(|result| {
        let mut words = result.id.split('.');
        let name = words
            .find_map(|word| word.strip_suffix("_us"))?
            .replace('_', "-");
        Some(format!("{name} {} us", figure(result.value)))
    });
    let words: Vec<String> = words.collect();
    match &words[..] {
        [] => String::new(),
        _ => format!(" ({})", words.join(", ")),
    }
}

impl FirstLook {
    /// A first look without measurements.
    pub fn new(command: impl Into<String>) -> Self {
        let mut report = Report::new(command);
        report.say(
            "A first look: each mechanism without it and with it, in turns, with few rounds. \
             Figures to quote come from `lacuna lab --full`.",
        );
        Self {
            report,
            rows: Vec::new(),
            speed: None,
        }
    }

    /// Measures everything. Results from before an error are kept.
    ///
    /// # Errors
    /// The error of the first failed part.
    pub fn run(&mut self, options: &Options) -> LabResult {
        options.begin(PARTS.len() as u64);
        for (system, arch, seconds, measure) in PARTS {
            options.step(format!("{system}: without it and with it, in turns"))?;
            let rounds = match options.quick {
                true => Rounds::Count(2),
                false => Rounds::Within(Duration::from_secs(seconds)),
            };
            let options = Options {
                arch,
                ..options.clone()
            };
            let Found { row, results } = measure(&options, rounds)?;
            let row = Row { system, ..row };
            if system == SPEED {
                self.speed = Some(row);
            } else {
                self.rows.push((row, beside(&results)));
            }
            self.report.begin(arch);
            results
                .into_iter()
                .for_each(|result| self.report.push(result));
        }
        self.report.begin(Arch::X86_64);
        let why = match lacuna::kvm::available() {
            Ok(()) => "it takes longer: `lacuna lab apf.kvm pml.kvm`".to_owned(),
            Err(why) => why.to_string(),
        };
        for system in ["apf", "pml"] {
            self.report.skip(format!("{system}.kvm"), &why);
        }
        Ok(())
    }

    /// The text for people: at most [`LINES`] lines.
    pub fn text(&self) -> String {
        let mut text = wrap(ABOUT);
        text.push_str("\n\n");
        let header = HEADER.map(str::to_owned);
        let figures = self.rows.iter().map(|(row, _)| row.figures());
        let aligned = align(&std::iter::once(header).chain(figures).collect::<Vec<_>>());
        let mut lines = aligned.lines();
        let _ = writeln!(text, "{}", lines.next().unwrap_or_default());
        for ((row, beside), figures) in self.rows.iter().zip(lines) {
            let _ = writeln!(text, "{}: {}{beside}\n{figures}", row.system, row.what);
        }
        if let Some(row) = &self.speed {
            let (share, system) = (figure(row.ratio.median), row.system);
            let (with, without) = (&row.with, &row.without);
            let _ = writeln!(text, "{system}: {with}, {share} of {without}; {}", row.what);
        }
        for alike in self.report.skipped.chunk_by(|a, b| a.why == b.why) {
            let ids: Vec<&str> = alike.iter().map(|skipped| &*skipped.id).collect();
            let line = format!("not measured: {}: {}", ids.join(", "), alike[0].why);
            let _ = writeln!(text, "{}", wrap(&line));
        }
        if let Some(why) = &self.report.ended_early {
            let _ = writeln!(text, "ended early: {why}; rows after that are missing");
        }
        let host = wrap(&self.report.host.to_string());
        let _ = writeln!(text, "\n{READ_ON}\n\n{host}");
        text
    }
}

/// The header of the figures. The first column is their indentation; the sixth has the verdict.
const HEADER: [&str; 8] = [
    "",
    "without",
    "with",
    "ratio",
    "95 % interval",
    "",
    "null",
    "published",
];

/// Above the rows.
const ABOUT: &str = "A first look at Lacuna: each mechanism without it and with it, in turns, on \
                     this machine. A ratio above 1 means that it is better with the mechanism. The \
                     null is the ratio where nothing differs.";

/// Below the rows.
const READ_ON: &str = "\
figures to quote    lacuna lab --full (more than an hour), or a part: lacuna lab pml.score
how it is measured  docs/speed-*.md: apf, thp, pml, arm64-apf, paging, fault, x86
what to run next    lacuna run bm (2 GiB of guest memory in 512 MiB), lacuna doctor, lacuna --help";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::Better;

    fn row(system: &'static str, ratio: Summary) -> Row {
        Row {
            system,
            what: "what it gives; without, a guest that waits",
            without: "12345 M/s".into(),
            with: "123456 M/s".into(),
            ratio,
            null: Summary::example(0.987, 1.0, 1.012),
            published: "2.1x (cover",
        }
    }

    fn look(rows: Vec<Row>) -> FirstLook {
        let mut look = FirstLook::new("lacuna");
        look.rows = rows.into_iter().map(|row| (row, String::new())).collect();
        look
    }

    /// Every row, every skip with a long reason, and an early end.
    #[test]
    fn the_longest_look_has_forty_lines_of_a_hundred_columns() {
        let ratio = Summary::example(0.987, 123.4, 12345.6);
        let mut look = look(PARTS.map(|(system, ..)| row(system, ratio)).into());
        look.speed = look.rows.pop().map(|(row, _)| row);
        for id in ["apf.kvm", "pml.kvm"] {
            let why = format!("{id}: {}", "no reason is longer than this one ".repeat(4));
            look.report.skip(id, why);
        }
        look.report
            .skip("cpu.x86.vs_qemu_tcg.mem64m", "no QEMU ".repeat(20));
        look.report.ended_early = Some("interrupted by SIGINT".into());
        look.report.host.cpu = "A processor with a long name @ 3.14 GHz".into();
        look.report.host.kernel = "6.18.44-a-release-with-a-name".into();
        let text = look.text();
        assert!(text.lines().count() <= LINES, "{text}");
        let wide = text.lines().find(|line| line.chars().count() > 100);
        assert_eq!(wide, None, "{text}");
    }

    #[test]
    fn a_row_is_a_heading_and_its_figures_under_the_names_of_the_columns() {
        let rows = vec![
            row("x86 async page faults", Summary::example(1.9, 1.99, 2.1)),
            row("page-modification logging", Summary::example(0.9, 1.2, 1.5)),
        ];
        let mut look = look(rows);
        look.report.host.date = "2026-01-31T00:00:00Z".into();
        let text = look.text();
        let lines: Vec<&str> = text.lines().skip(3).map(|line| line.trim_start()).collect();
        let expected = [
            "without        with  ratio  95 % interval                      null  published",
            "x86 async page faults: what it gives; without, a guest that waits",
            "12345 M/s  123456 M/s  1.99x   1.90 .. 2.10             0.987 .. 1.01  2.1x (cover",
            "page-modification logging: what it gives; without, a guest that waits",
            "12345 M/s  123456 M/s  1.20x  0.900 .. 1.50  undecided  0.987 .. 1.01  2.1x (cover",
        ];
        assert_eq!(lines[..5], expected, "{text}");
    }

    #[test]
    fn an_interval_around_one_or_of_few_rounds_decides_nothing() {
        let few = Summary {
            runs: 2,
            ..Summary::example(1.9, 2.0, 2.1)
        };
        for (ratio, decided) in [
            (Summary::example(1.01, 1.1, 1.2), true),
            (Summary::example(0.8, 0.9, 0.99), true),
            (Summary::example(0.99, 1.1, 1.2), false),
            (Summary::example(1.0, 1.1, 1.2), false),
            (few, false),
        ] {
            assert_eq!(row("x", ratio).is_decided(), decided, "{ratio:?}");
        }
    }

    /// The times among a row's results are in its heading, and the vCPU's speed is no row.
    #[test]
    fn what_moves_a_ratio_is_beside_it() {
        let time = |id: &str| {
            Measurement::new(id, "us", Better::Lower, Summary::example(20.0, 21.5, 30.0))
        };
        let ratio = Summary::example(6.0, 7.0, 8.0);
        let ratio = Measurement::new("thp.call.elsewhere", "x", Better::Higher, ratio);
        assert_eq!(beside(std::slice::from_ref(&ratio)), "");
        let results = [
            ratio,
            time("thp.call.shootdown_us.elsewhere"),
            time("paging.wake_up_us"),
        ];
        assert_eq!(beside(&results), " (shootdown 21.5 us, wake-up 21.5 us)");
        let mut look = look(vec![row(
            "huge pages, 2012",
            Summary::example(6.0, 7.0, 8.0),
        )]);
        look.rows[0].1 = beside(&results);
        look.speed = Some(row("vCPU", Summary::example(0.3, 0.33, 0.4)));
        let text = look.text();
        for line in [
            "guest that waits (shootdown 21.5 us, wake-up 21.5 us)\n",
            "vCPU: 123456 M/s, 0.330 of 12345 M/s; what it gives",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }
}
