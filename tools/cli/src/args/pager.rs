//! The options of `lacuna pager`.

use super::{Output, PagesFrom, Patience};
use crate::exit::EXIT_CODES;
use crate::size::Size;
use clap::{ArgGroup, Args, ValueEnum};
use lacuna_pager::WhenLost;
use std::net::SocketAddr;
use std::path::PathBuf;

/// `lacuna pager`.
#[derive(Clone, PartialEq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
#[command(group = ArgGroup::new("fills").args(["fill", "working_set"]).multiple(true))]
pub struct PagerArgs {
    /// The socket to make. A VMM connects to it, such as Firecracker with this path as the
    /// backend_path of a snapshot's mem_backend
    #[arg(long, value_name = "SOCKET")]
    pub socket: PathBuf,
    /// Where the pages of all VMs come from: zeros, file:PATH, file:BASE+DIFF, snapshot:PATH,
    /// objects:URL or peer:PATH, as in lacuna run --pages-from
    #[arg(long, value_name = "SOURCE")]
    pub from: PagesFrom,
    /// Memory of the source [default: all that it has]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Size>,
    /// How long the source may take for a page, until the page is lost; or forever [default: 10s]
    #[arg(long, value_name = "TIME|forever")]
    pub patience: Option<Patience>,
    /// What a VM gets that needs a lost page: poison (SIGBUS at each access), kill (its VMM is
    /// ended by SIGKILL) or hold (it waits). Never zeros
    #[arg(
        long,
        value_enum,
        default_value = "poison",
        value_name = "poison|kill|hold"
    )]
    pub when_lost: Lost,
    /// Record which pages the first VM needs, in the order of first touch; written to this file
    /// when the VM ends, and at the first signal
    #[arg(long, value_name = "FILE", conflicts_with = "fills")]
    pub record: Option<PathBuf>,
    /// Bring the pages of this record to each VM before it needs them
    #[arg(long, value_name = "FILE")]
    pub working_set: Option<PathBuf>,
    /// Bring all pages to each VM before it needs them, those of --working-set first
    #[arg(long)]
    pub fill: bool,
    /// The most bytes that --fill and --working-set bring in a second, to all VMs together
    /// [default: no limit]
    #[arg(long, value_name = "SIZE", requires = "fills")]
    pub fill_rate: Option<Size>,
    /// Serve the VMs of this user too; by default, only this process's user. All users can then
    /// connect, and others are refused
    #[arg(long = "user", value_name = "UID")]
    pub users: Vec<u32>,
    /// As lacuna run --metrics, with the counters of the pager
    #[arg(long, value_name = "IP:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
}

/// `--when-lost`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Lost {
    /// Each access gets SIGBUS
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
