//! The options of `lacuna pager`.

use super::group::{AHEAD, CONTROL, MEMORY, PAGES, RESTART, SECURITY};
use super::{Output, Pacing, PagesFrom, Patience, SandboxArgs, address};
use crate::exit::EXIT_CODES;
use crate::size::{Size, parse_duration};
use clap::{Args, Subcommand, ValueEnum};
use lacuna_pager::WhenLost;
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// `lacuna pager`.
#[derive(Clone, PartialEq, Debug, Args)]
#[command(
    after_help = EXIT_CODES,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct PagerArgs {
    /// Something else than to serve
    #[command(subcommand)]
    pub what: Option<PagerCommand>,
    /// Several images, each with its socket, and all other settings from this file instead of the
    /// options; docs/pager.md has an example
    #[arg(long, value_name = "FILE", conflicts_with_all = ["PagedImage", "metrics", "cold_after"])]
    pub config: Option<PathBuf>,
    /// One image
    #[command(flatten)]
    pub image: Option<PagedImage>,
    /// Move the pages of a VM to the host's swap when it has used almost no processor time for this
    /// long. Needs CAP_SYS_NICE, and swap or zram
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = MEMORY)]
    pub cold_after: Option<Duration>,
    /// Keep what the next pager needs in this folder, in /run or /dev/shm. If this pager is killed,
    /// its VMs wait for the next one with the same folder
    #[arg(long, value_name = "FOLDER", help_heading = RESTART)]
    pub state: Option<PathBuf>,
    /// Start this pager in a child process again and again, and keep its VMs' descriptors
    /// meanwhile, as systemd does. SIGHUP starts the program that is installed now
    #[arg(long, requires = "state", help_heading = RESTART)]
    pub park: bool,
    /// As lacuna run --metrics, with the counters of the pager
    #[arg(long, value_name = "IP:PORT", value_parser = address, help_heading = CONTROL)]
    pub metrics: Option<SocketAddr>,
    /// The limits of this process
    #[command(flatten)]
    pub sandbox: SandboxArgs,
    /// Where the result goes
    #[command(flatten, next_help_heading = CONTROL)]
    pub output: Output,
}

/// `lacuna pager COMMAND`.
#[derive(Clone, PartialEq, Debug, Subcommand)]
pub enum PagerCommand {
    /// Show a running pager and its VMs, period by period
    Top(TopArgs),
}

/// `lacuna pager top`.
#[derive(Clone, PartialEq, Debug, Args)]
pub struct TopArgs {
    /// Where the pager's counters are, as in lacuna pager --metrics
    #[arg(value_name = "IP:PORT", value_parser = address)]
    pub at: SocketAddr,
    /// Its periods
    #[command(flatten)]
    pub pacing: Pacing,
}

/// A socket, and what its VMs get: options of the command line, or an `[[image]]` of a file.
#[derive(Clone, PartialEq, Debug, Args, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PagedImage {
    /// The socket to make. A VMM connects to it, such as Firecracker with this path as the
    /// backend_path of a snapshot's mem_backend
    #[arg(
        long,
        value_name = "SOCKET",
        required = false,
        required_unless_present = "config"
    )]
    pub socket: PathBuf,
    /// Where the pages of all VMs come from: zeros, file:PATH, file:BASE+DIFF, snapshot:PATH,
    /// objects:URL or peer:PATH, as in lacuna run --pages-from
    #[arg(long, value_name = "SOURCE", required = false, required_unless_present = "config",
          help_heading = PAGES)]
    #[serde(alias = "layers", deserialize_with = "source")]
    pub from: PagesFrom,
    /// Memory of the source [default: all that it has]
    #[arg(long, value_name = "SIZE", help_heading = PAGES)]
    #[serde(default, deserialize_with = "text")]
    pub memory: Option<Size>,
    /// How long the source may take for a page, until the page is lost; or forever [default: 10s]
    #[arg(long, value_name = "TIME|forever", help_heading = PAGES)]
    #[serde(default, deserialize_with = "text")]
    pub patience: Option<Patience>,
    /// What a VM gets that needs a lost page: poison (SIGBUS at each access), kill (its VMM is
    /// ended by SIGKILL) or hold (it waits). Never zeros [default: poison]
    #[arg(long, value_enum, value_name = "poison|kill|hold", help_heading = PAGES)]
    pub when_lost: Option<Lost>,
    /// Record which pages the first VM needs, in the order of first touch; written to this file
    /// when the VM ends, and at the first signal; without the next three options
    #[arg(long, value_name = "FILE", help_heading = AHEAD)]
    pub record: Option<PathBuf>,
    /// Bring the pages of this record to each VM before it needs them
    #[arg(long, value_name = "FILE", help_heading = AHEAD)]
    pub working_set: Option<PathBuf>,
    /// Bring all pages to each VM before it needs them, those of --working-set first
    #[arg(long, help_heading = AHEAD)]
    #[serde(default)]
    pub fill: bool,
    /// The most bytes that --fill and --working-set bring in a second, to all VMs together
    /// [default: no limit]
    #[arg(long, value_name = "SIZE", help_heading = AHEAD)]
    #[serde(default, deserialize_with = "text")]
    pub fill_rate: Option<Size>,
    /// Serve the VMs of this user too; by default, only this process's user. All users can then
    /// connect, and others are refused
    #[arg(long = "user", value_name = "UID", help_heading = SECURITY)]
    #[serde(default)]
    pub users: Vec<u32>,
    /// Refuse more VMs at a time
    #[arg(long, value_name = "N", help_heading = SECURITY)]
    pub vms_max: Option<u64>,
    /// Refuse a VM if all VMs of the socket would have more memory together
    #[arg(long, value_name = "SIZE", help_heading = SECURITY)]
    #[serde(default, deserialize_with = "text")]
    pub memory_max: Option<Size>,
}

impl PagedImage {
    /// Whether it brings pages before a VM needs them.
    pub fn fills(&self) -> bool {
        self.fill || self.working_set.is_some()
    }

    /// Relative paths are below `folder`.
    pub fn below(&mut self, folder: &Path) {
        self.socket = folder.join(&self.socket);
        self.from.below(folder);
        let files = self.record.iter_mut().chain(&mut self.working_set);
        files.for_each(|file| *file = folder.join(&*file));
    }
}

/// A value that the command line has as text too.
fn text<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: FromStr<Err: fmt::Display>,
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(D::Error::custom)
}

/// A source as text, or a list of memory files.
fn source<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PagesFrom, D::Error> {
    struct Source;

    impl<'de> Visitor<'de> for Source {
        type Value = PagesFrom;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a source such as \"file:PATH\", or a list: a memory file and its diffs")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<PagesFrom, E> {
            text.parse().map_err(E::custom)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<PagesFrom, A::Error> {
            let mut files = Vec::<PathBuf>::new();
            while let Some(file) = all.next_element()? {
                files.push(file);
            }
            PagesFrom::files(files).ok_or_else(|| A::Error::invalid_length(0, &self))
        }
    }
    deserializer.deserialize_any(Source)
}

/// `--when-lost`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lost {
    /// Each access gets SIGBUS
    #[default]
    Poison,
    /// The VMM is ended
    Kill,
    /// The VM waits
    Hold,
}

impl From<Lost> for WhenLost {
    fn from(lost: Lost) -> Self {
        match lost {
            Lost::Poison => Self::Poison,
            Lost::Kill => Self::Kill,
            Lost::Hold => Self::Hold,
        }
    }
}
