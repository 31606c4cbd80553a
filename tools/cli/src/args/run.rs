//! The options of `lacuna run`.

use super::group::{DEBUGGING, GUEST, MEMORY, MIGRATION, PAGES};
use super::{PagesFrom, Patience, RunOn, TlsArgs};
use crate::exit::EXIT_CODES;
use crate::size::{Size, parse_duration};
use clap::builder::ArgPredicate;
use clap::{Args, ValueEnum};
use lacuna::memory::HugePages;
use lacuna::migrate::transport::Address;
use lacuna::{Apf, Arch, CpuModel, VCPUS_MAX};
use lacuna_lab::cores::Cores;
use lacuna_lab::options::{ARCHS, Value, named};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

const _: () = assert!(lacuna_guest::MAX_CPUS as usize == VCPUS_MAX);

/// `lacuna run`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct RunArgs {
    /// A built-in workload (bm, verify, membound, touch, zipf, churn, paced, diskbusy, gaps, reads
    /// or cpubench), or the path of a kernel (x86-64: ELF64; AArch64: Linux's `Image`).
    /// docs/guide/run.md says what each workload does
    #[arg(
        required = false,
        required_unless_present = "incoming",
        default_value_if("incoming", ArgPredicate::IsPresent, "")
    )]
    pub image: String,
    /// The processor of a built-in guest; a file says by itself which it is for [default: x86_64]
    #[arg(long, value_name = "x86_64|arm64", value_parser = named(ARCHS), help_heading = GUEST)]
    pub arch: Option<Arch>,
    /// Guest memory: what the guest sees
    #[arg(long, value_name = "SIZE", default_value = "2G", help_heading = MEMORY)]
    pub memory: Size,
    /// Virtual processors; on soft, each takes 2.5M of this process beside --resident
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=VCPUS_MAX as i64),
          help_heading = GUEST)]
    pub vcpus: u32,
    /// The host's processors on which the vCPUs' threads run, one each, as in 0-3 or 0,2
    #[arg(long, value_name = "LIST", conflicts_with = "seed", help_heading = GUEST)]
    pub pin: Option<Cores>,
    /// Whether the guest is offered asynchronous page faults
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = named(APF),
          help_heading = GUEST)]
    pub apf: Apf,
    /// Which processor the guest sees: host (all that the backend has) or common (what every
    /// backend has, so that a snapshot can be restored on the other one)
    #[arg(long, value_enum, value_name = "host|common", default_value_t = Cpu::Host,
          help_heading = GUEST)]
    pub cpu: Cpu,
    /// Words that are appended to the guest's command line
    #[arg(long, value_name = "WORDS", default_value = "", allow_hyphen_values = true,
          help_heading = GUEST)]
    pub append: String,
    /// Where the guest's memory comes from, each page when it is first needed: zeros, file:PATH (a
    /// raw memory file), file:BASE+DIFF (and the diffs that Firecracker has saved after it, the
    /// oldest first), snapshot:PATH (the memory of a snapshot, in a folder or at a URL),
    /// objects:URL (a raw memory file in an object store), peer:PATH (the socket of a process that
    /// serves pages) or handler:PATH (of one that fills memory itself, with Firecracker's
    /// handshake) [default: zeros, without a source]
    #[arg(long, value_name = "SOURCE", help_heading = PAGES)]
    pub pages_from: Option<PagesFrom>,
    /// As `Patience::HELP` says
    #[arg(long, value_name = "TIME|forever", requires = "pages_from", help = Patience::HELP,
          help_heading = PAGES)]
    pub patience: Option<Patience>,
    /// A vCPU that needs a page of the source exits to the run loop, instead of waiting in the
    /// engine
    #[arg(long, requires = "pages_from", help_heading = PAGES)]
    pub exit_on_missing: bool,
    /// Wait at this address (unix:PATH, tcp:HOST:PORT, tls:HOST:PORT, fd:N or exec:COMMAND) for a
    /// guest that lacuna migrate sends, and run it. The guest brings its number of processors and
    /// its memory size
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = [
        "image", "arch", "memory", "vcpus", "apf", "cpu", "pages_from", "seed", "append", "paused"
    ], help_heading = MIGRATION)]
    pub incoming: Option<Address>,
    /// After a failed attempt of a source, say why and wait for the guest again, instead of ending
    #[arg(long, requires = "incoming", help_heading = MIGRATION)]
    pub wait_again: bool,
    /// Certificates for --incoming tls:HOST:PORT
    #[command(flatten)]
    pub tls: TlsArgs,
    /// What does not belong to the machine
    #[command(flatten)]
    pub on: RunOn,
    /// Run all vCPUs on one thread under a virtual clock: the same seed gives the same run; soft
    /// only
    #[arg(long, value_name = "N", conflicts_with_all = ["control", "metrics", "disk"],
          help_heading = DEBUGGING)]
    pub seed: Option<u64>,
    /// Interrupt the vCPUs a hundred times a second, and print which functions of the image they
    /// were in
    #[arg(long, conflicts_with = "seed", help_heading = DEBUGGING)]
    pub profile: bool,
}

/// `--backend`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Backend {
    /// Lacuna's own hypervisor, in user space; needs no KVM
    Soft,
    /// Linux's KVM, through /dev/kvm
    Kvm,
    /// kvm if /dev/kvm works and no option needs soft; otherwise soft
    Auto,
}

impl RunArgs {
    /// The first option that only the soft backend has, as the user has written it.
    pub fn needs_soft(&self) -> Option<&'static str> {
        match () {
            () if self.seed.is_some() => Some("--seed"),
            () if self.on.dirty.dirty.is_some() => Some("--dirty"),
            () if self.linux_limit().is_some() => Some("--resident with memory of Linux"),
            () if self.exit_on_missing && self.has_handler() => {
                Some("--exit-on-missing with a page-fault handler")
            }
            () => None,
        }
    }
}

/// `--apf`.
#[rustfmt::skip]
const APF: [Value<Apf>; 2] = [
    ("on", Apf::On, "The guest gets an event for a page on its way, and runs another process"),
    ("off", Apf::Off, "The vCPU waits for its page"),
];

/// `--cpu`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Cpu {
    /// All features that the backend has
    Host,
    /// The features that every backend has
    Common,
}

impl Cpu {
    /// The machine's word for it. The TSC of the common processor has the frequency of this host's
    /// KVM, if there is one, because KVM may be unable to change it.
    pub fn model(self, arch: Arch) -> CpuModel {
        let tsc_khz = || match arch {
            Arch::X86_64 => lacuna::kvm::tsc_khz(),
            _ => None,
        };
        match self {
            Self::Host => CpuModel::Host,
            Self::Common => CpuModel::Common { tsc_khz: tsc_khz() },
        }
    }
}

/// `--thp`.
pub const THP: [Value<HugePages>; 3] = [
    ("never", HugePages::Never, "Nowhere: 4 KiB pages only"),
    (
        "madvise",
        HugePages::Madvise,
        "In ranges for which the VM has advised it",
    ),
    (
        "always",
        HugePages::Always,
        "Wherever 2 MiB are free in one piece",
    ),
];

/// A swap device, as `--swap` describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SwapSpec {
    /// What holds the pages.
    pub medium: SwapMedium,
    /// Time added to each page, for measurements; zero for none.
    pub latency: Duration,
}

/// What holds swapped-out pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SwapMedium {
    /// An unlinked file in this folder.
    File {
        /// The folder. The default is the system's temporary folder.
        dir: PathBuf,
    },
    /// Compressed, in memory that is charged to the resident budget.
    Memory,
}

/// The system's temporary folder. An empty TMPDIR names none.
pub fn temp_dir() -> PathBuf {
    let dir = std::env::temp_dir();
    if dir.as_os_str().is_empty() {
        "/tmp".into()
    } else {
        dir
    }
}

/// A file in the system's temporary folder.
impl Default for SwapSpec {
    fn default() -> Self {
        Self {
            medium: SwapMedium::File { dir: temp_dir() },
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
                Some(("dir", _)) => {
                    return Err("dir=PATH is for swap on a file: file,dir=PATH".into());
                }
                _ => return Err(format!("{option:?} is neither latency=TIME nor dir=PATH")),
            }
        }
        let medium = match kind {
            "file" => SwapMedium::File {
                dir: dir.unwrap_or_else(temp_dir),
            },
            "mem" => SwapMedium::Memory,
            _ => return Err(format!("{kind:?} is no swap device; use file or mem")),
        };
        Ok(Self { medium, latency })
    }
}

/// As `--swap` takes it.
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
    use crate::args::tests::parse;
    use crate::args::{Cli, Command, JsonTarget, Output};
    use clap::CommandFactory;
    use lacuna::dirty::{Delivery, Detection};

    fn run(line: &str) -> RunArgs {
        match parse(line).unwrap().command {
            Some(Command::Run(args)) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn run_has_the_documented_defaults() {
        let args = run("lacuna run bm");
        assert_eq!(
            (args.memory, args.budget(), args.vcpus),
            (Size(2 << 30), Size(512 << 20), 2)
        );
        let little = run("lacuna run bm --memory 16M");
        assert_eq!(
            little.budget(),
            Size(16 << 20),
            "no more than the guest has"
        );
        assert_eq!((args.seed, args.append.as_str()), (None, ""));
        assert_eq!((args.apf, args.on.thp), (Apf::On, None));
        assert_eq!(args.on.dirty.detection(), Detection::Pml);
        assert_eq!(args.on.dirty.delivery(), Delivery::Bitmap);
        assert_eq!(args.on.backend, Backend::Soft);
        assert_eq!(args.on.swap, None);
        assert_eq!((args.pages_from, args.exit_on_missing), (None, false));
    }

    #[test]
    fn help_names_the_workloads_and_has_each_option_in_a_group() {
        let mut cli = Cli::command();
        cli.build();
        let run = cli.find_subcommand("run").unwrap();
        let image = run.get_arguments().find(|arg| arg.is_positional());
        let text = image.and_then(|arg| arg.get_help()).unwrap().to_string();
        let words: Vec<_> = text.split(|c: char| !c.is_alphanumeric()).collect();
        let archs = [lacuna_guest::Arch::X86_64, lacuna_guest::Arch::Arm64];
        for image in archs.iter().flat_map(|arch| arch.images()) {
            assert_eq!(
                words.contains(&image.name),
                !image.is_test,
                "{}",
                image.name
            );
        }
        let snapshot = cli.find_subcommand("snapshot").unwrap();
        for command in [run, snapshot.find_subcommand("restore").unwrap()] {
            for option in command.get_opts() {
                let id = option.get_id();
                let is_grouped = option.get_help_heading().is_some();
                assert!(is_grouped || id == "help", "--{id}: give it a help_heading");
            }
        }
    }

    #[test]
    fn run_reads_everything() {
        let args = run(
            "lacuna run x.elf --memory 64M --resident 16M --vcpus 4 --seed 7 --quiet \
                        --pages-from file:/m --exit-on-missing --swap mem,latency=1ms --apf off \
                        --thp always --dirty wp --delivery ring --append -v --json -",
        );
        assert_eq!(
            (args.image.as_str(), args.memory, args.vcpus),
            ("x.elf", Size(64 << 20), 4)
        );
        assert_eq!((args.seed, args.append.as_str()), (Some(7), "-v"));
        assert_eq!((args.apf, args.on.thp), (Apf::Off, Some(HugePages::Always)));
        assert_eq!(args.needs_soft(), Some("--seed"));
        assert_eq!(args.on.dirty.detection(), Detection::WriteProtect);
        assert!(matches!(args.on.dirty.delivery(), Delivery::Ring { .. }));
        let file = Some(PagesFrom::File("/m".into()));
        assert_eq!((args.pages_from, args.exit_on_missing), (file, true));
        let swap = SwapSpec {
            medium: SwapMedium::Memory,
            latency: Duration::from_millis(1),
        };
        assert_eq!(args.on.swap, Some(swap));
        assert_eq!(
            args.on.output,
            Output {
                json: Some(JsonTarget::Stdout),
                quiet: true
            }
        );
    }

    #[test]
    fn a_guest_that_comes_brings_its_machine() {
        let args = run("lacuna run --incoming unix:/s --backend kvm --resident 16M");
        assert_eq!(args.incoming, Some("unix:/s".parse().unwrap()));
        for option in [
            "bm",
            "--memory 1G",
            "--vcpus 2",
            "--arch arm64",
            "--cpu host",
            "--apf on",
            "--seed 1",
            "--append x",
            "--pages-from zeros",
        ] {
            let error = parse(&format!("lacuna run --incoming unix:/s {option}")).unwrap_err();
            assert!(error.to_string().contains("cannot be used with"), "{error}");
        }
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
            (
                "mem,dir=/x",
                "dir=PATH is for swap on a file: file,dir=PATH",
            ),
            (
                "file,latency=5",
                "\"5\" has no unit; add one of ns us ms s min",
            ),
            ("file,fast", "\"fast\" is neither latency=TIME nor dir=PATH"),
        ] {
            assert_eq!(text.parse::<SwapSpec>(), Err(error.to_owned()));
        }
    }
}
