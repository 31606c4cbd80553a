//! Markers in Markdown, and the text between them.
//!
//! ```text
//! <!--= thp.call.elsewhere-->9.10 [8.80 .. 9.40]<!--/-->        in a line: value and range
//! <!--figures thp.call.* thp.kept_percent-->                    a block: a table
//! <!--/figures-->
//! ```
//! A block names ids; `*` at the end of one stands for the rest. Its rows are in that order.
//! `id@16` is the figure of hosts with 16 cores; without a number, of hosts with two.

use std::fmt::Write;

use lacuna_report::digits;

use super::runs::{Figure, Runs};

const INLINE: &str = "<!--= ";
const INLINE_END: &str = "<!--/-->";
const BLOCK: &str = "<!--figures ";
const BLOCK_END: &str = "<!--/figures-->";

/// A line, and its problem.
pub type Problem = (usize, String);

/// `text` with the figures of `runs`. A figure that cannot be renewed stays as it is, and is a
/// problem.
pub fn renewed(text: &str, runs: &Runs) -> (String, Vec<Problem>) {
    let (mut out, mut problems) = (String::new(), Vec::new());
    let mut lines = (1..).zip(text.split_inclusive('\n'));
    while let Some((number, line)) = lines.next() {
        let mut problem = |what: String| problems.push((number, what));
        let marker = line.trim_end().strip_prefix(BLOCK);
        let Some(wanted) = marker.and_then(|rest| rest.strip_suffix("-->")) else {
            out.push_str(&in_line(line, runs, &mut problem));
            continue;
        };
        out.push_str(line);
        let old: Vec<&str> = lines
            .by_ref()
            .map(|(_, line)| line)
            .take_while(|line| line.trim_end() != BLOCK_END)
            .collect();
        match table(wanted, runs) {
            Ok(table) => out.push_str(&table),
            Err(what) => {
                problem(what);
                out.extend(old);
            }
        }
        out.push_str(BLOCK_END);
        out.push('\n');
    }
    (out, problems)
}

/// `line` with the figures of the markers in it.
fn in_line(line: &str, runs: &Runs, problem: &mut impl FnMut(String)) -> String {
    let (mut out, mut rest) = (String::new(), line);
    while let Some((before, marked)) = rest.split_once(INLINE) {
        let _ = write!(out, "{before}{INLINE}");
        rest = marked;
        let parts = marked.split_once("-->");
        let parts = parts.and_then(|(id, text)| Some((id, text.split_once(INLINE_END)?)));
        let Some((id, (old, after))) = parts else {
            problem(format!("a marker has no end: {INLINE_END}"));
            break;
        };
        let (plain, cores) = on_host(id);
        let new = runs.figure(plain, cores).map(|figure| {
            let [value, low, high] = [figure.value, figure.low, figure.high].map(digits);
            format!("{value} [{low} .. {high}]")
        });
        if new.is_none() {
            problem(format!("no run has {id}"));
        }
        let new = new.as_deref().unwrap_or(old);
        let _ = write!(out, "{id}-->{new}{INLINE_END}");
        rest = after;
    }
    out.push_str(rest);
    out
}

/// The rows of a block's table, in a fence.
fn table(wanted: &str, runs: &Runs) -> Result<String, String> {
    let mut rows = vec![HEADS.map(str::to_owned)];
    for word in wanted.split_whitespace() {
        let (plain, cores) = on_host(word);
        let host = &word[plain.len()..];
        let ids = match plain.strip_suffix('*') {
            Some(prefix) => runs.ids(prefix, cores),
            None => vec![plain],
        };
        if ids.is_empty() {
            return Err(format!("no run has {word}"));
        }
        for id in ids {
            let name = format!("{id}{host}");
            let figure = runs.figure(id, cores);
            rows.push(row(&name, &figure.ok_or(format!("no run has {name}"))?));
        }
    }
    Ok(format!("```text\n{}```\n", aligned(&rows)))
}

/// An id without its host, and the host's number of cores.
fn on_host(word: &str) -> (&str, &str) {
    word.split_once('@').unwrap_or((word, "2"))
}

const HEADS: [&str; 9] = [
    "result", "value", "range", "rounds", "runs", "bar", "wanted", "", "measured",
];

fn row(id: &str, figure: &Figure) -> [String; 9] {
    // The verdict says which side of the limit is good.
    let limit = |limit: Option<f64>| limit.map_or(String::new(), digits);
    let verdict = match (figure.met, figure.bar) {
        (Some(true), _) => "ok",
        (Some(false), _) => "MISSED",
        (None, Some(_)) => "undecided",
        (None, None) => "",
    };
    let simulated = if figure.simulated { "simulated" } else { "" };
    let words: Vec<&str> = [verdict, simulated]
        .into_iter()
        .filter(|word| !word.is_empty())
        .collect();
    [
        id.to_owned(),
        format!("{} {}", digits(figure.value), figure.unit),
        format!("{} .. {}", digits(figure.low), digits(figure.high)),
        figure.rounds.to_string(),
        figure.runs.to_string(),
        limit(figure.bar),
        limit(figure.wanted),
        words.join(", "),
        format!("{} {}", figure.date, figure.commit),
    ]
}

/// `rows` in columns, two spaces apart: the first and the last two flush left, the others right.
fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let is_left = column == 0 || column + 2 >= N;
            let _ = match is_left {
                true => write!(line, "{gap}{cell:<width$}"),
                false => write!(line, "{gap}{cell:>width$}"),
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs() -> Runs {
        Runs::parse(
            r#"{"runs":[{"commit":"abcdef1","date":"2026-11-24","host":"H, 2 cores, L",
            "command":"C","results":[
            {"id":"a.b","value":2.0,"min":1.5,"max":2.5,"runs":6,"unit":"x","bar":1.2,"met":true},
            {"id":"a.c.d","value":120.4,"min":100,"max":130,"runs":6,"unit":"us"},
            {"id":"a.c.e","value":0.5,"min":0.4,"max":0.6,"runs":6,"unit":"%","bar":0.5,
             "met":false,"simulated":true},
            {"id":"a.f","value":1,"min":0.9,"max":1.1,"runs":6,"unit":"x","bar":1.0}]},
            {"commit":"abcdef1","date":"2026-11-24","host":"H, 16 cores, L","command":"C",
            "results":[{"id":"a.b","value":7.0,"min":6,"max":8,"runs":6,"unit":"x"}]}]}"#,
        )
        .unwrap()
    }

    #[test]
    fn markers_in_a_line_get_value_and_range() {
        let text = "It is <!--= a.b-->old<!--/--> and <!--= a.c.d--><!--/-->.\nNo marker.\n\
                    <!--= a.b@16--><!--/--> with 16 cores.\n";
        let (new, problems) = renewed(text, &runs());
        assert_eq!(problems, []);
        let expected = "It is <!--= a.b-->2.00 [1.50 .. 2.50]<!--/--> and \
                        <!--= a.c.d-->120 [100 .. 130]<!--/-->.\nNo marker.\n\
                        <!--= a.b@16-->7.00 [6.00 .. 8.00]<!--/--> with 16 cores.\n";
        assert_eq!(new, expected);
        assert_eq!(renewed(&new, &runs()).0, new);
    }

    #[test]
    fn a_block_is_a_table_in_the_order_of_its_ids() {
        let text = "before\n<!--figures a.c.* a.b a.f-->\nold\n<!--/figures-->\nafter\n";
        let (new, problems) = renewed(text, &runs());
        assert_eq!(problems, []);
        let lines: Vec<&str> = new.lines().collect();
        let expected = ["before", "<!--figures a.c.* a.b a.f-->", "```text"];
        assert_eq!(lines[..3], expected, "{new}");
        assert!(lines[3].starts_with("result") && lines[3].ends_with("measured"));
        let cells = |line: usize| lines[line].split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(cells(4), "a.c.d 120 us 100 .. 130 6 1 2026-11-24 abcdef1");
        assert_eq!(
            cells(5),
            "a.c.e 0.500 % 0.400 .. 0.600 6 1 0.500 MISSED, simulated 2026-11-24 abcdef1"
        );
        assert!(cells(6).contains("1.20 ok 2026"), "{new}");
        assert!(cells(7).contains("1.00 undecided 2026"), "{new}");
        assert_eq!(lines[8..], ["```", "<!--/figures-->", "after"]);
        assert_eq!(renewed(&new, &runs()).0, new);
    }

    #[test]
    fn what_no_run_has_stays_and_is_a_problem() {
        for (text, what) in [
            ("<!--= a.z-->1<!--/-->\n", "no run has a.z"),
            ("<!--= a.b-->1\n", "no end"),
            (
                "<!--figures z.*-->\nold\n<!--/figures-->\n",
                "no run has z.*",
            ),
            (
                "<!--figures a.z-->\nold\n<!--/figures-->\n",
                "no run has a.z",
            ),
        ] {
            let (new, problems) = renewed(text, &runs());
            assert_eq!(new, text);
            assert_eq!(problems[0].0, 1);
            assert!(problems[0].1.contains(what), "{problems:?}");
        }
    }
}
