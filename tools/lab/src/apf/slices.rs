//! The arms of an experiment, and the slices of time in which they take turns in one guest.

use crate::experiment::LabError;
use crate::report::{align, short};
use crate::result::{Better, Measurement};
use crate::session::{Measured, Session};
use crate::stalls::{STALLS, add_stalls, stalls_json, stalls_text};
use crate::stats::{Rounds, Summary, measures, paired};
use lacuna_guest::status::Kind;
use lacuna_soft::{Apf, Stalls};
use serde_json::Value;
use std::time::Duration;

/// Which processes run, and how faults are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arm {
    /// Its name in results.
    pub name: &'static str,
    paused: &'static [Kind],
    /// How faults are taken; `None`: in the VM's own way.
    apf: Option<Apf>,
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

/// The processes that a rate counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The computing processes.
    Workers,
    /// The faulting processes.
    Faulters,
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

/// The rates of all arms.
pub struct Runs(Vec<ArmRuns>);

struct ArmRuns {
    arm: Arm,
    /// Steps a second in each round: workers, faulters.
    rates: [Vec<f64>; 2],
    stalls: Vec<Stalls>,
}

/// Lets `arms` take turns in one VM, whatever its backend. `begin` is called before each slice,
/// with the number of its round; round 0 is not counted.
pub fn take_turns<V: Measured>(
    session: &Session<'_, V>,
    arms: &[Arm],
    pace: Pace,
    begin: impl Fn(u64),
) -> Result<Runs, LabError> {
    let guest = &session.guest;
    let mut stalls = vec![Vec::new(); arms.len()];
    let mut slices = 0..;
    let rates = measures(arms.len(), pace.rounds, |index| {
        // A round has two slices of each arm.
        begin(slices.next().unwrap_or_default() / (2 * arms.len() as u64));
        let arm = arms[index];
        session.set_apf(arm.apf.unwrap_or(session.vm.config().apf));
        guest.pause(arm.paused)?;
        guest.run_for(pace.settle)?;
        let (before, stalls_before) = (guest.count()?, session.vm.stalls());
        guest.run_for(pace.slice)?;
        let (after, stalls_after) = (guest.count()?, session.vm.stalls());
        add_stalls(&mut stalls[index], &stalls_before, &stalls_after);
        Ok(after.rates_since(&before))
    })?;
    let arms = arms.iter().zip(rates).zip(stalls);
    let arms = arms.map(|((&arm, rates), stalls)| ArmRuns { arm, rates, stalls });
    Ok(Runs(arms.collect()))
}

impl Runs {
    fn of(&self, arm: Arm) -> &ArmRuns {
        let found = self.0.iter().find(|runs| runs.arm == arm);
        found.expect("asked for an arm that took part")
    }

    /// Whether the arms of `gain` took part.
    pub fn has(&self, gain: Gain) -> bool {
        let has = |arm| self.0.iter().any(|runs| runs.arm == arm);
        has(gain.base) && has(gain.arm)
    }

    fn rates(&self, arm: Arm, role: Role) -> &[f64] {
        &self.of(arm).rates[role as usize]
    }

    /// The steps a second of the processes of `role` in `arm`.
    pub fn rate(&self, arm: Arm, role: Role) -> Summary {
        Summary::of(self.rates(arm, role))
    }

    /// A gain, paired by round. [`LabError::Busy`]: the processes did no step in a round of the
    /// base, so there is nothing to compare with.
    pub fn ratio(&self, gain: Gain) -> Result<Summary, LabError> {
        let Gain { base, arm, role } = gain;
        let base_rates = self.rates(base, role);
        if base_rates.contains(&0.0) {
            let name = base.name;
            return Err(LabError::Busy(format!(
                "{role:?} did no step in a whole round of arm `{name}`"
            )));
        }
        Ok(paired(base_rates, self.rates(arm, role)))
    }

    /// A gain as a result: in percent if its base is [`Arm::ALONE`], and with a null if its base is
    /// [`Arm::OFF`].
    pub fn result(&self, id: impl Into<String>, gain: Gain) -> Result<Measurement, LabError> {
        let ratio = self.ratio(gain)?;
        let (name, unit, ratio) = match gain.base {
            Arm::ALONE => ("alone", "%", ratio.scaled(100.0)),
            _ => ("off", "x", ratio),
        };
        let result = Measurement::new(id, unit, Better::Higher, ratio)
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

    /// An arm for a result: the rate of `role`, in steps a second, and each vCPU's stalls.
    pub fn arm(&self, arm: Arm, role: Role) -> Value {
        let mut value = Value::from(self.rate(arm, role));
        value["stalls"] = stalls_json(self.stalls(arm));
        value
    }

    /// The arms as a table for people.
    pub fn table(&self, title: &str) -> String {
        let header = [title, "workers/s", "faulters/s", STALLS];
        let mut rows = vec![header.map(str::to_owned)];
        rows.extend(self.0.iter().map(|runs| {
            let [workers, faulters] = runs.rates.each_ref().map(|rates| Summary::of(rates).median);
            [
                format!("  {}", runs.arm.name),
                short(workers),
                short(faulters),
                stalls_text(&runs.stalls),
            ]
        }));
        align(&rows)
    }
}
