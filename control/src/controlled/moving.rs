//! Moves the guest elsewhere.

use super::{Controlled, Phase, budget};
use crate::message::{MoveRequest, Progress};
use crate::refused::Refused;
use crate::socket::Send;
use crate::threads::{beside, lock};
use crate::words::{given_up_at_source, no_decision, undecided_at_source};
use lacuna::migrate::session::{
    Migrated, NoPostCopy, Outcome, Outgoing, OutgoingHandle, OutgoingStage, Stayed, Undecided,
};
use lacuna::migrate::stream::{Plan, STREAMS_MAX};
use lacuna::migrate::transport::{Address, AddressError, Connector, TlsFiles};
use lacuna::{ErrorKind, Vm};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Mutex;

impl<'a, V: Vm> Controlled<'a, V> {
    /// Moves the guest, with progress for the client.
    pub(super) fn migrate(
        &self,
        request: MoveRequest,
        descriptors: Vec<OwnedFd>,
        send: Send<'_>,
    ) -> Result<Migrated, Refused> {
        let is_passed = !descriptors.is_empty() || request.to.starts_with("fd:");
        let to = request.to.clone();
        let mut outgoing = migration(request, descriptors)?;
        self.check_runs()?;
        self.check_whole()?;
        if !is_passed {
            self.socket.check_place(Path::new(&to))?;
        }
        // The guest must not resume here if the mover's thread cannot start.
        let undecided = Mutex::new(self.begin_moving(&mut outgoing)?);
        self.release_log();
        let handle = outgoing.handle().clone();
        let take = || lock(&undecided).take();
        let work = || {
            let moved = self.settle(&outgoing, take());
            // Clients that keep the guest wait for this.
            drop(outgoing);
            moved
        };
        let moved = beside("lacuna-migrate", work, &mut || {
            if self.devices.ending().is_some() {
                handle.end();
            }
            if let Some(moving) = self.moving()
                && send(Progress::Moving(moving.progress())).is_break()
            {
                handle.leave();
            }
        });
        moved.map_err(|error| {
            *self.phase() = take().map_or(Phase::Runs, Phase::Undecided);
            Refused::no_thread(error)
        })?
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
        let needed = |needed| self.socket.actions().set_needed(needed);
        let outcome = match undecided {
            Some(undecided) => outgoing.resume(*undecided, &needed),
            None => {
                if !self.vm.delivery().has_bitmaps() {
                    // This log would lack the pages that the migration harvests.
                    *lock(&self.tracked) = None;
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
                self.socket.actions().has_moved_by(report.clone());
                (Phase::Runs, Ok(report))
            }
            Outcome::Stayed(why) => (Phase::Runs, Err(Refused::of(why.kind(), why))),
            Outcome::Undecided(undecided) => {
                let text = given_up_at_source(undecided.handle());
                let refused = Refused::of(ErrorKind::Peer, text);
                (Phase::Undecided(Box::new(undecided)), Err(refused))
            }
            Outcome::Ended(stage) => (Phase::Runs, Err(self.ended(outgoing.handle(), stage))),
        };
        *self.phase() = phase;
        done
    }

    /// The run has ended before the guest moved.
    fn ended(&self, handle: &OutgoingHandle, stage: OutgoingStage) -> Refused {
        match (stage, self.devices.ending()) {
            (OutgoingStage::Here, Some(ending)) => {
                Refused::ended("the run has ended before the guest moved", &ending)
            }
            _ => {
                let text = undecided_at_source(handle).unwrap_or_default();
                Refused::of(ErrorKind::Cancelled, format!("the run has ended: {text}"))
            }
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
            let to = handle.to();
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
        Err(Refused::request(no_decision(stage, &handle.to())))
    }
}

/// The migration that a request asks for.
fn migration(request: MoveRequest, descriptors: Vec<OwnedFd>) -> Result<Outgoing, Refused> {
    let to = address(&request.to)?;
    let tls = request.tls;
    let paths = tls.iter().flat_map(|tls| [&tls.ca, &tls.cert, &tls.key]);
    if let Some(path) = paths.into_iter().find(|path| !path.is_absolute()) {
        return Err(Refused::relative(path.display()));
    }
    let plan = Plan {
        mode: request.mode.unwrap_or_default(),
        budget: budget(request.downtime_ms)?,
        streams: request.streams.unwrap_or(1),
        compression: request.compress.unwrap_or_default(),
        bandwidth: request.bandwidth,
    };
    if !(1..=STREAMS_MAX).contains(&plan.streams) {
        let text = format!("streams {}: give 1 to {STREAMS_MAX}", plan.streams);
        return Err(Refused::request(text));
    }
    Ok(Outgoing::new(
        connector(to, tls.as_ref(), descriptors)?,
        plan,
    ))
}

/// Connections to `to`: made here, or by the client that has passed a [`Dialer`]'s socket and the
/// open files of `tls`.
///
/// [`Dialer`]: lacuna::migrate::transport::Dialer
fn connector(
    to: Address,
    tls: Option<&TlsFiles>,
    descriptors: Vec<OwnedFd>,
) -> Result<Connector, Refused> {
    let mut passed = descriptors.into_iter();
    let Some(dialer) = passed.next() else {
        return Ok(Connector::new(to, tls)?);
    };
    let files: Vec<File> = passed.map(File::from).collect();
    let files: Result<[File; 3], _> = files.try_into();
    match (tls, files) {
        (Some(tls), Ok(files)) => Ok(Connector::dialled_by(dialer, to, Some((tls, files)))?),
        (None, Err(files)) if files.is_empty() => Ok(Connector::dialled_by(dialer, to, None)?),
        _ => Err(Refused::request(
            "wrong descriptors: pass the socket that asks for connections, and the three files of \
             tls, if there are some",
        )),
    }
}

/// The address of a request.
fn address(text: &str) -> Result<Address, Refused> {
    let address: Address = text
        .parse()
        .map_err(|error: AddressError| Refused::request(error.to_string()))?;
    match &address {
        Address::Unix(path) if !path.is_absolute() => Err(Refused::relative(&address)),
        _ => Ok(address),
    }
}
