//! Instructions a second of one program: on a soft vCPU, natively, and in QEMU, in turns.

use crate::experiment::{LabError, LabResult, Options};
use crate::external::{ExternalError, Timed, Timer, native, qemu_tcg};
use crate::first_look::{Found, Row};
use crate::fixture::resident;
use crate::options::guests;
use crate::report::short;
use crate::result::{Better, Measurement, Report};
use crate::stats::{Rounds, Summary, paired, rounds};
use lacuna::soft::VmBuilder;
use lacuna::{Arch, Ending, Image};
use lacuna_guest::{Image as GuestImage, image, native_cpubench};
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);
const MEMORY_MIB: u64 = 256;

/// One loop: its name, its iterations in a slice on a soft vCPU, natively, and in QEMU (a few
/// tenths of a second each), and the wanted rate.
type Test = (&'static str, [u64; 3], Option<f64>);
const TESTS: [Test; 4] = [
    ("alu", [30_000_000, 200_000_000, 60_000_000], Some(600.0)),
    ("mem256k", [20_000_000, 200_000_000, 60_000_000], None),
    ("mem64m", [4_000_000, 40_000_000, 4_000_000], None),
    ("branchy", [3_000, 40_000, 8_000], Some(150.0)),
];

/// The arms.
const OURS: usize = 0;
const NATIVE: usize = 1;
const QEMU: usize = 2;

/// `cpu.x86.*`, beside native and QEMU. For arm64 guests only `cpu.minstr_per_s.*`, because this
/// machine does not run their code natively.
pub fn rates(options: &Options, report: &mut Report) -> LabResult {
    let guest = guests(options.arch).image("cpubench").expect("built in");
    let is_x86 = options.arch == Arch::X86_64;
    let elf = write_image(guest)?;
    let mut machines = 1;
    if is_x86 {
        machines = match run_qemu(&elf, &TESTS[0], 1000) {
            Ok(_) => 3,
            Err(ExternalError::Unavailable(why)) => {
                report.skip("cpu.x86.vs_qemu_tcg.mem64m", why);
                2
            }
            Err(error) => return Err(error.into()),
        };
    }
    for test in &TESTS {
        options.step(format!("instructions a second: {}", test.0))?;
        let divisor = if options.quick { 10 } else { 1 };
        let arms = rounds(machines, super::rounds(options), |machine| {
            let iterations = test.1[machine] / divisor;
            match machine {
                OURS => run_ours(guest, test, iterations),
                NATIVE => run_native(test, iterations),
                _ => rate(&run_qemu(&elf, test, iterations)?),
            }
        })?;
        record(report, is_x86, test, &arms);
    }
    Ok(())
}

/// For the first look: the speed of the first loop on a soft vCPU, and natively in the same rounds.
pub fn first_look(_: &Options, repeats: Rounds) -> LabResult<Found> {
    let [test, ..] = &TESTS;
    let guest = image("cpubench").expect("built in");
    // A tenth of an experiment's slice. The second arm is the null.
    let arms = rounds(3, repeats, |arm| match arm {
        2 => run_ours(guest, test, test.1[OURS] / 10),
        _ => run_native(test, test.1[NATIVE] / 10),
    })?;
    let [native, null, ours] = [0, 1, 2].map(|arm: usize| &arms[arm]);
    let rate = |rates: &[f64]| format!("{}/s", short(1e6 * Summary::of(rates).median));
    let row = Row {
        system: "vCPU",
        what: "an integer loop",
        without: format!("native ({})", rate(native)),
        with: format!("{} instructions", rate(ours)),
        ratio: paired(native, ours),
        null: paired(native, null),
        published: "none",
    };
    let id = format!("cpu.x86.minstr_per_s.{}", test.0);
    let result = Measurement::new(id, "M/s", Better::Higher, Summary::of(ours))
        .param("iterations", test.1[OURS] / 10)
        .arm("native", Summary::of(native));
    let results = vec![result];
    Ok(Found { row, results })
}

fn record(
    report: &mut Report,
    is_x86: bool,
    &(name, iterations, wanted): &Test,
    arms: &[Vec<f64>],
) {
    let new = |id: String, arm: usize| {
        Measurement::new(id, "M/s", Better::Higher, Summary::of(&arms[arm]))
    };
    let prefix = if is_x86 { "cpu.x86" } else { "cpu" };
    let mut result = new(format!("{prefix}.minstr_per_s.{name}"), OURS);
    result = result.param("iterations", iterations[OURS]);
    for (arm, machine) in ["ours", "native", "qemu_tcg"]
        .into_iter()
        .enumerate()
        .skip(NATIVE)
    {
        if let Some(rates) = arms.get(arm) {
            result = result.arm(machine, Summary::of(rates));
        }
    }
    if let (true, Some(wanted)) = (is_x86, wanted) {
        result = result.wanted(wanted);
    }
    report.push(result);
    if is_x86 {
        report.push(new(format!("cpu.x86.native_minstr_per_s.{name}"), NATIVE));
    }
    if let (Some(qemu), "mem64m") = (arms.get(QEMU), name) {
        let ratio = paired(qemu, &arms[OURS]);
        let id = "cpu.x86.vs_qemu_tcg.mem64m";
        report.push(Measurement::new(id, "x", Better::Higher, ratio).wanted(1.0));
    }
}

fn write_image(guest: &GuestImage) -> LabResult<tempfile::TempPath> {
    let write = || {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(guest.file)?;
        Ok::<_, std::io::Error>(file.into_temp_path())
    };
    write().map_err(LabError::io("write the guest image"))
}

fn arguments(test: &Test, iterations: u64) -> [String; 2] {
    [format!("test={}", test.0), format!("iters={iterations}")]
}

fn run_ours(guest: &GuestImage, test: &Test, iterations: u64) -> LabResult<f64> {
    let image = Image::parse(guest.file).map_err(|e| LabError::Guest(e.to_string()))?;
    let builder = VmBuilder {
        arch: image.arch,
        command_line: arguments(test, iterations).join(" "),
        // All memory is resident, because the figure is about instructions.
        ..resident(MEMORY_MIB, 1)
    };
    let timer = Arc::new(Mutex::new(Timer::default()));
    let lines = Arc::clone(&timer);
    let console = move |line: &str| {
        let mut timer = lines.lock().expect("no panic here");
        timer.line(Instant::now(), line);
    };
    let ending = builder.run_to_summary(&image, console)?.ending;
    if !matches!(ending, Ending::Exited(0)) {
        return Err(LabError::Guest(format!("cpubench ended with {ending:?}")));
    }
    let timed = timer.lock().expect("no panic here").done.take();
    rate(&timed.ok_or_else(|| LabError::Guest("cpubench timed nothing".into()))?)
}

fn run_native(test: &Test, iterations: u64) -> LabResult<f64> {
    let arguments = arguments(test, iterations);
    let arguments = arguments.each_ref().map(String::as_str);
    rate(&native(native_cpubench(), &arguments, LIMIT)?)
}

fn run_qemu(elf: &std::path::Path, test: &Test, iterations: u64) -> Result<Timed, ExternalError> {
    let append = arguments(test, iterations).join(" ");
    qemu_tcg(elf, &append, MEMORY_MIB, LIMIT)
}

/// Millions of instructions a second.
fn rate(timed: &Timed) -> LabResult<f64> {
    let rate = timed.rate("insns").map(|rate| rate / 1e6);
    rate.ok_or_else(|| LabError::Guest("cpubench printed no instruction count".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::needs_guests;
    use lacuna_skip::test;

    #[test]
    fn guests_of_both_architectures_say_their_rate() {
        needs_guests();
        for arch in [Arch::X86_64, Arch::Arm64] {
            let guest = guests(arch).image("cpubench").expect("built in");
            assert!(run_ours(guest, &TESTS[0], 1000).unwrap() > 0.0);
        }
    }
}
