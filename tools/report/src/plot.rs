//! Rows of intervals as inline SVG, and their axis.
//!
//! Horizontal positions are percents, so that a plot has the width of its column while its text and
//! marks keep their size. What a mark means is in its shape; colour only repeats it.

use std::fmt::{Display, Write};

use crate::run::{Figure, Pair, Verdict};
use crate::scale::{Scale, tick};
use crate::text::{digits, escaped, range};

/// The middle of the marks of a row, in pixels; the distance of the other run's below it.
const MIDDLE: f64 = 16.0;
const SECOND: f64 = 17.0;
/// The shapes of marks: paths around the mark's centre.
pub(crate) const MARKS: [&str; 4] = [
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "M-4-4h8v8h-8z",
    "M0-5.5L5.2 4H-5.2z",
    "M0-6L6 0 0 6-6 0z",
];

/// The mark of a published figure, below `y`: a triangle that points down.
pub(crate) fn head(x: &str, y: f64) -> String {
    let path = r#"<path class="ref-head" d="M-4 0h8L0 7z"/>"#;
    format!(r#"<svg x="{x}" y="{y:.1}" overflow="visible">{path}</svg>"#)
}

/// The axis on which all of `pairs` fit, with their bars, published figures and nulls.
pub(crate) fn scale(pairs: &[Pair<'_>]) -> Scale {
    let figures = pairs.iter().flat_map(|pair| [pair.mine, pair.other]);
    Scale::of(figures.flatten().flat_map(|figure| {
        let null = figure.null().map(|(low, high)| [low, high]);
        let values = [figure.value, figure.min, figure.max];
        let quartiles = figure.spread.map(|[_, low, high, _]| [low, high]);
        let limits = [figure.bar, figure.reference, same(&figure.unit)];
        let also = [null, quartiles]
            .into_iter()
            .flatten()
            .flatten()
            .chain(limits.into_iter().flatten());
        values.into_iter().chain(also)
    }))
}

/// The value of a figure of this unit if nothing differs.
fn same(unit: &str) -> Option<f64> {
    (unit == "x").then_some(1.0)
}

/// A mark of one of [`MARKS`].
pub(crate) fn mark(x: f64, y: f64, shape: &str) -> String {
    format!(r#"<svg x="{x:.2}%" y="{y}" overflow="visible"><path class="m" d="{shape}"/></svg>"#)
}

/// A vertical line.
pub(crate) fn upright(class: &str, x: f64, top: f64, bottom: impl Display) -> String {
    format!(r#"<line class="{class}" x1="{x:.2}%" x2="{x:.2}%" y1="{top}" y2="{bottom}"/>"#)
}

/// One figure on `scale`: its median and interval, its null, bar and published figure; and below
/// it the figure of the other run.
pub(crate) fn row(pair: Pair<'_>, scale: Scale) -> String {
    let words = escaped(&in_words(pair));
    let mut svg =
        format!(r#"<svg class="row" width="100%" height="100%" role="img" aria-label="{words}">"#);
    svg += &grid(scale, "100%");
    if let Some(same) = same(&pair.shown().unit) {
        svg += &upright("same", scale.at(same), 0.0, "100%");
    }
    let below = if pair.mine.is_some() {
        MIDDLE + SECOND
    } else {
        MIDDLE
    };
    svg += &pair.mine.map_or(String::new(), |mine| marks(mine, scale));
    svg += &pair
        .other
        .map_or(String::new(), |other| old_marks(other, below, scale));
    svg + "</svg>"
}

/// The marks of one figure, around the middle of [`ROW`].
fn marks(figure: &Figure, scale: Scale) -> String {
    let mut svg = String::new();
    if let Some((low, high)) = figure.null() {
        svg += &null(scale.at(low), scale.at(high));
    }
    svg += &figure
        .spread
        .map_or(String::new(), |ends| spread(ends.map(|end| scale.at(end))));
    svg += &figure
        .bar
        .map_or(String::new(), |value| bar(scale.at(value)));
    svg += &figure
        .reference
        .map_or(String::new(), |value| published(scale.at(value)));
    let simulated = if figure.simulated { "hollow" } else { "" };
    let missed = if figure.verdict() == Some(Verdict::Missed) {
        "bad"
    } else {
        ""
    };
    let _ = write!(svg, r#"<g class="{missed} {simulated}">"#);
    svg += &interval(figure, MARKS[0], MIDDLE, scale);
    svg + "</g>"
}

fn old_marks(figure: &Figure, y: f64, scale: Scale) -> String {
    format!(
        r#"<g class="old">{}</g>"#,
        interval(figure, MARKS[3], y, scale)
    )
}

/// The marks that a legend explains, each with its words; `other` names the other run.
pub(crate) fn legend(other: Option<&str>) -> Vec<(String, String)> {
    let scale = Scale::of([0.5, 3.5]);
    let (from, to, at) = (scale.at(1.0), scale.at(3.0), scale.at(2.0));
    let median = interval_between(from, to, at, MARKS[0], MIDDLE);
    let mut all = vec![
        (median.clone(), "median and 95 % interval"),
        (
            format!(r#"<g class="hollow">{median}</g>"#),
            "simulated: a part is computed",
        ),
        (bar(at), "bar: what the project promises"),
        (published(at), "published figure"),
        (null(from, to), "null: an arm beside itself"),
        (
            spread([scale.at(0.5), from, to, scale.at(3.5)]),
            "all rounds, and the box of the middle half",
        ),
    ];
    if let Some(other) = other {
        let marks = interval_between(from, to, at, MARKS[3], MIDDLE);
        all.push((format!(r#"<g class="old">{marks}</g>"#), other));
    }
    let framed = |(marks, words): (String, &str)| {
        let svg = format!(r#"<svg width="44" height="30" aria-hidden="true">{marks}</svg>"#);
        (svg, escaped(words))
    };
    all.into_iter().map(framed).collect()
}

fn interval(figure: &Figure, shape: &str, y: f64, scale: Scale) -> String {
    if !figure.value.is_finite() {
        return format!(
            r#"<text class="small" x="6%" y="{}">no finite value</text>"#,
            y + 4.0
        );
    }
    let [from, to, at] = [figure.min, figure.max, figure.value].map(|value| scale.at(value));
    interval_between(from, to, at, shape, y)
}

fn interval_between(from: f64, to: f64, at: f64, shape: &str, y: f64) -> String {
    let line = format!(r#"<line class="ci" x1="{from:.2}%" x2="{to:.2}%" y1="{y}" y2="{y}"/>"#);
    let ends = [from, to].map(|end| upright("ci", end, y - 4.0, y + 4.0));
    line + &ends.concat() + &mark(at, y, shape)
}

fn null(from: f64, to: f64) -> String {
    let width = to - from;
    format!(r#"<rect class="null" x="{from:.2}%" width="{width:.2}%" y="8" height="16"/>"#)
}

/// The rounds of a figure: a line through all, a box around the middle half.
fn spread([smallest, lower, upper, largest]: [f64; 4]) -> String {
    let (y, width) = (MIDDLE, upper - lower);
    let line = format!(r#"x1="{smallest:.2}%" x2="{largest:.2}%" y1="{y}" y2="{y}""#);
    let middle = format!(r#"x="{lower:.2}%" width="{width:.2}%" y="10.5" height="11""#);
    format!(r#"<line class="spread" {line}/><rect class="spread" {middle}/>"#)
}

fn bar(at: f64) -> String {
    upright("bar", at, 5.0, 27.0)
}

fn published(at: f64) -> String {
    let line = upright("ref", at, 7.0, 27.0);
    line + &head(&format!("{at:.2}%"), 4.0)
}

/// A row in words, for programs that read the page aloud.
fn in_words(pair: Pair<'_>) -> String {
    let figure = pair.shown();
    let interval = range((figure.min, figure.max));
    let mut words = format!("{}, interval {interval}", figure.quantity());
    let null = figure.null().map(|null| ("null", range(null)));
    let bar = figure.bar.map(|bar| ("bar", digits(bar)));
    let published = figure
        .reference
        .map(|published| ("published", digits(published)));
    let other = pair.other.map(|other| ("other run", other.quantity()));
    for (name, value) in [null, bar, published, other].into_iter().flatten() {
        let _ = write!(words, ", {name} {value}");
    }
    words
}

fn grid(scale: Scale, bottom: &str) -> String {
    let ticks = scale.ticks().into_iter();
    ticks
        .map(|tick| upright("grid", scale.at(tick), 0.0, bottom))
        .collect()
}

/// The axis below rows on `scale`.
pub(crate) fn axis(scale: Scale) -> String {
    let mut svg = format!(
        r#"<svg class="row" width="100%" height="20" aria-hidden="true">{}"#,
        grid(scale, "4")
    );
    for value in scale.ticks() {
        let _ = write!(
            svg,
            r#"<text class="small mid" x="{:.2}%" y="16">{}</text>"#,
            scale.at(value),
            tick(value)
        );
    }
    svg + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::example;

    #[test]
    fn a_row_has_the_rounds_of_its_figure() {
        let run = example();
        let all = run.figures.iter().map(|figure| Pair {
            mine: Some(figure),
            other: None,
        });
        let all: Vec<_> = all.collect();
        let rows = all.iter().map(|pair| row(*pair, scale(&[*pair])));
        let with_rounds: Vec<bool> = rows
            .map(|row| row.contains("rect class=\"spread\""))
            .collect();
        let expected = run.figures.iter().map(|figure| figure.spread.is_some());
        assert_eq!(with_rounds, expected.collect::<Vec<_>>());
        assert!(with_rounds.contains(&true));
    }
}
