//! The command line.
//!
//! ```text
//! lacuna                          the first look: each system without it and with it
//! lacuna run IMAGE [...]          one guest, live
//! lacuna lab [apf pml.score ...]  experiments, or parts of them; without a name, the first look
//! lacuna lab --full               every system, with as many rounds as figures to quote need
//! lacuna doctor                   what this host can do
//! ```

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::exit::EXIT_CODES;
use crate::size::{Size, parse_duration};
use lacuna_soft::HugePages;

/// A guest runs in a fraction of the memory it believes it has.
#[derive(Clone, PartialEq, Eq, Debug, Parser)]
#[command(name = "lacuna", version, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do; without it, a first look at each system, in less than a minute
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What can be done.
#[derive(Clone, PartialEq, Eq, Debug, Subcommand)]
pub enum Command {
    /// Run a guest image and show its progress
    Run(RunArgs),
    /// Measure each system without it and with it: a first look, or chosen experiments
    Lab(LabArgs),
    /// Say what this host can do, what is missing, and how to get it
    Doctor(DoctorArgs),
}

/// `lacuna run`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct RunArgs {
    /// The path of an ELF64 image, or a built-in guest: bm, verify, membound, touch,
    /// zipf, reads, churn, gaps, cpubench, litmus, maxpage, smc, random, msr, apfstorm, apfhostile,
    /// triple, hello
    pub image: String,
    /// The hypervisor: soft is Lacuna's own and needs no KVM, kvm is /dev/kvm, auto is kvm where it
    /// can be used and no option needs soft
    #[arg(long, value_enum, value_name = "soft|kvm|auto", default_value_t = Backend::Soft)]
    pub backend: Backend,
    /// Memory the guest believes it has
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    pub memory: Size,
    /// Host memory it really gets
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    pub resident: Size,
    /// Virtual processors
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub vcpus: u32,
    /// Where pages go: file or mem, with ,latency=1ms and ,dir=PATH if wanted; file on soft, mem on
    /// kvm
    #[arg(long, value_name = "DEVICE")]
    pub swap: Option<SwapSpec>,
    /// Whether the guest is told of pages that are on their way (asynchronous page faults)
    #[arg(long, value_enum, value_name = "on|off", default_value_t = Apf::On)]
    pub apf: Apf,
    /// Where host memory is given out in 2 MiB pages: nowhere, where it is advised, or wherever a
    /// whole one is free
    #[arg(long, value_enum, value_name = "never|madvise|always")]
    pub thp: Option<Thp>,
    /// Run all vCPUs on one thread under the virtual clock: the same seed, the same run
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Words for the guest's own command line
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        allow_hyphen_values = true
    )]
    pub append: String,
    /// How the result is told
    #[command(flatten)]
    pub output: Output,
}

/// `--backend`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Backend {
    /// Lacuna's own hypervisor, in this process
    Soft,
    /// Linux's, by /dev/kvm
    Kvm,
    /// kvm where it can be used and no option needs soft
    Auto,
}

impl RunArgs {
    /// The first option that the kvm backend does not have, in the user's words.
    pub fn needs_soft(&self) -> Option<&'static str> {
        let file = |swap: &SwapSpec| matches!(swap.medium, SwapMedium::File { .. });
        match () {
            () if self.seed.is_some() => Some("--seed"),
            () if self.thp.is_some() => Some("--thp"),
            () if self.swap.as_ref().is_some_and(file) => Some("--swap file"),
            () => None,
        }
    }
}

/// `--apf`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Apf {
    /// The guest is told, and runs another process
    On,
    /// Its vCPUs wait
    Off,
}

/// `--thp`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Thp {
    /// 4 KiB pages only
    Never,
    /// Where the VM has advised it
    Madvise,
    /// Wherever a whole 2 MiB page is free
    Always,
}

impl Thp {
    /// The same, to the host.
    pub const fn pages(self) -> HugePages {
        match self {
            Self::Never => HugePages::Never,
            Self::Madvise => HugePages::Madvise,
            Self::Always => HugePages::Always,
        }
    }
}

/// The host's own default.
impl Default for Thp {
    fn default() -> Self {
        match HugePages::default() {
            HugePages::Never => Self::Never,
            HugePages::Madvise => Self::Madvise,
            HugePages::Always => Self::Always,
        }
    }
}

/// In `--thp`'s own words.
impl fmt::Display for Thp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("no value is hidden");
        f.write_str(value.get_name())
    }
}

/// `lacuna lab`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Args)]
#[command(after_help = EXIT_CODES)]
pub struct LabArgs {
    /// Which experiments (apf, thp, pml, base), or parts of them (pml.score, base.scaling); without
    /// a name a first look at each system, in less than a minute
    pub experiments: Vec<Name>,
    /// All experiments that compare a system with its absence: apf, thp, pml (some 50 minutes)
    #[arg(long, conflicts_with = "experiments")]
    pub full: bool,
    /// Fewer and shorter runs: for CI, not for figures to quote
    #[arg(long)]
    pub quick: bool,
    /// How the result is told
    #[command(flatten)]
    pub output: Output,
}

/// An experiment with its chosen parts; no part means all of them.
pub type Parts = (Experiment, Vec<&'static str>);

/// What `lacuna lab` is to measure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Chosen {
    /// One row of each system.
    FirstLook,
    /// These experiments, each once.
    Parts(Vec<Parts>),
}

impl LabArgs {
    /// What is to be measured.
    pub fn chosen(&self) -> Chosen {
        if self.full {
            let systems = [Experiment::Apf, Experiment::Thp, Experiment::Pml];
            return Chosen::Parts(systems.map(|experiment| (experiment, Vec::new())).into());
        }
        if self.experiments.is_empty() {
            return Chosen::FirstLook;
        }
        let parts_of = |experiment: &Experiment| {
            let named = self.experiments.iter();
            let named = named.filter(|name| name.experiment == *experiment);
            // An experiment that is named as a whole and by a part is measured as a whole.
            let parts: Option<Vec<_>> = named.clone().map(|name| name.part).collect();
            named
                .clone()
                .next()
                .map(|_| (*experiment, parts.unwrap_or_default()))
        };
        let experiments = Experiment::value_variants().iter();
        Chosen::Parts(experiments.filter_map(parts_of).collect())
    }
}

/// The name of an experiment, or of a part of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Name {
    /// The experiment.
    pub experiment: Experiment,
    /// Its part; `None` for all of it.
    pub part: Option<&'static str>,
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, part) = match text.split_once('.') {
            Some((name, part)) => (name, Some(part)),
            None => (text, None),
        };
        let experiment = Experiment::from_str(name, false)
            .map_err(|_| "no such experiment: choose apf, thp, pml or base".to_owned())?;
        let known = |part: &str| {
            let parts = experiment.parts();
            let found = parts.iter().find(|known| **known == part);
            found.copied().ok_or_else(|| {
                let parts = parts.join(", ");
                format!("{name} has no such part: choose one of {parts}")
            })
        };
        Ok(Self {
            experiment,
            part: part.map(known).transpose()?,
        })
    }
}

/// An experiment of the lab.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Experiment {
    /// Asynchronous page faults, on and off: threads that compute and threads that fault
    Apf,
    /// Huge pages: invalidating a range, first touch, reads at random, memory pressure
    Thp,
    /// Dirty logging: what it costs to know which pages a running guest writes
    Pml,
    /// Overcommit: what it costs in memory, a fault, an instruction. Only by name
    Base,
}

impl Experiment {
    const fn parts(self) -> &'static [&'static str] {
        match self {
            Self::Apf => lacuna_lab::apf::PARTS,
            Self::Thp => lacuna_lab::thp::PARTS,
            Self::Pml => lacuna_lab::pml::PARTS,
            Self::Base => lacuna_lab::base::PARTS,
        }
    }
}

/// `lacuna doctor`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct DoctorArgs {
    /// The folder swap files would go to
    #[arg(long, value_name = "PATH")]
    pub swap_dir: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

/// How a result is told.
#[derive(Clone, PartialEq, Eq, Debug, Default, Args)]
pub struct Output {
    /// Write the result as JSON; - is stdout, which then carries nothing else
    #[arg(long, value_name = "FILE")]
    pub json: Option<JsonTarget>,
    /// Show no progress
    #[arg(long)]
    pub quiet: bool,
}

/// Where JSON goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum JsonTarget {
    /// Standard output.
    Stdout,
    /// A file, written anew.
    File(PathBuf),
}

impl FromStr for JsonTarget {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "-" => Self::Stdout,
            path => Self::File(path.into()),
        })
    }
}

/// A swap device, as `--swap` describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SwapSpec {
    /// What holds the pages.
    pub medium: SwapMedium,
    /// Time added to each page, for measurements; zero for none.
    pub latency: Duration,
}

/// What holds swapped pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SwapMedium {
    /// An unlinked file in this folder.
    File {
        /// The folder; the system's temporary one unless told otherwise.
        dir: PathBuf,
    },
    /// Compressed, in memory that is charged to the resident budget.
    Memory,
}

/// A file in the system's temporary folder.
impl Default for SwapSpec {
    fn default() -> Self {
        Self {
            medium: SwapMedium::File {
                dir: std::env::temp_dir(),
            },
            latency: Duration::ZERO,
        }
    }
}

impl FromStr for SwapSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, options) = text.split_once(',').unwrap_or((text, ""));
        let (mut latency, mut dir) = (Duration::ZERO, None);
        for option in options.split(',').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("latency", time)) => {
                    latency = parse_duration(time).map_err(|error| error.to_string())?;
                }
                Some(("dir", path)) if kind == "file" => dir = Some(PathBuf::from(path)),
                Some(("dir", _)) => return Err("only swap on a file has a folder".into()),
                _ => return Err(format!("{option:?} is neither latency=TIME nor dir=PATH")),
            }
        }
        let medium = match kind {
            "file" => SwapMedium::File {
                dir: dir.unwrap_or_else(std::env::temp_dir),
            },
            "mem" => SwapMedium::Memory,
            _ => return Err(format!("{kind:?} is no swap device; use file or mem")),
        };
        Ok(Self { medium, latency })
    }
}

/// In `--swap`'s own words.
impl fmt::Display for SwapSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.medium {
            SwapMedium::File { dir } => write!(f, "file,dir={}", dir.display())?,
            SwapMedium::Memory => write!(f, "mem")?,
        }
        if self.latency > Duration::ZERO {
            write!(f, ",latency={}us", self.latency.as_micros())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    fn run(line: &str) -> RunArgs {
        match parse(line).unwrap().command {
            Some(Command::Run(args)) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn no_command_is_the_first_look() {
        assert_eq!(parse("lacuna").unwrap().command, None);
        assert_eq!(LabArgs::default().chosen(), Chosen::FirstLook);
    }

    #[test]
    fn run_has_the_documented_defaults() {
        let args = run("lacuna run bm");
        assert_eq!(
            (args.memory, args.resident, args.vcpus),
            (Size(2 << 30), Size(512 << 20), 2)
        );
        assert_eq!((args.seed, args.append.as_str()), (None, ""));
        assert_eq!((args.apf, args.thp), (Apf::On, None));
        assert_eq!(args.backend, Backend::Soft);
        assert_eq!(Thp::default().pages(), HugePages::default());
        assert_eq!(args.swap, None);
    }

    #[test]
    fn run_reads_everything() {
        let args = run(
            "lacuna run x.elf --memory 64M --resident 16M --vcpus 4 --seed 7 --quiet \
                        --swap mem,latency=1ms --apf off --thp always --append -v --json -",
        );
        assert_eq!(
            (args.image.as_str(), args.memory, args.vcpus),
            ("x.elf", Size(64 << 20), 4)
        );
        assert_eq!((args.seed, args.append.as_str()), (Some(7), "-v"));
        assert_eq!((args.apf, args.thp), (Apf::Off, Some(Thp::Always)));
        let swap = SwapSpec {
            medium: SwapMedium::Memory,
            latency: Duration::from_millis(1),
        };
        assert_eq!(args.swap, Some(swap));
        assert_eq!(
            args.output,
            Output {
                json: Some(JsonTarget::Stdout),
                quiet: true
            }
        );
    }

    #[test]
    fn swap_devices() {
        let spec: SwapSpec = "file,dir=/var/tmp,latency=250us".parse().unwrap();
        assert_eq!(
            spec.medium,
            SwapMedium::File {
                dir: "/var/tmp".into()
            }
        );
        assert_eq!(spec.latency, Duration::from_micros(250));
        for (text, error) in [
            ("tape", "\"tape\" is no swap device; use file or mem"),
            ("mem,dir=/x", "only swap on a file has a folder"),
            (
                "file,latency=5",
                "\"\" is no unit here; use one of ns us ms s min",
            ),
            ("file,fast", "\"fast\" is neither latency=TIME nor dir=PATH"),
        ] {
            assert_eq!(text.parse::<SwapSpec>(), Err(error.to_owned()));
        }
    }

    #[test]
    fn wrong_arguments_are_refused_with_the_reason() {
        for (line, reason) in [
            ("lacuna run", "<IMAGE>"),
            ("lacuna run bm --vcpus 0", "0 is not in 1..=64"),
            (
                "lacuna run bm --memory much",
                "does not begin with a whole number",
            ),
            ("lacuna lab everything", "invalid value 'everything'"),
            ("lacuna lab --full apf", "cannot be used with"),
            ("lacuna run bm --apf maybe", "[possible values: on, off]"),
            (
                "lacuna run bm --thp maybe",
                "[possible values: never, madvise, always]",
            ),
            ("lacuna walk", "unrecognized subcommand"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
    }

    #[test]
    fn the_lab_runs_what_is_named() {
        let chosen = |line| match parse(line).unwrap().command {
            Some(Command::Lab(args)) => args.chosen(),
            other => panic!("{other:?}"),
        };
        let parts = |parts: &[Parts]| Chosen::Parts(parts.to_vec());
        let whole = |experiment| (experiment, vec![]);
        for line in ["lacuna lab", "lacuna lab --quick --quiet"] {
            assert_eq!(chosen(line), Chosen::FirstLook, "{line}");
        }
        let systems = [Experiment::Apf, Experiment::Thp, Experiment::Pml].map(whole);
        assert_eq!(chosen("lacuna lab --full"), parts(&systems));
        assert_eq!(chosen("lacuna lab apf thp pml"), parts(&systems));
        let both = [Experiment::Apf, Experiment::Base].map(whole);
        assert_eq!(chosen("lacuna lab base apf"), parts(&both));
        let base = [whole(Experiment::Base)];
        assert_eq!(chosen("lacuna lab base base --quick"), parts(&base));
        assert_eq!(chosen("lacuna lab base.fault base"), parts(&base));
        let some = [
            (Experiment::Pml, vec!["harvest", "page"]),
            (Experiment::Base, vec!["scaling"]),
        ];
        let line = "lacuna lab pml.harvest base.scaling pml.page";
        assert_eq!(chosen(line), parts(&some));
    }

    #[test]
    fn a_part_that_does_not_exist_is_refused_with_those_that_do() {
        let refused = |line| parse(line).unwrap_err().to_string();
        let text = refused("lacuna lab pml.pages");
        let parts = "pml has no such part: choose one of score, page, ending, harvest, kvm";
        assert!(text.contains(parts), "{text}");
        let text = refused("lacuna lab pmk.page");
        assert!(text.contains("choose apf, thp, pml or base"), "{text}");
    }
}
