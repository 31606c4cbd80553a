//! `lacuna lab restore`: a guest of 1 GiB that resumes from a snapshot, with all pages read at
//! first, or while it runs.
//!
//! ```text
//! eager     read all pages ──────────────────────────────► the guest runs
//! lazy      the guest runs; a page comes when it is needed, the others in the order of the file
//! replay    as lazy; the pages that another run has needed come first, 16 MiB of them before the
//!           guest runs
//! demand    the guest runs; a page comes when it is needed
//! ```
//! | id | what is compared |
//! |---|---|
//! | `restore.first_output_ratio` | time until the guest's first line, lazy / eager |
//! | `restore.verify_ratio` | time until the guest has checked all of its memory, lazy / eager |
//! | `restore.replay_saved` | the share of lazy's requested pages that replay saves |
//!
//! Times begin before the snapshot is opened and the VM is made. The ids of the same results on
//! `/dev/kvm` begin with `restore.kvm`. Guests have two vCPUs.
//!
//! The first two have the guest `verify`, saved between two passes over its memory. The third has
//! the guest `zipf`, saved when its memory is prepared. Its processes then use the same scattered
//! pages in each run. They choose among them by another seed than in the recorded run.

mod arms;

use crate::experiment::{LabError, LabResult, Options};
use crate::guests::{self, GuestBuilder};
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, measures, paired};
use arms::{Arm, Scene, Took};
use std::cell::Cell;

/// The separately measurable parts.
pub const PARTS: &[&str] = &["time", "replay"];

/// Memory of the guests in MiB.
const MEMORY: u64 = 1024;
/// The size for a quick run.
const QUICK: u64 = 64;
const VCPUS: usize = 2;
/// The seed of the run whose first touches are recorded.
const RECORDED: u32 = 1;

/// Measures everything, in the order of the table above.
///
/// # Errors
/// The error of the first failed experiment.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    options.begin(2 * PARTS.len() as u64);
    report.say(
        "restore: a guest resumes from a snapshot. Its memory file is in the page cache. Eager \
         reads all pages before the guest runs, lazy while it runs: a page that the guest needs at \
         once, the others in the background. Replay begins with the pages that another run has \
         needed.",
    );
    let memory = if options.quick { QUICK } else { MEMORY };
    let soft = guests::soft(options)(memory, VCPUS);
    measure("restore", &soft, options, report)?;
    match guests::kvm(options) {
        Ok(kvm) => measure("restore.kvm", &kvm(memory, VCPUS), options, report),
        Err(why) => {
            report.skip("restore.kvm.*", why);
            Ok(())
        }
    }
}

/// Measures all results of one backend.
fn measure<B: GuestBuilder>(
    prefix: &str,
    builder: &B,
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let folder = tempfile::tempdir_in(&options.swap_dir);
    let what = format!("make a folder in {}", options.swap_dir.display());
    let folder = folder.map_err(LabError::io(what))?;
    let scene = |guest, words: &str| Scene::save(builder, guest, words, folder.path());
    if options.wants("time") {
        options.step(format!(
            "{prefix}: eager and lazy, until all memory is checked"
        ))?;
        let scene = scene("verify", "gate=1 rounds=1")?;
        times(prefix, &scene, options, report)?;
    }
    if options.wants("replay") {
        options.step(format!(
            "{prefix}: lazy, with and without a record of another run"
        ))?;
        let words = if options.quick { QUICK_ZIPF } else { ZIPF };
        let scene = scene("zipf", words)?;
        replay(prefix, &scene, words, options, report)?;
    }
    Ok(())
}

/// How often each arm runs. With nine rounds, the interval leaves the best and the worst one out.
fn rounds(options: &Options) -> Rounds {
    Rounds::Count(if options.quick { 2 } else { 9 })
}

/// The arms of [`measures`]: the base, its null, and the compared arm.
const BASE: usize = 0;
const NULL: usize = 1;

fn times<B: GuestBuilder>(
    prefix: &str,
    scene: &Scene<'_, B>,
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let runs = measures(3, rounds(options), |arm| {
        let arm = if arm > NULL { Arm::Lazy } else { Arm::Eager };
        let took = scene.restore(&arm, RECORDED)?;
        Ok([took.first_output, took.end])
    })?;
    let [eager, null, lazy] = [0, 1, 2].map(|arm| &runs[arm]);
    for (index, (name, bar)) in [("first_output_ratio", 0.1), ("verify_ratio", 1.2)]
        .into_iter()
        .enumerate()
    {
        let ratio = paired(&eager[index], &lazy[index]);
        let found = Measurement::new(format!("{prefix}.{name}"), "x", Better::Lower, ratio)
            .bar(bar)
            .param("memory_mib", scene.memory_mib())
            .param("vcpus", VCPUS)
            .param("guest", "verify gate=1 rounds=1")
            .arm("eager_seconds", Summary::of(&eager[index]))
            .arm("lazy_seconds", Summary::of(&lazy[index]))
            .arm("null", paired(&eager[index], &null[index]));
        report.push(found);
    }
    Ok(())
}

/// The guest of [`replay`]: each of two processes uses 32 MiB of its half of the memory.
const ZIPF: &str = "gate=1 scatter=1 set=8192 skew=99 accesses=200000";
const QUICK_ZIPF: &str = "gate=1 scatter=1 set=512 skew=99 accesses=10000";

fn replay<B: GuestBuilder>(
    prefix: &str,
    scene: &Scene<'_, B>,
    words: &str,
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let touches = scene.restore(&Arm::Demand, RECORDED)?.touches;
    let slices = Cell::new(0);
    let asked = |took: &Took| took.touches.pages().len() as f64;
    // A round runs each arm twice, in order and in reverse. All its runs have one seed of their
    // own.
    const ARMS: usize = 4;
    let runs = measures(ARMS, rounds(options), |arm| {
        let arm = match arm {
            BASE | NULL => Arm::Lazy,
            2 => Arm::Replay(&touches),
            _ => Arm::Demand,
        };
        let round = slices.replace(slices.get() + 1) / (2 * ARMS as u32);
        let took = scene.restore(&arm, RECORDED + 1 + round)?;
        Ok([asked(&took), took.begins])
    })?;
    let [lazy, null, replay, demand] = [0, 1, 2, 3].map(|arm| &runs[arm][0]);
    let saved = |kept: Summary| kept.map(|kept| 100.0 * (1.0 - kept));
    let id = format!("{prefix}.replay_saved");
    let found = Measurement::new(id, "%", Better::Higher, saved(paired(lazy, replay)))
        .bar(80.0)
        .param("memory_mib", scene.memory_mib())
        .param("vcpus", VCPUS)
        .param("guest", format!("zipf {words}"))
        .param("recorded_seed", RECORDED)
        .param("recorded", touches.pages().len())
        .arm("lazy", Summary::of(lazy))
        .arm("replay", Summary::of(replay))
        .arm("demand", Summary::of(demand))
        .arm("lazy_begins_seconds", Summary::of(&runs[BASE][1]))
        .arm("replay_begins_seconds", Summary::of(&runs[2][1]))
        .arm("saved_of_demand", saved(paired(demand, replay)))
        .arm("null", paired(lazy, null));
    report.push(found);
    Ok(())
}
