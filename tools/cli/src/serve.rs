//! `lacuna serve`: provides a guest's memory to other processes, page by page.

use crate::args::ServeArgs;
use crate::exit::{Exit, transport_refusal};
use crate::output::{check_target, columns, fit, write_result_until_signal};
use crate::progress;
use crate::run::{Refusal, catch_signals, exit_of};
use crate::sandbox;
use crate::size::Size;
use crate::source::{open_to_serve, whole_pages};
use lacuna::migrate::transport::PrivateSocket;
use lacuna::source::{Injected, Measured, PageSource, Policy, Server, SourceStats, serve as start};
use lacuna_lab::report::{short, time};
use lacuna_lab::result::{command_line, to_json};
use lacuna_sandbox::{Access, Sandbox};
use serde::Serialize;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How often the live line is renewed and signals are checked.
const LOOK: Duration = Duration::from_millis(200);

/// The result of `lacuna serve`, as JSON.
#[derive(Serialize)]
struct ServeReport {
    command: String,
    source: String,
    memory_bytes: u64,
    outcome: String,
    exit_code: u8,
    seconds: f64,
    connections: u64,
    asked: u64,
    provided: u64,
    failed: u64,
    p50_ns: u128,
    p99_ns: u128,
    p999_ns: u128,
}

/// Serves pages as `args` say, until a signal arrives; prints a summary and returns the exit code.
pub fn serve(args: &ServeArgs) -> Exit {
    exit_of(serve_until_signal(args))
}

fn serve_until_signal(args: &ServeArgs) -> Result<Exit, Refusal> {
    let host = |error: &dyn ToString| (Exit::Host, error.to_string());
    let signals = catch_signals(&Arc::default())?;
    check_target(&args.output)?;
    let pages = whole_pages(args.memory.0)?;
    let interrupt = signals.flag().map_err(|error| host(&error))?;
    let policy = Policy::default();
    let socket = PrivateSocket::bind(&args.socket).map_err(transport_refusal)?;
    enter_sandbox(args)?;
    let (mut source, _) = open_to_serve(&args.source, Some(pages), policy, &interrupt)?;
    if let Some(faults) = args.faults() {
        let link = Injected::new(source, faults);
        source = Box::new(link.map_err(|error| host(&no_thread(&error)))?);
    }
    let source = Arc::new(Measured::new(source));
    let asked = Arc::clone(&source) as Arc<dyn PageSource>;
    let listener = socket.listener().try_clone();
    let listener = listener.map_err(|error| host(&format!("no descriptor is left: {error}")))?;
    let server = start(listener, pages, asked);
    let server = server.map_err(|error| host(&no_thread(&error)))?;
    let live = progress::line(args.output.quiet);
    let began = Instant::now();
    let signal = loop {
        if let Some(signal) = signals.caught() {
            break signal;
        }
        let line = line(args, &server, &source.stats(), began.elapsed());
        live.set_message(fit(&line, columns()));
        live.tick();
        thread::sleep(LOOK);
    };
    live.finish_and_clear();
    let (stats, exit) = (source.stats(), Exit::Interrupted(signal));
    let text = line(args, &server, &stats, began.elapsed());
    let report = ServeReport {
        command: command_line(),
        source: args.source.to_string(),
        memory_bytes: args.memory.0,
        outcome: format!("ended by {signal}"),
        exit_code: exit.code(),
        seconds: began.elapsed().as_secs_f64(),
        connections: server.accepted(),
        asked: stats.asked,
        provided: stats.provided,
        failed: stats.failed,
        p50_ns: stats.p50.as_nanos(),
        p99_ns: stats.p99.as_nanos(),
        p999_ns: stats.p999.as_nanos(),
    };
    let json = to_json(&report);
    write_result_until_signal(&args.output, &(text + "\n"), &json, &signals)?;
    Ok(exit)
}

/// Enters the sandbox, before the first thread and the first byte of the source.
fn enter_sandbox(args: &ServeArgs) -> Result<(), Refusal> {
    let mut sandbox = Sandbox::new();
    sandbox::allow_source(&mut sandbox, &args.source);
    sandbox.allow(sandbox::parent(&args.socket), Access::Remove);
    sandbox::allow_output(&mut sandbox, &args.output);
    sandbox::enter(&sandbox, &args.sandbox)
}

fn no_thread(error: &io::Error) -> String {
    format!("cannot start a thread that serves pages: {error}")
}

fn line(args: &ServeArgs, server: &Server, stats: &SourceStats, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(1e-3);
    let [p50, p99, p999] = [stats.p50, stats.p99, stats.p999].map(|t| time(t.as_nanos() as u64));
    let failed = match stats.failed {
        0 => String::new(),
        failed => format!(", {failed} failed"),
    };
    format!(
        "serving   {} from {} at {}: {} clients so far, {} pages{failed}; {}/s, p50 {p50}, p99 \
         {p99}, p99.9 {p999}",
        Size(args.memory.0),
        args.source,
        args.socket.display(),
        server.accepted(),
        stats.provided,
        short(stats.provided as f64 / seconds),
    )
}
