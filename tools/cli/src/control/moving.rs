//! Moves the guest elsewhere.

use super::controlled::{Controlled, PROGRESS, Phase, budget};
use super::message::{Answer, Progress, Refused};
use super::words::{no_decision, undecided_at_source};
use crate::args::Compress;
use lacuna::migrate::session::{
    Migrated, NoPostCopy, Outcome, Outgoing, OutgoingHandle, OutgoingStage, Stayed, Undecided,
};
use lacuna::migrate::stream::{Mode, Plan, STREAMS_MAX};
use lacuna::migrate::transport::{Address, AddressError, Connector, TlsFiles};
use lacuna::{ErrorKind, Vm};
use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// The fields of a request.
pub(super) struct Fields {
    pub to: String,
    pub mode: Option<Mode>,
    pub tls: Option<TlsFiles>,
    pub downtime_ms: Option<u64>,
    pub streams: Option<u32>,
    pub compress: Option<Compress>,
    pub bandwidth: Option<NonZeroU64>,
}

impl Fields {
    /// The migration that the request asks for.
    pub fn migration(self) -> Result<Outgoing, Refused> {
        let to = address(&self.to)?;
        let tls = self.tls;
        let paths = tls.iter().flat_map(|tls| [&tls.ca, &tls.cert, &tls.key]);
        if let Some(path) = paths.into_iter().find(|path| !path.is_absolute()) {
            return Err(relative(&path.display()));
        }
        let plan = Plan {
            mode: self.mode.unwrap_or_default(),
            budget: budget(self.downtime_ms)?,
            streams: self.streams.unwrap_or(1),
            compression: self.compress.map(Into::into).unwrap_or_default(),
            bandwidth: self.bandwidth,
        };
        if !(1..=STREAMS_MAX).contains(&plan.streams) {
            let text = format!("streams {}: give 1 to {STREAMS_MAX}", plan.streams);
            return Err(Refused::request(text));
        }
        let connector = Connector::new(to, tls.as_ref());
        let connector = connector.map_err(|error| Refused::of(error.kind(), &error))?;
        Ok(Outgoing::new(connector, plan))
    }
}

/// Why it is undecided which side runs the guest, and what to do.
pub(super) fn undecided_text(handle: &OutgoingHandle) -> String {
    let text = undecided_at_source(handle).unwrap_or_default();
    let to = handle.progress().to;
    format!(
        "{text}. This side no longer tries to connect. To make it try again, ask it again to move \
         the guest to {to}"
    )
}

impl<'a, V: Vm> Controlled<'a, V> {
    /// Moves the guest, with progress for the client.
    pub(super) fn migrate(
        &self,
        mut outgoing: Outgoing,
        send: &mut dyn FnMut(Answer) -> ControlFlow<()>,
    ) -> Result<Migrated, Refused> {
        self.check_runs()?;
        self.check_whole()?;
        // The guest must not resume here if the mover's thread cannot start.
        let undecided = Mutex::new(self.begin_moving(&mut outgoing)?);
        self.release_log();
        let handle = outgoing.handle().clone();
        let take = || {
            let mut undecided = undecided.lock().unwrap_or_else(PoisonError::into_inner);
            undecided.take()
        };
        let client = thread::current();
        thread::scope(|scope| {
            let named = thread::Builder::new().name("lacuna-migrate".into());
            let mover = named.spawn_scoped(scope, || {
                let moved = self.settle(&outgoing, take());
                // Clients that keep the guest wait for this.
                drop(outgoing);
                client.unpark();
                moved
            });
            let mover = mover.map_err(|error| {
                *self.phase() = take().map_or(Phase::Runs, Phase::Undecided);
                Refused::of(ErrorKind::Host, &format!("cannot start a thread: {error}"))
            })?;
            while !mover.is_finished() {
                thread::park_timeout(PROGRESS);
                if self.guest.devices.ending().is_some() {
                    handle.end();
                }
                if let Some(now) = self.status().migrating
                    && send(Answer::Progress(Progress::Moving(now))).is_break()
                {
                    handle.leave();
                }
            }
            mover
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Returns the guest of an earlier request that was handed over.
    fn begin_moving(
        &self,
        outgoing: &mut Outgoing,
    ) -> Result<Option<Box<Undecided<'a, V>>>, Refused> {
        let mut phase = self.phase();
        match &*phase {
            Phase::Runs => {}
            Phase::Undecided(undecided) => outgoing.follow(undecided),
            Phase::Paused(_) => {
                return Err(Refused::request(
                    "the guest is paused, and only a running guest moves: resume it first",
                ));
            }
            other => return Err(self.refused(other)),
        }
        let moves = Phase::Moves(outgoing.handle().clone());
        match std::mem::replace(&mut *phase, moves) {
            Phase::Undecided(undecided) => Ok(Some(undecided)),
            _ => Ok(None),
        }
    }

    /// Sends the guest, or continues with a guest that was handed over. Afterwards it runs there,
    /// or here, or is paused here.
    fn settle(
        &self,
        outgoing: &Outgoing,
        undecided: Option<Box<Undecided<'a, V>>>,
    ) -> Result<Migrated, Refused> {
        let needed = |needed| self.actions.set_needed(needed);
        let outcome = match undecided {
            Some(undecided) => outgoing.resume(*undecided, &needed),
            None => {
                if !self.guest.vm.delivery().has_bitmaps() {
                    // This log would lack the pages that the migration harvests.
                    *self.tracked.lock().unwrap_or_else(PoisonError::into_inner) = None;
                }
                match self.running() {
                    Ok(guest) => outgoing.send(guest, &needed),
                    Err(why) => Outcome::Stayed(Stayed::Failed(why)),
                }
            }
        };
        let (phase, done) = match outcome {
            Outcome::Moved(moved) => {
                let report = moved.report.clone();
                self.actions.has_moved_by(report.clone());
                (Phase::Runs, Ok(report))
            }
            Outcome::Stayed(why) => (Phase::Runs, Err(Refused::of(why.kind(), &why))),
            Outcome::Undecided(undecided) => {
                let text = undecided_text(undecided.handle());
                let refused = Refused::of(ErrorKind::Peer, &text);
                (Phase::Undecided(Box::new(undecided)), Err(refused))
            }
            Outcome::Ended(stage) => (Phase::Runs, Err(self.ended(outgoing.handle(), stage))),
        };
        *self.phase() = phase;
        done
    }

    /// The run has ended before the guest moved.
    fn ended(&self, handle: &OutgoingHandle, stage: OutgoingStage) -> Refused {
        match (stage, self.guest.devices.ending()) {
            (OutgoingStage::Here, Some(ending)) => {
                Refused::ended("the run has ended before the guest moved", &ending)
            }
            _ => {
                let text = undecided_at_source(handle).unwrap_or_default();
                Refused::of(ErrorKind::Cancelled, &format!("the run has ended: {text}"))
            }
        }
    }

    /// The migration in progress, or the last one if it waits for a decision.
    pub fn migration(&self) -> Option<OutgoingHandle> {
        match &*self.phase() {
            Phase::Undecided(undecided) => Some(undecided.handle().clone()),
            Phase::Moves(handle) => Some(handle.clone()),
            _ => None,
        }
    }

    /// The migration in progress.
    fn moving(&self) -> Option<OutgoingHandle> {
        match &*self.phase() {
            Phase::Moves(handle) => Some(handle.clone()),
            _ => None,
        }
    }

    /// Hands the guest over before the rest of its memory.
    pub(super) fn post_copy(&self) -> Result<(), Refused> {
        let handle = self.moving();
        let handle = handle.ok_or_else(|| Refused::request("no migration is in progress"))?;
        handle.post_copy().map_err(|why| {
            Refused::request(match why {
                NoPostCopy::PreCopy => format!("{why}; cancel it, and ask again in that mode"),
                _ => why.to_string(),
            })
        })
    }

    /// Cancels the migration. The requesting client gets the answer when the migration has ended.
    pub(super) fn cancel_at_source(&self) -> Result<(), Refused> {
        let handle = self.moving().ok_or_else(|| {
            Refused::request(
                "no migration is in progress; a snapshot is cancelled by its client, which closes \
                 its connection",
            )
        })?;
        handle.cancel().map_err(|_| {
            let to = handle.progress().to;
            Refused::request(format!(
                "the guest runs at {to} already, and the rest of its memory is on its way: wait \
                 for its end"
            ))
        })
    }

    /// Resumes the guest here after a hand-over with unknown outcome.
    pub(super) fn keep_at_source(&self) -> Result<(), Refused> {
        self.check_runs()?;
        let mut phase = self.phase();
        let (stage, handle) = match std::mem::replace(&mut *phase, Phase::Runs) {
            Phase::Undecided(undecided) => match undecided.take_back() {
                Ok(()) => return Ok(()),
                Err(undecided) => {
                    let handle = undecided.handle().clone();
                    *phase = Phase::Undecided(undecided);
                    (handle.progress().stage, handle)
                }
            },
            Phase::Moves(handle) => {
                *phase = Phase::Moves(handle.clone());
                drop(phase);
                match handle.keep() {
                    Ok(()) => return Ok(()),
                    Err(stage) => (stage, handle),
                }
            }
            other => {
                *phase = other;
                return Err(Refused::request(
                    "no migration waits for a decision: ask for the status",
                ));
            }
        };
        Err(Refused::request(no_decision(stage, &handle.progress().to)))
    }
}

/// The address of a request.
fn address(text: &str) -> Result<Address, Refused> {
    let address: Address = text
        .parse()
        .map_err(|error: AddressError| Refused::request(error.to_string()))?;
    match &address {
        Address::Unix(path) if !path.is_absolute() => Err(relative(&address)),
        _ => Ok(address),
    }
}

fn relative(path: &dyn std::fmt::Display) -> Refused {
    Refused::request(format!(
        "{path} is relative, and the VM has a current folder of its own: give the path from / on"
    ))
}
