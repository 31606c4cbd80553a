//! The state of a run, and its counters.

use super::{Controlled, Phase};
use crate::message::{PROTOCOL, Pages, State, Status};
use crate::words::{self, RANGES_SHOWN, given_up_at_source, undecided_at_source};
use lacuna::metrics::Metrics;
use lacuna::migrate::session::{OutgoingHandle, OutgoingStage};
use lacuna::{Arch, Vm};
use serde_json::Number;
use std::collections::BTreeMap;
use std::time::Duration;

/// The pages of a guest with a page source, as its VMM counts them.
pub trait PageCounts: Send + Sync {
    /// Their counts. The rate is the mean over `ran`, the time since the guest's start.
    fn pages(&self, ran: Duration) -> Pages;

    /// Why the source provides no pages at present.
    fn outage(&self) -> Option<String>;

    /// Adds the counters of the source.
    fn fill(&self, to: &mut Metrics);
}

impl<V: Vm> Controlled<'_, V> {
    pub(super) fn status(&self) -> Status {
        let ending = self.devices.ending();
        let ending = ending.map(|ending| match self.socket.moved() {
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
                undecided = Some(given_up_at_source(guest.handle()));
                State::Paused
            }
        };
        let state = match ending {
            Some(_) => State::Ended,
            None if self.is_awaited() => State::Arriving,
            None => state,
        };
        let arriving = self.incoming.as_ref();
        let arriving = arriving.map(|guest| guest.progress(RANGES_SHOWN));
        let config = self.vm.config();
        let running = self.running.get();
        let ran = running.map_or(Duration::ZERO, |guest| Duration::from_nanos(guest.now().0));
        let pages = self.pages.as_ref();
        Status {
            protocol: PROTOCOL,
            state,
            backend: V::BACKEND.name().into(),
            arch: arch_name(config.arch).into(),
            vcpus: config.vcpus,
            memory_bytes: config.memory.bytes(),
            seconds: ran.as_secs_f64(),
            pages: pages.map(|pages| pages.pages(ran)),
            outage: pages.and_then(|pages| pages.outage()),
            saving,
            migrating,
            undecided: undecided.or_else(|| words::undecided(arriving.as_ref()?)),
            arriving,
            waiting: None,
            ending,
        }
    }

    /// The counters of the VM, of its page source, of a migration, and of the VMM.
    pub fn counters(&self) -> Metrics {
        let mut metrics = self.vm.metrics();
        if let Some(pages) = &self.pages {
            pages.fill(&mut metrics);
        }
        if let Some(migration) = self.migration() {
            migration.progress().fill(&mut metrics);
        }
        if let Some(more) = self.more {
            more(&mut metrics);
        }
        metrics
    }

    /// The migration in progress, or the last one if it waits for a decision.
    fn migration(&self) -> Option<OutgoingHandle> {
        match &*self.phase() {
            Phase::Undecided(undecided) => Some(undecided.handle().clone()),
            Phase::Moves(handle) => Some(handle.clone()),
            _ => None,
        }
    }

    /// The counters' text, without its comments.
    pub(super) fn stat(&self) -> BTreeMap<String, Number> {
        let text = self.counters().to_string();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let values = lines.filter_map(|line| line.rsplit_once(' '));
        values
            .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
            .collect()
    }
}

/// As `--arch` takes it.
fn arch_name(arch: Arch) -> &'static str {
    match arch {
        Arch::Arm64 => "arm64",
        _ => "x86_64",
    }
}
