//! `lacuna ctl`: one request to the control socket of a guest. The monitors are in
//! [`monitor`].

use crate::args::{CtlArgs, CtlCommand, DIRTY, Output, SetArgs};
use crate::client;
use crate::exit::Exit;
use crate::migrate::progress;
use crate::monitor;
use crate::output::{vcpus, visible};
use crate::run::{Refusal, exit_of};
use crate::size::Size;
use crate::view;
use lacuna_control::{AskError, Client, SetRequest, Setting, Settings, State, Status};
use lacuna_lab::options::name_of;
use serde_json::json;
use std::path::Path;

/// Sends the request; prints the guest's status after it and returns the exit code.
pub fn ctl(args: &CtlArgs) -> Exit {
    let control = &args.control;
    exit_of(match &args.command {
        CtlCommand::Status(output) => ask(control, Client::status, output),
        CtlCommand::Pause(output) => ask(control, Client::pause, output),
        CtlCommand::Resume(output) => ask(control, Client::resume, output),
        CtlCommand::Stop(output) => ask(control, Client::stop, output),
        CtlCommand::Stat(pacing) => monitor::stat(control, pacing),
        CtlCommand::Set(args) => set(control, args),
        CtlCommand::Top(args) => view::top(control, args),
        CtlCommand::Dirty(args) => monitor::writes(control, args),
    })
}

fn ask(
    control: &Path,
    request: fn(&mut Client) -> Result<Status, AskError>,
    output: &Output,
) -> Result<Exit, Refusal> {
    let status = client::ask(control, output, request)?;
    let text = in_words(&status);
    client::report(output, &text, "done", json!({ "status": status }))
}

/// Changes the settings; prints them.
fn set(control: &Path, args: &SetArgs) -> Result<Exit, Refusal> {
    let request = SetRequest {
        async_faults: args.async_faults,
        huge_pages: args.huge_pages,
        detect: args.dirty,
        resident_bytes: args.resident.map(|size| size.0),
        source_delay_us: args.source_delay.map(|delay| delay.as_micros() as u64),
    };
    let change = |client: &mut Client| match request == SetRequest::default() {
        true => client.settings(),
        false => client.set(request),
    };
    let settings = client::ask(control, &args.output, change)?;
    let text = settings_in_words(&settings);
    client::report(&args.output, &text, "done", json!({ "settings": settings }))
}

/// Settings in lines, each with its option in front.
fn settings_in_words(settings: &Settings) -> String {
    fn line<T>(name: &str, setting: &Setting<T>, word: impl Fn(&T) -> String) -> String {
        let value = setting.value.as_ref().map_or_else(|| "none".into(), word);
        let fixed = setting.fixed.as_ref();
        let fixed = fixed.map_or_else(String::new, |why| format!(" (fixed: {})", visible(why)));
        format!("{name:<14}{value}{fixed}\n")
    }
    let on_off = |on: &bool| if *on { "on" } else { "off" }.to_owned();
    [
        line("async-faults", &settings.async_faults, on_off),
        line("huge-pages", &settings.huge_pages, on_off),
        line("dirty", &settings.detect, |of| name_of(&DIRTY, of).into()),
        line("resident", &settings.resident_bytes, |bytes| {
            Size(*bytes).to_string()
        }),
        line("source-delay", &settings.source_delay_us, |us| {
            format!("{us}us")
        }),
    ]
    .concat()
}

/// A status in lines, each with a name in front.
fn in_words(status: &Status) -> String {
    let state = match status.state {
        State::Waiting => "waiting",
        State::Arriving => "arriving",
        State::Running => "running",
        State::Pausing => "pausing",
        State::Paused => "paused",
        State::Ended => "ended",
    };
    let machine = (status.vcpus > 0).then(|| {
        let (backend, arch) = (visible(&status.backend), visible(&status.arch));
        let memory = Size(status.memory_bytes);
        format!("{backend} {arch}, {}, {memory}", vcpus(status.vcpus))
    });
    let pages = status.pages.as_ref().map(|pages| {
        let (present, total) = (pages.present, pages.total);
        format!("{present} of {total} present, {} lost", pages.lost)
    });
    let saving = status.saving.as_ref().map(|now| {
        let path = now.path.display();
        let (round, done, pages) = (now.round, now.done, now.pages);
        format!("to {path}: round {round}, {done} of {pages} pages")
    });
    let arriving = status.arriving.as_ref().map(|now| {
        let missing = now.missing.map_or_else(String::new, |pages| {
            format!(", {pages} pages only at its source")
        });
        format!("at {}: {:?}{missing}", now.at, now.stage).to_lowercase()
    });
    let lines = [
        ("state", Some(state.to_owned())),
        ("machine", machine),
        (
            "ran",
            (status.seconds > 0.0).then(|| format!("{:.1} s", status.seconds)),
        ),
        ("pages", pages),
        ("outage", status.outage.clone()),
        ("saving", saving),
        ("moving", status.migrating.as_ref().map(progress)),
        ("arriving", arriving),
        (
            "waiting",
            status.waiting.as_ref().map(|at| format!("at {at}")),
        ),
        ("undecided", status.undecided.clone()),
        ("ending", status.ending.clone()),
    ];
    let known = lines
        .iter()
        .filter_map(|(name, text)| Some((name, text.as_ref()?)));
    known
        .map(|(name, text)| format!("{name:<10}{}\n", visible(text)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_in_words() {
        let status = serde_json::json!({
            "protocol": 1, "state": "running", "backend": "soft", "arch": "x86_64", "vcpus": 2,
            "memory_bytes": 16 << 20, "seconds": 1.25, "saving": null, "undecided": null,
            "migrating": {
                "to": "tcp:h:1", "mode": "hybrid", "stage": "here", "round": 1, "done": 1,
                "pages": 4, "remaining": 3, "bytes": 4096, "rate": 0.0, "cuts": 0, "cut": null,
            },
            "ending": "a\u{1b}[2J",
        });
        let status = serde_json::from_value(status).unwrap();
        let expected = "\
state     running
machine   soft x86_64, 2 vCPUs, 16M
ran       1.2 s
moving    to tcp:h:1 (hybrid): round 1 25 %, 3 pages left; 4K sent, 0B/s
ending    a\\u{1b}[2J
";
        assert_eq!(in_words(&status), expected);
    }
}
