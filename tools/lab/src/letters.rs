//! `lacuna lab letters`: published experiments at their own size and in their own layout, with the
//! published figures beside ours.
//!
//! | part | experiment |
//! |---|---|
//! | `talk` | x86 async page faults, KVM Forum 2010 |
//! | `arm64` | arm64 async page faults, the cover letter of RFCv2, 2020 |
//! | `range` | invalidation of huge pages by range, the cover letter of v3, 2012 |
//! | `paging` | exits on missing memory, the cover letter of 2023 |
//! | `pml` | page-modification logging, kvm list 2015 |
//!
//! A part says what differs from the original, and why. `--scale N` divides memory and time by N,
//! and the number of processes where a part has many.

mod arm64;
mod paging;
mod pml;
mod range;
mod talk;

use crate::experiment::{LabResult, Options, skip_if_busy};
use crate::result::{Measurement, Report};
use lacuna::{Apf, PageCount};
use std::fmt;
use std::time::Duration;

/// Measures everything.
///
/// # Errors
/// The error of the first failed experiment.
pub fn run(options: &Options, report: &mut Report) -> LabResult {
    let steps = talk::STEPS + arm64::STEPS + range::STEPS + paging::STEPS + pml::STEPS;
    options.begin(steps);
    if options.wants_x86("talk", [talk::ID], report) {
        talk::measure(options, report)?;
    }
    if options.wants("arm64") {
        arm64::measure(options, report)?;
    }
    if options.wants_x86("range", [range::ID], report) {
        let done = range::measure(options, report);
        skip_if_busy(report, [range::ID], done)?;
    }
    if options.wants("paging") {
        paging::measure(options, report)?;
    }
    if options.wants_x86("pml", pml::IDS, report) {
        pml::measure(options, report)?;
    }
    Ok(())
}

/// The separately measurable parts.
pub const PARTS: &[&str] = &["talk", "arm64", "range", "paging", "pml"];

/// The size of an experiment.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// Guest memory, and resident memory.
    memory: [PageCount; 2],
    /// The time of one run: a minute, unless it is divided.
    time: Duration,
}

impl Size {
    /// The published memory in MiB and a minute, both divided by `--scale`; or memory divided by
    /// `quick` and a fifth of a second.
    fn of(options: &Options, mib: [u64; 2], quick: u32) -> Self {
        let (scale, seconds) = match options.quick {
            true => (quick, 0.2),
            false => (options.scale, 60.0 / f64::from(options.scale)),
        };
        Self {
            memory: mib.map(|mib| PageCount::from_bytes((mib << 20) / u64::from(scale))),
            time: Duration::from_secs_f64(seconds),
        }
    }

    fn with_params(self, result: Measurement) -> Measurement {
        let [memory, resident] = self.memory.map(|pages| pages.bytes() >> 20);
        result
            .param("memory_mib", memory)
            .param("resident_mib", resident)
            .param("seconds", self.time.as_secs_f64())
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [memory, resident] = self.memory.map(|pages| pages.bytes() >> 20);
        write!(
            f,
            "{memory} MiB of guest memory, {resident} MiB of it resident"
        )
    }
}

/// What the runs without and with async page faults found.
type Arms<T> = [Vec<T>; 2];

/// Carries out `runs` runs of each arm: off and on, on and off, ... A slow change of the machine's
/// speed falls on both. `run` gets the number of the run.
fn in_turns<T>(runs: usize, mut run: impl FnMut(usize, Apf) -> LabResult<T>) -> LabResult<Arms<T>> {
    let mut arms: Arms<T> = [Vec::new(), Vec::new()];
    for number in 0..runs {
        let mut order = [Apf::Off, Apf::On];
        order.rotate_left(number % 2);
        for apf in order {
            arms[usize::from(apf == Apf::On)].push(run(number, apf)?);
        }
    }
    Ok(arms)
}

/// `1234567` as `1 234 567`.
fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let parts = digits.as_bytes().rchunks(3).rev();
    let parts: Vec<_> = parts.map(String::from_utf8_lossy).collect();
    parts.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Progress, Verbosity};
    use lacuna::Arch;
    use std::sync::Arc;

    fn options(parts: Vec<&'static str>) -> Options {
        Options {
            quick: true,
            scale: 1,
            arch: Arch::X86_64,
            lacuna: Default::default(),
            swap_dir: std::env::temp_dir(),
            progress: Arc::new(Progress::new(0, Verbosity::Quiet)),
            parts,
        }
    }

    /// The report of a quick run of `part`.
    pub fn quick(part: &'static str) -> Report {
        let mut report = Report::new("lacuna lab");
        run(&options(vec![part]), &mut report).expect("a run");
        report
    }

    #[test]
    fn the_published_size_is_divided_by_the_scale() {
        let size = |scale, quick| {
            let options = Options {
                scale,
                quick,
                ..options(vec![])
            };
            let size = Size::of(&options, [2048, 512], 64);
            (size.memory.map(|pages| pages.bytes() >> 20), size.time)
        };
        assert_eq!(size(1, false), ([2048, 512], Duration::from_secs(60)));
        assert_eq!(size(4, false), ([512, 128], Duration::from_secs(15)));
        assert_eq!(size(1, true), ([32, 8], Duration::from_millis(200)));
    }
}
