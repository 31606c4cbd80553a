//! Charts of series: curves with intervals, and the published curve.

use std::fmt::Write;

use crate::plot::{MARKS, head, mark, upright};
use crate::scale::{Scale, tick};
use crate::series::Series;
use crate::text::{breakable, escaped};

/// Height of a chart in pixels, and of the parts above and below its curves.
const HEIGHT: f64 = 230.0;
const EDGES: (f64, f64) = (14.0, 34.0);

/// Charts of `all` series: those of one namespace, unit and number together. `name` names their run
/// where there are two.
pub(crate) fn charts(all: &[Series], name: &str) -> String {
    let mut groups: Vec<Vec<&Series>> = Vec::new();
    for one in all {
        let is_alike = |group: &&mut Vec<&Series>| kind(group[0]) == kind(one);
        match groups.iter_mut().find(is_alike) {
            Some(group) => group.push(one),
            None => groups.push(vec![one]),
        }
    }
    let mut html = String::from("<div class=\"charts\">");
    for group in &groups {
        let charts = group.len().div_ceil(MARKS.len());
        for curves in group.chunks(group.len().div_ceil(charts)) {
            html += &figure(curves, name);
        }
    }
    html + "</div>"
}

/// What the series of one chart have in common: the words before the measure, unit and number.
fn kind(series: &Series) -> (Vec<&str>, &str, &str) {
    let words = series.name.split('.');
    let words = words.take_while(|word| !word.contains('_'));
    (words.collect(), &series.along, &series.points[0].1.unit)
}

/// One chart with its legend.
fn figure(curves: &[&Series], name: &str) -> String {
    let unit = match &*curves[0].points[0].1.unit {
        "x" => "ratio".to_owned(),
        unit => escaped(unit),
    };
    let caption = match name {
        "" => unit,
        name => format!("{unit}, {}", escaped(name)),
    };
    let published = published(curves);
    let svg = svg(curves, &published);
    let mut html = format!("<figure class=\"curves\"><figcaption>{caption}</figcaption>{svg}<ul>");
    let mut item = |class: &str, marks: &str, words: &str| {
        let svg = format!(r#"<svg width="34" height="16" aria-hidden="true">{marks}</svg>"#);
        let _ = write!(html, r#"<li class="{class}">{svg}{words}</li>"#);
    };
    let line = |class: &str| format!(r#"<line class="{class}" x2="34" y1="8" y2="8"/>"#);
    for (index, curve) in curves.iter().enumerate() {
        let (class, word) = match is_simulated(curve) {
            true => ("hollow", ", simulated"),
            false => ("", ""),
        };
        let marks = line(&format!("ci d{index}")) + &mark(50.0, 8.0, MARKS[index]);
        item(
            class,
            &marks,
            &format!("<code>{}</code>{word}", breakable(&curve.name)),
        );
    }
    if !published.is_empty() {
        item("", &(line("ref") + &head("17", 5.0)), "published");
    }
    html + "</ul></figure>\n"
}

fn is_simulated(curve: &Series) -> bool {
    curve.points.iter().all(|(_, figure)| figure.simulated)
}

/// The published figures along the first curve that has some.
fn published(curves: &[&Series]) -> Vec<(f64, f64)> {
    let of = |curve: &&Series| -> Vec<(f64, f64)> {
        let points = curve.points.iter();
        points
            .filter_map(|(at, figure)| Some((*at, figure.reference?)))
            .collect()
    };
    let all = curves.iter().map(of);
    all.into_iter()
        .find(|points| !points.is_empty())
        .unwrap_or_default()
}

/// Where a number and a value are: percent of the width, and pixels from the top.
struct Plane {
    across: Scale,
    up: Scale,
}

impl Plane {
    /// The left tenth is for the numbers of the vertical axis.
    fn x(&self, at: f64) -> f64 {
        10.0 + self.across.at(at) * 0.9
    }

    fn y(&self, value: f64) -> f64 {
        EDGES.0 + (HEIGHT - EDGES.0 - EDGES.1) * (1.0 - self.up.at(value) / 100.0)
    }

    /// The lines between `points`.
    fn lines(&self, class: &str, points: &[(f64, f64)]) -> String {
        let line = |pair: &[(f64, f64)]| {
            let [(x1, y1), (x2, y2)] =
                [pair[0], pair[1]].map(|(at, value)| (self.x(at), self.y(value)));
            format!(
                r#"<line class="{class}" x1="{x1:.2}%" x2="{x2:.2}%" y1="{y1:.1}" y2="{y2:.1}"/>"#
            )
        };
        points.windows(2).map(line).collect()
    }
}

fn svg(curves: &[&Series], published: &[(f64, f64)]) -> String {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let values = points().flat_map(|(_, figure)| [figure.min, figure.max]);
    let values = values.chain(published.iter().map(|(_, value)| *value));
    let across = Scale::of(points().map(|(at, _)| *at));
    let up = Scale::of(values);
    let plane = Plane { across, up };
    let names: Vec<&str> = curves.iter().map(|curve| &*curve.name).collect();
    let names = escaped(&names.join(", "));
    let mut svg =
        format!(r#"<svg width="100%" height="{HEIGHT}" role="img" aria-label="Curves: {names}">"#);
    svg += &axes(&plane, curves);
    svg += &plane.lines("ref", published);
    for (at, value) in published {
        svg += &head(&format!("{:.2}%", plane.x(*at)), plane.y(*value) - 3.0);
    }
    for (index, curve) in curves.iter().enumerate() {
        let medians = curve.points.iter().map(|(at, figure)| (*at, figure.value));
        let medians: Vec<(f64, f64)> = medians.collect();
        svg += if is_simulated(curve) {
            r#"<g class="hollow">"#
        } else {
            "<g>"
        };
        svg += &plane.lines(&format!("ci d{index}"), &medians);
        for (at, figure) in &curve.points {
            let x = plane.x(*at);
            svg += &upright("ci", x, plane.y(figure.min), plane.y(figure.max));
            svg += &mark(x, plane.y(figure.value), MARKS[index]);
        }
        svg += "</g>";
    }
    svg + "</svg>"
}

/// Horizontal lines with the values, and the numbers below the curves.
fn axes(plane: &Plane, curves: &[&Series]) -> String {
    let mut svg = String::new();
    for value in plane.up.ticks() {
        let (y, number) = (plane.y(value), tick(value));
        let below = y + 4.0;
        svg += &format!(r#"<line class="grid" x1="10%" x2="100%" y1="{y:.1}" y2="{y:.1}"/>"#);
        svg += &format!(r#"<text class="small end" x="9%" y="{below:.1}">{number}</text>"#);
    }
    let points = curves.iter().flat_map(|curve| &curve.points);
    let mut numbers: Vec<f64> = points.map(|(at, _)| *at).collect();
    numbers.sort_by(f64::total_cmp);
    numbers.dedup();
    let mut text = |x: f64, y: f64, text: &str| {
        let _ = write!(
            svg,
            r#"<text class="small mid" x="{x:.2}%" y="{y}">{text}</text>"#
        );
    };
    for number in numbers {
        text(plane.x(number), HEIGHT - 20.0, &tick(number));
    }
    let along = match &*curves[0].along {
        "vcpu" => "vCPUs",
        "" => "*",
        other => other,
    };
    text(55.0, HEIGHT - 4.0, &escaped(along));
    svg
}
