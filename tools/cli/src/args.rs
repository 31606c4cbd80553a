//! The command line.
//!
//! ```text
//! lacuna                          the first look: each mechanism, without it and with it
//! lacuna run IMAGE [...]          one guest, live
//! lacuna serve SOURCE SOCKET      a guest's memory, for run --pages-from peer:SOCKET
//! lacuna pager                    fills the guests' memory of other VMMs
//! lacuna offload                  VMs of Cloud Hypervisor, saved and restored
//! lacuna snapshot save FOLDER     a running guest, saved; restore FOLDER resumes it
//! lacuna migrate ADDRESS          a running guest, moved to lacuna run --incoming ADDRESS
//! lacuna ctl SOCKET REQUEST       a running guest: status, pause, set, stat, top ...
//! lacuna demo NAME                one system in half a minute, off and on
//! lacuna lab [apf pml.score ...]  experiments, or parts of them; without a name, the first look
//! lacuna lab --full               every mechanism, with as many rounds as figures to quote need
//! lacuna test TOOL [...]          one test of the engine, as Linux's selftests of KVM
//! lacuna pager-test [...]         rules for a page-fault handler, of any project
//! lacuna doctor                   what this host can do
//! lacuna manual FOLDER            man pages and completions, for packages
//! ```

mod ctl;
mod demo;
mod dirty;
mod group;
mod lab;
mod machine;
mod memory;
mod migrate;
mod offload;
mod pager;
mod pager_test;
mod pages;
mod run;
mod sandbox;
mod serve;
mod snapshot;
mod test;
mod tls;

pub use ctl::{CtlArgs, CtlCommand, Pacing, SetArgs, ViewArgs, WritesArgs};
pub use demo::{DemoArgs, DemoName};
pub use dirty::{DIRTY, DirtyArgs};
pub use lab::{Chosen, Experiment, LabArgs, Name, Parts, arch_of, repeats};
pub use machine::RunOn;
pub use memory::WrongMemory;
pub use migrate::{MODES, MigrateArgs};
pub use offload::{OffloadArgs, OffloadCommand, OffloadOn, OffloadRestoreArgs, OffloadSaveArgs};
pub use pager::{Lost, PagedImage, PagerArgs, PagerCommand, TopArgs};
pub use pager_test::{CHECK_ONE, PagerTestArgs};
pub use pages::{PagesFrom, Patience};
pub use run::{Backend, Cpu, RunArgs, SwapMedium, SwapSpec, THP, temp_dir};
pub use sandbox::SandboxArgs;
pub use serve::ServeArgs;
pub use snapshot::{RestoreArgs, SaveArgs, SnapshotArgs, SnapshotCommand};
pub use test::{DemandPagingArgs, TestArgs, TestCommand, Tool};

pub use tls::TlsArgs;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, Parser, Subcommand};

use crate::exit::EXIT_CODES;

/// A guest-memory engine: runs virtual machines in a fraction of the memory that they believe they
/// have, and measures what each of its mechanisms gains and costs
#[derive(Clone, PartialEq, Debug, Parser)]
#[command(name = "lacuna", version, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do; without it, a first look at each mechanism, in less than a minute
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// The subcommands.
#[derive(Clone, PartialEq, Debug, Subcommand)]
pub enum Command {
    /// Run a guest image and show its progress
    Run(RunArgs),
    /// Provide a guest's memory to another process, page by page
    Serve(ServeArgs),
    /// Fill the memory of other VMMs' guests, such as Firecracker's, page by page
    Pager(PagerArgs),
    /// Save a VM of Cloud Hypervisor, or restore a saved one, by its migration protocol
    Offload(OffloadArgs),
    /// Save a running guest, or resume a saved one
    Snapshot(SnapshotArgs),
    /// Move a running guest to another process, here or on another host
    Migrate(MigrateArgs),
    /// Ask a running guest for its state, pause it, resume it or stop it; watch its counters or its
    /// writes
    Ctl(CtlArgs),
    /// Show one system in half a minute, without its mechanism and with it
    Demo(DemoArgs),
    /// Measure each mechanism, without it and with it: a first look, or the named experiments
    Lab(LabArgs),
    /// Run one test of the engine with chosen options, as Linux's selftests of KVM
    Test(TestArgs),
    /// Check a page-fault handler, of any project, against the rules of Firecracker's handshake
    PagerTest(PagerTestArgs),
    /// Report what this host can do, what is missing, and how to get it
    Doctor(DoctorArgs),
    /// Write the man pages and the completions for bash, fish and zsh
    #[command(hide = true)]
    Manual(ManualArgs),
}

impl Command {
    /// The file for the trace.
    pub fn trace(&self) -> Option<&Path> {
        match self {
            Self::Run(args) => args.on.trace.as_deref(),
            Self::Snapshot(SnapshotArgs {
                what: SnapshotCommand::Restore(args),
            }) => args.on.trace.as_deref(),
            _ => None,
        }
    }
}

/// `lacuna doctor`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct DoctorArgs {
    /// The folder for swap files
    #[arg(long, value_name = "PATH")]
    pub swap_dir: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

/// `lacuna manual`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub struct ManualArgs {
    /// The share folder below which they are written, such as /usr/share or ~/.local/share
    pub folder: PathBuf,
}

/// The address of a metrics page.
fn address(text: &str) -> Result<SocketAddr, &'static str> {
    let found = text.parse();
    found.map_err(|_| "give an IP address and a port, such as 127.0.0.1:9100")
}

/// Where a result goes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Args)]
pub struct Output {
    /// Write the result as JSON to this file; - is stdout, which then gets no text
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
    /// A file, which is replaced.
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
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
    fn wrong_arguments_are_refused_with_the_reason() {
        for (line, reason) in [
            ("lacuna run", "<IMAGE>"),
            ("lacuna run bm --vcpus 0", "0 is not in 1..=256"),
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
            (
                "lacuna run bm --memory-kind ram",
                "[possible values: pool, anonymous, memfd, hugetlbfs, hugetlbfs-1g]",
            ),
            ("lacuna run bm --metrics 9100", "such as 127.0.0.1:9100"),
            ("lacuna walk", "unrecognized subcommand"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
    }
}
