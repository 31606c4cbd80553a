//! The arms, and the slices of time in which they take turns in one guest.
//!
//! Arms differ in the flag of the memory slot, in the switch of async page faults, in the paused
//! processes, and in whether pages are pushed. All are switched while the guest runs. Memory is
//! missing only once, so each round has a VM of its own. Its guest boots before the peer is asked.

use super::peer::{Pages, Remote};
use super::push::{Pace, Push};
use crate::experiment::{LabError, LabResult};
use crate::fixture::resident;
use crate::report::{align, short};
use crate::session::{Session, image, on};
use crate::stalls::{STALLS, add_stalls, stalls_json, stalls_text};
use crate::stats::{Rounds, Summary, collected, paired};
use crate::turns;
use lacuna::memory::{MemoryKind, SlotFlags};
use lacuna::soft::{Stalls, Vm, VmBuilder};
use lacuna::source::PageSource;
use lacuna::{Apf, Arch, MemorySlots as _, Vm as _};
use lacuna_guest::status::Kind;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The settings of a slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arm {
    /// Its name in results.
    pub name: &'static str,
    /// At a missing page the vCPU exits. The VMM notifies the guest if it can, and asks for the
    /// page. Without this, the vCPU waits or notifies the guest, and the engine asks.
    pub exits: bool,
    /// Whether the guest may get an event for a missing page.
    pub apf: Apf,
    /// The paused processes.
    pub paused: &'static [Kind],
    /// Whether pages are pushed.
    pub pushes: bool,
}

impl Arm {
    /// An arm in which all processes run and pages are pushed.
    pub const fn new(name: &'static str, exits: bool, apf: Apf) -> Self {
        Self {
            name,
            exits,
            apf,
            paused: &[],
            pushes: true,
        }
    }

    /// Whether something is counted for `figure` in this arm.
    pub fn counts(&self, figure: Figure) -> bool {
        match figure {
            Figure::Workers => !self.paused.contains(&Kind::Worker),
            Figure::Faulters | Figure::Demanded | Figure::P99 => {
                !self.paused.contains(&Kind::Faulter)
            }
            Figure::Pushed => self.pushes,
        }
    }

    /// The same under another name.
    pub const fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }
}

/// What all arms of an experiment have in common.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The processor of the guest.
    pub arch: Arch,
    /// The memory of the guest.
    pub kind: MemoryKind,
    /// Its size in MiB.
    pub memory_mib: u64,
    /// The numbers of the guest's computing and faulting processes.
    pub processes: [usize; 2],
    /// The peer's distance.
    pub latency: Duration,
    /// How fast pages are pushed.
    pub push: Pace,
    /// The most pushed pages in flight.
    pub window: u64,
    /// The counted part of a slice.
    pub slice: Duration,
    /// The time before it: pages of the slice before are still on their way, and a paused process
    /// looks every 20 ms whether its pause is over.
    pub settle: Duration,
}

/// A measure of a slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Figure {
    /// Steps a second of the computing processes.
    Workers,
    /// Accesses a second of the faulting processes.
    Faulters,
    /// Demanded pages a second: a vCPU needed them.
    Demanded,
    /// Pushed pages a second.
    Pushed,
    /// The 99th percentile of the stalls, in nanoseconds.
    P99,
}

/// All of [`Figure`].
type Figures = [f64; 5];

/// The figures of all arms.
pub struct Runs {
    arms: Vec<Arm>,
    /// Of each arm: one value for each round, for each [`Figure`].
    figures: Vec<[Vec<f64>; 5]>,
    /// Of each arm: the stalls of each vCPU.
    stalls: Vec<Vec<Stalls>>,
}

impl Scene {
    /// Lets `arms` take turns. The first round is not counted.
    pub fn measure(&self, arms: &[Arm], rounds: impl Into<Rounds>) -> LabResult<Runs> {
        let remote = Remote::start(self.latency)?;
        let mut of_rounds = Vec::new();
        let figures = collected(rounds, || {
            let (figures, stalls) = self.round(&remote, arms)?.into_iter().unzip();
            of_rounds.push(stalls);
            Ok(figures)
        })?;
        let mut stalls = vec![Vec::new(); arms.len()];
        for round in of_rounds.iter().skip(1) {
            let round: &Vec<Vec<Stalls>> = round;
            for (sum, took) in stalls.iter_mut().zip(round) {
                add_stalls(sum, &vec![Stalls::default(); took.len()], took);
            }
        }
        Ok(Runs {
            arms: arms.to_vec(),
            figures,
            stalls,
        })
    }

    /// The VM of a round.
    fn builder(&self, source: Arc<dyn PageSource>) -> VmBuilder {
        let [workers, faulters] = self.processes;
        VmBuilder {
            arch: self.arch,
            memory_kind: self.kind,
            source: Some(source),
            apf: Apf::On,
            command_line: format!(
                "workers={workers} faulters={faulters} seconds=1000000 slice_us={} tick_us={}",
                super::SLICE_US,
                super::TICK_US
            ),
            ..resident(self.memory_mib, 1)
        }
    }

    /// One turn of all arms, there and back, in a fresh VM: the means, and the stalls.
    fn round(&self, remote: &Remote, arms: &[Arm]) -> LabResult<Vec<(Figures, Vec<Stalls>)>> {
        let memory = resident(self.memory_mib, 1).memory;
        let pages = remote.connect(memory, self.window)?;
        let builder = self.builder(Arc::clone(&pages) as Arc<dyn PageSource>);
        on(&builder, &image(builder.arch, "bm")?, |session| {
            session.guest.prepared()?;
            pages.set_far();
            let memory = session.vm.missing_memory().expect("it has a source");
            let push = Push {
                memory,
                arch: self.arch,
                pages: &pages,
                pace: self.push,
                is_on: AtomicBool::new(false),
            };
            push.during(|| {
                let mut took = vec![(Figures::default(), Vec::new()); arms.len()];
                turns::round(arms.len(), 1, |arm, _| {
                    self.slice(session, &pages, &push, &arms[arm], &mut took[arm])
                })?;
                for (figures, stalls) in &mut took {
                    let p99 = stalls
                        .iter()
                        .map(|stalls: &Stalls| stalls.quantile_ns(0.99));
                    figures[Figure::P99 as usize] = p99.max().unwrap_or(0) as f64;
                }
                Ok(took)
            })
        })
    }

    fn slice(
        &self,
        session: &Session<'_, Vm>,
        pages: &Pages,
        push: &Push<'_>,
        arm: &Arm,
        (means, waited): &mut (Figures, Vec<Stalls>),
    ) -> LabResult {
        let guest = &session.guest;
        let mut flags = SlotFlags::empty();
        flags.set(SlotFlags::EXIT_ON_MISSING, arm.exits);
        for slot in session.vm.memory_slots() {
            session.vm.set_slot_flags(slot.id, flags)?;
        }
        session.set_apf(arm.apf);
        guest.pause(arm.paused)?;
        push.is_on.store(arm.pushes, Ordering::Relaxed);
        guest.run_for(self.settle)?;
        let (before, stalls, provided) = (guest.count()?, session.vm.stalls(), pages.provided());
        guest.run_for(self.slice)?;
        let (after, now, came) = (guest.count()?, session.vm.stalls(), pages.provided());
        add_stalls(waited, &stalls, &now);
        let seconds = (after.at - before.at).as_secs_f64();
        let [workers, faulters] = after.rates_since(&before);
        let [demanded, pushed] = [0, 1].map(|of| (came[of] - provided[of]) as f64 / seconds);
        let rates = [workers, faulters, demanded, pushed];
        means
            .iter_mut()
            .zip(rates)
            .for_each(|(mean, rate)| *mean += rate / 2.0);
        Ok(())
    }
}

impl Runs {
    fn of(&self, arm: &Arm) -> usize {
        let found = self.arms.iter().position(|known| known.name == arm.name);
        found.expect("asked for an arm that took part")
    }

    fn runs(&self, arm: &Arm, figure: Figure) -> &[f64] {
        &self.figures[self.of(arm)][figure as usize]
    }

    /// `figure` in `arm`.
    pub fn figure(&self, arm: &Arm, figure: Figure) -> Summary {
        Summary::of(self.runs(arm, figure))
    }

    /// `figure` in `arm` over `figure` in `base`, paired by round.
    ///
    /// # Errors
    /// [`LabError::Busy`]: in a round of `base` nothing was counted, or no vCPU waited.
    pub fn ratio(&self, base: &Arm, arm: &Arm, figure: Figure) -> LabResult<Summary> {
        let [of_base, of_arm] = [base, arm].map(|arm| self.runs(arm, figure));
        if of_base.contains(&0.0) {
            let name = base.name;
            return Err(LabError::Busy(format!(
                "nothing was counted in a whole round of arm `{name}`"
            )));
        }
        Ok(paired(of_base, of_arm))
    }

    /// An arm for a result: `rate`, and each vCPU's stalls.
    pub fn arm(&self, arm: &Arm, rate: Figure) -> Value {
        let mut value = Value::from(self.figure(arm, rate));
        value["stalls"] = stalls_json(&self.stalls[self.of(arm)]);
        value
    }

    /// The arms as a table for people.
    pub fn table(&self, title: &str) -> String {
        let rates = ["workers/s", "faulters/s", "demanded/s", "pushed/s"];
        let [workers, faulters, demanded, pushed] = rates;
        let heads = [title, workers, faulters, demanded, pushed, STALLS];
        let mut rows = vec![heads.map(str::to_owned)];
        for (arm, (runs, stalls)) in self.arms.iter().zip(self.figures.iter().zip(&self.stalls)) {
            let name = format!("  {}", arm.name);
            let [workers, faulters, demanded, pushed, _] =
                runs.each_ref().map(|runs| short(Summary::of(runs).median));
            rows.push([
                name,
                workers,
                faulters,
                demanded,
                pushed,
                stalls_text(stalls),
            ]);
        }
        align(&rows)
    }
}
