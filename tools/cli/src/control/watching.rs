//! Watches the guest's writes for a client.
//!
//! While a client has a monitor, the VMM reads the log of writes. A snapshot and a migration read
//! it too, and only the newest reader gets pages. So the monitor gives the log up before a copy
//! begins, and begins a new log afterwards.

use super::controlled::{Controlled, PROGRESS, Phase, refusal};
use super::message::{Answer, Progress, Refused, Writes};
use super::writes::{Monitor, Watch, WorkingSet};
use lacuna::dirty::{Detection, DirtyError};
use lacuna::migrate::MigrateError;
use lacuna::{LogReader, Vm};
use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::sync::{MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

/// A connection's thread has the monitor from [`Controlled::begin_monitor`] until [`End`].
const OWN: &str = "this client's monitor";

/// Ends the monitor, and the log with it.
struct End<'c, 'a, V: Vm> {
    controlled: &'c Controlled<'a, V>,
    /// How writes were detected before.
    detection: Option<Detection>,
}

impl<V: Vm> Drop for End<'_, '_, V> {
    fn drop(&mut self) {
        // The next monitor finds the former detection.
        let mut monitor = self.controlled.monitor();
        *monitor = None;
        let choice = self.controlled.guest.vm.detection();
        if let Some((choice, detection)) = choice.zip(self.detection) {
            choice.choose(detection);
        }
    }
}

impl<'a, V: Vm> Controlled<'a, V> {
    /// Sends the guest's writes, period by period, until the client disconnects, or for as many
    /// periods as it has asked for.
    pub(super) fn watch_writes(
        &self,
        watch: &Watch,
        send: &mut dyn FnMut(Answer) -> ControlFlow<()>,
    ) -> Result<Answer, Refused> {
        self.check_runs()?;
        let _end = self.begin_monitor(watch)?;
        let mut left = watch.count.map(NonZeroU64::get);
        loop {
            let began = Instant::now();
            while let Some(rest) = watch.every.checked_sub(began.elapsed()) {
                self.read_log(self.monitor().as_mut().expect(OWN))?;
                thread::sleep(PROGRESS.min(rest));
                if self.guest.devices.ending().is_some() {
                    return Ok(Answer::Status(Box::new(self.status())));
                }
            }
            let writes = self.harvest()?;
            left = left.map(|left| left - 1);
            if left == Some(0) {
                return Ok(Answer::Dirty(writes));
            }
            if send(Answer::Progress(Progress::Writes(writes))).is_break() {
                return Err(Refused::request("the client has disconnected"));
            }
        }
    }

    /// A copy of the guest's memory begins: its log gets every page.
    pub(super) fn release_log(&self) {
        if let Some(monitor) = &mut *self.monitor() {
            monitor.log = None;
        }
    }

    fn monitor(&self) -> MutexGuard<'_, Option<Monitor<'a, V>>> {
        self.monitor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_monitor<'c>(&'c self, watch: &Watch) -> Result<End<'c, 'a, V>, Refused> {
        let mut monitor = self.monitor();
        if monitor.is_some() {
            return Err(Refused::request(
                "another client watches the guest's writes: wait until it has disconnected",
            ));
        }
        let choice = self.guest.vm.detection();
        if watch.detection.is_some() && choice.is_none() {
            return Err(Refused::request(
                "on this backend the host's kernel chooses how writes are detected: leave out \
                 detect, which is --dirty",
            ));
        }
        let chosen = choice.zip(watch.detection).map(|(choice, detection)| {
            let before = choice.current();
            choice.choose(detection);
            before
        });
        *monitor = Some(Monitor {
            log: None,
            written: WorkingSet::new(watch.window),
        });
        Ok(End {
            controlled: self,
            detection: chosen,
        })
    }

    /// Begins the log, or empties its rings. Returns why there is no log at present.
    fn read_log(&self, monitor: &mut Monitor<'a, V>) -> Result<Option<String>, Refused> {
        // The lock of `monitor` is held. A copy changes the phase first, and takes the log away
        // under this lock then. So either the phase shows the copy here, or the copy ends this log
        // before it begins its own.
        if let Some((log, _)) = &mut monitor.log {
            if self.guest.vm.dirty_rings().is_some() {
                // A vCPU with a full ring does not run until the ring is emptied.
                let written = &mut monitor.written;
                log.harvest(|slot, page| written.note(slot, page))
                    .map_err(failed)?;
            }
            return Ok(None);
        }
        match &*self.phase() {
            Phase::Runs | Phase::Pausing | Phase::Paused(_) => {}
            other => return Ok(Some(self.refused(other).text)),
        }
        let mut log = LogReader::begin(self.guest.vm).map_err(failed)?;
        // It may have pages that were written before.
        log.harvest(|_, _| {}).map_err(failed)?;
        monitor.log = Some((log, Instant::now()));
        Ok(None)
    }

    /// Ends a period.
    fn harvest(&self) -> Result<Writes, Refused> {
        let mut monitor = self.monitor();
        let monitor = monitor.as_mut().expect(OWN);
        let in_use = self.read_log(monitor)?;
        let Monitor { log, written } = monitor;
        let (mut seconds, mut pages) = (0.0, 0);
        if let Some((log, since)) = log {
            log.harvest(|slot, page| written.note(slot, page))
                .map_err(failed)?;
            pages = written.present();
            let now = Instant::now();
            seconds = now.duration_since(*since).as_secs_f64();
            *since = now;
        }
        Ok(Writes {
            seconds,
            pages,
            rate: if pages > 0 {
                pages as f64 / seconds
            } else {
                0.0
            },
            working_set: written.end_period(),
            detected_by: self.guest.vm.detected_by().to_string(),
            in_use,
        })
    }
}

fn failed(error: DirtyError) -> Refused {
    refusal(&MigrateError::from(error))
}
