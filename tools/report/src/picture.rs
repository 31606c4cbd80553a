//! Pictures in files of their own, for the README: light and dark.

use std::fmt::Write;

use crate::page::headlines;
use crate::plot;
use crate::run::Run;
use crate::systems::SYSTEMS;
use crate::text::{escaped, range};

/// Width of the overview, and of its parts: names, plot, values.
const WIDTH: u32 = 880;
const PLOT: (u32, u32) = (336, 320);
/// Height of a row, and of the line above the rows.
const ROW: u32 = 50;
const TOP: u32 = 34;

/// One figure of each system on one axis, with its published figure.
pub fn overview(run: &Run, other: Option<&Run>) -> String {
    let rows = headlines(run, other);
    let pairs: Vec<_> = rows.iter().map(|(_, pair)| *pair).collect();
    let scale = plot::scale(&pairs);
    let (left, width) = PLOT;
    let names = other.map_or(String::new(), |other| {
        format!("● {}, ◇ {}", run.name, other.name)
    });
    let value = left + width + 24;
    let mut body = format!(
        r#"<text class="small" x="{left}" y="16">times better with it; ▼ published</text>
<text class="small" x="{value}" y="16">{}</text>
"#,
        escaped(&names)
    );
    let mut y = TOP;
    for (system, pair) in rows {
        let figure = pair.shown();
        let title = system.title;
        let simulated = if figure.simulated { ", simulated" } else { "" };
        let id = escaped(&figure.id);
        let _ = write!(
            body,
            r#"<text class="label" x="0" y="{}">{title}</text>
<text class="small" x="0" y="{}">{id}{simulated}</text>
<svg x="{left}" y="{y}" width="{width}" height="{ROW}" overflow="visible">{}</svg>
"#,
            y + 14,
            y + 30,
            plot::row(pair, scale),
        );
        let values = [("●", pair.mine), ("◇", pair.other)].into_iter();
        let values = values.filter_map(|(mark, figure)| Some((mark, figure?)));
        for ((mark, one), y) in values.zip([y + 20, y + 37]) {
            let (quantity, range) = (escaped(&one.quantity()), range((one.min, one.max)));
            let range = format!(r#"<tspan class="small">{range}</tspan>"#);
            let _ = writeln!(
                body,
                r#"<text x="{value}" y="{y}">{mark} {quantity} {range}</text>"#
            );
        }
        y += ROW;
    }
    let _ = writeln!(
        body,
        r#"<svg x="{left}" y="{y}" width="{width}" height="20" overflow="visible">{}</svg>"#,
        plot::axis(scale)
    );
    framed(
        "One figure of each system, and its published figure",
        (WIDTH, y + 22),
        &body,
    )
}

/// The drawing of each system: its name, and the picture.
pub fn drawings() -> Vec<(&'static str, String)> {
    let style = format!("<style>\n{}</style>\n", style());
    let with_style = |drawing: &str| {
        let (first, rest) = drawing.split_once('\n').unwrap_or((drawing, ""));
        format!("{first}\n{style}{rest}")
    };
    SYSTEMS
        .iter()
        .map(|system| (system.name, with_style(system.drawing)))
        .collect()
}

fn framed(name: &str, (width, height): (u32, u32), body: &str) -> String {
    let style = style();
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
         aria-label=\"{name}\">\n<style>\n{style}</style>\n{body}</svg>\n"
    )
}

fn style() -> String {
    [include_str!("theme.css"), include_str!("plot.css")].concat()
}
