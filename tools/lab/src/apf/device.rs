//! Workers and faulters on one swap device, together and alone, with asynchronous faults and
//! without.

use super::read_latency::ReadLatency;
use super::{bm, with_params};
use crate::experiment::{LabResult, Options};
use crate::first_look::{Found, Row};
use crate::report::short;
use crate::result::{Measurement, Report};
use crate::session::{image, on};
use crate::slices::{Arm, Gain, OFF_NULL_ON, PROCESSES, Pace, Role, Runs, take_turns};
use crate::stats::Rounds;
use lacuna::Arch;
use lacuna::memory::Swap;
use std::time::Duration;

/// A swap device, and the project's promises for it.
pub struct Device {
    /// Its word in result ids, and the part that measures it alone.
    pub id: &'static str,
    /// What it is, for people. An injected latency is called injected.
    pub about: &'static str,
    /// It is a file, and not compressed memory.
    is_file: bool,
    /// Injected: added to each read and write.
    pub latency: Duration,
    /// The bars of [`RESULTS`].
    bars: [Option<f64>; 4],
    /// Enough that the median's interval is narrower than its distance from the bars.
    rounds: usize,
}

/// In the order of measuring.
pub const DEVICES: [Device; 3] = [
    Device {
        id: "latency_1ms",
        // Compressed memory takes little time itself, so the figure is about the latency.
        about: "compressed memory with 1 ms of injected latency",
        is_file: false,
        latency: Duration::from_millis(1),
        bars: [Some(95.0), None, Some(1.5), None],
        rounds: 41,
    },
    Device {
        id: "file",
        about: "swap file",
        is_file: true,
        latency: Duration::ZERO,
        bars: [None, Some(1.35), Some(1.0), None],
        rounds: 21,
    },
    MEMORY,
];

/// Compressed memory, which takes a few microseconds.
pub const MEMORY: Device = Device {
    id: "mem",
    about: "compressed memory",
    is_file: false,
    latency: Duration::ZERO,
    bars: [None; 4],
    rounds: 9,
};

/// The results of a device: the name in the id, and the gain.
const RESULTS: [(&str, Gain); 4] = [
    ("worker_share_percent", Gain::SHARE),
    ("worker_ratio", Gain::WORKERS),
    ("faulter_ratio", Gain::FAULTERS),
    ("faulter_alone_ratio", FAULTERS_ALONE),
];
const FAULTERS_ALONE: Gain = Gain::new(Arm::FAULTERS_OFF, Arm::FAULTERS_ON, Role::Faulters);
const ARMS: [Arm; 6] = [
    Arm::OFF,
    Arm::NULL,
    Arm::ON,
    Arm::ALONE,
    Arm::FAULTERS_OFF,
    Arm::FAULTERS_ON,
];

/// The guests of an experiment, and the words of their result ids.
#[derive(Clone, Copy, Debug)]
pub struct Guests {
    /// The first word.
    pub experiment: &'static str,
    /// The last word: the contract between host and guest. None if empty.
    pub form: &'static str,
    /// The contract, for people.
    pub about: &'static str,
    /// The word that chooses it on the guest kernel's command line.
    pub word: &'static str,
}

impl Guests {
    /// The guests of `lacuna lab apf`.
    pub const APF: Self = Self {
        experiment: "apf",
        form: "",
        about: "",
        word: "",
    };

    /// The ids of the results of `device`.
    pub fn ids(&self, device: &Device) -> [String; 4] {
        let Self {
            experiment, form, ..
        } = self;
        RESULTS.map(|(name, _)| {
            let id = format!("{experiment}.{name}.{}.{form}", device.id);
            id.trim_end_matches('.').to_owned()
        })
    }
}

/// The four results of `device` with `guests`.
pub fn measure(
    device: &Device,
    guests: Guests,
    options: &Options,
    report: &mut Report,
) -> LabResult {
    let pace = match options.quick {
        true => Pace::new(2, 80, 30),
        false => Pace::new(device.rounds, 150, 30),
    };
    // None without a disk, or without direct I/O.
    let latency = match device.is_file {
        true => ReadLatency::measure(&options.swap_dir)?,
        false => None,
    };
    let runs = run(device, guests, pace, options, &ARMS)?;
    let title = match &latency {
        Some(latency) => format!("{}, which reads a page in {}", device.about, latency.text()),
        None => format!("{} {}", device.about, guests.form),
    };
    report.detail(runs.table(&title, &PROCESSES));
    // All ratios before the first result: on a busy machine all are skipped.
    let results = results(
        device,
        (options.arch, guests),
        pace,
        latency.as_ref(),
        &runs,
    )?;
    results.into_iter().for_each(|result| report.push(result));
    Ok(())
}

/// Lets `arms` take turns in one VM.
pub fn run(
    device: &Device,
    guests: Guests,
    pace: Pace,
    options: &Options,
    arms: &[Arm],
) -> LabResult<Runs> {
    let swap = match device.is_file {
        true => Swap::File(options.swap_dir.clone()),
        false => Swap::Memory,
    };
    let builder = bm(options.arch, swap, guests.word);
    on(&builder, &image(options.arch, "bm")?, |session| {
        session.guest.prepared()?;
        builder.latency.set(device.latency);
        take_turns(session, arms, pace, |_| ())
    })
}

/// The entries of [`RESULTS`] whose arms took part.
fn results(
    device: &Device,
    (arch, guests): (Arch, Guests),
    pace: Pace,
    latency: Option<&ReadLatency>,
    runs: &Runs,
) -> LabResult<Vec<Measurement>> {
    let ids = guests.ids(device).into_iter();
    let all = ids.zip(RESULTS).zip(device.bars);
    let measured = all.filter(|((_, (_, gain)), _)| runs.has(*gain));
    let result = |((id, (_, gain)), bar): ((String, (_, Gain)), Option<f64>)| {
        let result = with_params(runs.result(id, gain)?, pace)
            .param("swap", device.about)
            .param("injected_latency_us", device.latency.as_micros() as u64);
        let result = match latency {
            Some(latency) => latency.with_params(result),
            None => result,
        };
        let result = bar.into_iter().fold(result, Measurement::bar);
        Ok(match gain {
            Gain::WORKERS if arch == Arch::X86_64 => result.reference(1.995, "KVM Forum 2010"),
            _ => result,
        })
    };
    measured.map(result).collect()
}

/// The first row of the first look: workers beside faulters on the first device.
pub fn first_look(options: &Options, rounds: Rounds) -> LabResult<Found> {
    let [device, ..] = &DEVICES;
    let pace = Pace::new(rounds, 120, 30);
    let runs = run(device, Guests::APF, pace, options, &OFF_NULL_ON)?;
    let rate = |arm| format!("{}/s", short(runs.rate(arm, Role::Workers).median));
    let row = Row {
        system: "x86 async page faults",
        what: "computing beside processes whose pages take 1 ms, injected; without, vCPUs wait",
        without: rate(Arm::OFF),
        with: rate(Arm::ON),
        ratio: runs.ratio(Gain::WORKERS)?,
        null: runs.ratio(Gain::WORKERS.null())?,
        published: "1.995x (KVM Forum 2010)",
    };
    let results = results(device, (options.arch, Guests::APF), pace, None, &runs)?;
    Ok(Found { row, results })
}
