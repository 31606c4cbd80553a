//! The arms of an experiment, the slices of time in which they take turns in one guest, and what
//! was counted in them.

use crate::experiment::{LabError, LabResult};
use crate::report::{align, short};
use crate::result::{Better, Measurement};
use crate::session::{Measured, Session};
use crate::stalls::{STALLS, VcpuStalls, add_stalls, since, stalls_text};
use crate::stats::{Rounds, Summary, measures, paired};
use lacuna::Apf;
use lacuna::soft::Stalls;
use lacuna_guest::status::Kind;
use serde_json::{Value, json};
use std::time::Duration;

/// Which processes run, and how faults are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arm {
    /// Its name in results.
    pub name: &'static str,
    pub paused: &'static [Kind],
    /// How faults are taken; `None`: in the VM's own way.
    pub apf: Option<Apf>,
    /// At a missing page of a source the vCPU exits. The VMM notifies the guest if it can, and asks
    /// for the page. Without this, the vCPU waits or notifies the guest, and the engine asks.
    pub exits: bool,
    /// Whether pages of a source are pushed.
    pub pushes: bool,
}

impl Arm {
    /// The workers alone. They cause no fault, and faults of the slice before are completed.
    pub const ALONE: Self = Self::new("alone", &[Kind::Faulter], None);
    /// Workers beside faulters; vCPUs wait for pages.
    pub const OFF: Self = Self::new("off", &[], Some(Apf::Off));
    /// [`Arm::OFF`] once more.
    pub const NULL: Self = Self::new("null", &[], Some(Apf::Off));
    /// Workers beside faulters; faults are taken asynchronously.
    pub const ON: Self = Self::new("on", &[], Some(Apf::On));
    /// The faulters alone; vCPUs wait for pages.
    pub const FAULTERS_OFF: Self = Self::new("faulters_off", &[Kind::Worker], Some(Apf::Off));
    /// The faulters alone; faults are taken asynchronously.
    pub const FAULTERS_ON: Self = Self::new("faulters_on", &[Kind::Worker], Some(Apf::On));

    /// An arm without a page source.
    pub const fn new(name: &'static str, paused: &'static [Kind], apf: Option<Apf>) -> Self {
        Self {
            name,
            paused,
            apf,
            exits: false,
            pushes: false,
        }
    }

    /// The same under another name.
    pub const fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// Workers beside faulters, in a VM that takes its faults as `apf` says.
    pub const fn beside(apf: Apf) -> Self {
        match apf {
            Apf::On => Self::ON,
            Apf::Off => Self::OFF,
        }
    }
}

/// The columns of [`Runs::table`] for two processes.
pub const PROCESSES: [&str; 2] = ["workers/s", "faulters/s"];

/// The arms of a comparison with a null.
pub const OFF_NULL_ON: [Arm; 3] = [Arm::OFF, Arm::NULL, Arm::ON];

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Steps a second of the computing processes.
    Workers,
    /// Steps a second of the faulting processes.
    Faulters,
    /// Pages a second of a source that a vCPU needed.
    Demanded,
    /// Pushed pages a second.
    Pushed,
    /// The 99th percentile of the stalls, in nanoseconds.
    P99,
    /// Seconds of a round of a program.
    Time,
    /// The share of these seconds that it waited.
    Waits,
}

impl Role {
    /// Its place among the figures of a slice, or of a round of a program.
    pub const fn place(self) -> usize {
        match self {
            Self::Workers | Self::Time => 0,
            Self::Faulters | Self::Waits => 1,
            Self::Demanded => 2,
            Self::Pushed => 3,
            Self::P99 => 4,
        }
    }
}

/// The rate of `role` in `arm`, over the rate in `base`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gain {
    pub base: Arm,
    pub arm: Arm,
    pub role: Role,
}

impl Gain {
    /// The share of their speed that workers keep beside faulters.
    pub const SHARE: Self = Self::new(Arm::ALONE, Arm::ON, Role::Workers);
    /// The workers' gain beside faulters.
    pub const WORKERS: Self = Self::new(Arm::OFF, Arm::ON, Role::Workers);
    /// The faulters' gain beside workers.
    pub const FAULTERS: Self = Self::new(Arm::OFF, Arm::ON, Role::Faulters);

    pub const fn new(base: Arm, arm: Arm, role: Role) -> Self {
        Self { base, arm, role }
    }

    /// What the method reports where nothing differs, for a gain over [`Arm::OFF`].
    pub const fn null(self) -> Self {
        Self::new(self.base, Arm::NULL, self.role)
    }
}

/// Rounds, and the times of a slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pace {
    /// Counted rounds, after one uncounted round. Each has two slices of every arm.
    pub rounds: Rounds,
    /// The counted part of a slice.
    pub slice: Duration,
    /// The time before it. Faults of the arm before are still on their way, and a paused process
    /// looks every 20 ms whether its pause is over.
    pub settle: Duration,
}

impl Pace {
    /// `rounds` rounds with these times in milliseconds.
    pub fn new(rounds: impl Into<Rounds>, slice_ms: u64, settle_ms: u64) -> Self {
        Self {
            rounds: rounds.into(),
            slice: Duration::from_millis(slice_ms),
            settle: Duration::from_millis(settle_ms),
        }
    }

    /// `result` with its times.
    pub fn with_params(self, result: Measurement) -> Measurement {
        let ms = |time: Duration| time.as_millis() as u64;
        result
            .param("slice_ms", ms(self.slice))
            .param("settle_ms", ms(self.settle))
    }
}

/// What was counted in all arms: `M` figures.
pub struct Runs<const M: usize = 2>(Vec<ArmRuns<M>>);

struct ArmRuns<const M: usize> {
    arm: Arm,
    /// One value for each round, of each figure.
    figures: [Vec<f64>; M],
    stalls: Vec<Stalls>,
}

/// Lets `arms` take turns, and counts two figures. `begin` is called before each turn, with the
/// number of its round; round 0 is not counted. `turn` adds its stalls.
pub fn turns(
    arms: &[Arm],
    rounds: impl Into<Rounds>,
    begin: impl Fn(u64),
    mut turn: impl FnMut(Arm, &mut Vec<Stalls>) -> LabResult<[f64; 2]>,
) -> LabResult<Runs> {
    let mut stalls = vec![Vec::new(); arms.len()];
    // A round has two turns of each arm.
    let mut number = (0..).flat_map(|round| std::iter::repeat_n(round, 2 * arms.len()));
    let figures = measures(arms.len(), rounds, |index| {
        begin(number.next().unwrap_or_default());
        turn(arms[index], &mut stalls[index])
    })?;
    Ok(Runs::new(arms, figures, stalls))
}

/// Lets `arms` take turns in one VM, slice by slice, whatever its backend. `begin` is as in
/// [`turns`].
pub fn take_turns<V: Measured>(
    session: &Session<'_, V>,
    arms: &[Arm],
    pace: Pace,
    begin: impl Fn(u64),
) -> LabResult<Runs> {
    turns(arms, pace.rounds, begin, |arm, stalls| {
        let (rates, []) = slice(session, arm, pace, stalls, || [])?;
        Ok(rates)
    })
}

/// A slice of `arm`. Returns steps a second of workers and of faulters, and the growth of `others`
/// a second; adds the stalls.
pub fn slice<V: Measured, const M: usize>(
    session: &Session<'_, V>,
    arm: Arm,
    pace: Pace,
    stalls: &mut Vec<Stalls>,
    others: impl Fn() -> [u64; M],
) -> LabResult<([f64; 2], [f64; M])> {
    let guest = &session.guest;
    session.set_apf(arm.apf.unwrap_or(session.vm.config().apf));
    guest.pause(arm.paused)?;
    guest.run_for(pace.settle)?;
    let (before, stalls_before, others_before) = (guest.count()?, session.vm.stalls(), others());
    guest.run_for(pace.slice)?;
    let (after, stalls_after, others_after) = (guest.count()?, session.vm.stalls(), others());
    add_stalls(stalls, &since(&stalls_before, &stalls_after));
    let seconds = (after.at - before.at).as_secs_f64();
    let grown = |of: usize| (others_after[of] - others_before[of]) as f64 / seconds;
    Ok((after.rates_since(&before), std::array::from_fn(grown)))
}

impl<const M: usize> Runs<M> {
    /// The figures and the stalls of each of `arms`.
    pub fn new(arms: &[Arm], figures: Vec<[Vec<f64>; M]>, stalls: Vec<Vec<Stalls>>) -> Self {
        let arms = arms.iter().zip(figures).zip(stalls);
        let arms = arms.map(|((&arm, figures), stalls)| ArmRuns {
            arm,
            figures,
            stalls,
        });
        Self(arms.collect())
    }

    fn of(&self, arm: Arm) -> &ArmRuns<M> {
        let found = self.0.iter().find(|runs| runs.arm == arm);
        found.expect("asked for an arm that took part")
    }

    /// Whether the arms of `gain` took part.
    pub fn has(&self, gain: Gain) -> bool {
        let has = |arm| self.0.iter().any(|runs| runs.arm == arm);
        has(gain.base) && has(gain.arm)
    }

    fn figures(&self, arm: Arm, role: Role) -> &[f64] {
        &self.of(arm).figures[role.place()]
    }

    /// The figures of `role` in `arm`.
    pub fn rate(&self, arm: Arm, role: Role) -> Summary {
        Summary::of(self.figures(arm, role))
    }

    /// A gain, paired by round. [`LabError::Busy`]: in a round of the base the processes did no
    /// step, or no vCPU waited, so there is nothing to compare with.
    pub fn ratio(&self, gain: Gain) -> LabResult<Summary> {
        let Gain { base, arm, role } = gain;
        let base_rates = self.figures(base, role);
        if base_rates.contains(&0.0) {
            let name = base.name;
            return Err(LabError::Busy(format!(
                "no figure for {role:?} in a whole round of arm `{name}`"
            )));
        }
        Ok(paired(base_rates, self.figures(arm, role)))
    }

    /// A gain as a result: in percent if its base is [`Arm::ALONE`], and with a null if its base is
    /// [`Arm::OFF`].
    pub fn result(&self, id: impl Into<String>, gain: Gain) -> LabResult<Measurement> {
        let ratio = self.ratio(gain)?;
        let (name, unit, ratio) = match gain.base {
            Arm::ALONE => ("alone", "%", ratio.scaled(100.0)),
            _ => ("off", "x", ratio),
        };
        let better = match gain.role {
            Role::Time => Better::Lower,
            _ => Better::Higher,
        };
        let result = Measurement::new(id, unit, better, ratio)
            .arm(name, self.arm(gain.base, gain.role))
            .arm("on", self.arm(gain.arm, gain.role));
        Ok(match gain.base {
            Arm::OFF => result.arm("null", self.ratio(gain.null())?),
            _ => result,
        })
    }

    /// Each vCPU's stalls in `arm`.
    pub fn stalls(&self, arm: Arm) -> &[Stalls] {
        &self.of(arm).stalls
    }

    /// An arm for a result: the figure of `role`, and each vCPU's stalls.
    pub fn arm(&self, arm: Arm, role: Role) -> Value {
        let mut value = Value::from(self.rate(arm, role));
        value["stalls"] = json!(VcpuStalls::of_all(self.stalls(arm)));
        value
    }

    /// The arms as a table for people, with columns for the first figures.
    pub fn table(&self, title: &str, columns: &[&str]) -> String {
        let header = [&[title], columns, &[STALLS]].concat();
        let mut rows = vec![header.into_iter().map(str::to_owned).collect::<Vec<_>>()];
        rows.extend(self.0.iter().map(|runs| {
            let mut row = vec![format!("  {}", runs.arm.name)];
            let figures = runs.figures.iter().take(columns.len());
            row.extend(figures.map(|figures| short(Summary::of(figures).median)));
            row.push(stalls_text(&runs.stalls));
            row
        }));
        align(&rows)
    }

    /// The arms' stalls for people, a line for each.
    pub fn stalls_table(&self) -> String {
        let line = |runs: &ArmRuns<M>| {
            let stalls = stalls_text(&runs.stalls);
            format!("  {:<4}  {stalls}\n", runs.arm.name)
        };
        self.0.iter().map(line).collect()
    }
}
