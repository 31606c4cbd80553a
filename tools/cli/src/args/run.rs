//! The options of `lacuna run`.

use super::{DirtyArgs, MemoryKind, Output, PagesFrom, Patience, TlsArgs};
use crate::exit::EXIT_CODES;
use crate::size::{Size, parse_duration};
use clap::builder::ArgPredicate;
use clap::{Args, ValueEnum};
use lacuna::memory::HugePages;
use lacuna::migrate::transport::Address;
use lacuna::{CpuModel, VCPUS_MAX};
use lacuna_lab::cores::Cores;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

const _: () = assert!(lacuna_guest::MAX_CPUS as usize == VCPUS_MAX);

/// `lacuna run`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct RunArgs {
    /// A built-in guest, or the path of a kernel (x86-64: ELF64; AArch64: Linux's `Image`). Built
    /// in: bm, verify, membound, touch, zipf, reads, churn, gaps, paced, diskbusy, cpubench,
    /// litmus, maxpage, smc, random, msr, apfstorm, apfhostile, hello; for x86-64 triple; for
    /// AArch64 traps, reset
    #[arg(
        required = false,
        required_unless_present = "incoming",
        default_value_if("incoming", ArgPredicate::IsPresent, "")
    )]
    pub image: String,
    /// Wait at this address (unix:PATH, tcp:HOST:PORT, tls:HOST:PORT, fd:N or exec:COMMAND) for a
    /// guest that lacuna migrate sends, and run it. The guest brings its number of processors and
    /// its memory size
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = [
        "image", "arch", "memory", "vcpus", "apf", "cpu", "pages_from", "seed", "append"
    ])]
    pub incoming: Option<Address>,
    /// After a failed attempt of a source, say why and wait for the guest again, instead of ending
    #[arg(long, requires = "incoming")]
    pub wait_again: bool,
    /// Certificates for --incoming tls:HOST:PORT
    #[command(flatten)]
    pub tls: TlsArgs,
    /// The processor of a built-in guest; a file says by itself which it is for [default: x86_64]
    #[arg(long, value_enum, value_name = "x86_64|arm64")]
    pub arch: Option<Arch>,
    /// The hypervisor
    #[arg(long, value_enum, value_name = "soft|kvm|auto", default_value_t = Backend::Soft)]
    pub backend: Backend,
    /// Guest memory: what the guest sees
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    pub memory: Size,
    /// Where the guest's memory is: pool (frames of a budget of this process, soft only), anonymous
    /// (private memory of Linux), memfd (a shared memory file, soft only) or hugetlbfs (one in
    /// reserved huge pages of 2 MiB, soft only) [default: pool on soft; anonymous on kvm, and for a
    /// handler]
    #[arg(long, value_enum, value_name = "KIND", hide_possible_values = true)]
    pub memory_kind: Option<MemoryKind>,
    /// How much of the guest's memory is resident at a time; for the pool, and on kvm [default: all
    /// of it, and at most 512M]
    #[arg(long, value_name = "SIZE")]
    pub resident: Option<Size>,
    /// Virtual processors; on soft, each takes 2.5M of this process beside --resident
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=VCPUS_MAX as i64))]
    pub vcpus: u32,
    /// The host's processors on which the vCPUs' threads run, one each, as in 0-3 or 0,2
    #[arg(long, value_name = "LIST", conflicts_with = "seed")]
    pub pin: Option<Cores>,
    /// Where pages are swapped out to: file or mem (compressed memory), with ,latency=TIME and
    /// ,dir=PATH if wanted, as in file,dir=/var/tmp,latency=1ms [default: file]
    #[arg(long, value_name = "DEVICE")]
    pub swap: Option<SwapSpec>,
    /// Whether the guest is offered asynchronous page faults
    #[arg(long, value_enum, value_name = "on|off", default_value_t = Apf::On)]
    pub apf: Apf,
    /// Which processor the guest sees: host (all that the backend has) or common (what every
    /// backend has, so that a snapshot can be restored on the other one)
    #[arg(long, value_enum, value_name = "host|common", default_value_t = Cpu::Host)]
    pub cpu: Cpu,
    /// Where host memory is allocated in 2 MiB pages; on kvm not if the guest is all resident and
    /// has a page source [default: never]
    #[arg(long, value_enum, value_name = "never|madvise|always")]
    pub thp: Option<Thp>,
    /// How the guest's writes are tracked
    #[command(flatten)]
    pub dirty: DirtyArgs,
    /// Where the guest's memory comes from, each page when it is first needed: zeros, file:PATH (a
    /// raw memory file), peer:PATH (the socket of a process that serves pages) or handler:PATH (of
    /// one that fills memory itself, with Firecracker's handshake) [default: zeros, without a
    /// source]
    #[arg(long, value_name = "SOURCE")]
    pub pages_from: Option<PagesFrom>,
    /// As `Patience::HELP` says
    #[arg(long, value_name = "TIME|forever", requires = "pages_from", help = Patience::HELP)]
    pub patience: Option<Patience>,
    /// A vCPU that needs a page of the source exits to the run loop, instead of waiting in the
    /// engine
    #[arg(long, requires = "pages_from")]
    pub exit_on_missing: bool,
    /// Run all vCPUs on one thread under a virtual clock: the same seed gives the same run; soft
    /// only
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// A socket to make, through which other processes pause, save, move and stop the guest while
    /// it runs: docs/control.md, lacuna snapshot save, lacuna migrate
    #[arg(long, value_name = "SOCKET", conflicts_with = "seed")]
    pub control: Option<PathBuf>,
    /// Answer HTTP requests for /metrics at this address with the counters of the guest and its
    /// memory, in the text format of Prometheus. Every process that reaches the port can read them;
    /// port 0 lets the system choose one, which is printed
    #[arg(long, value_name = "IP:PORT", conflicts_with = "seed")]
    pub metrics: Option<SocketAddr>,
    /// Write the events of the engine to this file at the end of the run: faults, async page faults
    /// with their tokens, reads, invalidations, aging, exits. Perfetto opens it
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Interrupt the vCPUs a hundred times a second, and print which functions of the image they
    /// were in
    #[arg(long, conflicts_with = "seed")]
    pub profile: bool,
    /// Start the guest paused: its first instruction follows a resume through --control, as by
    /// lacuna ctl SOCKET resume
    #[arg(long, requires = "control", conflicts_with = "incoming")]
    pub paused: bool,
    /// A virtio disk with the bytes of this file, which the guest reads and writes. A guest that
    /// moves or is restored needs the same file there
    #[arg(long, value_name = "FILE", conflicts_with = "seed")]
    pub disk: Option<PathBuf>,
    /// Words that are appended to the guest's command line
    #[arg(
        long,
        value_name = "WORDS",
        default_value = "",
        allow_hyphen_values = true
    )]
    pub append: String,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
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
            () if self.dirty.dirty.is_some() => Some("--dirty"),
            () if self.exit_on_missing && self.has_handler() => {
                Some("--exit-on-missing with a page-fault handler")
            }
            () => None,
        }
    }
}

/// `--arch`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Arch {
    /// 64-bit x86
    #[value(name = "x86_64")]
    X86_64,
    /// 64-bit Arm: AArch64
    Arm64,
}

impl From<Arch> for lacuna::Arch {
    fn from(arch: Arch) -> Self {
        match arch {
            Arch::X86_64 => Self::X86_64,
            Arch::Arm64 => Self::Arm64,
        }
    }
}

/// `--apf`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Apf {
    /// The guest gets an event for a page on its way, and runs another process
    On,
    /// The vCPU waits for its page
    Off,
}

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
    pub fn model(self, arch: lacuna::Arch) -> CpuModel {
        let tsc_khz = || match arch {
            lacuna::Arch::X86_64 => lacuna::kvm::tsc_khz(),
            _ => None,
        };
        match self {
            Self::Host => CpuModel::Host,
            Self::Common => CpuModel::Common { tsc_khz: tsc_khz() },
        }
    }
}

/// `--thp`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Thp {
    /// Nowhere: 4 KiB pages only
    Never,
    /// In ranges for which the VM has advised it
    Madvise,
    /// Wherever 2 MiB are free in one piece
    Always,
}

impl Thp {
    /// The host's word for it.
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

/// As `--thp` takes it.
impl fmt::Display for Thp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("no value is hidden");
        f.write_str(value.get_name())
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
    use crate::args::{Command, JsonTarget};
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
        assert_eq!((args.apf, args.thp), (Apf::On, None));
        assert_eq!(args.dirty.detection(), Detection::Pml);
        assert_eq!(args.dirty.delivery(), Delivery::Bitmap);
        assert_eq!(args.backend, Backend::Soft);
        assert_eq!(Thp::default().pages(), HugePages::default());
        assert_eq!(args.swap, None);
        assert_eq!((args.pages_from, args.exit_on_missing), (None, false));
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
        assert_eq!((args.apf, args.thp), (Apf::Off, Some(Thp::Always)));
        assert_eq!(args.needs_soft(), Some("--seed"));
        assert_eq!(args.dirty.detection(), Detection::WriteProtect);
        assert!(matches!(args.dirty.delivery(), Delivery::Ring { .. }));
        let file = Some(PagesFrom::File("/m".into()));
        assert_eq!((args.pages_from, args.exit_on_missing), (file, true));
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
