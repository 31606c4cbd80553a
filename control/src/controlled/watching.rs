//! Watches the guest's writes for a client.
//!
//! While a client has a monitor, the VMM reads the log of writes. A snapshot and a migration read
//! it too, and only the newest reader gets pages. So the monitor gives the log up before a copy
//! begins, and begins a new log afterwards.

use super::working_set::WorkingSet;
use super::{Controlled, Phase};
use crate::message::{Progress, WatchRequest, Writes};
use crate::refused::Refused;
use crate::socket::Send;
use crate::threads::{PROGRESS, lock};
use lacuna::dirty::{Detection, DirtyError};
use lacuna::migrate::MigrateError;
use lacuna::{LogReader, Vm};
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::sync::MutexGuard;
use std::thread;
use std::time::{Duration, Instant};

/// The periods that a request may ask for, in milliseconds. Each harvest interrupts all vCPUs, and
/// the end of a period shows whether the client is still connected.
const EVERY_MS: RangeInclusive<u64> = 100..=60_000;
/// The times of a working set that a request may ask for, in milliseconds.
const WINDOW_MS: RangeInclusive<u64> = 100..=3_600_000;

/// The log of writes as a client watches it.
pub(super) struct Monitor<'a, V: Vm> {
    /// The log, and when it was harvested. `None` while the guest is copied.
    pub log: Option<(LogReader<'a, V>, Instant)>,
    pub written: WorkingSet,
    /// Whether its client has chosen how writes are detected.
    pub detects: bool,
}

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
        let choice = self.controlled.vm.detection();
        if let Some((choice, detection)) = choice.zip(self.detection) {
            choice.choose(detection);
        }
    }
}

impl<'a, V: Vm> Controlled<'a, V> {
    /// Sends the guest's writes, period by period, until the client disconnects, or for as many
    /// periods as it has asked for: the last one is returned. `None`: the run has ended.
    pub(super) fn watch_writes(
        &self,
        request: &WatchRequest,
        send: Send<'_>,
    ) -> Result<Option<Writes>, Refused> {
        let every = checked("every_ms", request.every_ms.unwrap_or(1_000), EVERY_MS)?;
        let window = checked("window_ms", request.window_ms.unwrap_or(10_000), WINDOW_MS)?;
        self.check_runs()?;
        let _end = self.begin_monitor(window.div_ceil(every) as usize, request.detect)?;
        let mut left = request.count.map(NonZeroU64::get);
        loop {
            let began = Instant::now();
            while let Some(rest) = Duration::from_millis(every).checked_sub(began.elapsed()) {
                self.read_log(self.monitor().as_mut().expect(OWN))?;
                thread::sleep(PROGRESS.min(rest));
                if self.devices.ending().is_some() {
                    return Ok(None);
                }
            }
            let writes = self.harvest()?;
            left = left.map(|left| left - 1);
            if left == Some(0) {
                return Ok(Some(writes));
            }
            if send(Progress::Writes(writes)).is_break() {
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

    pub(super) fn monitor(&self) -> MutexGuard<'_, Option<Monitor<'a, V>>> {
        lock(&self.monitor)
    }

    /// Begins a monitor with a working set of `window` periods.
    fn begin_monitor(
        &self,
        window: usize,
        detection: Option<Detection>,
    ) -> Result<End<'_, 'a, V>, Refused> {
        let mut monitor = self.monitor();
        if monitor.is_some() {
            return Err(Refused::request(
                "another client watches the guest's writes: wait until it has disconnected",
            ));
        }
        let choice = self.vm.detection();
        if detection.is_some() && choice.is_none() {
            return Err(Refused::request(
                "on this backend the host's kernel chooses how writes are detected: leave out \
                 detect (lacuna ctl dirty --dirty)",
            ));
        }
        let chosen = choice.zip(detection).map(|(choice, detection)| {
            let before = choice.current();
            choice.choose(detection);
            before
        });
        *monitor = Some(Monitor {
            log: None,
            written: WorkingSet::new(window),
            detects: chosen.is_some(),
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
            if self.vm.dirty_rings().is_some() {
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
        let mut log = LogReader::begin(self.vm).map_err(failed)?;
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
        let Monitor { log, written, .. } = monitor;
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
            detected_by: self.vm.detected_by().to_string(),
            in_use,
        })
    }
}

fn checked(name: &str, value: u64, range: RangeInclusive<u64>) -> Result<u64, Refused> {
    match range.contains(&value) {
        true => Ok(value),
        false => Err(Refused::request(format!(
            "{name} {value}: give {} to {}",
            range.start(),
            range.end()
        ))),
    }
}

fn failed(error: DirtyError) -> Refused {
    MigrateError::from(error).into()
}
