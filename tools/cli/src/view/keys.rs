//! Keys of the view, and the requests that they send.

use super::feed::{Ask, Wanted};
use super::model::Model;
use crate::size::Size;
use lacuna::PAGE_SIZE;
use lacuna::dirty::Detection;
use lacuna_control::{SetRequest, Setting, Settings, State};
use lacuna_lab::report::time;
use std::time::Duration;

/// Source delays in the order of the key, in microseconds.
const DELAYS: [u64; 4] = [0, 100, 1_000, 10_000];

/// The effect of a key.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Action {
    Ask(Ask),
    /// Shows a text: the request is not possible.
    Refuse(String),
    Help,
    Quit,
}

/// The action of `key`; `None` if it has none.
pub(super) fn action(key: char, model: &Model) -> Option<Action> {
    let ask = |wanted, mark, text: &str| {
        Some(Action::Ask(Ask {
            wanted,
            mark,
            text: text.into(),
        }))
    };
    match (key, model.state()) {
        ('q', _) => Some(Action::Quit),
        ('?', _) => Some(Action::Help),
        // A key would change one half of a demo's comparison.
        _ if !model.heading.is_empty() => None,
        ('p', Some(State::Paused)) => ask(Wanted::Resume, 'P', "resumed"),
        ('p', _) => ask(Wanted::Pause, 'p', "paused"),
        ('a' | 'h' | 'd' | '+' | '-' | 's', _) => {
            let now = model.settings.as_ref();
            let now = now.ok_or_else(|| "this VM reports no settings".to_owned());
            let ask = now.and_then(|now| change(key, now, model.memory_bytes()));
            Some(ask.map_or_else(Action::Refuse, Action::Ask))
        }
        _ => None,
    }
}

/// The change of a setting that `key` asks for, in a guest of `memory` bytes.
///
/// # Errors
/// Why the setting cannot be changed.
fn change(key: char, now: &Settings, memory: u64) -> Result<Ask, String> {
    let mut request = SetRequest::default();
    let (mark, text) = match key {
        'a' | 'h' => {
            let (name, setting, field) = match key {
                'a' => ("async faults", &now.async_faults, &mut request.async_faults),
                _ => ("huge pages", &now.huge_pages, &mut request.huge_pages),
            };
            let on = !value(name, setting)?;
            *field = Some(on);
            let mark = if on { key.to_ascii_uppercase() } else { key };
            (mark, format!("{name} {}", in_words(on)))
        }
        'd' => {
            let (mark, to) = match value("detection", &now.detect)? {
                Detection::Pml => ('d', Detection::WriteProtect),
                Detection::WriteProtect => ('D', Detection::Pml),
            };
            request.detect = Some(to);
            (mark, format!("detection {}", detection(to)))
        }
        's' => {
            let delay = value("source delay", &now.source_delay_us)?;
            let next = DELAYS.into_iter().find(|next| *next > delay);
            let to = next.unwrap_or(0);
            request.source_delay_us = Some(to);
            (key, format!("source delay {}", time(to * 1000)))
        }
        _ => {
            let budget = value("budget", &now.resident_bytes)?;
            let page = PAGE_SIZE as u64;
            // An eighth of the guest's memory: the steps do not shrink with the budget.
            let step = memory / 8 / page * page;
            let to = match key {
                '+' => budget.saturating_add(step),
                _ => budget.saturating_sub(step).max(page),
            };
            request.resident_bytes = Some(to);
            (key, format!("budget {}", Size(to)))
        }
    };
    Ok(Ask {
        wanted: Wanted::Set(request),
        mark,
        text,
    })
}

/// The value of a setting, or why it cannot be changed.
fn value<T: Copy>(name: &str, setting: &Setting<T>) -> Result<T, String> {
    match (setting.value, &setting.fixed) {
        (Some(now), None) => Ok(now),
        (_, Some(why)) => Err(format!("{name}: {why}")),
        (None, None) => Err(format!("{name}: this VM has none")),
    }
}

pub(super) const fn in_words(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// As `--dirty` takes it.
pub(super) const fn detection(of: Detection) -> &'static str {
    match of {
        Detection::Pml => "pml",
        Detection::WriteProtect => "wp",
    }
}

/// The settings with their keys, for the last lines of the view. A fixed setting has no key.
pub(super) fn bar(model: &Model) -> String {
    let mut parts = Vec::new();
    if let Some(now) = &model.settings {
        let on = |on: bool| in_words(on).to_owned();
        let delay = |us: u64| match us {
            0 => "0".into(),
            us => format!("{:?}", Duration::from_micros(us)),
        };
        parts.extend([
            part("[a] ", "async faults", &now.async_faults, on),
            part("[h] ", "huge pages", &now.huge_pages, on),
            part("[d] ", "detect", &now.detect, |of| detection(of).into()),
            part("[+-] ", "budget", &now.resident_bytes, |of| {
                Size(of).to_string()
            }),
            part("[s] ", "delay", &now.source_delay_us, delay),
        ]);
    }
    let pause = match model.state() {
        Some(State::Paused) => "[p] resume",
        _ => "[p]ause",
    };
    let rest = [pause, "[q]uit", "[?]"].map(|text| Some(text.to_owned()));
    let parts: Vec<_> = parts.into_iter().chain(rest).flatten().collect();
    parts.join("   ")
}

/// A setting with its key; `None` if this VM does not have it.
fn part<T: Copy>(
    key: &str,
    name: &str,
    setting: &Setting<T>,
    text: impl Fn(T) -> String,
) -> Option<String> {
    let value = text(setting.value?);
    let key = if setting.fixed.is_none() { key } else { "" };
    Some(format!("{key}{name} {value}"))
}

/// What the keys do, and what the view's marks mean. A line has at most 60 columns.
pub(super) const HELP: [&str; 21] = [
    "a   async faults on or off: other processes of the guest run",
    "    while a page is read",
    "h   huge pages on or off, for new faults and for collapse",
    "d   how writes are detected: pml or wp (write protection)",
    "+-  budget: 1/8 of guest memory more or less",
    "s   delay of a page of the source or swap device: 0, 100 us,",
    "    1 ms, 10 ms",
    "p   pause or resume the guest",
    "?   this help, and back",
    "q   quit; under lacuna run it ends the guest, as Ctrl-C",
    "vCPUs: █ running  ▒ faulting  x waiting for a page  · halted",
    "map: guest memory in order, the commonest state of each cell",
    "    █ resident  H huge  d dirty  s swapped  m missing",
    "    · untouched: zeros without memory",
    "zero-fill: first touch          resident: only not mapped",
    "swap-in: read from swap         missing: from the source",
    "shared: another vCPU reads it   rescued: about to be evicted",
    "write log, write fast: logged writes, with a lock or without",
    "p50, p99: the times of all faults of a kind so far",
    "letters below the curves: A H on, a h off, D pml, d wp,",
    "    + - budget, s delay, p paused, P resumed",
];
