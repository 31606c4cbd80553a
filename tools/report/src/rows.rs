//! Rows of figures: the name, the plot and the numbers of each, over one axis.

use std::fmt::Write;

use crate::plot;
use crate::run::{Figure, Pair, Verdict};
use crate::scale::Scale;
use crate::tables::notes;
use crate::text::{breakable, digits, escaped, range};

/// What several rows have in common, below them: sources, and commands that repeat them.
#[derive(Default)]
pub(crate) struct Notes(Vec<String>);

impl Notes {
    /// A mark in a row that stands for `note`.
    fn mark(&mut self, note: String) -> String {
        let known = self.0.iter().position(|one| *one == note);
        let number = known.unwrap_or_else(|| {
            self.0.push(note);
            self.0.len() - 1
        });
        format!("[{}]", number + 1)
    }

    /// All notes, numbered.
    pub fn list(&self) -> String {
        let items = self.0.iter().map(|note| format!("<li>{note}</li>"));
        match &self.0[..] {
            [] => String::new(),
            _ => format!("<ol class=\"notes\">{}</ol>", items.collect::<String>()),
        }
    }
}

/// The rows of `pairs`, with an axis for each unit.
pub(crate) fn groups(pairs: &[Pair<'_>], notes: &mut Notes) -> String {
    let mut html = String::new();
    let mut units: Vec<&str> = Vec::new();
    for pair in pairs {
        let unit = &*pair.shown().unit;
        if !units.contains(&unit) {
            units.push(unit);
        }
    }
    for unit in units {
        let mine = pairs.iter().filter(|pair| pair.shown().unit == unit);
        let mine: Vec<Pair<'_>> = mine.copied().collect();
        let scale = plot::scale(&mine);
        html += "<div class=\"rows\">";
        for pair in mine {
            let name = format!("<code>{}</code>", breakable(&pair.shown().id));
            html += &row(&name, pair, scale, notes);
        }
        html += &axis(scale, unit);
        html += "</div>\n";
    }
    html
}

/// The axis below rows.
pub(crate) fn axis(scale: Scale, unit: &str) -> String {
    let unit = match unit {
        "x" => "x, a ratio",
        other => other,
    };
    let (svg, unit) = (plot::axis(scale), escaped(unit));
    format!(
        "<div class=\"row axis\"><div></div><div class=\"plot\">{svg}</div>\
         <div class=\"unit\">{unit}</div></div>"
    )
}

/// One row.
pub(crate) fn row(name: &str, pair: Pair<'_>, scale: Scale, notes: &mut Notes) -> String {
    let about = about(pair.shown(), notes).join(" · ");
    let value = |figure: &Figure| {
        let (value, interval) = (escaped(&figure.quantity()), range((figure.min, figure.max)));
        format!("<b>{value}</b> <span>{interval}</span>")
    };
    let mut values = pair.mine.map_or(String::new(), value);
    if let Some(other) = pair.other.map(value) {
        let differs = if pair.differs() {
            " <b>differs</b>"
        } else {
            ""
        };
        let _ = write!(values, "<div class=\"other\">◇ {other}{differs}</div>");
    }
    let has_both = pair.mine.is_some() && pair.other.is_some();
    let two = if has_both { " two" } else { "" };
    let svg = plot::row(pair, scale);
    format!(
        "<div class=\"row\"><div class=\"name\">{name}<small>{about}</small></div>\
         <div class=\"plot{two}\">{svg}</div><div class=\"value\">{values}</div></div>\n"
    )
}

/// A figure's bar, published figure, null, rounds and command, in words.
fn about(figure: &Figure, also: &mut Notes) -> Vec<String> {
    let mut words = Vec::new();
    if let Some(bar) = figure.bar {
        let sign = match figure.better.as_deref() {
            Some("higher") => "≥ ",
            Some("lower") => "≤ ",
            _ => "",
        };
        let verdict = notes(figure)[0].to_lowercase();
        let is_missed = figure.verdict() == Some(Verdict::Missed);
        let class = if is_missed { "missed" } else { "verdict" };
        let bar = digits(bar);
        words.push(format!(
            "bar {sign}{bar}: <b class=\"{class}\">{verdict}</b>"
        ));
    }
    if let Some(published) = figure.reference {
        let source = figure.reference_source.as_deref().map(escaped);
        let mark = source.map_or(String::new(), |source| also.mark(source));
        words.push(format!("published {} {mark}", digits(published)));
    }
    if figure.simulated {
        words.push("<b class=\"verdict\">simulated</b>".into());
    }
    if let Some(null) = figure.null() {
        words.push(format!("null {}", range(null)));
    }
    if figure.bar.is_none()
        && let Some(better) = &figure.better
    {
        words.push(format!("{} is better", escaped(better)));
    }
    let rounds = if figure.runs == 1 { "round" } else { "rounds" };
    let command = escaped(&figure.command);
    let measured = match &*figure.measured {
        "" => String::new(),
        measured => format!(", {}", escaped(measured)),
    };
    let mark = also.mark(format!("by <code>{command}</code>{measured}"));
    words.push(format!("{} {rounds} {mark}", figure.runs));
    words
}
