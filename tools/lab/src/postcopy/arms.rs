//! The arms, and the slices of time in which they take turns in one guest.
//!
//! Arms differ in the flag of the memory slot, in the switch of async page faults, in the paused
//! processes, and in whether pages are pushed. All are switched while the guest runs. Memory is
//! missing only once, so each round has a VM of its own. Its guest boots with a near peer.

use super::peer::{Pages, Remote};
use super::push::{Pace, Push};
use crate::experiment::{LabError, LabResult};
use crate::fixture::resident;
use crate::report::{align, short};
use crate::session::{Session, image, on};
use crate::stalls::{STALLS, add_stalls, stalls_json, stalls_text};
use crate::stats::{Rounds, Summary, paired};
use crate::turns;
use lacuna::memory::{MemoryKind, SlotFlags};
use lacuna::soft::{Stalls, Vm, VmBuilder};
use lacuna::source::PageSource;
use lacuna::{Apf, Arch, MemorySlots as _, Vm as _};
use lacuna_guest::status::Kind;
use serde_json::Value;
use std::sync::Arc;
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

/// The counted events of a slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rate {
    /// Steps a second of the computing processes.
    Workers,
    /// Accesses a second of the faulting processes.
    Faulters,
    /// Demanded pages a second: a vCPU needed them.
    Demanded,
    /// Pushed pages a second.
    Pushed,
}

const RATES: usize = 4;

/// What is compared between two arms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Figure {
    Rate(Rate),
    /// The 99th percentile of the stalls.
    P99,
}

/// The counts of all arms.
pub struct Runs {
    arms: Vec<ArmRuns>,
}

struct ArmRuns {
    arm: Arm,
    /// One figure for each round, for each [`Rate`].
    rates: [Vec<f64>; RATES],
    /// The 99th percentile of the stalls of each round, in nanoseconds.
    p99: Vec<f64>,
    stalls: Vec<Stalls>,
}

impl Scene {
    /// Lets `arms` take turns. The first round is not counted.
    pub fn measure(&self, arms: &[Arm], rounds: impl Into<Rounds>) -> LabResult<Runs> {
        let remote = Remote::start(self.latency)?;
        let mut runs: Vec<_> = arms.iter().map(|arm| ArmRuns::new(*arm)).collect();
        self.round(&remote, arms)?;
        rounds.into().repeat(|| {
            let round = self.round(&remote, arms)?;
            let runs = runs.iter_mut().zip(&round);
            runs.for_each(|(runs, took)| runs.add(took));
            Ok(())
        })?;
        Ok(Runs { arms: runs })
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

    /// One turn of all arms, there and back, in a fresh VM.
    fn round(&self, remote: &Remote, arms: &[Arm]) -> LabResult<Vec<Took>> {
        remote.set_far(false);
        let memory = resident(self.memory_mib, 1).memory;
        let pages = remote.connect(memory, self.window)?;
        let builder = self.builder(Arc::clone(&pages) as Arc<dyn PageSource>);
        on(&builder, &image(builder.arch, "bm")?, |session| {
            session.guest.prepared()?;
            remote.set_far(true);
            let memory = session.vm.missing_memory().expect("it has a source");
            let push = Push::new((memory, self.arch), &pages, self.push);
            push.during(|| {
                let mut took = vec![Took::default(); arms.len()];
                turns::round(arms.len(), 1, |arm, _| {
                    self.slice(session, &pages, &push, &arms[arm], &mut took[arm])
                })?;
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
        took: &mut Took,
    ) -> LabResult {
        let guest = &session.guest;
        let mut flags = SlotFlags::empty();
        flags.set(SlotFlags::EXIT_ON_MISSING, arm.exits);
        for slot in session.vm.memory_slots() {
            session.vm.set_slot_flags(slot.id, flags)?;
        }
        session.set_apf(arm.apf);
        guest.pause(arm.paused)?;
        push.set_on(arm.pushes);
        guest.run_for(self.settle)?;
        let (before, stalls, provided) = (guest.count()?, session.vm.stalls(), pages.provided());
        guest.run_for(self.slice)?;
        let (after, now, came) = (guest.count()?, session.vm.stalls(), pages.provided());
        add_stalls(&mut took.stalls, &stalls, &now);
        let seconds = (after.at - before.at).as_secs_f64();
        let [workers, faulters] = after.rates_since(&before);
        let [demanded, pushed] = [0, 1].map(|of| (came[of] - provided[of]) as f64 / seconds);
        let rates = [workers, faulters, demanded, pushed];
        let sums = took.rates.iter_mut().zip(rates);
        sums.for_each(|(sum, rate)| *sum += rate);
        Ok(())
    }
}

/// Two slices of one arm.
#[derive(Clone, Default)]
struct Took {
    rates: [f64; RATES],
    stalls: Vec<Stalls>,
}

impl ArmRuns {
    fn new(arm: Arm) -> Self {
        Self {
            arm,
            rates: Default::default(),
            p99: Vec::new(),
            stalls: Vec::new(),
        }
    }

    fn add(&mut self, took: &Took) {
        for (rates, sum) in self.rates.iter_mut().zip(took.rates) {
            rates.push(sum / 2.0);
        }
        let none = vec![Stalls::default(); took.stalls.len()];
        add_stalls(&mut self.stalls, &none, &took.stalls);
        let p99 = took.stalls.iter().map(|stalls| stalls.quantile_ns(0.99));
        self.p99.push(p99.max().unwrap_or(0) as f64);
    }
}

impl Runs {
    fn of(&self, arm: &Arm) -> &ArmRuns {
        let found = self.arms.iter().find(|runs| runs.arm.name == arm.name);
        found.expect("asked for an arm that took part")
    }

    /// `rate` in `arm`.
    pub fn rate(&self, arm: &Arm, rate: Rate) -> Summary {
        Summary::of(&self.of(arm).rates[rate as usize])
    }

    /// `figure` in `arm` over `figure` in `base`, paired by round.
    ///
    /// # Errors
    /// [`LabError::Busy`]: in a round of `base` nothing was counted, or no vCPU waited.
    pub fn ratio(&self, base: &Arm, arm: &Arm, figure: Figure) -> LabResult<Summary> {
        let [of_base, of_arm] = [base, arm].map(|arm| match figure {
            Figure::Rate(rate) => &self.of(arm).rates[rate as usize],
            Figure::P99 => &self.of(arm).p99,
        });
        if of_base.contains(&0.0) {
            let name = base.name;
            return Err(LabError::Busy(format!(
                "nothing was counted in a whole round of arm `{name}`"
            )));
        }
        Ok(paired(of_base, of_arm))
    }

    /// An arm for a result: `rate`, and each vCPU's stalls.
    pub fn arm(&self, arm: &Arm, rate: Rate) -> Value {
        let mut value = Value::from(self.rate(arm, rate));
        value["stalls"] = stalls_json(&self.of(arm).stalls);
        value
    }

    /// The arms as a table for people.
    pub fn table(&self, title: &str) -> String {
        let mut rows = vec![
            [
                "",
                "workers/s",
                "faulters/s",
                "demanded/s",
                "pushed/s",
                STALLS,
            ]
            .map(str::to_owned),
        ];
        title.clone_into(&mut rows[0][0]);
        rows.extend(self.arms.iter().map(|runs| {
            let rates = runs.rates.each_ref();
            let [workers, faulters, demanded, pushed] =
                rates.map(|rates| short(Summary::of(rates).median));
            [
                format!("  {}", runs.arm.name),
                workers,
                faulters,
                demanded,
                pushed,
                stalls_text(&runs.stalls),
            ]
        }));
        align(&rows)
    }
}
