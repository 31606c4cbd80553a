//! `lacuna snapshot`: saves a running guest, and resumes a saved one.

use crate::args::{Patience, RestoreArgs, SaveArgs, SnapshotArgs, SnapshotCommand};
use crate::client;
use crate::exit::{self, Exit};
use crate::output::check_target;
use crate::pages::Restoring;
use crate::progress::bar;
use crate::run::{Lazy, Opened, Record, Refusal, Start, catch_signals, exit_of, run_from};
use crate::sandbox;
use lacuna::migrate::{MigrateError, Snapshot, Touches};
use lacuna_control::store::{self, url};
use lacuna_control::{SaveRequest, Saving};
use lacuna_lab::report::time;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Does what `args` say; prints the result and returns the exit code.
pub fn snapshot(args: &SnapshotArgs) -> Exit {
    exit_of(match &args.what {
        SnapshotCommand::Save(args) => save(args),
        SnapshotCommand::Restore(args) => restore(args),
    })
}

fn save(args: &SaveArgs) -> Result<Exit, Refusal> {
    let request = SaveRequest {
        path: place(&args.folder)?,
        downtime_ms: args.downtime.map(|downtime| downtime.as_millis() as u64),
        track: args.track,
        base: args.base.as_deref().map(place).transpose()?,
    };
    let (began, live) = (Instant::now(), bar(args.output.quiet));
    let mut show = |now: Saving| {
        live.set_length(now.pages);
        live.set_position(now.done);
        live.set_message(format!("saving, round {}", now.round));
    };
    let saved = client::ask(&args.control, &args.output, |client| {
        client.save(request, &mut show)
    });
    live.finish_and_clear();
    let saved = saved?;
    let seconds = began.elapsed().as_secs_f64();
    let by = match &saved.detected_by {
        None => String::new(),
        Some(by) => format!(" by {by}"),
    };
    let text = format!(
        "saved     {} pages to {} in {seconds:.1} s and {} rounds{}; downtime {}\n",
        saved.pages,
        saved.path.display(),
        saved.rounds.len(),
        by,
        time(saved.downtime_us * 1000),
    );
    let result = json!({ "seconds": seconds, "saved": saved });
    client::report(&args.output, &text, "done", result)
}

/// The place of a snapshot, as the VM takes it.
fn place(path: &Path) -> Result<PathBuf, Refusal> {
    match url(path) {
        Some(_) => Ok(path.to_owned()),
        None => absolute(path),
    }
}

/// A path as the VM, which has a current folder of its own, takes it.
pub(crate) fn absolute(folder: &Path) -> Result<PathBuf, Refusal> {
    let path = std::path::absolute(folder);
    let path = path.map_err(|error| (Exit::Usage, format!("{}: {error}", folder.display())))?;
    match path.to_str() {
        Some(_) => Ok(path),
        None => {
            let text = format!(
                "{}: the control socket takes no path that is not UTF-8: give another name",
                folder.display()
            );
            Err((Exit::Usage, text))
        }
    }
}

fn restore(args: &RestoreArgs) -> Result<Exit, Refusal> {
    let signals = catch_signals(&Arc::default())?;
    check_target(&args.on.output)?;
    let opened = Opened::open(&args.on, false)?;
    sandbox::enter_restore(args)?;
    let interrupt = signals.flag();
    let interrupt = interrupt.map_err(|error| (Exit::Host, error.to_string()))?;
    let snapshot = open(args, &interrupt).map_err(|refusal| match signals.caught() {
        None => refusal,
        Some(signal) => {
            let text = format!("interrupted by {signal} before the snapshot was open");
            (Exit::Interrupted(signal), text)
        }
    })?;
    let from = args.folder.display().to_string();
    let run = args.on.machine(from, snapshot.machine());
    if !args.lazy {
        return run_from(&run, Start::Snapshot(&snapshot), &signals, opened);
    }
    let lazy = lazy(args, &snapshot, &interrupt).map_err(|error| refusal(&error))?;
    run_from(&run, Start::Lazily(&lazy), &signals, opened)
}

/// The snapshot in a folder, or at a URL.
fn open(args: &RestoreArgs, interrupt: &Arc<AtomicBool>) -> Result<Snapshot, Refusal> {
    let opened = match url(&args.folder) {
        None => Snapshot::open(&args.folder),
        Some(url) => {
            let patience = Patience::of_threads(args.patience);
            Snapshot::open_in(store::open(url, patience, interrupt).map_err(exit::refusal)?)
        }
    };
    opened.map_err(|error| refusal(&error))
}

/// How long first touches are recorded.
const RECORD_FOR: Duration = Duration::from_secs(10);

/// The settings in `args` for pages that arrive while the guest runs.
fn lazy<'a>(
    args: &'a RestoreArgs,
    snapshot: &'a Snapshot,
    interrupt: &'a Arc<AtomicBool>,
) -> Result<Lazy<'a>, MigrateError> {
    let replay = args.replay.as_deref();
    let replay = replay
        .map(|path| Touches::load(path, snapshot.touched_memory()))
        .transpose()?;
    let record = args.record.as_deref().map(|path| {
        // An unwritable record is refused before the guest runs.
        Touches::check_target(path).map(|()| Record {
            path,
            time: args.record_for.unwrap_or(RECORD_FOR),
            recorder: snapshot.recorder(),
        })
    });
    Ok(Lazy {
        snapshot,
        policy: Patience::policy(args.patience),
        counts: Arc::new(Restoring::new(snapshot)),
        interrupt,
        record: record.transpose()?,
        replay,
    })
}

/// The exit code and the text for the user.
pub(crate) fn refusal(error: &MigrateError) -> Refusal {
    (error.kind().into(), error.to_string())
}
