//! Saves the guest.

use super::controlled::{Controlled, PROGRESS, Phase, budget, refusal};
use super::message::{Answer, Progress, Refused, Saved, Saving, State};
use crate::store::{self, url};
use lacuna::migrate::{
    Budget, MigrateError, PausedGuest, Stop, Target, Tracked, When, save, save_paused,
};
use lacuna::{ErrorKind, Vm};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

impl<'a, V: Vm> Controlled<'a, V> {
    pub(super) fn snapshot(
        &self,
        plan: &Plan,
        send: &mut dyn FnMut(Answer) -> ControlFlow<()>,
    ) -> Result<Saved, Refused> {
        self.check_runs()?;
        self.check_whole()?;
        // The saver's thread alone locks it: vCPUs are sent to a thread, and not shared.
        let paused = Mutex::new(self.begin_saving(&plan.path)?);
        self.release_log();
        let (gone, client) = (Arc::new(AtomicBool::new(false)), thread::current());
        let saved = thread::scope(|scope| {
            let named = thread::Builder::new().name("lacuna-save".into());
            let saver = named.spawn_scoped(scope, || {
                let paused = paused.lock().unwrap_or_else(PoisonError::into_inner);
                let saved = self.open_and_save(plan, paused.as_ref(), &gone);
                client.unpark();
                saved
            });
            let saver = saver.map_err(|error| {
                Refused::of(ErrorKind::Host, &format!("cannot start a thread: {error}"))
            })?;
            while !saver.is_finished() {
                thread::park_timeout(PROGRESS);
                if let Some(progress) = self.status().saving
                    && send(Answer::Progress(Progress::Saving(progress))).is_break()
                {
                    gone.store(true, Ordering::Relaxed);
                }
                if self.guest.devices.ending().is_some() {
                    // The flag also ends a wait for an object store.
                    gone.store(true, Ordering::Relaxed);
                }
            }
            saver
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        let paused = paused.into_inner().unwrap_or_else(PoisonError::into_inner);
        *self.phase() = paused.map_or(Phase::Runs, Phase::Paused);
        saved
    }

    /// Notes that the guest is being saved. Returns the guest's vCPUs if it is paused.
    fn begin_saving(&self, path: &Path) -> Result<Option<PausedGuest<'a, V>>, Refused> {
        let mut phase = self.phase();
        let state = match &*phase {
            Phase::Runs => State::Running,
            Phase::Paused(_) => State::Paused,
            other => return Err(self.refused(other)),
        };
        let progress = Saving {
            path: path.to_owned(),
            round: 0,
            done: 0,
            pages: 0,
        };
        match std::mem::replace(&mut *phase, Phase::Saves(progress, state)) {
            Phase::Paused(paused) => Ok(Some(paused)),
            _ => Ok(None),
        }
    }

    fn open_and_save(
        &self,
        plan: &Plan,
        paused: Option<&PausedGuest<'a, V>>,
        gone: &Arc<AtomicBool>,
    ) -> Result<Saved, Refused> {
        let Some(url) = url(&plan.path) else {
            return self.save(plan, Target::Folder(&plan.path), paused, gone);
        };
        store::with(url, gone, |store| {
            self.save(plan, Target::Store(store), paused, gone)
        })
    }

    fn save(
        &self,
        plan: &Plan,
        to: Target<'_>,
        paused: Option<&PausedGuest<'a, V>>,
        gone: &AtomicBool,
    ) -> Result<Saved, Refused> {
        let mut progress = |now: lacuna::migrate::Progress| {
            if let Phase::Saves(progress, _) = &mut *self.phase() {
                progress.round = now.round;
                progress.done = now.done;
                progress.pages = now.pages;
            }
            let over = gone.load(Ordering::Relaxed) || self.guest.devices.ending().is_some();
            match over {
                true => ControlFlow::Break(Stop::Cancel),
                false => ControlFlow::Continue(()),
            }
        };
        let guest = self.running().map_err(|error| refusal(&error))?;
        let progress = &mut progress;
        let ran = paused.is_none();
        let when = paused.map_or(When::Runs(&plan.budget), When::Paused);
        // One snapshot is saved at a time.
        let mut tracked = self.tracked.lock().unwrap_or_else(PoisonError::into_inner);
        // Between two snapshots no thread would empty the rings, and a vCPU with a full one stops.
        if matches!(plan.kind, Kind::First) && guest.vm().dirty_rings().is_some() {
            let text = "this guest's writes are recorded in rings, which only a running save \
                        empties: save without track, or run the guest with --delivery bitmap";
            return Err(Refused::request(text));
        }
        if !matches!(plan.kind, Kind::Since(_)) && !guest.vm().delivery().has_bitmaps() {
            // Rings have one reader, so this log ends before the save. So all checks come first.
            to.check_new().map_err(|error| refusal(&error))?;
            *tracked = None;
        }
        // A failed whole save leaves the log since the last snapshot as it is.
        let saved = match (&plan.kind, tracked.as_mut()) {
            (Kind::Since(base), Some(tracked)) if tracked.last() == base => {
                tracked.save_changes(guest, when, to, progress)
            }
            (Kind::Since(base), tracked) => return Err(not_the_last(base, tracked)),
            (Kind::First, _) => {
                let saved = Tracked::save_first(guest, when, to, progress);
                saved.map(|(saved, first)| {
                    *tracked = Some(first);
                    saved
                })
            }
            (Kind::Alone, _) => {
                let saved = match when {
                    When::Paused(paused) => save_paused(guest, paused, to, progress),
                    When::Runs(budget) => save(guest, to, budget, progress),
                };
                saved.inspect(|_| *tracked = None)
            }
        };
        let saved = saved.map_err(|error| self.not_saved(&error))?;
        Ok(Saved {
            path: plan.path.clone(),
            pages: saved.pages,
            rounds: saved.rounds.iter().map(|round| round.pages).collect(),
            detected_by: ran.then(|| guest.vm().detected_by().to_string()),
            downtime_us: saved.downtime.as_micros() as u64,
        })
    }

    /// Why there is no snapshot.
    fn not_saved(&self, why: &MigrateError) -> Refused {
        match self.guest.devices.ending() {
            Some(ending) => {
                Refused::ended("the run has ended before the snapshot was whole", &ending)
            }
            None => refusal(why),
        }
    }
}

/// The snapshot that a request asks for.
pub(super) struct Plan {
    /// An absolute path, or the URL of an object store.
    path: PathBuf,
    budget: Budget,
    kind: Kind,
}

impl Plan {
    /// The plan for the fields of a request.
    pub fn of(
        path: PathBuf,
        downtime_ms: Option<u64>,
        track: bool,
        base: Option<PathBuf>,
    ) -> Result<Self, Refused> {
        if !path.is_absolute() && url(&path).is_none() {
            let text = format!(
                "path {:?} is relative, and the VM has a current folder of its own: give the path \
                 from / on",
                path.display()
            );
            return Err(Refused::request(text));
        }
        let kind = match (base, track) {
            (Some(base), _) => Kind::Since(base),
            (None, true) => Kind::First,
            (None, false) => Kind::Alone,
        };
        Ok(Self {
            path,
            budget: budget(downtime_ms)?,
            kind,
        })
    }
}

enum Kind {
    /// Whole; no later one has it as its base.
    Alone,
    /// Whole; later ones may have it as their base.
    First,
    /// Changes since this snapshot.
    Since(PathBuf),
}

fn not_the_last<V: Vm>(base: &Path, tracked: Option<&mut Tracked<'_, V>>) -> Refused {
    let base = base.display();
    Refused::request(match tracked {
        Some(tracked) => format!(
            "base {base}: the last snapshot of this guest is {}: give that",
            tracked.last().display()
        ),
        None => format!(
            "base {base}: it is not known what has changed since then: save a whole snapshot with \
             track first, which later ones can have as their base"
        ),
    })
}
