//! Workers and faulters on one swap device, together and alone, with asynchronous faults and
//! without.

use super::read_latency::ReadLatency;
use super::slices::{Arm, Pace, Role, Runs, take_turns};
use super::{bm, us, with_params};
use crate::experiment::{LabError, Options};
use crate::first_look::{Found, Row};
use crate::report::short;
use crate::result::{Better, Measurement, Report};
use crate::session::{image, on};
use crate::stats::{Rounds, Summary};
use lacuna_soft::Swap;
use std::time::Duration;

/// A swap device, and the project's promises for it.
pub struct Device {
    /// Its word in result ids, and the part that measures it alone.
    pub id: &'static str,
    /// What it is, for people. An injected latency is called injected.
    pub about: &'static str,
    medium: Medium,
    /// Injected: added to each read and write.
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
        about: "compressed memory with 1 ms of injected latency",
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
        faulter_ratio: Some(1.0),
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
    /// The read latency of the disk under it; `None` without a disk, or without direct I/O.
    fn read_latency(&self, options: &Options) -> Result<Option<ReadLatency>, LabError> {
        match self.medium {
            Medium::File => ReadLatency::measure(&options.swap_dir),
            Medium::Memory => Ok(None),
        }
    }

    /// The ids of its results with the default guests.
    pub fn ids(&self) -> [String; 4] {
        Guests::default().ids(self)
    }
}

/// The guests with which a device is measured, and the words of their result ids.
#[derive(Clone, Copy, Debug)]
pub struct Guests {
    /// The first word.
    pub experiment: &'static str,
    /// The last word; none if empty.
    pub form: &'static str,
    /// Words of the kernel's command line.
    pub words: &'static str,
}

impl Default for Guests {
    fn default() -> Self {
        Self {
            experiment: "apf",
            form: "",
            words: "",
        }
    }
}

impl Guests {
    /// The ids of the results of `device`.
    pub fn ids(&self, device: &Device) -> [String; 4] {
        [SHARE, WORKERS, FAULTERS, ALONE].map(|(name, _)| self.id_of(device, name))
    }

    fn id_of(&self, device: &Device, name: &str) -> String {
        let id = format!("{}.{name}.{}", self.experiment, device.id);
        match self.form {
            "" => id,
            form => format!("{id}.{form}"),
        }
    }
}

/// The four results of a device: the name in the id, and the unit.
const SHARE: Measure = ("worker_share_percent", "%");
const WORKERS: Measure = ("worker_ratio", "x");
const FAULTERS: Measure = ("faulter_ratio", "x");
const ALONE: Measure = ("faulter_alone_ratio", "x");
type Measure = (&'static str, &'static str);

/// The four results of `device` with `guests`.
pub fn measure(
    device: &Device,
    guests: Guests,
    options: &Options,
    report: &mut Report,
) -> Result<(), LabError> {
    let scene = Scene {
        device,
        guests,
        pace: pace(device, options),
        latency: device.read_latency(options)?,
    };
    let runs = run(&scene, options, &ARMS)?;
    report.detail(runs.table(&format!("{} {}", device.about, guests.form)));
    record(&scene, &runs, report)
}

/// A device with the guests on it.
struct Scene<'a> {
    device: &'a Device,
    guests: Guests,
    pace: Pace,
    /// The disk's read latency; `None` without a disk.
    latency: Option<ReadLatency>,
}

fn run(scene: &Scene<'_>, options: &Options, arms: &[Arm]) -> Result<Runs, LabError> {
    let Scene { device, guests, .. } = scene;
    let swap = match device.medium {
        Medium::File => Swap::File(options.swap_dir.clone()),
        Medium::Memory => Swap::Memory,
    };
    let mut builder = bm(options.arch, swap);
    builder.command_line = format!("{} {}", builder.command_line, guests.words);
    on(&builder, &image(options.arch, "bm")?, |session| {
        session.guest.prepared()?;
        builder.latency.set(device.latency);
        take_turns(session, arms, scene.pace)
    })
}

/// The first row of the first look: workers beside faulters on the first device.
pub fn first_look(options: &Options, rounds: Rounds) -> Result<Found, LabError> {
    let [device, ..] = &DEVICES;
    let scene = Scene {
        device,
        guests: Guests::default(),
        pace: Pace {
            rounds,
            slice: Duration::from_millis(120),
            settle: Duration::from_millis(30),
        },
        latency: None,
    };
    let runs = run(&scene, options, &[Arm::Off, Arm::OffAgain, Arm::On])?;
    let rate = |arm| format!("{}/s", short(runs.rate(arm, Role::Workers).median));
    let row = Row {
        system: "x86 async page faults",
        what: "computing beside processes whose pages take 1 ms, injected; without, vCPUs wait",
        without: rate(Arm::Off),
        with: rate(Arm::On),
        ratio: runs.ratio(Arm::Off, Arm::On, Role::Workers)?,
        null: runs.ratio(Arm::Off, Arm::OffAgain, Role::Workers)?,
        published: "1.995x (KVM Forum 2010)",
    };
    let results = vec![worker_ratio(&scene, &runs)?, faulter_ratio(&scene, &runs)?];
    Ok(Found { row, results })
}

/// A result of `device`, with the bar if there is one.
fn measured(
    scene: &Scene<'_>,
    (name, unit): Measure,
    summary: Summary,
    bar: Option<f64>,
) -> Measurement {
    let device = scene.device;
    let id = scene.guests.id_of(device, name);
    let result = Measurement::new(id, unit, Better::Higher, summary);
    let result = with_params(result, scene.pace)
        .param("swap", device.about)
        .param("injected_latency_us", us(device.latency));
    let result = match &scene.latency {
        Some(latency) => latency.with_params(result),
        None => result,
    };
    bar.into_iter().fold(result, Measurement::bar)
}

fn worker_ratio(scene: &Scene<'_>, runs: &Runs) -> Result<Measurement, LabError> {
    let ratio = runs.ratio(Arm::Off, Arm::On, Role::Workers)?;
    let result = measured(scene, WORKERS, ratio, scene.device.worker_ratio)
        .reference(1.995, "KVM Forum 2010")
        .arm("off", runs.arm(Arm::Off, Role::Workers))
        .arm("on", runs.arm(Arm::On, Role::Workers))
        .arm("null", null(runs, Role::Workers)?);
    Ok(result)
}

fn faulter_ratio(scene: &Scene<'_>, runs: &Runs) -> Result<Measurement, LabError> {
    let ratio = runs.ratio(Arm::Off, Arm::On, Role::Faulters)?;
    let result = measured(scene, FAULTERS, ratio, scene.device.faulter_ratio)
        .arm("off", runs.arm(Arm::Off, Role::Faulters))
        .arm("on", runs.arm(Arm::On, Role::Faulters))
        .arm("null", null(runs, Role::Faulters)?);
    Ok(result)
}

fn record(scene: &Scene<'_>, runs: &Runs, report: &mut Report) -> Result<(), LabError> {
    let device = scene.device;
    let share = runs.ratio(Arm::Alone, Arm::On, Role::Workers)?;
    let kept = runs.ratio(Arm::Alone, Arm::Off, Role::Workers)?;
    let faulters = runs.ratio(Arm::Off, Arm::On, Role::Faulters)?;
    let alone = runs.ratio(Arm::FaultersOff, Arm::FaultersOn, Role::Faulters)?;
    // All ratios before the first result: on a busy machine all are skipped.
    let worker_ratio = worker_ratio(scene, runs)?;
    let faulter_ratio = faulter_ratio(scene, runs)?;
    report.say(format!(
        "{}{}: beside faulters, workers keep {:.0} % of their speed with asynchronous faults, and \
         {:.0} % without. Faulters are {:.2} times as fast with them as without.{}",
        device.about,
        match scene.guests.form {
            "" => String::new(),
            form => format!(" ({form})"),
        },
        100.0 * share.median,
        100.0 * kept.median,
        faulters.median,
        match &scene.latency {
            Some(latency) => format!(" The disk reads a page in {}.", latency.text()),
            None => String::new(),
        },
    ));
    report.push(
        measured(scene, SHARE, share.scaled(100.0), device.worker_share)
            .arm("alone", runs.arm(Arm::Alone, Role::Workers))
            .arm("on", runs.arm(Arm::On, Role::Workers)),
    );
    report.push(worker_ratio);
    report.push(faulter_ratio);
    report.push(
        measured(scene, ALONE, alone, None)
            .arm("off", runs.arm(Arm::FaultersOff, Role::Faulters))
            .arm("on", runs.arm(Arm::FaultersOn, Role::Faulters)),
    );
    Ok(())
}

/// The ratio that the method reports where nothing differs.
fn null(runs: &Runs, role: Role) -> Result<serde_json::Value, LabError> {
    Ok(runs.ratio(Arm::Off, Arm::OffAgain, role)?.into())
}
