//! `LACUNA_LOG`: what the engine does, in lines on stderr. Also starts the recorder of `--trace`.

use crate::output::Events;
use crate::trace::Recorder;
use std::env;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The name of the variable. Its value has targets with levels, such as
/// `lacuna=debug,lacuna::fault=trace`.
pub const VARIABLE: &str = "LACUNA_LOG";

/// Writes the wanted events from now on, if the variable is set, and records all events if `trace`.
///
/// # Errors
/// Its value is wrong: the text for the user.
pub fn start(trace: bool) -> Result<(), String> {
    let wrong =
        |why: &str| format!("{VARIABLE}: {why}; give targets and levels, such as lacuna=debug");
    let mut lines = None;
    if let Some(value) = env::var_os(VARIABLE) {
        let value = value.to_str().ok_or_else(|| wrong("no text"))?;
        let targets: Targets = value.parse().map_err(|why| wrong(&format!("{why}")))?;
        let layer = tracing_subscriber::fmt::layer().with_ansi(false);
        // A closed stderr must not end the guest, and the layer's own errors would go there too.
        let layer = layer.with_writer(|| Events).log_internal_errors(false);
        lines = Some(layer.with_filter(targets));
    }
    if lines.is_none() && !trace {
        return Ok(());
    }
    let all = Targets::new().with_target("lacuna", LevelFilter::TRACE);
    let recorder = trace.then(|| Recorder::new().with_filter(all));
    let events = tracing_subscriber::registry().with(lines).with(recorder);
    events.try_init().map_err(|why| wrong(&why.to_string()))
}
