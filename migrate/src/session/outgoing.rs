//! The source's session: sends the guest, and connects again when the connection is cut.

use super::outgoing_handle::{OutgoingHandle, Wanted};
use super::report::{Migrated, OutgoingStage, again};
use crate::stream::{OutgoingGuest, Plan, Sent, send};
use crate::transport::{Connector, TransportError};
use crate::{MigrateError, Progress, Stop};
use lacuna_machine::{ErrorKind, PlatformDevices, Running, Vm};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

/// A migration of a guest to another process. Drop it after its outcome was carried out: until
/// then [`OutgoingHandle::keep`] waits.
pub struct Outgoing {
    connector: Connector,
    plan: Plan,
    handle: OutgoingHandle,
}

/// How a migration has ended.
#[must_use = "the guest may be on either side"]
pub enum Outcome<'a, V: Vm> {
    /// The guest runs at the destination, and lacks nothing of this process.
    Moved(Moved<'a, V>),
    /// The guest runs here.
    Stayed(Stayed),
    /// [`OutgoingHandle::cancel`] has ended the attempts to connect again.
    Undecided(Undecided<'a, V>),
    /// The run of the guest has ended here. The stage says whether it was handed over before.
    Ended(OutgoingStage),
}

/// Why a guest has not moved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Stayed {
    /// There was no first connection.
    #[error(transparent)]
    NotConnected(#[from] TransportError),
    /// The migration has failed before the hand-over.
    #[error("the guest has not moved, and keeps running here: {0}")]
    Failed(#[from] MigrateError),
    /// [`OutgoingHandle::cancel`] has ended the migration.
    #[error("the migration was cancelled: the guest keeps running here")]
    Cancelled,
    /// [`OutgoingHandle::keep`] has resumed the guest here.
    #[error("the guest has not moved: it was decided to keep it here")]
    Kept,
}

/// A guest that has moved. When the value is dropped, the guest's run here ends.
#[non_exhaustive]
pub struct Moved<'a, V: Vm> {
    /// How it has moved.
    pub report: Migrated,
    _outgoing: OutgoingGuest<'a, V>,
}

/// A guest that was handed over, while it is undecided which side runs it, or with which memory.
/// When the value is dropped, the guest's run here ends.
pub struct Undecided<'a, V: Vm> {
    outgoing: OutgoingGuest<'a, V>,
    devices: &'a PlatformDevices,
    handle: OutgoingHandle,
}

impl<V: Vm> Undecided<'_, V> {
    /// Where the migration stands.
    pub fn handle(&self) -> &OutgoingHandle {
        &self.handle
    }

    /// Resumes the guest here. First end the other side, or make sure that it has ended.
    ///
    /// # Errors
    /// The guest is known to run there.
    pub fn take_back(self) -> Result<(), Box<Self>> {
        match self.handle.check_keep() {
            Ok(()) => {
                self.outgoing.take_back();
                Ok(())
            }
            Err(_) => Err(Box::new(self)),
        }
    }
}

impl Outgoing {
    /// A migration through `connector` by `plan`.
    pub fn new(connector: Connector, plan: Plan) -> Self {
        let link = Arc::clone(connector.link());
        Self {
            handle: OutgoingHandle::new(connector.to(), plan.mode, link),
            connector,
            plan,
        }
    }

    /// Begins where `undecided` ended. [`Outgoing::resume`] continues with its guest.
    pub fn follow<V: Vm>(&mut self, undecided: &Undecided<'_, V>) {
        let link = Arc::clone(self.connector.link());
        self.handle = undecided.handle.again(self.connector.to(), link);
    }

    /// What other threads need of this migration.
    pub fn handle(&self) -> &OutgoingHandle {
        &self.handle
    }

    /// Sends `guest`. Calls `needed` with `true` before the guest may need pages of this process
    /// elsewhere, and with `false` when it no longer does.
    pub fn send<'a, V: Vm>(&self, guest: &'a Running<V>, needed: &dyn Fn(bool)) -> Outcome<'a, V> {
        let (began, devices) = (Instant::now(), guest.devices());
        let needed_connections = self.plan.connections();
        let connected = self.connector.check_connections(needed_connections);
        if let Err(error) = connected.and_then(|()| self.connector.connect_first()) {
            return self.failed(devices, error.into());
        }
        let note = &mut |now| self.note(devices, needed, &now);
        match send(guest, &self.connector, &self.plan, note) {
            Ok(sent) => self.until_settled(devices, needed, (sent, began)),
            Err(error) => self.failed(devices, error.into()),
        }
    }

    /// Continues with a guest that was handed over before. `needed` as in [`Outgoing::send`].
    pub fn resume<'a, V: Vm>(
        &self,
        undecided: Undecided<'a, V>,
        needed: &dyn Fn(bool),
    ) -> Outcome<'a, V> {
        let Undecided {
            outgoing, devices, ..
        } = undecided;
        let began = outgoing.paused().since();
        let note = &mut |now| self.note(devices, needed, &now);
        let sent = outgoing.resume(&self.connector, note);
        self.until_settled(devices, needed, (sent, began))
    }

    /// The guest has not moved. A peer that was silent until the run ended, or until a cancel, has
    /// been cut off.
    fn failed<'a, V: Vm>(&self, devices: &PlatformDevices, why: Stayed) -> Outcome<'a, V> {
        if devices.ending().is_some() {
            return Outcome::Ended(OutgoingStage::Here);
        }
        Outcome::Stayed(match self.handle.is_cancelled() {
            true => Stayed::Cancelled,
            false => why,
        })
    }

    /// Connects again until the guest is on one side with all of its memory, or it is decided
    /// otherwise.
    fn until_settled<'a, V: Vm>(
        &self,
        devices: &'a PlatformDevices,
        needed: &dyn Fn(bool),
        (mut sent, began): (Sent<'a, V>, Instant),
    ) -> Outcome<'a, V> {
        let handle = &self.handle;
        loop {
            let (outgoing, why, runs_there) = match sent {
                Sent::Moved(outgoing) => {
                    let report = self.report(&outgoing, began);
                    let _outgoing = outgoing;
                    return Outcome::Moved(Moved { report, _outgoing });
                }
                Sent::Cut { outgoing, why } => (outgoing, why, true),
                Sent::Unknown { outgoing, why } => (outgoing, why, false),
            };
            handle.was_cut(runs_there, &why, outgoing.pages_left());
            needed(handle.is_needed());
            match handle.wait(&|| devices.ending().is_some()) {
                Wanted::Continue => {
                    let note = &mut |now| self.note(devices, needed, &now);
                    sent = outgoing.resume(&self.connector, note);
                }
                Wanted::End => return Outcome::Ended(handle.progress().stage),
                Wanted::Keep => {
                    needed(false);
                    // The log of writes is the VMM's again before the guest counts as kept.
                    outgoing.take_back();
                    handle.has_kept();
                    return Outcome::Stayed(Stayed::Kept);
                }
                Wanted::Cancel => {
                    needed(false);
                    let handle = handle.clone();
                    return Outcome::Undecided(Undecided {
                        outgoing,
                        devices,
                        handle,
                    });
                }
            }
        }
    }

    fn report<V: Vm>(&self, outgoing: &OutgoingGuest<'_, V>, began: Instant) -> Migrated {
        let rounds: Vec<u64> = outgoing.rounds().iter().map(|round| round.pages).collect();
        let ran = outgoing.ran().unwrap_or_else(Instant::now);
        let (now, late) = (self.handle.progress(), self.handle.late());
        let detected_by = outgoing.vm().detected_by().to_string();
        let detected_by = (!rounds.is_empty()).then_some(detected_by);
        Migrated {
            to: now.to,
            mode: now.mode,
            again: again(&rounds, late, outgoing.memory_pages()),
            rounds,
            late,
            pages: outgoing.pages(),
            detected_by,
            cuts: now.cuts,
            bytes: now.bytes,
            downtime_us: (ran - outgoing.paused().since()).as_micros() as u64,
            seconds: began.elapsed().as_secs_f64(),
            ended: outgoing.ended().map(str::to_owned),
        }
    }

    fn note(
        &self,
        devices: &PlatformDevices,
        needed: &dyn Fn(bool),
        now: &Progress,
    ) -> ControlFlow<Stop> {
        // From round 0 on the VMM does not end the run. If it has ended it before, the guest stays
        // here.
        if now.round == 0 {
            needed(true);
        }
        let noted = match devices.ending() {
            None => self.handle.note(now),
            Some(_) => ControlFlow::Break(Stop::Cancel),
        };
        needed(self.handle.is_needed());
        noted
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        self.handle.settle();
    }
}

impl Stayed {
    /// Where the cause lies.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotConnected(error) => error.kind(),
            Self::Failed(error) => error.kind(),
            Self::Cancelled | Self::Kept => ErrorKind::Cancelled,
        }
    }
}
