//! One swap device: workers and faulters together and alone, with asynchronous faults and without.

use super::slices::{Arm, Pace, Runs, Who, take_turns};
use super::{bm, with_params};
use crate::experiment::{LabError, Options};
use crate::result::{Better, Measurement, Report};
use crate::session::on_soft;
use lacuna_soft::Swap;
use std::time::Duration;

/// A device and what is promised on it.
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
    /// Enough that the median's interval is narrower than what the bars ask about.
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
        // What the data then costs is small, and no disk's: the latency is what is measured.
        about: "compressed memory, 1 ms away",
        medium: Medium::Memory,
        latency: Duration::from_millis(1),
        worker_share: Some(95.0),
        worker_ratio: None,
        faulter_ratio: Some(1.5),
        rounds: 41,
    },
    Device {
        id: "file",
        about: "plain swap file",
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
            rounds: 2,
            slice: Duration::from_millis(80),
            settle: Duration::from_millis(30),
        }
    } else {
        Pace {
            rounds: device.rounds,
            slice: Duration::from_millis(150),
            settle: Duration::from_millis(30),
        }
    }
}

/// The four results of `device`.
pub fn measure(device: &Device, options: &Options, report: &mut Report) -> Result<(), LabError> {
    let pace = pace(device, options);
    let builder = bm(match device.medium {
        Medium::File => Swap::File(options.swap_dir.clone()),
        Medium::Memory => Swap::Memory,
    });
    let runs = on_soft(&builder, "bm", |session| {
        session.guest.prepared()?;
        builder.latency.set(device.latency);
        take_turns(session, &ARMS, pace)
    })?;
    report.detail(runs.table(device.about));
    tell(device, pace, &runs, report)
}

fn tell(device: &Device, pace: Pace, runs: &Runs, report: &mut Report) -> Result<(), LabError> {
    let measured = |measure: &str, unit, summary, bar: Option<f64>| {
        let id = format!("apf.{measure}.{}", device.id);
        let result = Measurement::new(id, unit, Better::Higher, summary);
        let result = with_params(result, pace).param("swap", device.about);
        bar.into_iter().fold(result, Measurement::bar)
    };
    let share = runs.ratio(Arm::Alone, Arm::On, Who::Workers)?;
    let kept = runs.ratio(Arm::Alone, Arm::Off, Who::Workers)?;
    let workers = runs.ratio(Arm::Off, Arm::On, Who::Workers)?;
    let faulters = runs.ratio(Arm::Off, Arm::On, Who::Faulters)?;
    let alone = runs.ratio(Arm::FaultersOff, Arm::FaultersOn, Who::Faulters)?;
    report.say(format!(
        "{}: beside faulters, workers keep {:.0} % of their speed with asynchronous faults, {:.0} \
         % without; the faulters do {:.2} times as much.",
        device.about,
        100.0 * share.median,
        100.0 * kept.median,
        faulters.median,
    ));
    report.push(
        measured(
            "worker_share_percent",
            "%",
            share.scaled(100.0),
            device.worker_share,
        )
        .arm("alone", runs.arm(Arm::Alone, Who::Workers))
        .arm("on", runs.arm(Arm::On, Who::Workers)),
    );
    report.push(
        measured("worker_ratio", "x", workers, device.worker_ratio)
            .reference(1.995, "KVM Forum 2010")
            .arm("off", runs.arm(Arm::Off, Who::Workers))
            .arm("on", runs.arm(Arm::On, Who::Workers))
            .arm("null", null(runs, Who::Workers)?),
    );
    report.push(
        measured("faulter_ratio", "x", faulters, device.faulter_ratio)
            .arm("off", runs.arm(Arm::Off, Who::Faulters))
            .arm("on", runs.arm(Arm::On, Who::Faulters))
            .arm("null", null(runs, Who::Faulters)?),
    );
    report.push(
        measured("faulter_alone_ratio", "x", alone, None)
            .arm("off", runs.arm(Arm::FaultersOff, Who::Faulters))
            .arm("on", runs.arm(Arm::FaultersOn, Who::Faulters)),
    );
    Ok(())
}

/// What the method reports where there is nothing to find.
fn null(runs: &Runs, who: Who) -> Result<serde_json::Value, LabError> {
    Ok(runs.ratio(Arm::Off, Arm::OffAgain, who)?.into())
}
