//! `lacuna offload`: saves and restores VMs of Cloud Hypervisor.

use crate::args::{OffloadArgs, OffloadCommand, OffloadOn, OffloadRestoreArgs, OffloadSaveArgs};
use crate::client;
use crate::exit::{Exit, transport_refusal};
use crate::output::{check_target, complain};
use crate::progress;
use crate::run::{Refusal, catch_signals, exit_of};
use crate::signals::Signals;
use crate::size::Size;
use indicatif::ProgressBar;
use lacuna::migrate::transport::PrivateSocket;
use lacuna_offload::{OffloadError, Settings, Snapshot, Sources, When, restore, save};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// How often the live line is renewed. The end of the work waits for it.
const LOOK: Duration = Duration::from_millis(20);

/// Does what `args` say; prints the result and returns the exit code.
pub fn offload(args: &OffloadArgs) -> Exit {
    exit_of(match &args.what {
        OffloadCommand::Save(args) => save_vm(args),
        OffloadCommand::Restore(args) => restore_vm(args),
    })
}

fn save_vm(args: &OffloadSaveArgs) -> Result<Exit, Refusal> {
    let (settings, signals, live) = settings(&args.on)?;
    let socket = PrivateSocket::bind(&args.socket).map_err(transport_refusal)?;
    let waits = format!("waiting   for a VM at {}", args.socket.display());
    let saved = shown(&live, &settings, ("saving", &waits), || {
        save(socket.listener(), &args.to, &settings)
    });
    let saved = saved.map_err(|error| refusal(&error, &signals))?;
    let text = format!(
        "saved     {} of memory in {} slots to {}, {} on the disk; the VM was {}\n",
        Size(saved.bytes),
        saved.slots,
        args.to.display(),
        Size(saved.disk),
        if saved.was_running {
            "running"
        } else {
            "paused"
        },
    );
    let result = json!({
        "folder": args.to,
        "memory_bytes": saved.bytes,
        "slots": saved.slots,
        "disk_bytes": saved.disk,
        "was_running": saved.was_running,
    });
    client::report(&args.on.output, &text, "done", result)
}

fn restore_vm(args: &OffloadRestoreArgs) -> Result<Exit, Refusal> {
    let (settings, signals, live) = settings(&args.on)?;
    let snapshot = Snapshot::open(&args.from).map_err(|error| refusal(&error, &signals))?;
    let pages = || {
        let pages = snapshot.pages();
        pages.map_err(|error| (Exit::Usage, error.to_string()))
    };
    let sources = Sources {
        faults: &pages()?,
        fill: &pages()?,
    };
    let when = match args.on_demand {
        true => When::OnDemand { fill: args.fill },
        false => When::Before,
    };
    let began = Instant::now();
    let restored = shown(&live, &settings, ("restoring", ""), || {
        restore(&snapshot, &args.to, sources, when, &settings)
    });
    let restored = restored.map_err(|error| refusal(&error, &signals))?;
    let seconds = began.elapsed().as_secs_f64();
    let text = format!(
        "restored  {} of {} pages from {}, {} faults, in {seconds:.1} s; the VM is {}\n",
        restored.in_place,
        restored.pages,
        args.from.display(),
        restored.faults,
        if restored.is_running {
            "running"
        } else {
            "paused"
        },
    );
    let result = json!({
        "folder": args.from,
        "pages": restored.pages,
        "in_place": restored.in_place,
        "faults": restored.faults,
        "is_running": restored.is_running,
        "seconds": seconds,
    });
    client::report(&args.on.output, &text, "done", result)
}

/// Calls `work` on another thread, and shows its progress meanwhile. `waits` stands for a progress
/// that has not begun.
fn shown<T: Send>(
    live: &ProgressBar,
    settings: &Settings,
    (what, waits): (&str, &str),
    work: impl FnOnce() -> T + Send,
) -> T {
    thread::scope(|scope| {
        let working = scope.spawn(work);
        while !working.is_finished() {
            let progress = &settings.progress;
            let [done, all] = [&progress.done, &progress.all].map(|n| n.load(Ordering::Relaxed));
            live.set_message(match all {
                0 => waits.to_owned(),
                _ => format!("{what:<9} {} of {}", Size(done), Size(all)),
            });
            live.tick();
            thread::sleep(LOOK);
        }
        live.finish_and_clear();
        let done = working.join();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A signal is the wish to end.
fn settings(on: &OffloadOn) -> Result<(Settings, Signals, ProgressBar), Refusal> {
    let live = progress::line(on.output.quiet);
    let line = live.clone();
    let mut settings = Settings {
        report: Arc::new(move |text: &str| line.suspend(|| complain(text))),
        ..Settings::default()
    };
    if let Some(patience) = on.patience {
        settings.patience = patience;
    }
    let signals = catch_signals(&settings.stop)?;
    check_target(&on.output)?;
    Ok((settings, signals, live))
}

fn refusal(error: &OffloadError, signals: &Signals) -> Refusal {
    let exit = match (error, signals.caught()) {
        (OffloadError::Interrupted, Some(signal)) => Exit::Interrupted(signal),
        (OffloadError::Snapshot { .. }, _) => Exit::Usage,
        _ if error.is_of_vmm() => Exit::Peer,
        _ => Exit::Host,
    };
    (exit, error.to_string())
}
