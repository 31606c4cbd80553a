//! The commands that are clients of a control socket: one request, and its result.

use crate::args::Output;
use crate::exit::{Exit, no_answer};
use crate::output::{check_target, write_result};
use crate::run::Refusal;
use lacuna_control::{AskError, Client};
use lacuna_lab::result::{SCHEMA, command_line, to_json};
use serde::Serialize;
use std::path::Path;

/// A request to the control socket `control`. `output` is checked before.
pub(crate) fn ask<T>(
    control: &Path,
    output: &Output,
    request: impl FnOnce(&mut Client) -> Result<T, AskError>,
) -> Result<T, Refusal> {
    check_target(output)?;
    let answer = Client::connect(control).and_then(|mut client| request(&mut client));
    answer.map_err(no_answer)
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
