//! The arms of an experiment with `bm`, and the slices of time in which they take turns in one
//! guest.

use crate::experiment::LabError;
use crate::report::{align, short};
use crate::session::{Measured, Session};
use crate::stalls::{STALLS, add_stalls, stalls_json, stalls_text};
use crate::stats::{Rounds, Summary, measures, paired};
use lacuna_guest::status::Kind;
use lacuna_soft::{Apf, Stalls};
use serde_json::Value;
use std::time::Duration;

/// Which processes run, and how faults are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arm {
    /// The workers alone: no process faults.
    Alone,
    /// Workers beside faulters; vCPUs wait for pages.
    Off,
    /// [`Arm::Off`] once more: the null.
    OffAgain,
    /// Workers beside faulters; faults are taken asynchronously.
    On,
    /// The faulters alone; vCPUs wait for pages.
    FaultersOff,
    /// The faulters alone; faults are taken asynchronously.
    FaultersOn,
}

impl Arm {
    /// Its name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Off => "off",
            Self::OffAgain => "null",
            Self::On => "on",
            Self::FaultersOff => "faulters_off",
            Self::FaultersOn => "faulters_on",
        }
    }

    /// How faults are taken in a VM made with `offered`. Workers alone cause none; faults of the
    /// slice before are completed in the VM's own way.
    pub const fn apf(self, offered: Apf) -> Apf {
        match self {
            Self::Off | Self::OffAgain | Self::FaultersOff => Apf::Off,
            Self::On | Self::FaultersOn => Apf::On,
            Self::Alone => offered,
        }
    }

    const fn paused(self) -> &'static [Kind] {
        match self {
            Self::Alone => &[Kind::Faulter],
            Self::Off | Self::OffAgain | Self::On => &[],
            Self::FaultersOff | Self::FaultersOn => &[Kind::Worker],
        }
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

/// The processes that a rate counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The computing processes.
    Workers,
    /// The faulting processes.
    Faulters,
}

/// The rates of all arms.
pub struct Runs {
    arms: Vec<ArmRuns>,
}

struct ArmRuns {
    arm: Arm,
    /// Steps a second in each round: workers, faulters.
    rates: [Vec<f64>; 2],
    stalls: Vec<Stalls>,
}

/// Lets `arms` take turns in one VM, whatever its backend.
///
/// # Errors
/// The guest ends, or its memory cannot be read.
pub fn take_turns<V: Measured>(
    session: &Session<'_, V>,
    arms: &[Arm],
    pace: Pace,
) -> Result<Runs, LabError> {
    take_turns_with(session, arms, pace, || ())
}

/// As [`take_turns`]. `begin` is called before each slice.
///
/// # Errors
/// As [`take_turns`].
pub fn take_turns_with<V: Measured>(
    session: &Session<'_, V>,
    arms: &[Arm],
    pace: Pace,
    mut begin: impl FnMut(),
) -> Result<Runs, LabError> {
    let mut stalls = vec![Vec::new(); arms.len()];
    let rates = measures(arms.len(), pace.rounds, |index| {
        begin();
        slice(session, arms[index], pace, &mut stalls[index])
    })?;
    let arms = arms.iter().zip(rates).zip(stalls);
    let arms = arms.map(|((&arm, rates), stalls)| ArmRuns { arm, rates, stalls });
    Ok(Runs {
        arms: arms.collect(),
    })
}

fn slice<V: Measured>(
    session: &Session<'_, V>,
    arm: Arm,
    pace: Pace,
    stalls: &mut Vec<Stalls>,
) -> Result<[f64; 2], LabError> {
    let guest = &session.guest;
    session.set_apf(arm.apf(session.vm.config().apf));
    guest.pause(arm.paused())?;
    guest.run_for(pace.settle)?;
    let (before, stalls_before) = (guest.count()?, session.vm.stalls());
    guest.run_for(pace.slice)?;
    let (after, stalls_after) = (guest.count()?, session.vm.stalls());
    add_stalls(stalls, &stalls_before, &stalls_after);
    Ok(after.rates_since(&before))
}

impl Runs {
    fn of(&self, arm: Arm) -> &ArmRuns {
        let found = self.arms.iter().find(|runs| runs.arm == arm);
        found.expect("asked for an arm that took part")
    }

    fn rates(&self, arm: Arm, role: Role) -> &[f64] {
        &self.of(arm).rates[role as usize]
    }

    /// The steps a second of the processes of `role` in `arm`.
    pub fn rate(&self, arm: Arm, role: Role) -> Summary {
        Summary::of(self.rates(arm, role))
    }

    /// The rates of `role` in `arm` over those in `base`, paired by round.
    ///
    /// # Errors
    /// [`LabError::Busy`]: the processes of `role` did no step in a round of `base`, so there is
    /// nothing to compare with.
    pub fn ratio(&self, base: Arm, arm: Arm, role: Role) -> Result<Summary, LabError> {
        let base_rates = self.rates(base, role);
        if base_rates.contains(&0.0) {
            let name = base.name();
            return Err(LabError::Busy(format!(
                "{role:?} did no step in a whole round of arm `{name}`"
            )));
        }
        Ok(paired(base_rates, self.rates(arm, role)))
    }

    /// Each vCPU's stalls in `arm`.
    pub fn stalls(&self, arm: Arm) -> &[Stalls] {
        &self.of(arm).stalls
    }

    /// An arm for a result: the rate of `role`, in steps a second, and each vCPU's stalls.
    pub fn arm(&self, arm: Arm, role: Role) -> Value {
        let mut value = Value::from(Summary::of(self.rates(arm, role)));
        value["stalls"] = stalls_json(&self.of(arm).stalls);
        value
    }

    /// The arms as a table for people.
    pub fn table(&self, title: &str) -> String {
        let header = [title, "workers/s", "faulters/s", STALLS];
        let mut rows = vec![header.map(str::to_owned)];
        rows.extend(self.arms.iter().map(|runs| {
            let [workers, faulters] = runs.rates.each_ref().map(|rates| Summary::of(rates).median);
            [
                format!("  {}", runs.arm.name()),
                short(workers),
                short(faulters),
                stalls_text(&runs.stalls),
            ]
        }));
        align(&rows)
    }
}
