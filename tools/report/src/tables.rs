//! Tables in plain text: Markdown for pasting, and what differs between two runs.

use std::fmt::Write;

use crate::run::{Figure, Run, Verdict, pairs};
use crate::text::{digits, range};

/// The run as a Markdown table, with `other` in columns beside it.
pub fn markdown(run: &Run, other: Option<&Run>) -> String {
    let mut text = format!("`{}`, {}\n\n", run.command, facts(run));
    text += "| result | value | 95 % interval | rounds | bar | published | note |";
    text += if other.is_some() {
        " other run | interval |\n"
    } else {
        "\n"
    };
    text += "|---|--:|--:|--:|--:|--:|---|";
    text += if other.is_some() { "--:|--:|\n" } else { "\n" };
    for figure in &run.figures {
        let limit = |value: Option<f64>| value.map_or(String::new(), digits);
        let _ = write!(
            text,
            "| `{}` | {} | {} | {} | {} | {} | {} |",
            figure.id,
            figure.quantity(),
            range((figure.min, figure.max)),
            figure.runs,
            limit(figure.bar),
            limit(figure.reference),
            notes(figure).join(", "),
        );
        if let Some(other) = other {
            let old = other.figure(&figure.id);
            let cells = old.map(|old| (old.quantity(), range((old.min, old.max))));
            let (value, interval) = cells.unwrap_or_default();
            let differs = if old.is_some_and(|old| figure.differs(old)) {
                " **differs**"
            } else {
                ""
            };
            let _ = write!(text, " {value}{differs} | {interval} |");
        }
        text.push('\n');
    }
    for skipped in &run.skipped {
        let _ = write!(
            text,
            "\n`{}` was not measured: {}\n",
            skipped.id, skipped.why
        );
    }
    if let Some(other) = other {
        let _ = write!(text, "\nOther run: `{}`, {}\n", other.command, facts(other));
    }
    text
}

/// The words beside a figure: its verdict, and whether it is simulated.
pub(crate) fn notes(figure: &Figure) -> Vec<&'static str> {
    let verdict = figure.verdict().map(|verdict| match verdict {
        Verdict::Met => "met",
        Verdict::Missed => "MISSED",
        Verdict::Undecided => "undecided",
    });
    let simulated = figure.simulated.then_some("simulated");
    verdict.into_iter().chain(simulated).collect()
}

/// Host, commit and date.
pub(crate) fn facts(run: &Run) -> String {
    let commit = (!run.commit.is_empty()).then(|| format!("commit {}", run.commit));
    let all = [Some(run.host.clone()), commit, Some(run.date.clone())];
    all.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Which figures of `run` differ from those of `old`: their intervals do not overlap.
pub fn compared(run: &Run, old: &Run) -> String {
    let pairs = pairs(run, Some(old));
    let both = pairs
        .iter()
        .filter_map(|pair| Some((pair.other?, pair.mine?)));
    let differing: Vec<_> = both.clone().filter(|(old, new)| new.differs(old)).collect();
    let mut text = format!("compared with {}\n", facts(old));
    let widths = differing.iter().map(|(old, _)| old.id.len());
    let width = widths.max().unwrap_or(0);
    for (old, new) in &differing {
        let [old_value, value] =
            [old, new].map(|one| format!("{} [{}]", one.quantity(), range((one.min, one.max))));
        let _ = writeln!(text, "  {:width$}  {old_value} -> {value}", new.id);
    }
    let (count, all) = (differing.len(), both.count());
    let _ = write!(
        text,
        "{count} of {all} figures differ, which means that their intervals do not overlap"
    );
    text += &match pairs.len() - all {
        0 => "\n".to_owned(),
        alone => format!("; {alone} are in one run only\n"),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::example;

    #[test]
    fn a_table_has_a_row_for_each_result_and_each_skipped_one() {
        let run = example();
        let text = markdown(&run, None);
        for row in [
            "| `apf.worker_ratio.latency_1ms` | 1.96 x | 1.89 .. 2.08 | 41 | 1.80 | 2.00 | met |",
            "| `apf.worker_share_percent.file` | 45.8 % | 44.1 .. 47.5 | 21 | 95.0 |  | MISSED |",
            "| `paging.exit_vs_queue.16vcpu` | 2.90 x | 2.50 .. 3.40 | 9 |  |  | simulated |",
            "`apf.kvm` was not measured: /dev/kvm does not exist",
            "commit abcdef1",
        ] {
            assert!(text.contains(row), "{row}\n{text}");
        }
    }

    #[test]
    fn two_runs_are_compared_by_their_intervals() {
        let (run, mut old) = (example(), example());
        old.figures[0] = Figure {
            value: 1.5,
            min: 1.4,
            max: 1.6,
            ..old.figures[0].clone()
        };
        old.figures.pop();
        let text = compared(&run, &old);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        let expected =
            "apf.worker_ratio.latency_1ms  1.50 x [1.40 .. 1.60] -> 1.96 x [1.89 .. 2.08]";
        assert_eq!(lines[1].trim(), expected);
        assert!(lines[2].starts_with("1 of 6 figures differ"), "{text}");
        assert!(markdown(&run, Some(&old)).contains("| 1.50 x **differs** | 1.40 .. 1.60 |"));
    }
}
