//! The rate that a guest keeps during a pre-copy, by page-modification logging and by write
//! protection.
//!
//! ```text
//! none  the guest runs, and nothing is logged
//! wp    its pages are sent at [`SPEED`] in two rounds, writes are found by write protection
//! pml   the same, writes are found in the vCPUs' logs
//! null  as pml
//! ```
//! `migrate.pml.churn_share_percent.pml` is the rate of the guest `churn` in *pml*, as a share of
//! its rate in *none*; `.wp` is the share in *wp*. The arm `pml_over_wp` compares the two.
//! The guest `paced` writes to half of its memory, one page after the other, as fast as it can.
//!
//! The number of rounds is the same in both arms, and a guest is not slowed down in the first two.
//! The rate is counted until the guest is paused.

use super::VCPUS;
use super::ends::{counted, move_guest};
use super::modes::CHURN;
use super::route::Route;
use crate::experiment::{LabResult, Options};
use crate::guests::beside;
use crate::result::{Better, Measurement, Report};
use crate::session::Session;
use crate::stats::{Rounds, Summary, measures, paired};
use lacuna::dirty::{Detection, DetectionChoice as _, DirtyStats};
use lacuna::migrate::Budget;
use lacuna::migrate::stream::{Mode, Plan};
use lacuna::soft::{Vm, VmBuilder};
use std::num::NonZeroU64;
use std::time::Duration;

/// Less than [`crate::backed::back`] waits for.
const MEMORY: u64 = 192;
const QUICK: u64 = 32;
/// Bytes a second: a pre-copy of [`MEMORY`] lasts about a second.
const SPEED: NonZeroU64 = NonZeroU64::new(256 << 20).expect("not 0");
const ROUNDS: u32 = 2;
/// With this setting, a transaction of `churn` writes to every page of the process.
const SWEEP: u32 = u32::MAX;
/// The arms, and what detects writes during the move.
const ARMS: [(&str, Option<Detection>); 4] = [
    ("none", None),
    ("wp", Some(Detection::WriteProtect)),
    ("pml", Some(Detection::Pml)),
    ("null", Some(Detection::Pml)),
];
const NONE: usize = 0;
const WP: usize = 1;
const PML: usize = 2;
const NULL: usize = 3;

/// Steps a second; write faults and logged pages.
type Figures = [f64; 3];

/// `migrate.pml.*`.
pub fn measure(
    builder: &impl Fn(u64, usize) -> VmBuilder,
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let memory = if options.quick { QUICK } else { MEMORY };
    let rounds = Rounds::Count(if options.quick { 1 } else { Rounds::LEAST });
    let builder = builder(memory, VCPUS);
    let paced = format!(
        "rate=1000000000 hot={}M beat_us=1000000 seconds=1000000",
        memory / 2
    );
    for (name, words, steps) in [
        ("churn", CHURN, 4 * VCPUS as u64),
        // Twice its hot pages.
        ("paced", &paced, memory << 8),
    ] {
        let runs = beside(&builder, name, words, |session| {
            measures(ARMS.len(), rounds, |arm| {
                // After a move with write protection, the first write to each page would be a fault
                // in this arm.
                session.guest.steps_with(SWEEP, steps)?;
                one(&builder, session, ARMS[arm].1)
            })
        })?;
        let share = |arm: usize| paired(&runs[NONE][0], &runs[arm][0]).scaled(100.0);
        for arm in [PML, WP] {
            let id = format!("migrate.pml.{name}_share_percent.{}", ARMS[arm].0);
            let [_, faults, logged] = [0, 1, 2].map(|figure| Summary::of(&runs[arm][figure]));
            let found = Measurement::new(id, "%", Better::Higher, share(arm))
                .param("memory_mib", memory)
                .param("vcpus", VCPUS)
                .param("guest", format!("{name} {words}"))
                .param("bytes_per_s", SPEED.get())
                .param("rounds", ROUNDS)
                .arm("none_per_s", Summary::of(&runs[NONE][0]))
                .arm("watched_per_s", Summary::of(&runs[arm][0]))
                .arm("write_faults", faults)
                .arm("logged", logged)
                .arm("pml_over_wp", paired(&runs[WP][0], &runs[PML][0]))
                .arm("null", paired(&runs[NULL][0], &runs[PML][0]));
            report.push(found);
        }
    }
    Ok(())
}

fn one(
    builder: &VmBuilder,
    session: &Session<'_, Vm>,
    detection: Option<Detection>,
) -> LabResult<Figures> {
    let Session { guest, running, .. } = session;
    let Some(detection) = detection else {
        let before = guest.count()?;
        let round = builder.memory.bytes() as f64 / SPEED.get() as f64;
        guest.run_for(Duration::from_secs_f64(round))?;
        let [rate, _] = guest.count()?.rates_since(&before);
        return Ok([rate, 0.0, 0.0]);
    };
    running.vm().choose(detection);
    let plan = Plan {
        budget: Budget {
            downtime: Duration::ZERO,
            rounds: ROUNDS,
        },
        bandwidth: Some(SPEED),
        ..Mode::PreCopy.into()
    };
    let stats = || {
        let mut all = DirtyStats::default();
        let vcpus = running.vm().dirty_stats();
        vcpus.iter().for_each(|one| all.merge(one));
        [all.faults + all.fast_page_faults, all.logged]
    };
    let before = stats();
    let (moved, _) = move_guest(builder, running, (plan, Route::tcp()?), counted)?;
    let now = stats();
    let [faults, logged] = [0, 1].map(|at| (now[at] - before[at]) as f64);
    Ok([moved.rate, faults, logged])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{needs_guests, resident};
    use lacuna_skip::test;

    /// Each arm detects writes in its own way, and in no other.
    #[test]
    fn an_arm_logs_or_faults() {
        needs_guests();
        let builder = resident(16, VCPUS);
        beside(&builder, "churn", CHURN, |session| {
            for (name, detection) in ARMS {
                session.guest.steps_with(SWEEP, 4 * VCPUS as u64)?;
                let [rate, faults, logged] = one(&builder, session, detection)?;
                let found = (rate > 0.0, faults > 100.0, logged > 100.0);
                let logs = detection == Some(Detection::Pml);
                assert_eq!(found, (true, name == "wp", logs), "{name}: {faults}");
            }
            Ok(())
        })
        .unwrap();
    }
}
