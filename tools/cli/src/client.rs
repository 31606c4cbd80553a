//! The commands that are clients of a control socket: one request, and its result.

use crate::args::Output;
use crate::exit::{Exit, no_answer};
use crate::output::{check_target, write_result};
use crate::run::{Refusal, catch_signals};
use lacuna_control::{AskError, Client};
use lacuna_lab::result::{SCHEMA, command_line, to_json};
use serde::Serialize;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// The time between two looks at the signals.
const LOOK: Duration = Duration::from_millis(50);

/// A request to the control socket `control`. `output` is checked before. The first signal ends the
/// connection, and the second one this process.
pub(crate) fn ask<T>(
    control: &Path,
    output: &Output,
    request: impl FnOnce(&mut Client) -> Result<T, AskError>,
) -> Result<T, Refusal> {
    check_target(output)?;
    let signals = catch_signals(&Arc::default())?;
    let mut client = Client::connect(control).map_err(no_answer)?;
    let closer = client.closer().map_err(failed)?;
    let is_answered = AtomicBool::new(false);
    let answer = thread::scope(|scope| {
        // A signal does not interrupt the wait for the answer.
        let watch = || {
            while !is_answered.load(Ordering::Acquire) {
                match signals.caught() {
                    None => thread::park_timeout(LOOK),
                    Some(_) => return closer.close(),
                }
            }
        };
        let named = thread::Builder::new().name("lacuna-signals".into());
        let watcher = named.spawn_scoped(scope, watch).map_err(failed)?;
        let answer = request(&mut client);
        is_answered.store(true, Ordering::Release);
        watcher.thread().unpark();
        Ok::<_, Refusal>(answer)
    })?;
    answer.map_err(|error| match (signals.caught(), error) {
        (Some(signal), AskError::Gone { .. }) => {
            let text = format!(
                "interrupted by {signal}: the VM cancels what it can still cancel; lacuna ctl {} \
                 status says what the guest does",
                control.display()
            );
            (Exit::Interrupted(signal), text)
        }
        (_, error) => no_answer(error),
    })
}

fn failed(error: io::Error) -> Refusal {
    (
        Exit::Host,
        format!("cannot wait for the VM's answer: {error}"),
    )
}

/// The result of a fulfilled request, as JSON.
#[derive(Serialize)]
struct Report<T> {
    schema: u32,
    command: String,
    outcome: String,
    exit_code: u8,
    #[serde(flatten)]
    result: T,
}

/// Prints a result. `result` is a structure or a map: its fields are the JSON's.
pub(crate) fn report(
    output: &Output,
    text: &str,
    outcome: impl Into<String>,
    result: impl Serialize,
) -> Result<Exit, Refusal> {
    let report = Report {
        schema: SCHEMA,
        command: command_line(),
        outcome: outcome.into(),
        exit_code: 0,
        result,
    };
    write_result(output, text, &to_json(&report))?;
    Ok(Exit::Done)
}
