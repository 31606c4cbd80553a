//! The parts of the view. Each returns at most `rows` lines of at most `width` columns, its title
//! included; none if it has nothing to show.

use super::keys;
use super::model::{Curve, FAULTS, Model, QUANTILES, TIMED};
use crate::migrate;
use crate::output::{self, fit, visible};
use crate::size::Size;
use lacuna::PAGE_SIZE;
use lacuna::memory::PageStates;
use lacuna_control::{State, Status};
use lacuna_lab::report::{short, time};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

/// A panel.
pub(super) type Panel = fn(&Model, usize, usize) -> Vec<Line<'static>>;

/// What a vCPU does, with its glyph. Glyphs differ, because a terminal may have no colours.
const DOING: [(&str, char, Color); 4] = [
    ("running", '█', Color::Green),
    ("faulting", '▒', Color::Yellow),
    ("waiting", 'x', Color::Red),
    ("halted", '·', Color::DarkGray),
];
/// The state of a page, with its glyph, in the order of a cell's counts.
const PAGES: [(&str, char, Color); 6] = [
    ("resident", '█', Color::Green),
    ("swapped", 's', Color::Yellow),
    ("missing", 'm', Color::Red),
    ("huge", 'H', Color::Cyan),
    ("dirty", 'd', Color::Magenta),
    ("untouched", '·', Color::DarkGray),
];
/// Columns of a name.
const NAME: usize = 10;

/// The first line of a panel.
fn title(name: &str, width: usize) -> Line<'static> {
    let rest = width.saturating_sub(name.chars().count() + 4);
    let text = format!("── {name} {}", "─".repeat(rest));
    Line::styled(text, Style::new().add_modifier(Modifier::BOLD))
}

/// `text` as a line of at most `width` columns. A longer text ends with an ellipsis.
fn line(text: &str, width: usize) -> Line<'static> {
    let text = visible(text);
    match text.chars().count() > width {
        true => {
            let start: String = text.chars().take(width.saturating_sub(1)).collect();
            Line::raw(start + "…")
        }
        false => Line::raw(text.into_owned()),
    }
}

/// `text` in several lines.
fn wrapped(text: &str, width: usize) -> Vec<Line<'static>> {
    let fitted = fit(text, width);
    fitted.lines().map(|text| line(text, width)).collect()
}

fn styled(model: &Model, glyphs: String, colour: Color) -> Span<'static> {
    match model.has_colours {
        true => Span::styled(glyphs, Style::new().fg(colour)),
        false => Span::raw(glyphs),
    }
}

/// A bar of `width` columns: each part with its share, glyph and colour.
fn bar(model: &Model, parts: &[(f64, char, Color)], width: usize) -> Vec<Span<'static>> {
    let (mut sum, mut at) = (0.0, 0);
    let mut spans = Vec::new();
    for (share, glyph, colour) in parts {
        sum += share;
        let end = ((sum * width as f64).round() as usize).clamp(at, width);
        spans.push(styled(model, glyph.to_string().repeat(end - at), *colour));
        at = end;
    }
    spans.push(Span::raw(" ".repeat(width - at)));
    spans
}

/// What the guest is and does.
pub(super) fn head(model: &Model, width: usize) -> Line<'static> {
    let Some(status) = model.status() else {
        return line("lacuna   connecting", width);
    };
    let state = match status.state {
        State::Waiting => "waiting",
        State::Arriving => "arriving",
        State::Running => "running",
        State::Pausing => "pausing",
        State::Paused => "paused",
        State::Ended => "ended",
    };
    let text = match &status.waiting {
        Some(at) => format!("lacuna   waiting for a guest at {at}"),
        None => format!(
            "lacuna   {state} {:.1} s   {} {}, {}, {}",
            status.seconds,
            status.backend,
            status.arch,
            output::vcpus(status.vcpus),
            Size(status.memory_bytes)
        ),
    };
    line(&text, width).style(Style::new().add_modifier(Modifier::BOLD))
}

/// The text of a demo.
pub(super) fn heading(model: &Model, width: usize) -> Vec<Line<'static>> {
    model
        .heading
        .iter()
        .flat_map(|text| wrapped(text, width))
        .collect()
}

/// The vCPUs' time, by what they did.
pub(super) fn vcpus(model: &Model, width: usize, rows: usize) -> Vec<Line<'static>> {
    const METRIC: &str = "lacuna_vcpu_state_seconds_total";
    let running = model.each(METRIC, "state");
    let vcpus: Vec<_> = running
        .iter()
        .filter(|of| of["state"] == "running")
        .collect();
    if vcpus.is_empty() || rows < 2 {
        return Vec::new();
    }
    let shares = |labels: &[(&str, &str)], vcpus: usize| {
        DOING.map(|(state, glyph, colour)| {
            let labels = [labels, &[("state", state)]].concat();
            (model.rate(METRIC, &labels) / vcpus as f64, glyph, colour)
        })
    };
    let legend = DOING.map(|(state, glyph, _)| format!("{glyph} {state}"));
    let mut lines = vec![title(&format!("vCPUs: {}", legend.join("  ")), width)];
    let mut show = |name: &str, shares: [(f64, char, Color); 4]| {
        let numbers = shares.map(|(share, ..)| format!("{:>3.0}", share.min(1.0) * 100.0));
        let numbers = format!(" {} %", numbers.join(" "));
        let room = width.saturating_sub(NAME + numbers.len());
        let mut spans = vec![Span::raw(format!("{name:<NAME$}"))];
        spans.extend(bar(model, &shares, room));
        spans.push(Span::raw(numbers));
        lines.push(Line::from(spans));
    };
    // One line for all where they do not fit.
    if vcpus.len() >= rows {
        show(&format!("all {}", vcpus.len()), shares(&[], vcpus.len()));
    } else {
        for labels in &vcpus {
            let vcpu = labels.get("vcpu").map_or("", |vcpu| vcpu);
            show(&format!("vcpu {vcpu}"), shares(&[("vcpu", vcpu)], 1));
        }
    }
    lines
}

/// The guest's pages by state, and the budget.
pub(super) fn memory(model: &Model, width: usize, rows: usize) -> Vec<Line<'static>> {
    let total = model.memory_bytes();
    if total == 0 || rows < 2 {
        return Vec::new();
    }
    let page = PAGE_SIZE as u64;
    let resident = model.values("lacuna_vm_resident_bytes", &[]).next();
    let cells = model.map.iter().flat_map(|map| &map.cells);
    let states = sum(cells);
    let of = |index: usize| Size(states[index] * page);
    let budget = model
        .settings
        .as_ref()
        .and_then(|now| now.resident_bytes.value);
    let budget = budget.map_or_else(String::new, |bytes| format!(" of budget {}", Size(bytes)));
    let mut text = format!(
        "resident {}{budget} (guest {})",
        Size(resident.unwrap_or(0.0) as u64),
        Size(total)
    );
    for (index, (name, glyph, _)) in PAGES.iter().enumerate().skip(1) {
        if states[index] > 0 && *name != "untouched" {
            text.push_str(&format!("   {glyph} {name} {}", of(index)));
        }
    }
    let mut lines = vec![title("memory", width)];
    let shares = [0, 1, 2, 5].map(|index| {
        let (_, glyph, colour) = PAGES[index];
        (
            states[index] as f64 * page as f64 / total as f64,
            glyph,
            colour,
        )
    });
    if model.map.is_some() && rows > 2 {
        lines.push(Line::from(bar(model, &shares, width)));
    }
    lines.extend(wrapped(&text, width));
    lines.truncate(rows);
    lines
}

/// Eighths of a column of one line.
const EIGHTHS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A curve in one line, from zero to its highest value. A blank is a time without a sample.
fn spark(values: &[Option<f64>]) -> String {
    let highest = values.iter().flatten().copied().fold(0.0, f64::max);
    let column = |value: &Option<f64>| match value {
        None => ' ',
        Some(value) if highest > 0.0 => EIGHTHS[((value / highest * 7.0).round() as usize).min(7)],
        Some(_) => EIGHTHS[0],
    };
    values.iter().map(column).collect()
}

/// Rates and times of the last minute, and the marks of switches.
pub(super) fn curves(model: &Model, width: usize, rows: usize) -> Vec<Line<'static>> {
    const NAME: usize = 14;
    const VALUE: usize = 10;
    if rows < 3 || model.status().is_none() {
        return Vec::new();
    }
    let room = width.saturating_sub(NAME + VALUE + 1);
    let mut lines = vec![title(
        "work and faults in the last 60 s; p50, p99 of all so far",
        width,
    )];
    let mut show = |name: &str, curve, text: String, colour| {
        let spark = spark(&model.curve(curve, room));
        lines.push(Line::from(vec![
            Span::raw(format!("{name:<NAME$}{text:>VALUE$} ")),
            styled(model, spark, colour),
        ]));
    };
    let rate = |curve| format!("{}/s", short(model.last(curve)));
    if model
        .values("lacuna_guest_thread_steps_total", &[])
        .next()
        .is_some()
    {
        show("steps", Curve::Steps, rate(Curve::Steps), Color::Green);
    }
    if model.values("lacuna_apf_in_flight", &[]).next().is_some() {
        let tokens = short(model.last(Curve::Tokens));
        show("tokens", Curve::Tokens, tokens, Color::Cyan);
    }
    for kind in model.faults() {
        let curve = Curve::Faults(kind);
        show(FAULTS[kind].0, curve, rate(curve), Color::Yellow);
    }
    // The slowest kinds first, and their p99 before their p50.
    for (quantile, (at, _)) in QUANTILES.iter().enumerate().rev() {
        for kind in (0..TIMED).rev() {
            let curve = Curve::Time(kind, quantile);
            if model.last(curve) > 0.0 {
                let name = format!("{} {at}", FAULTS[kind].0);
                show(&name, curve, time(model.last(curve) as u64), Color::Red);
            }
        }
    }
    lines.truncate(rows - 1);
    let axis = model.axis(room);
    lines.push(Line::raw(format!(
        "{:<NAME$}{:>VALUE$} {axis}",
        "switches", "60 s ago"
    )));
    lines
}

/// The guest's memory in order, a glyph for the commonest state of some pages.
pub(super) fn map(model: &Model, width: usize, rows: usize) -> Vec<Line<'static>> {
    let Some(map) = model
        .map
        .as_ref()
        .filter(|map| !map.cells.is_empty() && rows > 1)
    else {
        return Vec::new();
    };
    let cells = map.cells.len();
    let shown = cells.min(width.saturating_mul(rows - 1));
    let each = cells.div_ceil(shown.max(1));
    let pages = Size(map.pages_per_cell * each as u64 * PAGE_SIZE as u64);
    let name = format!("memory map, {pages} a cell");
    let legend = PAGES.map(|(name, glyph, _)| format!("{glyph} {name}"));
    let long = format!("{name}: {}", legend.join("  "));
    // Without room for the legend, the help has it.
    let fits = long.chars().count() + 6 <= width;
    let mut lines = vec![title(if fits { &long } else { &name }, width)];
    let cells = map.cells.chunks(each);
    let glyphs: Vec<_> = cells.map(|cells| PAGES[commonest(sum(cells))]).collect();
    for row in glyphs.chunks(width) {
        let runs = row.chunk_by(|a, b| a.1 == b.1);
        let spans = runs.map(|run| styled(model, run[0].1.to_string().repeat(run.len()), run[0].2));
        lines.push(Line::from(spans.collect::<Vec<_>>()));
    }
    lines
}

/// The pages of all cells by their state, in the order of [`PAGES`].
fn sum<'a>(cells: impl IntoIterator<Item = &'a PageStates>) -> [u64; 6] {
    let mut states = PageStates::default();
    cells.into_iter().for_each(|cell| states += *cell);
    states.counts()
}

/// The state to show for pages with these counts, by its index in [`PAGES`].
fn commonest([resident, swapped, missing, huge, dirty, untouched]: [u64; 6]) -> usize {
    let states = [(0, resident), (1, swapped), (2, missing), (5, untouched)];
    let (state, _) = states
        .into_iter()
        .max_by_key(|(_, count)| *count)
        .unwrap_or((5, 0));
    // Huge and dirty pages are resident ones.
    match state {
        0 if dirty * 2 > resident => 4,
        0 if huge * 2 > resident => 3,
        state => state,
    }
}

/// A migration, restore or snapshot in progress, on both sides.
pub(super) fn moving(model: &Model, width: usize, rows: usize) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    for (side, status) in [("", model.status()), ("other side: ", model.other.as_ref())] {
        for text in status.into_iter().flat_map(in_progress) {
            lines.extend(wrapped(&format!("{side}{text}"), width));
        }
    }
    if lines.is_empty() || rows < 2 {
        return Vec::new();
    }
    lines.insert(0, title("in progress", width));
    lines.truncate(rows);
    lines
}

/// What is in progress, in words.
fn in_progress(status: &Status) -> Vec<String> {
    let mut texts = Vec::new();
    if let Some(now) = &status.migrating {
        texts.push(format!("moves {}", migrate::progress(now)));
    }
    if let Some(now) = &status.arriving {
        let missing = now.missing.map_or_else(String::new, |pages| {
            format!("   {} pages missing", short(pages as f64))
        });
        let stage = format!("{:?}", now.stage).to_lowercase();
        texts.push(format!(
            "arrives at {}: stage {stage}   {} came{missing}   {}/s   {:.1} s",
            now.at,
            Size(now.came * PAGE_SIZE as u64),
            Size(now.rate as u64),
            now.seconds
        ));
    }
    if let Some(now) = &status.saving {
        let (path, percent) = (now.path.display(), (now.done * 100).checked_div(now.pages));
        let percent = percent.unwrap_or(0);
        texts.push(format!(
            "saves to {path}: round {} {percent} % of {} pages",
            now.round, now.pages
        ));
    }
    if let Some(now) = status.pages.filter(|now| !now.whole && now.missing > 0) {
        let [missing, rate] = [now.missing as f64, now.rate].map(short);
        texts.push(format!(
            "pages: {missing} of {} missing   {} lost   {rate}/s   p50 {}   p99 {}",
            short(now.total as f64),
            now.lost,
            time(now.p50_ns),
            time(now.p99_ns)
        ));
    }
    texts.extend(
        [&status.outage, &status.undecided]
            .into_iter()
            .flatten()
            .cloned(),
    );
    texts
}

/// The guest's threads.
pub(super) fn threads(model: &Model, width: usize, rows: usize) -> Vec<Line<'static>> {
    const STEPS: &str = "lacuna_guest_thread_steps_total";
    let mut all = model.each(STEPS, "thread");
    // Threads that neither work nor fault are last, so they are the first without a line.
    all.sort_by_key(|of| of.get("kind").is_some_and(|kind| kind == "other"));
    if all.is_empty() || rows < 2 {
        return Vec::new();
    }
    let mut lines = vec![title("guest threads", width)];
    let longest = all
        .iter()
        .map(|of| of["thread"].len())
        .max()
        .unwrap_or(0)
        .min(24);
    for labels in all.iter().take(rows - 1) {
        let of = [("thread", &*labels["thread"])];
        let name: String = visible(of[0].1).chars().take(longest).collect();
        let steps = model.values(STEPS, &of).sum::<f64>();
        let goal = model
            .values("lacuna_guest_thread_goal", &of)
            .next()
            .unwrap_or(0.0);
        let rate = format!(" {:>8}/s", short(model.rate(STEPS, &of)));
        let mut spans = vec![Span::raw(format!("{name:<longest$} "))];
        if goal > 0.0 {
            let done = (steps / goal).min(1.0);
            let room = width.saturating_sub(longest + rate.len() + 7).min(40);
            let parts = [
                (done, '█', Color::Green),
                (1.0 - done, '░', Color::DarkGray),
            ];
            spans.extend(bar(model, &parts, room));
            spans.push(Span::raw(format!(" {:>3.0} %", done * 100.0)));
        } else {
            spans.push(Span::raw(format!("{:>8}", short(steps))));
        }
        spans.push(Span::raw(rate));
        lines.push(Line::from(spans));
    }
    // The last line says how many threads do not fit.
    let hidden = all.len().saturating_sub(rows - 1);
    if hidden > 0 && rows > 2 {
        lines.pop();
        lines.push(line(&format!("and {} more", hidden + 1), width));
    }
    lines
}

/// The last lines of the guest.
pub(super) fn output(model: &Model, width: usize, rows: usize) -> Vec<Line<'static>> {
    if model.lines.is_empty() || rows < 2 {
        return Vec::new();
    }
    let mut lines = vec![title("output", width)];
    let first = model.lines.len().saturating_sub(rows - 1);
    lines.extend(model.lines[first..].iter().map(|text| line(text, width)));
    lines
}

/// The keys and settings, and what the last key did.
pub(super) fn foot(model: &Model, width: usize) -> Vec<Line<'static>> {
    let mut lines = wrapped(&keys::bar(model), width);
    if !model.note.is_empty() {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let note = wrapped(&model.note, width).into_iter().take(2);
        lines.splice(0..0, note.map(|line| line.style(bold)));
    }
    lines
}
