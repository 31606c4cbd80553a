//! The experiment of the cover letter of the KVM PML series, 2015: a guest of 4 vCPUs and 1 GiB. It
//! has six scores without and with PML while no slot logs (table a), and six with PML and with
//! write protection while a monitor harvests once a second (table b).

use crate::experiment::{LabResult, Options};
use crate::fixture::resident;
use crate::pml::monitor::{DIRTIED, PER_CPU_S, PER_S, Pace, Slice, slice};
use crate::report::align;
use crate::result::{Better, Measurement, Report};
use crate::session::{Session, image, on};
use crate::stats::{Summary, paired};
use lacuna::DirtyTracking as _;
use lacuna::dirty::Detection;
use lacuna::soft::{Vm, VmBuilder};
use std::thread::available_parallelism;
use std::time::Duration;

pub const IDS: [&str; 3] = [
    "letters.pml.always_on_loss_percent",
    "letters.pml.score_percent.pml",
    "letters.pml.score_percent.wp",
];
/// One step for each score.
pub const STEPS: u64 = (SCORES * ARMS.len()) as u64;

const VCPUS: usize = 4;
/// Scores of each arm.
const SCORES: usize = 6;

/// The arms: what detects writes, and whether slots log.
const ARMS: [(Detection, bool); 4] = [
    (Detection::WriteProtect, false),
    (Detection::Pml, false),
    (Detection::Pml, true),
    (Detection::WriteProtect, true),
];
/// The letter's scores of each arm, without a graphic window.
#[rustfmt::skip]
const PUBLISHED: [[u32; SCORES]; ARMS.len()] = [
    [109_090, 109_461, 110_523, 109_960, 109_090, 110_787],
    [109_686, 110_533, 108_550, 110_775, 109_802, 109_192],
    [104_778, 104_856, 103_783, 105_210, 106_218, 105_475],
    [98_967, 99_380, 99_406, 100_638, 99_763, 99_287],
];
const OFF: usize = 0;
const ALWAYS: usize = 1;
const PML: usize = 2;
const WP: usize = 3;

/// With this setting, a transaction of `churn` writes to every page of the process.
const SWEEP: u32 = u32::MAX;
/// Memory in MiB, the scores of each arm, and the times of a score.
fn size(options: &Options) -> (u64, usize, Pace) {
    let pace = |period, periods, settle| Pace {
        period: Duration::from_millis(period),
        periods,
        settle: Duration::from_millis(settle),
    };
    match options.quick {
        false => {
            let periods = (10 / options.scale).max(1);
            (
                1024 / u64::from(options.scale),
                SCORES,
                pace(1000, periods, 1000),
            )
        }
        true => (48, 2, pace(20, 2, 5)),
    }
}

/// `letters.pml.*`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    let cores = available_parallelism().map_or(1, usize::from);
    let (mib, scores, pace) = size(options);
    report.say(format!(
        "letters.pml: {VCPUS} vCPUs, {mib} MiB of guest memory, {scores} scores of {:?} for each \
         arm, a harvest every {:?}. Different from the letter: the guest is our transactional heap \
         `churn` instead of SPECjbb, so the scores are other numbers, and the dirty rate is its \
         own (`pml.score` searches for the letter's). Our own processor detects the writes: a \
         write fault and a full log are no exits of hardware. vCPUs are not pinned. The arms take \
         turns in one VM. Theirs are the scores without a graphic window; with it they had 0.45 % \
         of loss, and 96.17 and 91.99 % under logging.",
        pace.period * pace.periods,
        pace.period,
    ));
    if cores <= VCPUS {
        report.say(format!(
            "{VCPUS} vCPUs and the monitor share {cores} cores here, and the letter's host had 16: \
             the monitor's work counts as a cost to the guest. `by processor time` leaves \
             it out."
        ));
    }
    let builder = VmBuilder {
        command_line: format!("hot={}M writes=100 frees=0 seconds=1000000", mib / 32),
        ..resident(mib, VCPUS)
    };
    let runs = on(&builder, &image(builder.arch, "churn")?, |session| {
        session.guest.prepared()?;
        all_scores(session, scores, pace, options)
    })?;
    report.detail(tables(&runs));
    record(report, &runs, mib, cores);
    Ok(())
}

/// The slices of each arm. The arms take turns, there and back.
fn all_scores(
    session: &Session<'_, Vm>,
    scores: usize,
    pace: Pace,
    options: &Options,
) -> LabResult<[Vec<Slice>; 4]> {
    let mut runs = [const { Vec::new() }; 4];
    let choice = session.vm.detection().expect("soft has the choice");
    for score in 0..scores {
        for turn in 0..ARMS.len() {
            let at = if score % 2 == 0 {
                turn
            } else {
                ARMS.len() - 1 - turn
            };
            let (detection, logs) = ARMS[at];
            options.step(format!(
                "pml: score {score}, {detection:?}, slots log: {logs}"
            ))?;
            choice.choose(detection);
            runs[at].push(slice(session, pace, logs)?);
            if at == WP {
                // At the end of logging, unwritten pages stay write-protected, and each would cost
                // the next arm a fault. The first transaction of a process may be an ordinary one,
                // begun before, and the processes are not equally fast.
                session.guest.steps_with(SWEEP, 4 * VCPUS as u64)?;
            }
        }
    }
    Ok(runs)
}

/// The scores of an arm.
fn scores(runs: &[Vec<Slice>; 4], arm: usize, what: usize) -> Vec<f64> {
    runs[arm].iter().map(|slice| slice[what]).collect()
}

fn mean(scores: &[f64]) -> f64 {
    scores.iter().sum::<f64>() / scores.len() as f64
}

fn record(report: &mut Report, runs: &[Vec<Slice>; 4], mib: u64, cores: usize) {
    let of = |arm, what| scores(runs, arm, what);
    let percent = |base, arm| paired(&of(base, PER_S), &of(arm, PER_S)).scaled(100.0);
    let loss = percent(OFF, ALWAYS);
    let loss = loss.map(|kept| 100.0 - kept);
    for (id, better, value, published, arms) in [
        (IDS[0], Better::Lower, loss, 0.06, [OFF, ALWAYS]),
        (
            IDS[1],
            Better::Higher,
            percent(ALWAYS, PML),
            95.72,
            [ALWAYS, PML],
        ),
        (
            IDS[2],
            Better::Higher,
            percent(ALWAYS, WP),
            90.72,
            [ALWAYS, WP],
        ),
    ] {
        let source = "cover letter of the KVM PML series, 2015: SPECjbb, no graphic window";
        let per_s = |arm: usize| Summary::of(&of(arm, PER_S));
        report.push(
            Measurement::new(id, "%", better, value)
                .reference(published, source)
                .param("vcpus", VCPUS)
                .param("cores", cores)
                .param("memory_mib", mib)
                .param("pages_dirtied_per_s", mean(&of(arms[1], DIRTIED)))
                .arm("without_per_s", per_s(arms[0]))
                .arm("with_per_s", per_s(arms[1])),
        );
    }
}

/// The letter's two tables, each with theirs and ours.
fn tables(runs: &[Vec<Slice>; 4]) -> String {
    let a = [("NOPML", OFF), ("PML", ALWAYS)];
    let a = table::<5>(runs, "a. no slot logs", &a, 0);
    let b = [("PML", PML), ("WP", WP), ("no monitoring", ALWAYS)];
    format!("{a}\n{}", table::<7>(runs, "b. a monitor harvests", &b, 2))
}

/// A table of the columns `arms`, theirs and then ours. Percentages are of the column `whole`.
fn table<const COLUMNS: usize>(
    runs: &[Vec<Slice>; 4],
    title: &str,
    arms: &[(&str, usize)],
    whole: usize,
) -> String {
    let theirs = arms
        .iter()
        .map(|(_, arm)| PUBLISHED[*arm].map(f64::from).to_vec());
    let theirs: Vec<Vec<f64>> = theirs.collect();
    let ours = |what| -> Vec<Vec<f64>> {
        let all = arms.iter().map(|(_, arm)| scores(runs, *arm, what));
        all.collect()
    };
    let row = |title: &str, theirs: Vec<String>, ours: Vec<String>| -> [String; COLUMNS] {
        let cells: Vec<_> = [vec![title.to_owned()], theirs, ours].concat();
        cells
            .try_into()
            .expect("a title, and two columns for each arm")
    };
    let head = |whose| {
        arms.iter()
            .map(|(name, _)| format!("{whose} {name}"))
            .collect()
    };
    let means = |columns: &[Vec<f64>]| {
        let whole = |column: &Vec<f64>| (mean(column) as u64).to_string();
        columns.iter().map(whole).collect()
    };
    let percent = |columns: &[Vec<f64>]| {
        let share = |column: &Vec<f64>| 100.0 * mean(column) / mean(&columns[whole]);
        columns
            .iter()
            .map(|column| format!("{:.2} %", share(column)))
            .collect()
    };
    let none = || vec![String::new(); arms.len()];
    let mut rows = vec![row(title, head("theirs:"), head("ours:"))];
    for score in 0..SCORES {
        let cells = |columns: &[Vec<f64>]| {
            let cell = |column: &Vec<f64>| column.get(score).map(|score| format!("{score:.0}"));
            columns
                .iter()
                .map(|column| cell(column).unwrap_or_default())
                .collect()
        };
        rows.push(row("", cells(&theirs), cells(&ours(PER_S))));
    }
    rows.push(row("avg", means(&theirs), means(&ours(PER_S))));
    rows.push(row("percent", percent(&theirs), percent(&ours(PER_S))));
    rows.push(row("by processor time", none(), percent(&ours(PER_CPU_S))));
    rows.push(row("pages dirtied a second", none(), means(&ours(DIRTIED))));
    align(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use crate::report::{Progress, Verbosity};
    use lacuna::Arch;
    use lacuna_skip::test;
    use std::sync::Arc;

    #[test]
    fn every_arm_has_its_scores_beside_the_letters() {
        needs_guests();
        let options = Options {
            scale: 1,
            quick: true,
            arch: Arch::X86_64,
            lacuna: Default::default(),
            swap_dir: std::env::temp_dir(),
            progress: Arc::new(Progress::new(0, Verbosity::Quiet)),
            parts: vec!["pml"],
        };
        let mut report = Report::new("lacuna lab");
        super::super::run(&options, &mut report).expect("a run");
        let table = &report.details[0];
        for published in [
            "109818  ", "109756  ", "105053  ", "99573  ", "95.72 %", "90.72 %",
        ] {
            assert!(table.contains(published), "{table}");
        }
        let ids: Vec<_> = report.results.iter().map(|result| &*result.id).collect();
        assert_eq!(ids, IDS);
        let dirtied = |result: usize| report.results[result].params["pages_dirtied_per_s"].as_f64();
        assert_eq!(dirtied(0), Some(0.0), "no slot logs");
        assert!(dirtied(1) > Some(0.0) && dirtied(2) > Some(0.0), "{table}");
    }
}
