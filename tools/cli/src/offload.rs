//! `lacuna offload`: saves and restores VMs of Cloud Hypervisor.

use crate::args::{OffloadArgs, OffloadCommand, OffloadOn, OffloadRestoreArgs, OffloadSaveArgs};
use crate::client;
use crate::exit::{Exit, transport_refusal};
use crate::output::{check_target, complain};
use crate::run::{Refusal, catch_signals, exit_of};
use crate::signals::Signals;
use crate::size::Size;
use lacuna::migrate::transport::PrivateSocket;
use lacuna_offload::{OffloadError, Settings, Snapshot, Sources, When, restore, save};
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

/// Does what `args` say; prints the result and returns the exit code.
pub fn offload(args: &OffloadArgs) -> Exit {
    exit_of(match &args.what {
        OffloadCommand::Save(args) => save_vm(args),
        OffloadCommand::Restore(args) => restore_vm(args),
    })
}

fn save_vm(args: &OffloadSaveArgs) -> Result<Exit, Refusal> {
    let (settings, signals) = settings(&args.on)?;
    let socket = PrivateSocket::bind(&args.socket).map_err(transport_refusal)?;
    let saved = save(socket.listener(), &args.to, &settings);
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
    let (settings, signals) = settings(&args.on)?;
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
    let restored = restore(&snapshot, &args.to, sources, when, &settings);
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

/// A signal is the wish to end.
fn settings(on: &OffloadOn) -> Result<(Settings, Signals), Refusal> {
    let mut settings = Settings {
        report: Arc::new(|text: &str| complain(text)),
        ..Settings::default()
    };
    if let Some(patience) = on.patience {
        settings.patience = patience;
    }
    let signals = catch_signals(&settings.stop)?;
    check_target(&on.output)?;
    Ok((settings, signals))
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
