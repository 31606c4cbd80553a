//! `lacuna run --incoming`: waits for a guest, takes it, and resumes it.
//!
//! The command refuses a connection that announces no machine, makes nothing for it, and keeps
//! waiting. The first connection that announces a machine brings the guest. A failure from then on
//! ends the command, or with `--wait-again` the attempt, and the source gets the reason.

use super::opened::Opened;
use super::threads::{EndServing, failed};
use super::{Job, Refusal, Start, catch_signals, run_with};
use crate::args::RunArgs;
use crate::exit::{Exit, transport_refusal};
use crate::output::{check_target, complain, visible};
use crate::sample::Received;
use crate::sandbox;
use crate::signals::Signals;
use lacuna::migrate::session::{Arrival, Destination, IncomingEvent, IncomingHandle};
use lacuna::migrate::stream::Prepared;
use lacuna::migrate::transport::{Address, Listener};
use lacuna::migrate::{MachineConfig, MigrateError};
use lacuna::{PlatformDevices, VCPUS_MAX, Vm};
use lacuna_control::{Awaiting, ControlSocket, undecided_at_destination};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

/// How many ranges of missing pages a report has.
const RANGES_REPORTED: usize = 1000;

/// How the guest arrived, for the end of its run.
pub(super) fn received(handle: &IncomingHandle) -> Received {
    let now = handle.progress(RANGES_REPORTED);
    Received {
        at: now.at,
        mode: now.mode,
        pages: now.came,
        missing: now.missing.unwrap_or(0),
        ranges: now.ranges,
        cuts: now.cuts,
        late: now.late,
        bytes: now.bytes,
        again: now.again,
        downtime_us: now.downtime_us,
        seconds: now.seconds,
    }
}

/// Refuses a machine that no command line could ask for.
fn check(machine: &MachineConfig) -> Result<(), Refusal> {
    match machine.vcpus {
        1..=VCPUS_MAX => Ok(()),
        vcpus => {
            let text = format!("a guest with {vcpus} vCPUs: this release has 1 to {VCPUS_MAX}");
            Err((Exit::Usage, text))
        }
    }
}

/// Waits for a guest at `at`, and runs it as `args` say.
pub(super) fn wait_and_run(args: &RunArgs, at: &Address) -> Result<Exit, Refusal> {
    let cut: Arc<AtomicBool> = Arc::default();
    let signals = catch_signals(&cut)?;
    check_target(&args.on.output)?;
    let mut opened = Opened::open(&args.on, false)?;
    let files = args.tls.files(at).map_err(|text| (Exit::Usage, text))?;
    let listener = Listener::open(at, files.as_ref(), cut).map_err(transport_refusal)?;
    sandbox::enter_run(args)?;
    opened.show(&signals)?;
    let destination = Destination::new(listener, report);
    let at = destination.address().to_string();
    complain(&format!("waiting for a guest at {at}"));
    let control = opened.control.as_ref();
    let is_stopped = || control.is_some_and(ControlSocket::has_stopped);
    loop {
        let arrival = match control {
            None => destination.wait().map_err(transport_refusal)?,
            Some(socket) => wait_controlled(&destination, socket)?,
        };
        let arrival =
            arrival.ok_or_else(|| before_it_came(&signals, is_stopped(), "before a guest came"))?;
        let run = RunArgs {
            wait_again: args.wait_again,
            ..args.on.machine(at.clone(), arrival.machine())
        };
        let done = check(arrival.machine())
            .and_then(|()| run_with(&run, Start::Incoming(&arrival), &signals, &opened));
        if let Err((_, why)) = &done {
            arrival.refuse(why);
        }
        let has_run = !arrival.handle().is_awaited();
        match done {
            Err((_, why))
                if args.wait_again && !has_run && !is_stopped() && signals.caught().is_none() =>
            {
                complain(&format!("{why}; waiting again at {at}"));
            }
            done => return opened.finish(args, done?, &signals),
        }
    }
}

/// Shows an event of the migration.
fn report(event: IncomingEvent<'_>) {
    match event {
        IncomingEvent::Cut(handle) => {
            complain(&undecided_at_destination(handle).unwrap_or_default());
        }
        event => complain(&visible(&event.to_string())),
    }
}

/// Waits while clients of a control socket are served. A client may end the wait.
fn wait_controlled<'a>(
    destination: &'a Destination,
    socket: &ControlSocket,
) -> Result<Option<Arrival<'a>>, Refusal> {
    let awaiting = Awaiting::new(destination, socket);
    thread::scope(|scope| {
        let named = thread::Builder::new().name("lacuna-control".into());
        let serving = named.spawn_scoped(scope, || awaiting.serve());
        serving.map_err(failed)?;
        let end = EndServing::of(socket);
        let arrival = destination.wait().map_err(transport_refusal);
        if let Ok(Some(_)) = &arrival {
            end.hand_over();
        }
        arrival
    })
}

/// The exit code and the text for a run that a signal or a client has ended.
fn before_it_came(signals: &Signals, is_stopped: bool, when: &str) -> Refusal {
    match signals.caught() {
        Some(signal) => (
            Exit::Interrupted(signal),
            format!("interrupted by {signal} {when}"),
        ),
        None if is_stopped => (
            Exit::Stopped,
            format!("stopped through its control socket {when}"),
        ),
        None => (Exit::Host, format!("ended {when}")),
    }
}

/// Takes memory and state of the guest into `vm` and `devices`. Some pages may remain at the
/// source.
pub(super) fn receive<V: Vm>(
    job: &Job<'_>,
    arrival: &Arrival<'_>,
    vm: &Arc<V>,
    devices: &PlatformDevices,
) -> Result<Prepared<V>, Refusal> {
    let taken = arrival.receive(vm, devices, &mut || match job.signals.caught() {
        None => ControlFlow::Continue(()),
        Some(_) => ControlFlow::Break(()),
    });
    let prepared = taken.map_err(|why| has_not_come(job, &why))?;
    // The source must not hand the guest to a run that cannot begin.
    if let Err(error) = devices.check_memory(&vm.memory_slots()) {
        return Err((Exit::Host, format!("the run cannot start: {error}")));
    }
    Ok(prepared)
}

/// The exit code and the text for a guest that has not arrived.
pub(super) fn has_not_come(job: &Job<'_>, why: &MigrateError) -> Refusal {
    let is_stopped = job.control.is_some_and(ControlSocket::has_stopped);
    let is_asked_for = job.signals.caught().is_some() || is_stopped;
    match why {
        MigrateError::Cancelled | MigrateError::Cut(_) if is_asked_for => {
            before_it_came(job.signals, is_stopped, "before the guest had come")
        }
        _ => {
            let text = format!(
                "the guest has not come: {}; it is with its source",
                visible(&why.to_string())
            );
            (why.kind().into(), text)
        }
    }
}
