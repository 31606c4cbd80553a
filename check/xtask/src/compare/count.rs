//! Instructions per fault and per access, counted by valgrind's callgrind.
//!
//! `lacuna run --seed` is one thread under a virtual clock. So its number of host instructions is
//! the same in every run, to about ten in a hundred million. Each probe runs a guest twice, with
//! little and with much work. The difference in instructions, divided by the difference in work, is
//! the cost of a unit. The cost of the program's start and end cancels.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::lab::tail;
use super::{Failure, failure};

/// A probe counts as slower above this ratio of instructions: 1 % more.
pub const BAR: f64 = 1.01;
/// Above this difference in the guest's own work, the table mentions it.
const SAME_GUEST: f64 = 0.001;

/// Two runs of one guest with different amounts of work.
#[derive(PartialEq, Eq, Debug)]
pub struct Probe {
    /// Names the result.
    pub name: &'static str,
    /// The unit of work.
    pub unit: Unit,
    /// The guest.
    pub guest: &'static str,
    /// Its memory, in the run with little work and in the run with much.
    pub memory: [&'static str; 2],
    /// The resident part of it.
    pub resident: [&'static str; 2],
    /// The swap device.
    pub swap: &'static str,
    /// Whether the guest is offered asynchronous page faults: `on` or `off`.
    pub apf: &'static str,
    /// Words for the guest's command line.
    pub words: [&'static str; 2],
}

/// A unit of work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// Steps counted by the guest itself: pages touched, words read, instructions.
    Step,
    /// Pages read back from swap.
    SwapIn,
}

/// The common part of most probes: a guest with all of its memory resident.
const RESIDENT: Probe = Probe {
    name: "",
    unit: Unit::Step,
    guest: "cpubench",
    memory: ["64M"; 2],
    resident: ["64M"; 2],
    swap: "mem",
    apf: "on",
    words: [""; 2],
};

/// A guest that reads at random in twice its resident memory.
const SWAPPING: Probe = Probe {
    unit: Unit::SwapIn,
    guest: "reads",
    resident: ["32M"; 2],
    swap: "file",
    words: ["reads=2000", "reads=12000"],
    ..RESIDENT
};

/// The processor of a probe's guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arch {
    /// x86-64.
    X86,
    /// AArch64. A commit without such guests fails these probes.
    Arm64,
}

/// All probes, once for each processor.
pub fn probes() -> impl Iterator<Item = (Arch, &'static Probe)> {
    let archs = [Arch::X86, Arch::Arm64].into_iter();
    archs.flat_map(|arch| PROBES.iter().map(move |probe| (arch, probe)))
}

/// Each has one vCPU.
const PROBES: &[Probe] = &[
    Probe {
        name: "fault.first_touch",
        guest: "touch",
        memory: ["64M", "192M"],
        resident: ["64M", "192M"],
        ..RESIDENT
    },
    Probe {
        name: "fault.swap_in",
        apf: "off",
        ..SWAPPING
    },
    Probe {
        name: "fault.swap_in.apf",
        ..SWAPPING
    },
    Probe {
        name: "access.random_read",
        guest: "reads",
        words: ["reads=2000", "reads=102000"],
        ..RESIDENT
    },
    Probe {
        name: "instruction.mem256k",
        words: ["test=mem256k iters=1000", "test=mem256k iters=101000"],
        ..RESIDENT
    },
    Probe {
        name: "instruction.alu",
        words: ["test=alu iters=1000", "test=alu iters=101000"],
        ..RESIDENT
    },
    Probe {
        name: "instruction.branchy",
        words: ["test=branchy iters=10", "test=branchy iters=110"],
        ..RESIDENT
    },
];

impl Probe {
    /// The name of the result.
    pub fn id(&self, arch: Arch) -> String {
        match arch {
            Arch::X86 => self.name.to_owned(),
            Arch::Arm64 => format!("arm64.{}", self.name),
        }
    }

    /// The arguments of `lacuna run`, in the run with little work and in the run with much.
    fn arguments(&self, arch: Arch) -> [Vec<&'static str>; 2] {
        // Older commits do not know the option.
        let chosen: &[_] = match arch {
            Arch::X86 => &[],
            Arch::Arm64 => &["--arch", "arm64"],
        };
        [0, 1].map(|run| {
            let words = [
                self.guest,
                "--memory",
                self.memory[run],
                "--resident",
                self.resident[run],
                "--swap",
                self.swap,
                "--apf",
                self.apf,
                "--append",
                self.words[run],
            ];
            [&words[..], chosen].concat()
        })
    }
}

/// The counts of one run.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Run {
    instructions: f64,
    units: f64,
    /// Virtual time: about the number of guest instructions.
    guest_ns: f64,
}

/// The cost of one unit in one commit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PerUnit {
    /// Host instructions.
    pub instructions: f64,
    /// Nanoseconds of virtual time: guest instructions, and waits.
    pub guest_ns: f64,
}

impl PerUnit {
    fn between(little: Run, much: Run) -> Result<Self, Failure> {
        let units = much.units - little.units;
        if units <= 0.0 {
            return failure("the run with much work did no more than the other");
        }
        Ok(Self {
            instructions: (much.instructions - little.instructions) / units,
            guest_ns: (much.guest_ns - little.guest_ns) / units,
        })
    }
}

/// A probe of both commits.
pub struct Counted {
    /// The name of the result.
    pub name: String,
    /// The old commit.
    pub old: PerUnit,
    /// The new commit.
    pub new: PerUnit,
}

impl Counted {
    /// New over old.
    pub fn ratio(&self) -> f64 {
        self.new.instructions / self.old.instructions
    }

    /// Whether the new commit executes more instructions than the bar allows.
    pub fn is_slower(&self) -> bool {
        self.ratio() > BAR || self.ratio().is_nan()
    }

    /// Whether the guests did the same work. If not, the ratio is not due to the engine alone.
    pub fn same_guest(&self) -> bool {
        let difference = self.new.guest_ns - self.old.guest_ns;
        difference.abs() <= SAME_GUEST * self.old.guest_ns.abs()
    }
}

/// Runs both runs of `probe` under callgrind with the program `lacuna`; `folder` takes their files.
pub fn per_unit(
    lacuna: &Path,
    (arch, probe): (Arch, &Probe),
    folder: &Path,
) -> Result<PerUnit, Failure> {
    let [little, much] = probe.arguments(arch);
    PerUnit::between(
        run(lacuna, &little, probe.unit, folder)?,
        run(lacuna, &much, probe.unit, folder)?,
    )
}

fn run(lacuna: &Path, arguments: &[&str], unit: Unit, folder: &Path) -> Result<Run, Failure> {
    let report = folder.join("run.json");
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    command.arg(lacuna).arg("run").args(arguments);
    if knows_sandbox(lacuna)? {
        // Valgrind has no `seccomp`.
        command.arg("--no-sandbox");
    }
    command
        .args(["--seed", "1", "--vcpus", "1", "--quiet", "--json"])
        .arg(&report);
    // Without this setting, `memset` of a page is `rep stosb`. Callgrind counts each of its 4096
    // repetitions, and that number hides the rest of a fault.
    command.env(
        "GLIBC_TUNABLES",
        "glibc.cpu.x86_rep_stosb_threshold=1000000000",
    );
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            return failure(format!(
                "valgrind cannot be run (is it installed?): {error}"
            ));
        }
    };
    let printed = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let printed = own_words(&printed) + &String::from_utf8_lossy(&output.stdout);
        return failure(format!("the run failed: {}", tail(&printed, 3)));
    }
    let report = std::fs::read_to_string(&report)
        .map_err(|error| Failure(format!("cannot read {}: {error}", report.display())))?;
    let instructions = collected(&printed);
    let instructions = instructions.ok_or(Failure("callgrind printed no count".into()))?;
    let (units, guest_ns) = work(&report, unit).map_err(Failure)?;
    Ok(Run {
        instructions,
        units,
        guest_ns,
    })
}

/// Whether this commit's `lacuna run` enters a sandbox: commits before it do not know the option.
fn knows_sandbox(lacuna: &Path) -> Result<bool, Failure> {
    let help = Command::new(lacuna).args(["run", "--help"]).output();
    let help =
        help.map_err(|error| Failure(format!("cannot run {}: {error}", lacuna.display())))?;
    Ok(String::from_utf8_lossy(&help.stdout).contains("--no-sandbox"))
}

/// The program's own lines of the output. Valgrind's lines begin with its process id.
fn own_words(printed: &str) -> String {
    let lines = printed.lines().filter(|line| !line.starts_with("=="));
    lines.map(|line| format!("{line}\n")).collect()
}

/// The number in callgrind's line `==123== Collected : 456`.
fn collected(printed: &str) -> Option<f64> {
    let line = printed.lines().find(|line| line.contains("Collected :"))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// Units of work and virtual time in the report of `lacuna run --json`.
fn work(report: &str, unit: Unit) -> Result<(f64, f64), String> {
    let report: Value = serde_json::from_str(report)
        .map_err(|error| format!("the report of lacuna is not JSON: {error}"))?;
    let last = &report["last"];
    let units = match unit {
        Unit::SwapIn => last["swap_in"].as_f64(),
        Unit::Step => last["threads"].as_array().map(|threads| {
            let counters = threads.iter().map(|thread| thread["counter"].as_f64());
            counters.flatten().sum()
        }),
    };
    let seconds = last["elapsed_seconds"].as_f64();
    let seconds = seconds.ok_or("the report of lacuna has no elapsed_seconds")?;
    let units = units.ok_or_else(|| format!("the report of lacuna counts no {unit:?}"))?;
    Ok((units, seconds * 1e9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callgrind_is_read() {
        let printed = "==7== Events    : Ir\n==7== Collected : 114050525\n==7== \n";
        assert_eq!(collected(printed), Some(114_050_525.0));
        assert_eq!(collected("==7== Command: lacuna\n"), None);
        assert_eq!(own_words("==7== x\nno memory\n==7== \n"), "no memory\n");
    }

    /// As `lacuna run --json` prints it, shortened.
    #[test]
    fn work_is_read() {
        let report = r#"{"outcome": "done", "last": {"elapsed_seconds": 0.000002,
            "threads": [{"name": "main", "counter": 0}, {"name": "touch", "counter": 14037}],
            "swap_in": 12, "faults": []}}"#;
        assert_eq!(work(report, Unit::Step), Ok((14037.0, 2000.0)));
        assert_eq!(work(report, Unit::SwapIn), Ok((12.0, 2000.0)));
        assert!(
            work("{}", Unit::Step)
                .unwrap_err()
                .contains("elapsed_seconds")
        );
    }

    fn counted(old: f64, new: f64) -> Counted {
        let per_unit = |instructions| PerUnit {
            instructions,
            guest_ns: 20.0,
        };
        Counted {
            name: PROBES[0].id(Arch::X86),
            old: per_unit(old),
            new: per_unit(new),
        }
    }

    #[test]
    fn start_and_end_cancel() {
        let run = |pages: f64| Run {
            instructions: 9_000.0 + 444.0 * pages,
            units: pages,
            guest_ns: 70.0 + 20.0 * pages,
        };
        let per_unit = PerUnit::between(run(100.0), run(300.0)).unwrap();
        assert_eq!((per_unit.instructions, per_unit.guest_ns), (444.0, 20.0));
        assert!(PerUnit::between(run(100.0), run(100.0)).is_err());
    }

    #[test]
    fn one_percent_is_the_bar() {
        assert!(!counted(1000.0, 1010.0).is_slower());
        assert!(counted(1000.0, 1011.0).is_slower());
        assert!(counted(0.0, 0.0).is_slower(), "not a number");
    }

    #[test]
    fn another_guest_is_noticed() {
        let mut counted = counted(1000.0, 1000.0);
        assert!(counted.same_guest());
        counted.new.guest_ns = 21.0;
        assert!(!counted.same_guest());
    }

    #[test]
    fn probes_have_names_of_their_own() {
        let mut names: Vec<_> = probes().map(|(arch, probe)| probe.id(arch)).collect();
        names.sort_unstable();
        let number = names.len();
        names.dedup();
        assert_eq!(names.len(), number);
        for (arch, probe) in probes() {
            let [little, much] = probe.arguments(arch);
            assert_ne!(little, much, "{}", probe.id(arch));
        }
    }

    #[test]
    fn each_probe_has_a_guest_of_either_processor() {
        let of = |wanted| probes().filter(move |&(arch, _)| arch == wanted);
        assert_eq!(of(Arch::X86).count(), of(Arch::Arm64).count());
        for (arch, probe) in of(Arch::Arm64) {
            assert!(probe.id(arch).starts_with("arm64."));
            let [little, _] = probe.arguments(arch);
            assert!(little.ends_with(&["--arch", "arm64"]), "{little:?}");
        }
        let words = of(Arch::X86).flat_map(|(arch, probe)| probe.arguments(arch).concat());
        assert!(words.into_iter().all(|word| word != "--arch"));
    }
}
