//! `LACUNA_LOG`: what the engine does, in lines on stderr.

use std::env;
use std::io;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The name of the variable. Its value has targets with levels, such as
/// `lacuna=debug,lacuna::fault=trace`.
pub const VARIABLE: &str = "LACUNA_LOG";

/// Writes the wanted events from now on, if the variable is set.
///
/// # Errors
/// Its value is wrong: the text for the user.
pub fn start() -> Result<(), String> {
    let Some(value) = env::var_os(VARIABLE) else {
        return Ok(());
    };
    let wrong =
        |why: &str| format!("{VARIABLE}: {why}; give targets and levels, such as lacuna=debug");
    let value = value.to_str().ok_or_else(|| wrong("no text"))?;
    let targets: Targets = value.parse().map_err(|why| wrong(&format!("{why}")))?;
    let lines = tracing_subscriber::fmt::layer().with_ansi(false);
    // A closed stderr must not end the guest, and the layer's own errors would go there too.
    let lines = lines.with_writer(io::stderr).log_internal_errors(false);
    let events = tracing_subscriber::registry().with(lines).with(targets);
    events.try_init().map_err(|why| wrong(&why.to_string()))
}
