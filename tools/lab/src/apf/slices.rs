//! The arms of an experiment, and the slices of time in which they take turns in one guest.

use crate::experiment::{LabError, LabResult};
use crate::report::{align, short};
use crate::result::{Better, Measurement};
use crate::session::{Measured, Session};
use crate::stalls::{STALLS, add_stalls, stalls_json, stalls_text};
use crate::stats::{Rounds, Summary, measures, paired};
use lacuna::Apf;
use lacuna::soft::Stalls;
use lacuna_guest::status::Kind;
use serde_json::Value;
use std::time::Duration;

/// Which processes run, and how faults are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arm {
    /// Its name in results.
    pub name: &'static str,
    paused: &'static [Kind],
    /// How faults are taken; `None`: in the VM's own way.
    pub apf: Option<Apf>,
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

    const fn new(name: &'static str, paused: &'static [Kind], apf: Option<Apf>) -> Self {
        Self { name, paused, apf }
    }

    /// Workers beside faulters, in a VM that takes its faults as `apf` says.
    pub const fn beside(apf: Apf) -> Self {
        match apf {
            Apf::On => Self::ON,
            Apf::Off => Self::OFF,
        }
    }
}

/// The arms of a comparison with a null.
pub const OFF_NULL_ON: [Arm; 3] = [Arm::OFF, Arm::NULL, Arm::ON];

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Steps a second of the computing processes.
    Workers,
    /// Steps a second of the faulting processes.
    Faulters,
    /// Seconds of a round of a program.
    Time,
    /// The share of these seconds that it waited.
    Waits,
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

/// What was counted in all arms.
pub struct Runs {
    roles: [Role; 2],
    arms: Vec<ArmRuns>,
}

struct ArmRuns {
    arm: Arm,
    /// One figure for each round, of each of `roles`.
    figures: [Vec<f64>; 2],
    stalls: Vec<Stalls>,
}

/// Lets `arms` take turns, and counts `roles`. `begin` is called before each turn, with the number
/// of its round; round 0 is not counted. `turn` adds its stalls.
pub fn turns(
    arms: &[Arm],
    rounds: impl Into<Rounds>,
    roles: [Role; 2],
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
    let arms = arms.iter().zip(figures).zip(stalls);
    let arms = arms.map(|((&arm, figures), stalls)| ArmRuns {
        arm,
        figures,
        stalls,
    });
    let arms = arms.collect();
    Ok(Runs { roles, arms })
}

/// Lets `arms` take turns in one VM, slice by slice, whatever its backend. `begin` is as in
/// [`turns`].
pub fn take_turns<V: Measured>(
    session: &Session<'_, V>,
    arms: &[Arm],
    pace: Pace,
    begin: impl Fn(u64),
) -> LabResult<Runs> {
    let guest = &session.guest;
    let roles = [Role::Workers, Role::Faulters];
    turns(arms, pace.rounds, roles, begin, |arm, stalls| {
        session.set_apf(arm.apf.unwrap_or(session.vm.config().apf));
        guest.pause(arm.paused)?;
        guest.run_for(pace.settle)?;
        let (before, stalls_before) = (guest.count()?, session.vm.stalls());
        guest.run_for(pace.slice)?;
        let (after, stalls_after) = (guest.count()?, session.vm.stalls());
        add_stalls(stalls, &stalls_before, &stalls_after);
        Ok(after.rates_since(&before))
    })
}

impl Runs {
    fn of(&self, arm: Arm) -> &ArmRuns {
        let found = self.arms.iter().find(|runs| runs.arm == arm);
        found.expect("asked for an arm that took part")
    }

    /// Whether the arms of `gain` took part.
    pub fn has(&self, gain: Gain) -> bool {
        let has = |arm| self.arms.iter().any(|runs| runs.arm == arm);
        has(gain.base) && has(gain.arm)
    }

    fn figures(&self, arm: Arm, role: Role) -> &[f64] {
        let place = self.roles.iter().position(|counted| *counted == role);
        &self.of(arm).figures[place.expect("it was counted")]
    }

    /// The figures of `role` in `arm`.
    pub fn rate(&self, arm: Arm, role: Role) -> Summary {
        Summary::of(self.figures(arm, role))
    }

    /// A gain, paired by round. [`LabError::Busy`]: the processes did no step in a round of the
    /// base, so there is nothing to compare with.
    pub fn ratio(&self, gain: Gain) -> LabResult<Summary> {
        let Gain { base, arm, role } = gain;
        let base_rates = self.figures(base, role);
        if base_rates.contains(&0.0) {
            let name = base.name;
            return Err(LabError::Busy(format!(
                "{role:?} did no step in a whole round of arm `{name}`"
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
        value["stalls"] = stalls_json(self.stalls(arm));
        value
    }

    /// The arms as a table for people.
    pub fn table(&self, title: &str) -> String {
        let header = [title, "workers/s", "faulters/s", STALLS];
        let mut rows = vec![header.map(str::to_owned)];
        rows.extend(self.arms.iter().map(|runs| {
            let [workers, faulters] = runs
                .figures
                .each_ref()
                .map(|rates| Summary::of(rates).median);
            [
                format!("  {}", runs.arm.name),
                short(workers),
                short(faulters),
                stalls_text(&runs.stalls),
            ]
        }));
        align(&rows)
    }

    /// The arms' stalls for people, a line for each.
    pub fn stalls_table(&self) -> String {
        let line = |runs: &ArmRuns| {
            let stalls = stalls_text(&runs.stalls);
            format!("  {:<4}  {stalls}\n", runs.arm.name)
        };
        self.arms.iter().map(line).collect()
    }
}
