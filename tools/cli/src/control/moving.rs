//! Moves the guest elsewhere, and connects again when the connection is cut.

use super::controlled::{Controlled, PROGRESS, Phase, budget};
use super::message::{Answer, Progress, Refused};
use super::migration::{Migrated, again};
use super::outgoing::{OutgoingMigration, Wanted};
use crate::args::Compress;
use lacuna_machine::{ErrorKind, Vm};
use lacuna_migrate::MigrateError;
use lacuna_migrate::stream::{Mode, OutgoingGuest, Plan, STREAMS_MAX, Sent, send};
use lacuna_migrate::transport::{Address, AddressError, Connector, Link, TlsFiles};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

/// The migration that a request asks for.
pub(super) struct Order {
    connector: Connector,
    plan: Plan,
}

/// The fields of a request.
pub(super) struct Fields {
    pub to: String,
    pub mode: Option<Mode>,
    pub tls: Option<TlsFiles>,
    pub downtime_ms: Option<u64>,
    pub streams: Option<u32>,
    pub compress: Option<Compress>,
}

impl Order {
    /// The order of a request.
    pub fn of(fields: Fields) -> Result<Self, Refused> {
        let to = address(&fields.to)?;
        let tls = fields.tls;
        let paths = tls.iter().flat_map(|tls| [&tls.ca, &tls.cert, &tls.key]);
        if let Some(path) = paths.into_iter().find(|path| !path.is_absolute()) {
            return Err(relative(&path.display()));
        }
        let plan = Plan {
            mode: fields.mode.unwrap_or_default(),
            budget: budget(fields.downtime_ms)?,
            streams: fields.streams.unwrap_or(1),
            compression: fields.compress.map(Into::into).unwrap_or_default(),
        };
        if !(1..=STREAMS_MAX).contains(&plan.streams) {
            let text = format!("streams {}: give 1 to {STREAMS_MAX}", plan.streams);
            return Err(Refused::request(text));
        }
        let link = Arc::new(Link::of_source());
        let connector = Connector::new(to, tls.as_ref(), link);
        let connector = connector.map_err(|error| Refused::of(error.kind(), &error))?;
        Ok(Self { connector, plan })
    }
}

/// A guest that was handed over, while it is undecided which side runs it, or with which memory.
/// When the value is dropped, the guest's run here ends.
pub(super) struct Undecided<'a, V: Vm> {
    outgoing: OutgoingGuest<'a, V>,
    migration: OutgoingMigration,
}

impl<V: Vm> Undecided<'_, V> {
    /// Why, and what to do.
    pub fn text(&self) -> String {
        let (text, to) = (
            self.migration.undecided().unwrap_or_default(),
            self.migration.to(),
        );
        format!(
            "{text}. This side no longer tries to connect. To make it try again, ask it again to \
             move the guest to {to}"
        )
    }
}

/// The input of the mover's thread.
type Begin<'a, V> = (OutgoingMigration, Option<Undecided<'a, V>>);

impl<'a, V: Vm> Controlled<'a, V> {
    /// Moves the guest, with progress for the client.
    pub(super) fn migrate(
        &self,
        order: &Order,
        send: &mut dyn FnMut(Answer) -> ControlFlow<()>,
    ) -> Result<Migrated, Refused> {
        self.check_runs()?;
        self.check_whole()?;
        let (migration, undecided) = self.begin_moving(order)?;
        // The guest must not resume here if the mover's thread cannot start.
        let undecided = Mutex::new(undecided);
        let take = || {
            let mut undecided = undecided.lock().unwrap_or_else(PoisonError::into_inner);
            undecided.take()
        };
        let client = thread::current();
        thread::scope(|scope| {
            let named = thread::Builder::new().name("lacuna-migrate".into());
            let mover = named.spawn_scoped(scope, || {
                let moved = match take() {
                    None => self.send(&migration, order),
                    Some(Undecided { outgoing, .. }) => {
                        self.continue_handed_over(&migration, order, outgoing)
                    }
                };
                migration.settle();
                client.unpark();
                moved
            });
            let mover = mover.map_err(|error| {
                *self.phase() = take().map_or(Phase::Runs, |undecided| {
                    Phase::Undecided(Box::new(undecided))
                });
                Refused::of(ErrorKind::Host, &format!("cannot start a thread: {error}"))
            })?;
            while !mover.is_finished() {
                thread::park_timeout(PROGRESS);
                if self.guest.devices.ending().is_some() {
                    migration.end();
                }
                if let Some(now) = self.status().migrating
                    && send(Answer::Progress(Progress::Moving(now))).is_break()
                {
                    migration.leave();
                }
            }
            mover
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn begin_moving(&self, order: &Order) -> Result<Begin<'a, V>, Refused> {
        let (to, link) = (order.connector.to(), Arc::clone(order.connector.link()));
        let mut phase = self.phase();
        let migration = match &*phase {
            Phase::Runs => OutgoingMigration::new(to, order.plan.mode, link),
            Phase::Undecided(undecided) => undecided.migration.again(to, link),
            Phase::Paused(_) => {
                return Err(Refused::request(
                    "the guest is paused, and only a running guest moves: resume it first",
                ));
            }
            other => return Err(self.refused(other)),
        };
        match std::mem::replace(&mut *phase, Phase::Moves(migration.clone())) {
            Phase::Undecided(undecided) => Ok((migration, Some(*undecided))),
            _ => Ok((migration, None)),
        }
    }

    /// Sends the guest. Afterwards it runs there, or here, or is paused here.
    fn send(&self, migration: &OutgoingMigration, order: &Order) -> Result<Migrated, Refused> {
        if !self.guest.vm.delivery().has_bitmaps() {
            // This log would lack the pages that the migration harvests.
            *self.tracked.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        let (began, note) = (Instant::now(), &mut |now| self.note(migration, &now));
        let sent = order
            .connector
            .connect_first()
            .map_err(|error| {
                let refused = || Refused::of(error.kind(), &error);
                self.unwanted(migration).unwrap_or_else(refused)
            })
            .and_then(|()| {
                let sent = send(&self.guest, &order.connector, &order.plan, note);
                sent.map_err(|error| self.stayed(migration, &error))
            });
        match sent {
            Ok(sent) => self.until_settled(migration, order, (sent, began)),
            Err(refused) => {
                *self.phase() = Phase::Runs;
                Err(refused)
            }
        }
    }

    /// Continues with a guest that an earlier request has handed over.
    fn continue_handed_over(
        &self,
        migration: &OutgoingMigration,
        order: &Order,
        outgoing: OutgoingGuest<'a, V>,
    ) -> Result<Migrated, Refused> {
        let began = outgoing.paused().since();
        let sent = outgoing.resume(&order.connector, &mut |now| self.note(migration, &now));
        self.until_settled(migration, order, (sent, began))
    }

    /// Connects again until the guest is on one side with all of its memory, or a client decides.
    fn until_settled(
        &self,
        migration: &OutgoingMigration,
        order: &Order,
        (mut sent, began): (Sent<'a, V>, Instant),
    ) -> Result<Migrated, Refused> {
        loop {
            let (outgoing, why, runs_there) = match sent {
                Sent::Moved(outgoing) => return Ok(self.has_moved(migration, outgoing, began)),
                Sent::Cut { outgoing, why } => (outgoing, why, true),
                Sent::Unknown { outgoing, why } => (outgoing, why, false),
            };
            migration.was_cut(runs_there, &why, outgoing.pages_left());
            self.actions.set_needed(migration.is_needed());
            let text = migration.undecided().unwrap_or_default();
            match migration.wait(&|| self.guest.devices.ending().is_some()) {
                Wanted::Continue => {
                    let note = &mut |now| self.note(migration, &now);
                    sent = outgoing.resume(&order.connector, note);
                }
                Wanted::End => {
                    drop(outgoing);
                    *self.phase() = Phase::Runs;
                    return Err(Refused::of(
                        ErrorKind::Cancelled,
                        &format!("the run has ended: {text}"),
                    ));
                }
                Wanted::Keep => {
                    self.actions.set_needed(false);
                    // Take the guest back first: the next migration or snapshot must find the log
                    // as the VMM has it.
                    outgoing.take_back();
                    *self.phase() = Phase::Runs;
                    migration.has_kept();
                    let text = "the guest has not moved: a client has decided to keep it here";
                    return Err(Refused::of(ErrorKind::Cancelled, &text));
                }
                Wanted::Cancel => {
                    self.actions.set_needed(false);
                    let migration = migration.clone();
                    let undecided = Undecided {
                        outgoing,
                        migration,
                    };
                    let text = undecided.text();
                    *self.phase() = Phase::Undecided(Box::new(undecided));
                    return Err(Refused::of(ErrorKind::Peer, &text));
                }
            }
        }
    }

    /// The guest runs there, and has all of its memory, or has ended there.
    fn has_moved(
        &self,
        migration: &OutgoingMigration,
        outgoing: OutgoingGuest<'a, V>,
        began: Instant,
    ) -> Migrated {
        let rounds: Vec<u64> = outgoing.rounds().iter().map(|round| round.pages).collect();
        let ran = outgoing.ran().unwrap_or_else(Instant::now);
        let now = migration.progress();
        let migrated = Migrated {
            to: now.to,
            mode: now.mode,
            again: again(&rounds, migration.late()),
            rounds,
            late: migration.late(),
            pages: outgoing.pages(),
            cuts: now.cuts,
            bytes: now.bytes,
            downtime_us: (ran - outgoing.paused().since()).as_micros() as u64,
            seconds: began.elapsed().as_secs_f64(),
            ended: outgoing.ended().map(str::to_owned),
        };
        self.actions.has_moved_by(migrated.clone());
        drop(outgoing);
        *self.phase() = Phase::Runs;
        migrated
    }

    fn note(
        &self,
        migration: &OutgoingMigration,
        now: &lacuna_migrate::Progress,
    ) -> ControlFlow<()> {
        // From round 0 on a signal does not end the run. If one has ended it before, the guest
        // stays here.
        if now.round == 0 {
            self.actions.set_needed(true);
        }
        let noted = match self.guest.devices.ending() {
            None => migration.note(now),
            Some(_) => ControlFlow::Break(()),
        };
        self.actions.set_needed(migration.is_needed());
        noted
    }

    /// The guest has not moved.
    fn stayed(&self, migration: &OutgoingMigration, why: &MigrateError) -> Refused {
        self.unwanted(migration).unwrap_or_else(|| {
            let text = format!("the guest has not moved, and keeps running here: {why}");
            Refused::of(why.kind(), &text)
        })
    }

    /// Why a failed migration was no longer wanted. A peer that was silent meanwhile has been cut
    /// off.
    fn unwanted(&self, migration: &OutgoingMigration) -> Option<Refused> {
        if let Some(ending) = self.guest.devices.ending() {
            let what = "the run has ended before the guest moved";
            return Some(Refused::ended(what, &ending));
        }
        let text = "the migration was cancelled: the guest keeps running here";
        migration
            .is_cancelled()
            .then(|| Refused::of(ErrorKind::Cancelled, &text))
    }

    /// Cancels the migration. The requesting client gets the answer when the migration has ended.
    pub(super) fn cancel_at_source(&self) -> Result<(), Refused> {
        let migration = match &*self.phase() {
            Phase::Moves(migration) => migration.clone(),
            _ => {
                return Err(Refused::request(
                    "no migration is in progress; a snapshot is cancelled by its client, which \
                     closes its connection",
                ));
            }
        };
        migration.cancel()
    }

    /// Resumes the guest here after a hand-over with unknown outcome.
    pub(super) fn keep_at_source(&self) -> Result<(), Refused> {
        self.check_runs()?;
        let mut phase = self.phase();
        if let Phase::Undecided(undecided) = &*phase {
            undecided.migration.check_keep()?;
        }
        match std::mem::replace(&mut *phase, Phase::Runs) {
            Phase::Undecided(undecided) => {
                undecided.outgoing.take_back();
                Ok(())
            }
            Phase::Moves(migration) => {
                *phase = Phase::Moves(migration.clone());
                drop(phase);
                migration.keep()
            }
            other => {
                *phase = other;
                Err(Refused::request(
                    "no migration waits for a decision: ask for the status",
                ))
            }
        }
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
