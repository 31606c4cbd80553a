//! `lacuna run --incoming`: waits for a guest, takes it, and resumes it.
//!
//! ```text
//! listen ─► a connection ─► its first message ─► VM of that machine ─► memory, state ─► run
//!   ▲                           │ is none
//!   └──── refused, reason ◄─────┘
//! ```
//! The command watches all connections at the same time. It refuses a connection that announces no
//! machine, makes nothing for it, and keeps waiting. The first connection that announces a machine
//! brings the guest. Every failure from then on ends the command, and the source gets the reason.

use super::threads::{EndServing, failed};
use super::{Job, Refusal, Start, run_controlled};
use crate::args::RunArgs;
use crate::control::{Awaiting, ClientActions, ControlSocket, IncomingGuest};
use crate::exit::{Exit, transport_refusal};
use crate::migrate::{line, words};
use crate::output::{check_target, complain, visible};
use crate::sample::Received;
use crate::signals::Signals;
use crate::size::Size;
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{PageSource, PlatformDevices, Vm};
use lacuna_migrate::stream::{Incoming, Prepared};
use lacuna_migrate::transport::{Accepted, Address, Candidate, Link, Listener};
use lacuna_migrate::{Machine, MigrateError};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// How many ranges of missing pages a report has.
const RANGES_REPORTED: usize = 1000;
/// The most vCPUs of a guest, as `--vcpus` has it.
const VCPUS_MAX: usize = 64;

/// An announced guest.
pub struct Arrival<'a> {
    at: Address,
    machine: Machine,
    connections: Accepted<'a>,
    incoming_guest: Arc<IncomingGuest>,
    /// `None`: the guest has been taken.
    incoming: Mutex<Option<Incoming>>,
}

impl<'a> Arrival<'a> {
    /// The machine of the incoming guest.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Its progress.
    pub(crate) fn incoming_guest(&self) -> &Arc<IncomingGuest> {
        &self.incoming_guest
    }

    pub(super) fn connections(&self) -> &Accepted<'a> {
        &self.connections
    }

    /// The page source of its VM; `None` if all pages arrive before the guest.
    pub(super) fn page_source(&self) -> Option<Arc<dyn PageSource>> {
        let incoming = self.incoming.lock();
        let incoming = incoming.unwrap_or_else(PoisonError::into_inner);
        incoming.as_ref()?.page_source()
    }

    /// How the guest arrived, for the end of its run.
    pub(super) fn received(&self) -> Received {
        let now = self.incoming_guest.progress(RANGES_REPORTED);
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
    fn check(&self) -> Result<(), Refusal> {
        match self.machine.vcpus {
            1..=VCPUS_MAX => Ok(()),
            vcpus => {
                let text = format!("a guest with {vcpus} vCPUs: this release has 1 to {VCPUS_MAX}");
                Err((Exit::Usage, text))
            }
        }
    }

    fn take(&self) -> Option<Incoming> {
        let mut incoming = self.incoming.lock();
        let incoming = incoming.as_mut().unwrap_or_else(|error| error.get_mut());
        incoming.take()
    }
}

/// Waits for a guest at `at`, and runs it as `args` say.
pub(super) fn wait_and_run(args: &RunArgs, at: &Address) -> Result<Exit, Refusal> {
    let cut: Arc<AtomicBool> = Arc::default();
    let signals = Signals::catch(&cut);
    let signals =
        signals.map_err(|error| (Exit::Host, format!("cannot catch signals: {error}")))?;
    check_target(&args.output).map_err(|error| (Exit::Host, error.to_string()))?;
    let control = args.control.as_deref().map(ControlSocket::open);
    let control = control.transpose()?;
    let files = args.tls.files(at).map_err(|text| (Exit::Usage, text))?;
    let link = Arc::new(Link::of_destination(cut));
    let listener = Listener::open(at, files.as_ref(), link);
    let listener = listener.map_err(transport_refusal)?;
    complain(&format!("waiting for a guest at {}", listener.address()));
    let arrival = match &control {
        None => wait(&listener)?,
        Some(socket) => wait_controlled(&listener, socket)?,
    }
    .ok_or_else(|| {
        let is_stopped = control
            .as_ref()
            .is_some_and(|it| it.actions().has_stopped());
        before_it_came(&signals, is_stopped, "before a guest came")
    })?;
    let run = args.on(arrival.at.to_string(), &arrival.machine);
    let done = arrival
        .check()
        .and_then(|()| run_controlled(&run, Start::Incoming(&arrival), &signals, control));
    // If the guest has not been taken, no VM could be made for it.
    if let (Err((_, why)), Some(incoming)) = (&done, arrival.take()) {
        incoming.refuse(&MigrateError::NoVm(why.clone()));
    }
    done
}

/// As [`wait`], while clients of a control socket are served. A client may end the wait.
fn wait_controlled<'a>(
    listener: &'a Listener,
    socket: &ControlSocket,
) -> Result<Option<Arrival<'a>>, Refusal> {
    let (at, link) = (listener.address().to_string(), Arc::clone(listener.link()));
    let awaiting = Awaiting::new(at, socket.actions(), link);
    thread::scope(|scope| {
        let named = thread::Builder::new().name("lacuna-control".into());
        let serving = named.spawn_scoped(scope, || socket.serve(&awaiting));
        serving.map_err(failed)?;
        let end = EndServing::of(socket);
        let arrival = wait(listener);
        if let Ok(Some(_)) = &arrival {
            end.hand_over();
        }
        arrival
    })
}

/// Waits until a connection has announced a guest. Other connections are refused. `None`: a signal
/// or a client has ended the wait.
fn wait<'a>(listener: &'a Listener) -> Result<Option<Arrival<'a>>, Refusal> {
    while listener.link().is_open() {
        let next = listener.next().map_err(|error| {
            let text = format!(
                "{}: no connection can be accepted: {error}",
                listener.address()
            );
            (Exit::Host, text)
        })?;
        let Some(Candidate { from, connection }) = next else {
            continue;
        };
        let announced = connection.map_err(MigrateError::Cut).and_then(|first| {
            let connections = Accepted::new(listener, first);
            Ok((Incoming::accept(&connections)?, connections))
        });
        match announced {
            Ok((incoming, connections)) => {
                let (at, link) = (listener.address().clone(), connections.link());
                return Ok(Some(Arrival {
                    incoming_guest: Arc::new(IncomingGuest::new(at.to_string(), &incoming, link)),
                    at,
                    machine: incoming.machine().clone(),
                    connections,
                    incoming: Mutex::new(Some(incoming)),
                }));
            }
            Err(why) => complain(&format!(
                "refused {from}, and still waiting: {}",
                visible(&why.to_string())
            )),
        }
    }
    Ok(None)
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

/// Takes memory and state of the guest into `vm` and `devices`, with progress on a terminal. Some
/// pages may remain at the source.
pub(super) fn receive<V: Vm>(
    job: &Job<'_>,
    arrival: &Arrival<'_>,
    vm: &Arc<V>,
    devices: &PlatformDevices,
) -> Result<Prepared<V>, Refusal> {
    let incoming = arrival.take().expect("a guest is taken once");
    let live = line(job.args.output.quiet);
    let link = arrival.connections.link();
    let mode = words(incoming.mode());
    let taken = incoming.receive(&arrival.connections, vm, devices, &mut |more| {
        let pages = arrival.incoming_guest.count_arrived(more);
        live.set_message(format!(
            "receiving a guest of {} ({mode}): {} of pages came, {}/s",
            Size(arrival.machine.memory),
            Size(pages * PAGE_SIZE as u64),
            Size(link.rate() as u64),
        ));
        match job.signals.caught() {
            None => ControlFlow::Continue(()),
            Some(_) => ControlFlow::Break(()),
        }
    });
    live.finish_and_clear();
    let prepared = taken.map_err(|why| has_not_come(job, &why))?;
    // The source must not hand the guest to a run that cannot begin.
    if let Err(error) = devices.check_memory(&vm.memory_slots()) {
        return Err((Exit::Host, format!("the run cannot start: {error}")));
    }
    Ok(prepared)
}

/// The exit code and the text for a guest that has not arrived.
pub(super) fn has_not_come(job: &Job<'_>, why: &MigrateError) -> Refusal {
    let is_stopped = job.client_actions().is_some_and(ClientActions::has_stopped);
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
