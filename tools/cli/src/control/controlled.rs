//! What a request does to the guest.

use super::message::{Answer, PROTOCOL, Refused, Request, Saving, State, Status};
use super::moving::{Fields, undecided_text};
use super::saving::Plan;
use super::words::{RANGES_SHOWN, undecided_at_destination, undecided_at_source};
use super::writes::{Monitor, Watch};
use super::{Answers, ClientActions};
use crate::pages::GuestPages;
use crate::sample::Pages;
use lacuna::metrics::Metrics;
use lacuna::migrate::session::{
    IncomingHandle, IncomingStage, OutgoingHandle, OutgoingStage, Undecided,
};
use lacuna::migrate::{Budget, MigrateError, PausedGuest, Tracked};
use lacuna::{Arch, Ending, PlatformDevices, Running, Vm};
use serde_json::Number;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The time between two messages of progress.
pub(super) const PROGRESS: Duration = Duration::from_millis(100);
/// The time between two checks whether the run has begun, or shall begin.
const BEGIN: Duration = Duration::from_millis(1);
/// The longest pause that a request may ask for: a day.
const DOWNTIME_MAX_MS: u64 = 86_400_000;

/// A guest, before its run and during it.
pub struct Guest<'a, V: Vm> {
    /// Its VM.
    pub vm: &'a V,
    /// Its devices.
    pub devices: &'a PlatformDevices,
    /// The guest, once it runs.
    pub running: &'a OnceLock<Running<V>>,
}

/// A running guest under control of clients. Any thread may call its methods.
pub struct Controlled<'a, V: Vm> {
    pub(super) guest: &'a Guest<'a, V>,
    since: OnceLock<Instant>,
    phase: Mutex<Phase<'a, V>>,
    /// The migration that brings the guest here.
    incoming_guest: Option<IncomingHandle>,
    /// Its pages, if they have a source.
    pages: Option<Arc<GuestPages>>,
    /// The log of writes since the last snapshot, if the next one shall have it as its base.
    pub(super) tracked: Mutex<Option<Tracked<'a, V>>>,
    /// The monitor of a connected client.
    pub(super) monitor: Mutex<Option<Monitor<'a, V>>>,
    /// How requests have ended the run.
    pub(super) actions: &'a ClientActions,
}

/// The holder of the guest's vCPUs.
pub(super) enum Phase<'a, V: Vm> {
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
    /// Controls `guest`; `incoming_guest` if it arrives from another process. A request that ends
    /// the run is noted in `actions`. The status has the counts of its `pages`.
    pub fn new(
        guest: &'a Guest<'a, V>,
        actions: &'a ClientActions,
        incoming_guest: Option<IncomingHandle>,
        pages: Option<Arc<GuestPages>>,
    ) -> Self {
        Self {
            guest,
            pages,
            since: OnceLock::new(),
            phase: Mutex::new(Phase::Runs),
            incoming_guest,
            tracked: Mutex::new(None),
            monitor: Mutex::new(None),
            actions,
        }
    }

    /// The guest starts paused: [`Controlled::begins`] waits for a client.
    pub fn start_paused(&self) {
        *self.phase() = Phase::NotStarted;
    }

    /// The guest begins to run, or resumes. If it starts paused, this waits until a client resumes
    /// it or ends the run. A signal, which `has_signal` looks for, ends the run too.
    pub fn begins(&self, has_signal: &dyn Fn() -> bool) {
        let devices = self.guest.devices;
        while self.waits_to_start() && devices.ending().is_none() {
            if has_signal() {
                devices.end(Ending::Stopped, self.guest.vm);
            }
            thread::sleep(BEGIN);
        }
        if devices.ending().is_none() {
            self.since.get_or_init(Instant::now);
        }
    }

    /// Whether the guest was started paused, and no client has resumed it.
    fn waits_to_start(&self) -> bool {
        matches!(*self.phase(), Phase::NotStarted)
    }

    /// Releases a paused guest after the end of its run, so that its threads end.
    fn release_at_the_end(&self) {
        if self.guest.devices.ending().is_some() {
            let mut phase = self.phase();
            if let Phase::Paused(_) | Phase::Undecided(_) = &*phase {
                *phase = Phase::Runs;
            }
        }
    }

    pub(super) fn phase(&self) -> MutexGuard<'_, Phase<'a, V>> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn status(&self) -> Status {
        let ending = self
            .guest
            .devices
            .ending()
            .map(|ending| match self.actions.moved() {
                Some(moved) => moved.outcome(),
                None => ending.to_string(),
            });
        let (mut saving, mut migrating, mut undecided) = (None, None, None);
        let state = match &*self.phase() {
            Phase::Runs => State::Running,
            Phase::Pausing => State::Pausing,
            Phase::NotStarted | Phase::Paused(_) => State::Paused,
            Phase::Saves(progress, state) => {
                saving = Some(progress.clone());
                *state
            }
            Phase::Moves(handle) => {
                let now = handle.progress();
                undecided = undecided_at_source(handle);
                let state = match now.stage {
                    OutgoingStage::Here => State::Running,
                    _ => State::Paused,
                };
                migrating = Some(now);
                state
            }
            Phase::Undecided(guest) => {
                undecided = Some(undecided_text(guest.handle()));
                State::Paused
            }
        };
        let state = match ending {
            Some(_) => State::Ended,
            None if self.is_awaited() => State::Arriving,
            None => state,
        };
        let arriving = self.incoming_guest.as_ref();
        let arriving = arriving.map(|guest| guest.progress(RANGES_SHOWN));
        let config = self.guest.vm.config();
        let ran = self.since.get().map_or(Duration::ZERO, Instant::elapsed);
        let pages = self.pages.as_ref();
        Status {
            protocol: PROTOCOL,
            state,
            backend: V::BACKEND.name().into(),
            arch: arch_name(config.arch).into(),
            vcpus: config.vcpus,
            memory_bytes: config.memory.bytes(),
            seconds: ran.as_secs_f64(),
            pages: pages.map(|pages| pages.count(&Pages::default(), ran)),
            outage: pages.and_then(|pages| pages.outage()),
            saving,
            migrating,
            undecided: undecided.or_else(|| undecided_at_destination(arriving.as_ref()?)),
            arriving,
            waiting: None,
            ending,
        }
    }

    /// What `--metrics` shows, without its comments.
    fn counters(&self) -> BTreeMap<String, Number> {
        let migration = self.migration();
        let counters = counters(self.guest.vm, self.pages.as_deref(), migration.as_ref());
        let text = counters.to_string();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let values = lines.filter_map(|line| line.rsplit_once(' '));
        values
            .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
            .collect()
    }

    /// Refuses a request while another thread has the vCPUs.
    pub(super) fn refused(&self, phase: &Phase<'a, V>) -> Refused {
        match phase {
            Phase::Saves(progress, _) => Refused::request(format!(
                "the guest is being saved to {}: wait for its end, or close the connection that \
                 asked for it, which cancels it",
                progress.path.display()
            )),
            Phase::Moves(handle) => {
                Refused::request(undecided_at_source(handle).unwrap_or_else(|| {
                    let to = handle.progress().to;
                    format!("the guest is being moved to {to}: wait for its end, or cancel it")
                }))
            }
            Phase::Undecided(guest) => Refused::request(undecided_text(guest.handle())),
            Phase::NotStarted => Refused::request(
                "the guest was started with --paused, and has not begun: resume it first",
            ),
            _ => Refused::request("another client pauses the guest: ask for the status, and again"),
        }
    }

    /// Waits until the run has begun. Refuses a finished run, and a run that waits for another
    /// process.
    pub(super) fn check_runs(&self) -> Result<(), Refused> {
        let devices = self.guest.devices;
        if self.is_awaited() {
            return Err(Refused::request(
                "the guest does not run here yet: ask for the status",
            ));
        }
        let begins = || self.guest.running.get().is_none() && !self.waits_to_start();
        while devices.ending().is_none() && begins() {
            thread::sleep(BEGIN);
        }
        match devices.ending() {
            None => Ok(()),
            Some(ending) => Err(Refused::request(format!("the run is over: {ending}"))),
        }
    }

    /// The running guest.
    pub(super) fn running(&self) -> Result<&'a Running<V>, MigrateError> {
        self.guest.running.get().ok_or(MigrateError::NotRunning)
    }

    /// Whether the guest has not arrived yet.
    fn is_awaited(&self) -> bool {
        let is_over = self.guest.devices.ending().is_some();
        !is_over
            && self
                .incoming_guest
                .as_ref()
                .is_some_and(|guest| guest.is_awaited())
    }

    /// Refuses to copy a guest with missing memory.
    pub(super) fn check_whole(&self) -> Result<(), Refused> {
        match self.incoming_guest.as_ref().map(IncomingHandle::stage) {
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

    /// Resumes the guest here, although it is undecided which side runs it.
    fn keep(&self) -> Result<(), Refused> {
        match self.incoming_guest.as_ref().filter(|_| self.is_awaited()) {
            None => self.keep_at_source(),
            Some(incoming_guest) => {
                incoming_guest.keep().map_err(|stage| {
                    Refused::request(match stage {
                        IncomingStage::Unknown => "the run is over: the guest does not run here",
                        IncomingStage::Memory => "the guest has not arrived: it is with its source",
                        _ => "no migration waits for a decision: ask for the status",
                    })
                })?;
                self.check_runs()
            }
        }
    }

    /// Ends a migration, or the wait for its other side.
    fn cancel(&self) -> Result<(), Refused> {
        let is_moving = matches!(&*self.phase(), Phase::Moves(_));
        match self.incoming_guest.as_ref().filter(|_| !is_moving) {
            None => self.cancel_at_source(),
            Some(incoming_guest) => incoming_guest.cancel().map_err(nothing_to_cancel),
        }
    }

    fn pause(&self) -> Result<(), Refused> {
        self.check_runs()?;
        let mut phase = self.phase();
        match &*phase {
            Phase::NotStarted | Phase::Paused(_) | Phase::Undecided(_) => return Ok(()),
            Phase::Runs => *phase = Phase::Pausing,
            other => return Err(self.refused(other)),
        }
        drop(phase);
        let paused = self.running().and_then(PausedGuest::pause);
        let mut phase = self.phase();
        match paused {
            Ok(paused) => *phase = Phase::Paused(paused),
            Err(error) => {
                *phase = Phase::Runs;
                return Err(refusal(&error));
            }
        }
        Ok(())
    }

    fn resume(&self) -> Result<(), Refused> {
        self.check_runs()?;
        let mut phase = self.phase();
        match &*phase {
            Phase::Runs => {}
            Phase::NotStarted | Phase::Paused(_) => *phase = Phase::Runs,
            other => return Err(self.refused(other)),
        }
        Ok(())
    }

    /// Ends the run. A snapshot and a migration are cancelled.
    fn stop(&self) -> Result<(), Refused> {
        if !self.is_awaited() {
            self.check_runs()?;
        }
        self.actions.stop();
        self.guest.devices.end(Ending::Stopped, self.guest.vm);
        if let Some(incoming_guest) = &self.incoming_guest {
            incoming_guest.end(Some("stopped through its control socket"));
        }
        self.release_at_the_end();
        Ok(())
    }
}

impl<V: Vm> Answers for Controlled<'_, V> {
    /// A client that disconnects cancels its snapshot or its migration.
    fn answer(&self, request: Request, send: &mut dyn FnMut(Answer) -> ControlFlow<()>) -> Answer {
        let status =
            |done: Result<(), Refused>| done.map(|()| Answer::Status(Box::new(self.status())));
        let done = match request {
            Request::Status {} => status(Ok(())),
            Request::Pause {} => status(self.pause()),
            Request::Resume {} => status(self.resume()),
            Request::Stop {} => status(self.stop()),
            Request::Cancel {} => status(self.cancel()),
            Request::Keep {} => status(self.keep()),
            Request::PostCopy {} => status(self.post_copy()),
            Request::Snapshot {
                path,
                downtime_ms,
                track,
                base,
            } => Plan::of(path, downtime_ms, track, base)
                .and_then(|plan| self.snapshot(&plan, send))
                .map(Answer::Snapshot),
            Request::Migrate {
                to,
                mode,
                downtime_ms,
                streams,
                compress,
                bandwidth,
                tls,
            } => Fields {
                to,
                mode,
                tls,
                downtime_ms,
                streams,
                compress,
                bandwidth,
            }
            .migration()
            .and_then(|outgoing| self.migrate(outgoing, send))
            .map(Answer::Migrated),
            Request::Stat {} => Ok(Answer::Stat(self.counters())),
            Request::Dirty {
                every_ms,
                window_ms,
                count,
                detect,
            } => Watch::of(every_ms, window_ms, count, detect)
                .and_then(|watch| self.watch_writes(&watch, send)),
        };
        done.unwrap_or_else(Answer::Error)
    }

    fn look(&self) {
        self.release_at_the_end();
    }
}

/// Why there is no wait for a source to cancel.
fn nothing_to_cancel(stage: IncomingStage) -> Refused {
    Refused::request(match stage {
        IncomingStage::Memory => {
            "the guest has not come: cancel its migration at its source, or stop this run"
        }
        IncomingStage::Unknown => {
            "it is not known whether the guest was handed over: keep it here, or stop this run"
        }
        IncomingStage::Rest => "the rest of the guest's memory is on its way: wait for its end",
        IncomingStage::Cut | IncomingStage::Lost | IncomingStage::Whole => {
            "no migration is in progress: ask for the status"
        }
    })
}

/// The budget of a request.
pub(super) fn budget(downtime_ms: Option<u64>) -> Result<Budget, Refused> {
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

pub(super) fn refusal(error: &MigrateError) -> Refused {
    Refused::of(error.kind(), error)
}

/// The counters of a running guest.
pub fn counters<V: Vm>(
    vm: &V,
    pages: Option<&GuestPages>,
    migration: Option<&OutgoingHandle>,
) -> Metrics {
    let mut metrics = vm.metrics();
    if let Some(pages) = pages {
        pages.source().stats().fill(&mut metrics);
    }
    if let Some(migration) = migration {
        migration.progress().fill(&mut metrics);
    }
    metrics
}

/// As `--arch` takes it.
fn arch_name(arch: Arch) -> &'static str {
    match arch {
        Arch::Arm64 => "arm64",
        _ => "x86_64",
    }
}
