//! `lacuna ctl`: one request to the control socket of a guest. The monitors are in
//! [`monitor`].

use crate::args::{CtlArgs, CtlCommand, Output};
use crate::exit::{Exit, no_answer};
use crate::migrate::progress;
use crate::monitor;
use crate::output::{check_target, visible, write_result};
use crate::run::{Refusal, exit_of};
use crate::size::Size;
use lacuna_control::{AskError, Client, State, Status};
use lacuna_lab::result::SCHEMA;
use serde::Serialize;
use std::path::Path;

/// The result of `lacuna ctl`, as JSON.
#[derive(Serialize)]
struct CtlReport {
    schema: u32,
    command: String,
    outcome: &'static str,
    exit_code: u8,
    /// After the request.
    status: Status,
}

/// Sends the request; prints the guest's status after it and returns the exit code.
pub fn ctl(args: &CtlArgs) -> Exit {
    let control = &args.control;
    exit_of(match &args.command {
        CtlCommand::Status(output) => ask(control, Client::status, output),
        CtlCommand::Pause(output) => ask(control, Client::pause, output),
        CtlCommand::Resume(output) => ask(control, Client::resume, output),
        CtlCommand::Stop(output) => ask(control, Client::stop, output),
        CtlCommand::Stat(pacing) => monitor::stat(control, pacing),
        CtlCommand::Dirty(args) => monitor::writes(control, args),
    })
}

/// A request whose answer is the status after it.
pub(crate) type Request = fn(&mut Client) -> Result<Status, AskError>;

fn ask(control: &Path, request: Request, output: &Output) -> Result<Exit, Refusal> {
    check_target(output).map_err(|error| (Exit::Host, error.to_string()))?;
    let status = Client::connect(control).and_then(|mut client| request(&mut client));
    let status = status.map_err(no_answer)?;
    let text = in_words(&status);
    let report = CtlReport {
        schema: SCHEMA,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        outcome: "done",
        exit_code: 0,
        status,
    };
    let json = serde_json::to_string_pretty(&report).expect("every field has a JSON form");
    let written = write_result(output, &text, &(json + "\n"));
    written.map_err(|error| (Exit::Host, error.to_string()))?;
    Ok(Exit::Done)
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
        format!("{backend} {arch}, {} vCPUs, {memory}", status.vcpus)
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
