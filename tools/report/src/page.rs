//! The report: one HTML file without scripts and without requests to a network.

use std::fmt::Write;

use crate::chart;
use crate::plot;
use crate::rows::{self, Notes};
use crate::run::{Figure, Pair, Run, pairs};
use crate::series::series;
use crate::systems::{SYSTEMS, System};
use crate::tables::{compared, facts};
use crate::text::{escaped, with_code};

/// Figures that a section shows at most before it folds those without a bar.
const SHOWN: usize = 12;

/// The report of `run`, with `other` drawn beside it.
pub fn html(run: &Run, other: Option<&Run>) -> String {
    let css = [
        include_str!("theme.css"),
        include_str!("plot.css"),
        include_str!("page.css"),
    ]
    .concat();
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
         <title>Lacuna: measured {}</title>\n<link rel=\"icon\" href=\"data:,\">\n\
         <style>\n{css}</style></head>\n<body><main>\n",
        escaped(&run.date)
    );
    page += &head(run, other);
    page += &glance(run, other);
    for (index, system) in SYSTEMS.iter().enumerate() {
        page += &section(Some((index, system)), run, other);
    }
    page += &section(None, run, other);
    page + "</main></body></html>\n"
}

/// Where, when and how the figures were measured, and how they are read.
fn head(run: &Run, other: Option<&Run>) -> String {
    let mut html = String::from(
        "<header><h1>Lacuna, measured</h1>\n<p class=\"lead\">Mechanisms for guest memory that is \
         absent, each without it and with it, in turns on one machine.</p>\n<dl>",
    );
    let mut fact = |name: &str, value: &str| {
        if !value.is_empty() {
            let _ = write!(html, "<dt>{name}</dt><dd>{}</dd>", escaped(value));
        }
    };
    fact("host", &run.host);
    fact("commit", &run.commit);
    fact("date", &run.date);
    let _ = write!(
        html,
        "<dt>command</dt><dd><code>{}</code></dd>",
        escaped(&run.command)
    );
    if let Some(other) = other {
        let beside = format!("{}: {}", other.name, facts(other));
        let _ = write!(html, "<dt>beside it</dt><dd>{}</dd>", escaped(&beside));
    }
    html += "</dl>\n";
    for paragraph in &run.about {
        let _ = writeln!(html, "<p>{}</p>", with_code(paragraph));
    }
    if let Some(other) = other {
        let text = compared(run, other);
        let open = if text.lines().count() <= SHOWN {
            " open"
        } else {
            ""
        };
        let text = escaped(&text);
        let _ = writeln!(
            html,
            "<details{open}><summary>What differs</summary><pre>{text}</pre></details>"
        );
    }
    html + &legend(other) + "</header>\n"
}

/// The marks of the rows.
fn legend(other: Option<&Run>) -> String {
    let marks = plot::legend(other.map(|other| &*other.name)).into_iter();
    let items: String = marks
        .map(|(svg, words)| format!("<li>{svg}{words}</li>"))
        .collect();
    format!("<ul class=\"legend\">{items}</ul>")
}

/// One figure of each system on one axis, each with a link to its section.
fn glance(run: &Run, other: Option<&Run>) -> String {
    let headlines = headlines(run, other);
    if headlines.len() < 2 {
        return String::new();
    }
    let pairs: Vec<Pair<'_>> = headlines.iter().map(|(_, pair)| *pair).collect();
    let scale = plot::scale(&pairs);
    let mut notes = Notes::default();
    let mut html = String::from(
        "<section><h2>At a glance</h2>\n<p>How many times better with the mechanism: 1 is no \
         difference.</p>\n<div class=\"rows\">",
    );
    for (system, pair) in headlines {
        let name = format!("<a href=\"#{}\">{}</a>", system.name, system.title);
        html += &rows::row(&name, pair, scale, &mut notes);
    }
    html += &rows::axis(scale, "x");
    html + "</div>" + &notes.list() + "</section>\n"
}

/// The figure that stands for each system, if it was measured.
pub(crate) fn headlines<'r>(
    run: &'r Run,
    other: Option<&'r Run>,
) -> Vec<(&'static System, Pair<'r>)> {
    let of = |system: &System| {
        let pairs = system
            .headlines
            .iter()
            .filter_map(|id| Pair::of(id, run, other));
        let pairs: Vec<Pair<'r>> = pairs.collect();
        let mine = pairs.iter().find(|pair| pair.mine.is_some());
        mine.or(pairs.first()).copied()
    };
    SYSTEMS
        .iter()
        .filter_map(|system| Some((system, of(system)?)))
        .collect()
}

/// The figures of `system`; without one, the figures that no system has.
fn section(system: Option<(usize, &System)>, run: &Run, other: Option<&Run>) -> String {
    let index = system.map(|(index, _)| index);
    let is_mine = |id: &str| System::of(id) == index;
    let mut all = pairs(run, other);
    all.retain(|pair| is_mine(&pair.shown().id));
    let skipped = run.skipped.iter().filter(|skipped| is_mine(&skipped.id));
    let skipped: Vec<_> = skipped.collect();
    if all.is_empty() && skipped.is_empty() {
        return String::new();
    }
    let mut html = match system {
        Some((_, system)) => introduction(system),
        None => "<section id=\"others\"><h2>Other results</h2>".to_owned(),
    };
    let own = all.iter().filter_map(|pair| pair.mine);
    let others = all.iter().filter_map(|pair| pair.other);
    let [own, others]: [Vec<&Figure>; 2] = [own.collect(), others.collect()];
    let curves = [(series(&own), run), (series(&others), other.unwrap_or(run))];
    let is_on_curve = |id: &str| {
        let mut on = curves[0].0.iter().flat_map(|one| &one.points);
        on.any(|(_, figure)| figure.id == id)
    };
    let is_key = |pair: &Pair<'_>| {
        let figure = pair.shown();
        figure.bar.is_some() || figure.reference.is_some() && !is_on_curve(&figure.id)
    };
    let (mut shown, mut folded): (Vec<_>, Vec<_>) = all.iter().copied().partition(is_key);
    if all.len() <= SHOWN || shown.is_empty() {
        (shown, folded) = (all.clone(), Vec::new());
    }
    let mut notes = Notes::default();
    html += &rows::groups(&shown, &mut notes);
    for (curves, run) in &curves {
        let name = other.map_or("", |_| &*run.name);
        html += &chart::charts(curves, name);
    }
    if !folded.is_empty() {
        let (count, groups) = (folded.len(), rows::groups(&folded, &mut notes));
        let _ = write!(
            html,
            "<details><summary>{count} more figures</summary>{groups}</details>"
        );
    }
    html += &notes.list();
    for skipped in skipped {
        let (id, why) = (escaped(&skipped.id), with_code(&skipped.why));
        let _ = write!(
            html,
            "<p class=\"skipped\"><code>{id}</code> was not measured: {why}</p>"
        );
    }
    html + "</section>\n"
}

/// What a system is, and its experiment.
fn introduction(system: &System) -> String {
    let System {
        name,
        title,
        mechanism,
        experiment,
        drawing,
        page,
        ..
    } = system;
    format!(
        "<section id=\"{name}\"><h2>{title}</h2>\n<div class=\"about\"><figure>{drawing}</figure>\
         <div><p>{mechanism}</p><p>{experiment}</p><p class=\"again\">How it is measured: \
         <code>docs/{page}.md</code></p></div></div>\n"
    )
}
