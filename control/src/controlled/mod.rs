//! A guest under control of clients: which value holds its vCPUs, and what refuses a request.
//!
//! | file | what |
//! |---|---|
//! | `answers` | each request and its method; the service of clients |
//! | `status` | `status`, `stat` |
//! | `pausing` | `pause`, `resume`, `stop`, and a start that waits for them |
//! | `saving` | `snapshot` |
//! | `moving` | `migrate`, `postcopy`; `cancel` and `keep` at the source |
//! | `arriving` | `cancel` and `keep`, at the destination too |
//! | `setting` | `settings`, `set`, `map` |
//! | `watching`, `working_set` | `dirty` |

mod answers;
mod arriving;
mod moving;
mod pausing;
mod saving;
mod setting;
mod status;
mod watching;
mod working_set;

pub use status::PageCounts;

use crate::message::{Saving, State};
use crate::refused::Refused;
use crate::socket::ControlSocket;
use crate::threads::lock;
use crate::words::{given_up_at_source, undecided_at_source};
use lacuna::metrics::Metrics;
use lacuna::migrate::session::{IncomingHandle, IncomingStage, OutgoingHandle, Undecided};
use lacuna::migrate::{Budget, MigrateError, PausedGuest, Tracked};
use lacuna::{PlatformDevices, Running, Vm};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::Duration;
use watching::Monitor;

/// The time between two checks whether the run has begun, or shall begin.
const BEGIN: Duration = Duration::from_millis(1);
/// The longest downtime that a request may ask for: a day.
const DOWNTIME_MAX_MS: u64 = 86_400_000;

/// A guest under control of clients, before its run and during it. Any thread may call its methods.
pub struct Controlled<'a, V: Vm> {
    /// The migration that brings the guest here.
    pub incoming: Option<IncomingHandle>,
    /// The counts of the guest's pages, if they have a source.
    pub pages: Option<Arc<dyn PageCounts>>,
    /// Adds the VMM's own counters.
    pub more: Option<&'a (dyn Fn(&mut Metrics) + Sync)>,
    socket: &'a ControlSocket,
    vm: &'a V,
    devices: &'a PlatformDevices,
    running: OnceLock<&'a Running<V>>,
    phase: Mutex<Phase<'a, V>>,
    /// The log of writes since the last snapshot, if the next one shall have it as its base.
    tracked: Mutex<Option<Tracked<'a, V>>>,
    /// The monitor of a connected client.
    monitor: Mutex<Option<Monitor<'a, V>>>,
}

/// The holder of the guest's vCPUs.
enum Phase<'a, V: Vm> {
    /// The thread that begins the run has them, and waits for a client.
    NotStarted,
    /// Their threads have them.
    Runs,
    /// A thread waits for them.
    Pausing,
    /// This value has them.
    Paused(PausedGuest<'a, V>),
    /// A thread saves the guest. The [`State`] says whether it was paused before.
    Saves(Saving, State),
    /// A thread sends the guest elsewhere.
    Moves(OutgoingHandle),
    /// This value has them: the guest was handed over, and the attempts to connect again were
    /// cancelled.
    Undecided(Box<Undecided<'a, V>>),
}

impl<'a, V: Vm> Controlled<'a, V> {
    /// A guest of `vm` that does not run yet. Clients of `socket` control it; their requests for
    /// copies and pauses wait for [`Controlled::runs`].
    pub fn new(socket: &'a ControlSocket, vm: &'a V, devices: &'a PlatformDevices) -> Self {
        Self {
            incoming: None,
            pages: None,
            more: None,
            socket,
            vm,
            devices,
            running: OnceLock::new(),
            phase: Mutex::new(Phase::Runs),
            tracked: Mutex::new(None),
            monitor: Mutex::new(None),
        }
    }

    fn phase(&self) -> MutexGuard<'_, Phase<'a, V>> {
        lock(&self.phase)
    }

    /// The running guest.
    fn running(&self) -> Result<&'a Running<V>, MigrateError> {
        self.running.get().copied().ok_or(MigrateError::NotRunning)
    }

    /// Whether the guest was started paused, and no client has resumed it.
    fn waits_to_start(&self) -> bool {
        matches!(*self.phase(), Phase::NotStarted)
    }

    /// Whether the guest has not arrived yet.
    fn is_awaited(&self) -> bool {
        let is_awaited = self
            .incoming
            .as_ref()
            .is_some_and(IncomingHandle::is_awaited);
        is_awaited && self.devices.ending().is_none()
    }

    /// Refuses a request while another thread has the vCPUs.
    fn refused(&self, phase: &Phase<'a, V>) -> Refused {
        match phase {
            Phase::Saves(progress, _) => Refused::request(format!(
                "the guest is being saved to {}: wait for its end, or close the connection that \
                 asked for it, which cancels it",
                progress.path.display()
            )),
            Phase::Moves(handle) => {
                Refused::request(undecided_at_source(handle).unwrap_or_else(|| {
                    let to = handle.to();
                    format!("the guest is being moved to {to}: wait for its end, or cancel it")
                }))
            }
            Phase::Undecided(guest) => Refused::request(given_up_at_source(guest.handle())),
            Phase::NotStarted => {
                Refused::request("the guest was started paused, and has not begun: resume it first")
            }
            _ => Refused::request("another client pauses the guest: ask for the status, and again"),
        }
    }

    /// Waits until the run has begun. Refuses a finished run, and a run that waits for another
    /// process.
    fn check_runs(&self) -> Result<(), Refused> {
        let devices = self.devices;
        if self.is_awaited() {
            return Err(Refused::request(
                "the guest does not run here yet: ask for the status",
            ));
        }
        let begins = || self.running.get().is_none() && !self.waits_to_start();
        while devices.ending().is_none() && begins() {
            if !self.socket.serves() {
                return Err(Refused::request(
                    "the guest did not begin to run, and its VMM answers no longer",
                ));
            }
            thread::sleep(BEGIN);
        }
        match devices.ending() {
            None => Ok(()),
            Some(ending) => Err(Refused::request(format!("the run is over: {ending}"))),
        }
    }

    /// Refuses to copy a guest with missing memory.
    fn check_whole(&self) -> Result<(), Refused> {
        match self.incoming.as_ref().map(IncomingHandle::stage) {
            None | Some(IncomingStage::Whole) => Ok(()),
            Some(IncomingStage::Lost) => Err(Refused::request(
                "pages of the guest were lost when its source ended, and a copy of its memory \
                 would need them, which ends the run: let the guest run, or stop it",
            )),
            Some(_) => Err(Refused::request(
                "the rest of the guest's memory has not arrived: wait until the status says \
                 that it is whole",
            )),
        }
    }
}

/// The budget of a request.
fn budget(downtime_ms: Option<u64>) -> Result<Budget, Refused> {
    let mut budget = Budget::default();
    match downtime_ms {
        None => {}
        Some(ms) if ms <= DOWNTIME_MAX_MS => budget.downtime = Duration::from_millis(ms),
        Some(ms) => {
            let text = format!("downtime_ms {ms}: give at most {DOWNTIME_MAX_MS}, a day");
            return Err(Refused::request(text));
        }
    }
    Ok(budget)
}
