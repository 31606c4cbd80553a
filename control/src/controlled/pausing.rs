//! A pause, the start of a guest that starts paused, and the end of the run.

use super::{BEGIN, Controlled, Phase};
use crate::refused::Refused;
use lacuna::migrate::PausedGuest;
use lacuna::{Ending, Running, Vm};
use std::thread;

impl<'a, V: Vm> Controlled<'a, V> {
    /// The guest starts paused: [`Controlled::wait_to_start`] waits for a client.
    pub fn start_paused(&self) {
        *self.phase() = Phase::NotStarted;
    }

    /// If the guest starts paused, waits until a client resumes it or ends the run. Ends the run if
    /// `is_interrupted` returns true.
    pub fn wait_to_start(&self, is_interrupted: &dyn Fn() -> bool) {
        while self.waits_to_start() && self.devices.ending().is_none() {
            if is_interrupted() {
                self.devices.end(Ending::Stopped, self.vm);
            }
            thread::sleep(BEGIN);
        }
    }

    /// The guest runs: clients may pause, save and move it.
    pub fn runs(&self, guest: &'a Running<V>) {
        // A guest begins once.
        let _ = self.running.set(guest);
    }

    pub(super) fn pause(&self) -> Result<(), Refused> {
        self.check_runs()?;
        let mut phase = self.phase();
        match &*phase {
            Phase::NotStarted | Phase::Paused(_) | Phase::Undecided(_) => return Ok(()),
            Phase::Runs => *phase = Phase::Pausing,
            other => return Err(self.refused(other)),
        }
        drop(phase);
        let paused = self.running().and_then(PausedGuest::pause);
        let (phase, done) = match paused {
            Ok(paused) => (Phase::Paused(paused), Ok(())),
            Err(error) => (Phase::Runs, Err(error.into())),
        };
        *self.phase() = phase;
        done
    }

    pub(super) fn resume(&self) -> Result<(), Refused> {
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
    pub(super) fn stop(&self) -> Result<(), Refused> {
        if !self.is_awaited() {
            self.check_runs()?;
        }
        self.socket.actions().stop();
        self.devices.end(Ending::Stopped, self.vm);
        if let Some(incoming) = &self.incoming {
            incoming.end(Some("stopped through its control socket"));
        }
        self.release_at_the_end();
        Ok(())
    }

    /// Releases a paused guest after the end of its run, so that its threads end.
    pub(super) fn release_at_the_end(&self) {
        if self.devices.ending().is_some() {
            let mut phase = self.phase();
            if let Phase::Paused(_) | Phase::Undecided(_) = &*phase {
                *phase = Phase::Runs;
            }
        }
    }
}
