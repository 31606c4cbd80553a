//! The experiment in the cover letter of the arm64 series of 2020: 1 vCPU, 4 GiB of guest memory in
//! a memory group of 2 GiB. A memory-bound thread allocates all memory, accesses and frees it; a
//! CPU-bound process counts. First the memory-bound thread runs alone, then both, five times each.

use super::{Arms, Size, grouped, in_turns};
use crate::apf::alone::{Calibrated, Program, Search, calibrate, faults};
use crate::apf::arm64::{Membound, RFCV2, SEED, SOURCE, TIMES, statistics};
use crate::experiment::{LabResult, Options};
use crate::report::align;
use crate::result::{Better, Measurement, Report};
use crate::session::{Guest, image, on};
use crate::stats::paired;
use lacuna::memory::LatencySetting;
use lacuna::soft::ApfStats;
use lacuna::{Arch, PageCount};
use lacuna_guest::status::Kind;
use std::time::Duration;

pub const STEPS: u64 = 3;

/// The letter's memory and resident memory in MiB.
const MIB: [u64; 2] = [4096, 2048];
const RUNS: usize = 5;
/// Blocks a minute of the CPU-bound thread, without and with async page faults.
const BLOCKS: [[u64; RUNS]; 2] = [
    [7559625120, 5962155840, 7823208540, 7629633480, 6170527920],
    [8464584540, 8177073360, 8262723180, 8095084020, 8434672260],
];
/// Seconds of the memory-bound thread alone, without and with.
const SECONDS: [[f64; RUNS]; 2] = [
    [40.6, 39.3, 39.2, 41.6, 41.2],
    [40.6, 41.1, 40.9, 41.0, 40.7],
];

/// The most pages of one read of the disk. With so many, a round of our thread has about as many
/// swap-ins as the letter's: 7,555. The thread goes through its memory twice, in order, and finds
/// no page there: 2 * 4 GiB are 8,192 such reads.
const CLUSTER: PageCount = PageCount::new(256);
/// Different swap-in times of the disk, and how many lie between two runs.
const NUMBER: usize = 1 << 13;
const APART: u64 = 512;
/// A swap-in for each [`CLUSTER`] pages leaves less time to compute on each page.
const SEARCH: Search = Search {
    first: 10_000,
    rounds: 1,
};
/// A quick run divides the swap-in times, because its small guest has few free frames for pages
/// that are read ahead, and so more swap-ins.
const QUICK: u32 = 16;
/// Steps of the CPU-bound process in a block.
const BLOCK: f64 = 1024.0;

/// A figure of each run, with the letter's.
struct Series {
    id: &'static str,
    about: &'static str,
    better: Better,
    text: fn(f64) -> String,
    published: [[f64; RUNS]; 2],
    ours: Arms<f64>,
}

/// What was measured.
struct Found {
    calibrated: Calibrated,
    blocks: Series,
    alone: Series,
    /// The async page faults of the memory-bound thread alone.
    faults: ApfStats,
}

/// `letters.arm64.*`.
pub fn measure(options: &Options, report: &mut Report) -> LabResult {
    let size = Size::of(options, MIB, 512);
    report.say(format!(
        "letters.arm64: 1 vCPU, {size}; {:?} a run. Different from the letter: our own guest \
         kernel and processor, so the blocks are fewer and not the letter's; on and off are one \
         guest in turns; swap is compressed memory with injected times. A swap-in brings up to \
         {} pages, as a disk's read-ahead does, and the thread accesses its pages in order. The \
         times are log-normal between the letter's shortest and longest, with its mean. The \
         thread computes on each page until it waits 30 % of its time.",
        size.time,
        CLUSTER.get(),
    ));
    let found = run(options, size)?;
    report.say(format!(
        "Alone and without async page faults, the memory-bound thread waits {:.1} % of its time \
         (work {}).",
        100.0 * found.calibrated.share,
        found.calibrated.work,
    ));
    report.detail(table(&found));
    for series in [&found.blocks, &found.alone] {
        let [off, on] = &series.ours;
        let [published_off, published_on] = series.published.map(|runs| mean(&runs));
        let result = Measurement::new(series.id, "x", series.better, paired(off, on));
        let result = found.calibrated.with_params(size.with_params(result));
        report.push(
            result
                .reference(published_on / published_off, SOURCE)
                .param("vcpus", 1)
                .param("pages_per_swap_in", CLUSTER.get())
                .arm("off", off.clone())
                .arm("on", on.clone()),
        );
    }
    Ok(())
}

fn mean(runs: &[f64]) -> f64 {
    runs.iter().sum::<f64>() / runs.len() as f64
}

fn run(options: &Options, size: Size) -> LabResult<Found> {
    let divided = if options.quick { QUICK } else { 1 };
    let times = TIMES.sequence(SEED, NUMBER).into_iter();
    let times: Vec<_> = times.map(|time| time / divided).collect();
    let search = Search {
        first: SEARCH.first / divided,
        ..SEARCH
    };
    let builder = Membound {
        guests: &RFCV2,
        arch: Arch::Arm64,
        memory: size.memory,
        latency: LatencySetting::sequence(&times),
    }
    .builder(1, "nop=1 order=ascending");
    let begin = |run: usize| builder.latency.begin(run as u64 * APART);
    let runs = if options.quick { 1 } else { RUNS };
    on(&builder, &image(Arch::Arm64, "membound")?, |session| {
        let guest = &session.guest;
        session.vm.host().set_read_ahead(CLUSTER);
        options.step("arm64: how much the memory-bound thread computes")?;
        guest.pause(&[Kind::Worker])?;
        let mut program = Program::start(session)?;
        let calibrated = calibrate(&mut program, search, || begin(0))?;
        options.step("arm64: the memory-bound thread alone")?;
        let seconds = in_turns(runs, |run, apf| {
            begin(run);
            Ok(program.next(apf)?.seconds)
        })?;
        let faults = faults(session.vm);
        options.step("arm64: both threads")?;
        guest.pause(&[])?;
        let blocks = in_turns(runs, |run, apf| {
            begin(run);
            session.set_apf(apf);
            blocks_a_minute(guest, size.time)
        })?;
        Ok(Found {
            calibrated,
            blocks: Series {
                id: "letters.arm64.cpu_bound_ratio",
                about: "blocks a minute",
                better: Better::Higher,
                text: |blocks| grouped(blocks as u64),
                published: BLOCKS.map(|runs| runs.map(|blocks| blocks as f64)),
                ours: blocks,
            },
            alone: Series {
                id: "letters.arm64.alone_time_ratio",
                about: "alone",
                better: Better::Lower,
                text: |seconds| format!("{seconds:.1} s"),
                published: SECONDS,
                ours: seconds,
            },
            faults,
        })
    })
}

fn blocks_a_minute(guest: &Guest<'_>, time: Duration) -> LabResult<f64> {
    let before = guest.count()?;
    guest.run_for(time)?;
    let [steps_a_second, _] = guest.count()?.rates_since(&before);
    Ok(60.0 * steps_a_second / BLOCK)
}

/// The letter's layout: each run, the mean and the outcome, and the block of statistics.
fn table(found: &Found) -> String {
    let header = ["", "letter, without", "with", "ours, without", "with"];
    let mut rows = vec![header.map(str::to_owned)];
    rows.extend(found.blocks.rows());
    rows.extend(found.alone.rows());
    let alone = &found.alone.ours[1];
    format!(
        "{}\nalone, the mean of the runs with\n{}",
        align(&rows),
        statistics(&found.faults, alone.iter().sum(), alone.len() as f64),
    )
}

impl Series {
    /// A row for each run, for the mean, and for the outcome.
    fn rows(&self) -> Vec<[String; 5]> {
        let row = |name: String, theirs: [f64; 2], ours: [Option<f64>; 2]| {
            let [a, b] = theirs.map(self.text);
            let [c, d] = ours.map(|ours| ours.map(self.text).unwrap_or_default());
            [format!("{}, {name}", self.about), a, b, c, d]
        };
        let runs = (0..RUNS).map(|run| {
            let theirs = self.published.map(|runs| runs[run]);
            let ours = self.ours.each_ref().map(|runs| runs.get(run).copied());
            row(format!("run {}", run + 1), theirs, ours)
        });
        let mut rows: Vec<_> = runs.collect();
        let theirs = self.published.map(|runs| mean(&runs));
        let ours = self.ours.each_ref().map(|runs| mean(runs));
        rows.push(row("mean".into(), theirs, ours.map(Some)));
        let outcome = |[off, on]: [f64; 2]| format!("{:+.1} %", 100.0 * (on / off - 1.0));
        let name = format!("{}, outcome", self.about);
        let none = String::new;
        rows.push([name, none(), outcome(theirs), none(), outcome(ours)]);
        rows
    }
}

#[cfg(test)]
mod tests {
    use crate::fixture::needs_guests;
    use lacuna_skip::test;

    /// The published outcomes follow from the published runs, and both threads of our guest made
    /// progress in both arms.
    #[test]
    fn the_letters_outcome_is_beside_ours() {
        needs_guests();
        let report = super::super::tests::quick("arm64");
        let table = &report.details[0];
        for outcome in ["+17.9 %", "+1.2 %", "7 029 030 180", "40.4 s"] {
            assert!(table.contains(outcome), "{outcome}: {table}");
        }
        assert_eq!(report.results.len(), 2);
        for result in &report.results {
            for arm in ["off", "on"] {
                let runs = result.arms[arm].as_array().expect("runs");
                assert!(runs.iter().all(|run| run.as_f64() > Some(0.0)), "{runs:?}");
            }
        }
    }
}
