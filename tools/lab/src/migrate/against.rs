//! The same guest, moved here and by QEMU.
//!
//! ```text
//! here    two VMs in this process        ─┐ a UNIX socket; the guest `paced` boots anew for each
//! QEMU    two processes, driven by QMP   ─┘ move, and writes as many pages a second in all arms
//! ```
//! | id | ours / QEMU's |
//! |---|---|
//! | `migrate.vs_qemu.downtime.MODE` | from the last instruction to the first, as each says |
//! | `migrate.vs_qemu.total.MODE` | the time until the source is not needed, as each says |
//! | `migrate.vs_qemu.resume.MODE` | from the last instruction until each thread has printed |
//!
//! Lacuna's downtime begins with the pause of the source's vCPUs, and ends when the source knows
//! that the destination runs the guest. QEMU's downtime is the time between its events `STOP` and
//! `RESUME`. The downtime of `query-migrate` is noted beside it: it leaves out the destination's
//! work.
//!
//! Modes are `precopy` and `postcopy`. Soft is compared with QEMU's translator (TCG), kvm with QEMU
//! on `/dev/kvm`. QEMU has two ways for each mode: pre-copy with multifd or without, post-copy with
//! preempt or without. Each row has the better of the two figures.
//!
//! A row is met if its whole interval is at most 1, missed if none of it is, and undecided
//! otherwise.

use super::beats::{Beats, Seen};
use super::ends::{Here, move_guest};
use super::qemu::{self, Accelerator, Scene};
use super::route::Route;
use super::{MEMORY, QUICK, VCPUS};
use crate::experiment::{LabError, LabResult, Options};
use crate::external;
use crate::guests::{GuestBuilder, beside, folder};
use crate::options::guests;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, measures, paired};
use lacuna::Arch;
use lacuna::migrate::Budget;
use lacuna::migrate::stream::Mode;
use serde_json::json;
use std::cell::Cell;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// Written pages a second.
const RATE: u64 = 10_000;
const PACED: &str = "rate=10000 hot=64M seconds=1000000";
const QUICK_PACED: &str = "rate=10000 hot=8M seconds=1000000";
/// The longest time that a guest may be silent.
const LIMIT: Duration = Duration::from_secs(60);
/// How often a move by QEMU is tried if the guest is damaged.
const TRIES: usize = 4;

/// The compared figures of a move, in seconds.
const FIGURES: [&str; 3] = ["downtime", "total", "resume"];
/// The index of one more figure: the downtime that QEMU reports.
const SAID: usize = 3;

/// What moves the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Arm {
    Ours(Mode),
    Qemu(qemu::Way),
}

impl Arm {
    /// Its name in results.
    const fn name(self) -> &'static str {
        match self {
            Self::Ours(_) => "ours",
            Self::Qemu(qemu::Way::PreCopy { multifd: true }) => "qemu_multifd",
            Self::Qemu(qemu::Way::PostCopy { preempt: true }) => "qemu_preempt",
            Self::Qemu(_) => "qemu",
        }
    }
}

/// The modes of a row, and the arms of each: ours twice, so that the second is the null.
const MODES: [(&str, [Arm; 4]); 2] = [
    (
        "precopy",
        [
            Arm::Ours(Mode::PreCopy),
            Arm::Ours(Mode::PreCopy),
            Arm::Qemu(qemu::Way::PreCopy { multifd: false }),
            Arm::Qemu(qemu::Way::PreCopy { multifd: true }),
        ],
    ),
    (
        "postcopy",
        [
            Arm::Ours(Mode::PostCopy),
            Arm::Ours(Mode::PostCopy),
            Arm::Qemu(qemu::Way::PostCopy { preempt: false }),
            Arm::Qemu(qemu::Way::PostCopy { preempt: true }),
        ],
    ),
];
/// The places of the arms in a row.
const OURS: usize = 0;
const NULL: usize = 1;

/// The ids of all rows.
pub fn ids(prefix: &str) -> Vec<String> {
    let modes = MODES.iter().map(|(mode, _)| mode);
    let all = modes.flat_map(|mode| FIGURES.map(|figure| id(prefix, figure, mode)));
    all.collect()
}

fn id(prefix: &str, figure: &str, mode: &str) -> String {
    format!("{prefix}.vs_qemu.{figure}.{mode}")
}

/// Compares one backend with QEMU.
pub fn measure<B: GuestBuilder>(
    prefix: &str,
    builder: &B,
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let paced = guests(Arch::X86_64).image("paced");
    let paced = match (external::qemu(MEMORY), paced) {
        (Ok(_), Some(paced)) => paced,
        (installed, _) => {
            let why = installed.err().map(|why| why.to_string());
            let why = why.or(lacuna_guest::unavailable().map(str::to_owned));
            let why = why.unwrap_or("there is no guest paced".into());
            ids(prefix).into_iter().for_each(|id| report.skip(id, &why));
            return Ok(());
        }
    };
    let (memory, words) = match options.quick {
        true => (QUICK, QUICK_PACED),
        false => (MEMORY, PACED),
    };
    let folder = folder()?;
    let image = folder.path().join("paced.elf");
    let written = fs::write(&image, paced.file);
    written.map_err(LabError::io(format!("write {}", image.display())))?;
    // QEMU starts the second vCPU only when the guest asks for it.
    let line = builder.with(words).full_command_line();
    let line: Vec<&str> = line
        .split(' ')
        .filter(|word| *word != "ap=direct")
        .collect();
    let scene = Scene {
        accelerator: match prefix {
            "migrate.kvm" => Accelerator::Kvm,
            _ => Accelerator::Tcg,
        },
        image,
        words: line.join(" "),
        own_words: words,
        memory_mib: memory,
        vcpus: VCPUS,
        downtime: Budget::default().downtime,
        settle: Duration::from_millis(if options.quick { 100 } else { 300 }),
    };
    for (mode, arms) in &MODES {
        compare(prefix, builder, &scene, (mode, arms), options, report)?;
    }
    Ok(())
}

fn compare<B: GuestBuilder>(
    prefix: &str,
    builder: &B,
    scene: &Scene,
    (mode, arms): (&str, &[Arm; 4]),
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let rounds = Rounds::Count(if options.quick { 1 } else { Rounds::LEAST });
    // Moves, and moves that damaged the guest.
    let moves = arms.map(|_| Cell::new([0, 0]));
    let runs = measures(arms.len(), rounds, |arm| match arms[arm] {
        Arm::Ours(mode) => ours(builder, scene, mode),
        Arm::Qemu(way) => of_qemu(scene, way, &moves[arm]),
    })?;
    let of_qemu = || arms.iter().zip(&moves).skip(NULL + 1);
    for (figure, name) in FIGURES.into_iter().enumerate() {
        let id = id(prefix, name, mode);
        let Some(found) = row(id.clone(), &runs, figure, arms) else {
            report.skip(id, "no guest that QEMU moved has survived");
            continue;
        };
        let mut found = found
            .param("memory_mib", scene.memory_mib)
            .param("vcpus", VCPUS)
            .param("guest", format!("paced {}", scene.words))
            .param("pages_written_per_s", RATE)
            .param("downtime_limit_ms", scene.downtime.as_millis() as u64);
        for (arm, moves) in of_qemu() {
            let [moves, damaged] = moves.get();
            let value = json!({"moves": moves, "damaged": damaged});
            found = found.arm(&format!("{}_moves", arm.name()), value);
        }
        report.push(found);
    }
    for (arm, moves) in of_qemu() {
        let [moves, damaged] = moves.get();
        if damaged > 0 {
            report.say(format!(
                "{prefix}: QEMU has damaged the guest in {damaged} of {moves} moves by {mode} \
                 ({}): pages were lost, or it crashed.",
                arm.name()
            ));
        }
    }
    Ok(())
}

/// One row. `None`: no round has the figure of both.
fn row(id: String, runs: &[[Vec<f64>; 4]], figure: usize, arms: &[Arm; 4]) -> Option<Measurement> {
    // A round without a figure is left out of the pairs.
    let both = |a: usize, b: usize| {
        let pairs = runs[a][figure].iter().zip(&runs[b][figure]);
        let pairs = pairs.filter(|(a, b)| a.is_finite() && b.is_finite());
        let (a, b): (Vec<f64>, Vec<f64>) = pairs.unzip();
        (!a.is_empty()).then(|| (Summary::of(&a), paired(&a, &b)))
    };
    let ways = (NULL + 1..arms.len()).filter_map(|way| both(way, OURS));
    let best = ways.min_by(|(a, _), (b, _)| a.median.total_cmp(&b.median));
    let (_, ratio) = best?;
    let found = Measurement::new(id, "x", Better::Lower, ratio);
    let mut found = match (ratio.high <= 1.0, ratio.low > 1.0) {
        (false, false) => found.undecided(1.0),
        _ => found.bar(1.0),
    };
    for (index, arm) in arms.iter().enumerate() {
        let all = runs[index][figure].iter().copied();
        let all: Vec<f64> = all.filter(|value| value.is_finite()).collect();
        if index != NULL && !all.is_empty() {
            found = found.arm(&format!("{}_s", arm.name()), Summary::of(&all));
        }
        if index > NULL && figure == 0 {
            let said = Summary::of(&runs[index][SAID]);
            found = found.arm(&format!("{}_says_s", arm.name()), said);
        }
    }
    Some(found.arm("null", both(OURS, NULL)?.1))
}

/// Boots a guest and moves it.
fn ours<B: GuestBuilder>(builder: &B, scene: &Scene, mode: Mode) -> LabResult<[f64; 4]> {
    let folder = folder()?;
    beside(builder, "paced", scene.own_words, |session| {
        thread::sleep(scene.settle);
        let way = (mode, Route::unix(&folder.path().join("moves"), None)?);
        let (moved, resumed) = move_guest(builder, session.running, way, until_all_print)?;
        let since = |at: Instant| (at - moved.paused).as_secs_f64();
        Ok([since(moved.ran), moved.total, since(resumed), f64::NAN])
    })
}

/// When each thread has printed a line at the destination.
fn until_all_print<B: GuestBuilder>(here: &Here<'_, B>) -> LabResult<Instant> {
    let mut beats = Beats::new(VCPUS);
    let seen = beats.listen(here.lines, LIMIT);
    match beats.last_first() {
        Some(at) if seen == Seen::All && !beats.is_damaged_later(here.lines) => Ok(at),
        _ => Err(LabError::Guest(format!(
            "the guest does not run at its destination: {seen:?}"
        ))),
    }
}

/// As [`ours`], by QEMU. A lacking figure is NaN.
fn of_qemu(scene: &Scene, way: qemu::Way, moves: &Cell<[usize; 2]>) -> LabResult<[f64; 4]> {
    let mut tries = 0;
    loop {
        let folder = folder()?;
        let found = qemu::move_once(scene, way, folder.path())?;
        let [all, damaged] = moves.get();
        moves.set([all + 1, damaged + usize::from(found.is_damaged)]);
        tries += 1;
        if !found.is_damaged || tries == TRIES {
            let resume = found.blackout.filter(|_| !found.is_damaged);
            let resume = resume.unwrap_or(f64::NAN);
            return Ok([found.downtime, found.total, resume, found.said]);
        }
    }
}
