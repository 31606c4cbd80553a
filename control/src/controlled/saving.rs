//! Saves the guest.

use super::{Controlled, Phase, budget};
use crate::message::{Progress, SaveRequest, Saved, Saving, State};
use crate::refused::Refused;
use crate::socket::Send;
use crate::store::{self, url};
use crate::threads::{beside, lock};
use lacuna::Vm;
use lacuna::migrate::{
    Budget, MigrateError, OpenFiles, PausedGuest, Stop, Target, Tracked, When, save, save_paused,
};
use std::fs::File;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A snapshot in progress.
struct Save<'s, 'a, V: Vm> {
    request: &'s SaveRequest,
    /// The files, if the client has made them.
    open: Option<&'s OpenFiles>,
    budget: Budget,
    /// The guest's vCPUs, if it was paused before.
    paused: Option<&'s PausedGuest<'a, V>>,
    /// The client has disconnected, or the run has ended.
    is_over: &'s Arc<AtomicBool>,
}

impl<'a, V: Vm> Controlled<'a, V> {
    pub(super) fn save(
        &self,
        request: &SaveRequest,
        descriptors: Vec<OwnedFd>,
        send: Send<'_>,
    ) -> Result<Saved, Refused> {
        let path = &request.path;
        if !path.is_absolute() && url(path).is_none() {
            return Err(Refused::relative(format_args!("path {:?}", path.display())));
        }
        let open = open_files(request, descriptors)?;
        let budget = budget(request.downtime_ms)?;
        self.check_runs()?;
        self.check_whole()?;
        if open.is_none() {
            url(path).map_or(Ok(()), store::check)?;
            self.socket.check_place(path)?;
        }
        // The saver's thread alone locks it: vCPUs are sent to a thread, and not shared.
        let paused = Mutex::new(self.begin_saving(path)?);
        self.release_log();
        let is_over = Arc::default();
        let work = || {
            self.open_and_save(&Save {
                request,
                open: open.as_ref(),
                budget,
                paused: lock(&paused).as_ref(),
                is_over: &is_over,
            })
        };
        let saved = beside("lacuna-save", work, &mut || {
            let now = self.saving();
            let has_left = now.is_some_and(|now| send(Progress::Saving(now)).is_break());
            if has_left || self.devices.ending().is_some() {
                // The flag also ends a wait for an object store.
                is_over.store(true, Ordering::Relaxed);
            }
        });
        let paused = paused.into_inner().unwrap_or_else(PoisonError::into_inner);
        *self.phase() = paused.map_or(Phase::Runs, Phase::Paused);
        saved.map_err(Refused::no_thread)?
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

    fn saving(&self) -> Option<Saving> {
        match &*self.phase() {
            Phase::Saves(progress, _) => Some(progress.clone()),
            _ => None,
        }
    }

    fn open_and_save(&self, save: &Save<'_, 'a, V>) -> Result<Saved, Refused> {
        let path = &save.request.path;
        match (save.open, url(path)) {
            (Some(open), _) => self.save_to(Target::Files(open), save),
            (None, None) => self.save_to(Target::Folder(path), save),
            (None, Some(url)) => store::with(url, save.is_over, |store| {
                self.save_to(Target::Store(store), save)
            }),
        }
    }

    fn save_to(&self, to: Target<'_>, plan: &Save<'_, 'a, V>) -> Result<Saved, Refused> {
        let SaveRequest { base, track, .. } = plan.request;
        let progress = &mut |now: lacuna::migrate::Progress| self.note(&now, plan.is_over);
        let guest = self.running()?;
        let when = || plan.paused.map_or(When::Runs(&plan.budget), When::Paused);
        // One snapshot is saved at a time.
        let mut tracked = lock(&self.tracked);
        // Between two snapshots no thread would empty the rings, and a vCPU with a full one stops.
        if *track && base.is_none() && guest.vm().dirty_rings().is_some() {
            let text = "this guest's writes are recorded in rings, which only a running save \
                        empties: save without track, or run the guest with bitmaps (lacuna run \
                        --delivery bitmap)";
            return Err(Refused::request(text));
        }
        if base.is_none() && !guest.vm().delivery().has_bitmaps() {
            // Rings have one reader, so this log ends before the save. So all checks come first.
            to.check_new()?;
            *tracked = None;
        }
        // A failed whole save leaves the log since the last snapshot as it is.
        let saved = match (base, tracked.as_mut()) {
            (Some(base), Some(tracked)) if tracked.last() == base => {
                tracked.save_changes(guest, when(), to, progress)
            }
            (Some(base), tracked) => return Err(not_the_last(base, tracked)),
            (None, _) if *track => {
                let saved = Tracked::save_first(guest, when(), to, progress);
                saved.map(|(saved, first)| {
                    *tracked = Some(first);
                    saved
                })
            }
            (None, _) => {
                let saved = match plan.paused {
                    Some(paused) => save_paused(guest, paused, to, progress),
                    None => save(guest, to, &plan.budget, progress),
                };
                saved.inspect(|_| *tracked = None)
            }
        };
        let saved = saved.map_err(|error| self.not_saved(error))?;
        let ran = plan.paused.is_none();
        Ok(Saved {
            path: plan.request.path.clone(),
            pages: saved.pages,
            rounds: saved.rounds.iter().map(|round| round.pages).collect(),
            detected_by: ran.then(|| guest.vm().detected_by().to_string()),
            downtime_us: saved.downtime.as_micros() as u64,
        })
    }

    /// Notes the progress. `Break`: the save is over.
    fn note(&self, now: &lacuna::migrate::Progress, is_over: &AtomicBool) -> ControlFlow<Stop> {
        if let Phase::Saves(progress, _) = &mut *self.phase() {
            progress.round = now.round;
            progress.done = now.done;
            progress.pages = now.pages;
        }
        match is_over.load(Ordering::Relaxed) || self.devices.ending().is_some() {
            true => ControlFlow::Break(Stop::Cancel),
            false => ControlFlow::Continue(()),
        }
    }

    /// Why there is no snapshot.
    fn not_saved(&self, why: MigrateError) -> Refused {
        match self.devices.ending() {
            Some(ending) => {
                Refused::ended("the run has ended before the snapshot was whole", &ending)
            }
            None => why.into(),
        }
    }
}

/// The files that a client has made for its snapshot, if it has passed some.
fn open_files(
    request: &SaveRequest,
    descriptors: Vec<OwnedFd>,
) -> Result<Option<OpenFiles>, Refused> {
    let mut files: Vec<File> = descriptors.into_iter().map(File::from).collect();
    if files.is_empty() {
        return Ok(None);
    }
    // A read from a pipe as the base would wait for the client, and so would the end of the run.
    if !files
        .iter()
        .all(|file| file.metadata().is_ok_and(|found| found.is_file()))
    {
        return Err(Refused::request(
            "wrong descriptors: one is no regular file: pass files of a new folder",
        ));
    }
    let base = request.base.as_ref().and_then(|_| files.pop());
    match files.try_into() {
        Ok(files) => Ok(Some(OpenFiles {
            path: request.path.clone(),
            files,
            base,
        })),
        Err(_) => Err(Refused::request(format!(
            "wrong descriptors: pass the new files {}, and the file checksums of the base, if \
             there is one",
            OpenFiles::NAMES.join(", ")
        ))),
    }
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
             track first (lacuna snapshot save --track), which later ones can have as their base"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_taken() {
        let file = || OwnedFd::from(tempfile::tempfile().unwrap());
        let request = SaveRequest {
            base: Some("/base".into()),
            ..SaveRequest::to("/snapshot")
        };
        let all = [file(), file(), file(), file(), file()].into();
        assert!(open_files(&request, all).is_ok_and(|open| open.is_some()));
        let (pipe, _writer) = std::io::pipe().unwrap();
        let with_pipe = [file(), file(), file(), file(), pipe.into()].into();
        let refused = open_files(&request, with_pipe).err().expect("a pipe");
        assert!(refused.text.contains("no regular file"), "{}", refused.text);
    }
}
