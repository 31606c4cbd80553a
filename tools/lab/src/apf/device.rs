//! Workers and faulters on one swap device, together and alone, with asynchronous faults and
//! without.

use super::slices::{Arm, Pace, Role, Runs, take_turns};
use super::{bm, with_params};
use crate::experiment::{LabError, Options};
use crate::first_look::{Found, Row};
use crate::report::short;
use crate::result::{Better, Measurement, Report};
use crate::session::on;
use crate::stats::{Rounds, Summary};
use lacuna_soft::Swap;
use std::time::Duration;

/// A swap device, and what the project promises with it.
pub struct Device {
    /// Its word in result ids.
    id: &'static str,
    /// What it is, for people.
    pub about: &'static str,
    medium: Medium,
    latency: Duration,
    worker_share: Option<f64>,
    worker_ratio: Option<f64>,
    faulter_ratio: Option<f64>,
    /// Enough that the median's interval is narrower than its distance from the bars.
    rounds: usize,
}

#[derive(Clone, Copy)]
enum Medium {
    File,
    Memory,
}

/// In the order of measuring.
pub const DEVICES: [Device; 3] = [
    Device {
        id: "latency_1ms",
        // Compressed memory takes little time itself, so the figure is about the latency.
        about: "compressed memory with 1 ms of latency",
        medium: Medium::Memory,
        latency: Duration::from_millis(1),
        worker_share: Some(95.0),
        worker_ratio: None,
        faulter_ratio: Some(1.5),
        rounds: 41,
    },
    Device {
        id: "file",
        about: "swap file",
        medium: Medium::File,
        latency: Duration::ZERO,
        worker_share: None,
        worker_ratio: Some(1.35),
        faulter_ratio: Some(1.5),
        rounds: 21,
    },
    Device {
        id: "mem",
        about: "compressed memory",
        medium: Medium::Memory,
        latency: Duration::ZERO,
        worker_share: None,
        worker_ratio: None,
        faulter_ratio: None,
        rounds: 9,
    },
];

const ARMS: [Arm; 6] = [
    Arm::Off,
    Arm::OffAgain,
    Arm::On,
    Arm::Alone,
    Arm::FaultersOff,
    Arm::FaultersOn,
];

fn pace(device: &Device, options: &Options) -> Pace {
    if options.quick {
        Pace {
            rounds: 2.into(),
            slice: Duration::from_millis(80),
            settle: Duration::from_millis(30),
        }
    } else {
        Pace {
            rounds: device.rounds.into(),
            slice: Duration::from_millis(150),
            settle: Duration::from_millis(30),
        }
    }
}

impl Device {
    /// The ids of its results.
    pub fn ids(&self) -> [String; 4] {
        [SHARE, WORKERS, FAULTERS, ALONE].map(|(name, _)| self.id_of(name))
    }

    fn id_of(&self, name: &str) -> String {
        format!("apf.{name}.{}", self.id)
    }
}

/// The four results of a device: the name in the id, and the unit.
const SHARE: Measure = ("worker_share_percent", "%");
const WORKERS: Measure = ("worker_ratio", "x");
const FAULTERS: Measure = ("faulter_ratio", "x");
const ALONE: Measure = ("faulter_alone_ratio", "x");
type Measure = (&'static str, &'static str);

/// The four results of `device`.
pub fn measure(device: &Device, options: &Options, report: &mut Report) -> Result<(), LabError> {
    let pace = pace(device, options);
    let runs = run(device, options, &ARMS, pace)?;
    report.detail(runs.table(device.about));
    tell(device, pace, &runs, report)
}

fn run(device: &Device, options: &Options, arms: &[Arm], pace: Pace) -> Result<Runs, LabError> {
    let builder = bm(match device.medium {
        Medium::File => Swap::File(options.swap_dir.clone()),
        Medium::Memory => Swap::Memory,
    });
    on(&builder, "bm", |session| {
        session.guest.prepared()?;
        builder.latency.set(device.latency);
        take_turns(session, arms, pace)
    })
}

/// The row of the first look: the speed of workers beside faulters on the first device.
pub fn first_look(options: &Options, rounds: Rounds) -> Result<Found, LabError> {
    let [device, ..] = &DEVICES;
    let pace = Pace {
        rounds,
        slice: Duration::from_millis(120),
        settle: Duration::from_millis(30),
    };
    let runs = run(device, options, &[Arm::Off, Arm::OffAgain, Arm::On], pace)?;
    let rate = |arm| format!("{}/s", short(runs.rate(arm, Role::Workers).median));
    let row = Row {
        system: "x86 async page faults",
        what: "computing beside processes whose pages take 1 ms; without, the vCPU waits",
        without: rate(Arm::Off),
        with: rate(Arm::On),
        ratio: runs.ratio(Arm::Off, Arm::On, Role::Workers)?,
        null: runs.ratio(Arm::Off, Arm::OffAgain, Role::Workers)?,
        published: "1.995x (KVM Forum 2010)",
    };
    let results = vec![
        worker_ratio(device, pace, &runs)?,
        faulter_ratio(device, pace, &runs)?,
    ];
    Ok(Found { row, results })
}

/// A result of `device`, with the bar if there is one.
fn measured(
    device: &Device,
    pace: Pace,
    (name, unit): Measure,
    summary: Summary,
    bar: Option<f64>,
) -> Measurement {
    let result = Measurement::new(device.id_of(name), unit, Better::Higher, summary);
    let result = with_params(result, pace).param("swap", device.about);
    bar.into_iter().fold(result, Measurement::bar)
}

fn worker_ratio(device: &Device, pace: Pace, runs: &Runs) -> Result<Measurement, LabError> {
    let ratio = runs.ratio(Arm::Off, Arm::On, Role::Workers)?;
    let result = measured(device, pace, WORKERS, ratio, device.worker_ratio)
        .reference(1.995, "KVM Forum 2010")
        .arm("off", runs.arm(Arm::Off, Role::Workers))
        .arm("on", runs.arm(Arm::On, Role::Workers))
        .arm("null", null(runs, Role::Workers)?);
    Ok(result)
}

fn faulter_ratio(device: &Device, pace: Pace, runs: &Runs) -> Result<Measurement, LabError> {
    let ratio = runs.ratio(Arm::Off, Arm::On, Role::Faulters)?;
    let result = measured(device, pace, FAULTERS, ratio, device.faulter_ratio)
        .arm("off", runs.arm(Arm::Off, Role::Faulters))
        .arm("on", runs.arm(Arm::On, Role::Faulters))
        .arm("null", null(runs, Role::Faulters)?);
    Ok(result)
}

fn tell(device: &Device, pace: Pace, runs: &Runs, report: &mut Report) -> Result<(), LabError> {
    let share = runs.ratio(Arm::Alone, Arm::On, Role::Workers)?;
    let kept = runs.ratio(Arm::Alone, Arm::Off, Role::Workers)?;
    let faulters = runs.ratio(Arm::Off, Arm::On, Role::Faulters)?;
    let alone = runs.ratio(Arm::FaultersOff, Arm::FaultersOn, Role::Faulters)?;
    // All ratios before the first result: on a busy machine all are skipped.
    let worker_ratio = worker_ratio(device, pace, runs)?;
    let faulter_ratio = faulter_ratio(device, pace, runs)?;
    report.say(format!(
        "{}: beside faulters, workers keep {:.0} % of their speed with asynchronous faults, and \
         {:.0} % without. Faulters are {:.2} times as fast with them as without.",
        device.about,
        100.0 * share.median,
        100.0 * kept.median,
        faulters.median,
    ));
    report.push(
        measured(
            device,
            pace,
            SHARE,
            share.scaled(100.0),
            device.worker_share,
        )
        .arm("alone", runs.arm(Arm::Alone, Role::Workers))
        .arm("on", runs.arm(Arm::On, Role::Workers)),
    );
    report.push(worker_ratio);
    report.push(faulter_ratio);
    report.push(
        measured(device, pace, ALONE, alone, None)
            .arm("off", runs.arm(Arm::FaultersOff, Role::Faulters))
            .arm("on", runs.arm(Arm::FaultersOn, Role::Faulters)),
    );
    Ok(())
}

/// The ratio that the method reports where nothing differs.
fn null(runs: &Runs, role: Role) -> Result<serde_json::Value, LabError> {
    Ok(runs.ratio(Arm::Off, Arm::OffAgain, role)?.into())
}
