//! The options of `lacuna snapshot`.

use super::group::PAGES;
use super::{Output, Patience, RunOn};
use crate::exit::EXIT_CODES;
use crate::size::parse_duration;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

/// `lacuna snapshot`.
#[derive(Clone, PartialEq, Debug, Args)]
pub struct SnapshotArgs {
    /// Save or restore
    #[command(subcommand)]
    pub what: SnapshotCommand,
}

/// The subcommands of `lacuna snapshot`.
#[derive(Clone, PartialEq, Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Save a running or paused guest to a folder or an object store; a running one resumes
    /// afterwards
    Save(SaveArgs),
    /// Run a saved guest on from where it was saved
    Restore(Box<RestoreArgs>),
}

/// `lacuna snapshot save`.
#[derive(Clone, PartialEq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct SaveArgs {
    /// The folder to make, or (in builds with the feature s3) a place in an object store, such as
    /// s3://bucket/folder; it must not exist
    pub folder: PathBuf,
    /// The control socket of the guest, as in lacuna run --control SOCKET
    #[arg(long, value_name = "SOCKET")]
    pub control: PathBuf,
    /// Log what the guest writes from now on, so that the next snapshot can have this one as its
    /// base
    #[arg(long, conflicts_with = "base")]
    pub track: bool,
    /// Save only what has changed since this snapshot: the last one, which was saved with --track
    /// or --base, in the same folder or at the same place of a store as the new one
    #[arg(long, value_name = "FOLDER")]
    pub base: Option<PathBuf>,
    /// The limit of a running guest's downtime for its last pages; it is longer if the guest writes
    /// faster than pages are saved [default: 50ms]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub downtime: Option<Duration>,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
}

/// `lacuna snapshot restore`. Makes the processors and the memory of the saved machine.
#[derive(Clone, PartialEq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct RestoreArgs {
    /// The snapshot: a folder of lacuna snapshot save, or in builds with the feature s3 the URL of
    /// one in an object store, s3://bucket/folder
    pub folder: PathBuf,
    /// Start the guest at once: pages are read when it needs them, and in the background. The
    /// snapshot must stay until all are read
    #[arg(long, help_heading = PAGES)]
    pub lazy: bool,
    /// As `Patience::HELP` says
    #[arg(long, value_name = "TIME|forever", help = Patience::HELP, help_heading = PAGES)]
    pub patience: Option<Patience>,
    /// Record which pages the guest needs first, in their order, and write them to this file.
    /// Pages are read in the background only afterwards
    #[arg(long, value_name = "FILE", requires = "lazy", conflicts_with = "replay",
          help_heading = PAGES)]
    pub record: Option<PathBuf>,
    /// How long to record; the end of the run ends it too [default: 10s]
    #[arg(long, value_name = "TIME", requires = "record", value_parser = parse_duration,
          help_heading = PAGES)]
    pub record_for: Option<Duration>,
    /// Read the pages of this record of an earlier restore first, in their order
    #[arg(long, value_name = "FILE", requires = "lazy", help_heading = PAGES)]
    pub replay: Option<PathBuf>,
    /// What does not belong to the machine
    #[command(flatten)]
    pub on: RunOn,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::parse;

    #[test]
    fn save_and_restore() {
        let line = "lacuna snapshot save /s --control c --downtime 5ms --json -";
        let Some(Command::Snapshot(SnapshotArgs {
            what: SnapshotCommand::Save(args),
        })) = parse(line).unwrap().command
        else {
            panic!("{line}");
        };
        assert_eq!(args.downtime, Some(Duration::from_millis(5)));
        for (line, reason) in [
            ("lacuna snapshot", "save"),
            ("lacuna snapshot save /s", "--control <SOCKET>"),
            (
                "lacuna snapshot save /s --control c --track --base b",
                "cannot be used with",
            ),
            ("lacuna snapshot restore", "<FOLDER>"),
            ("lacuna snapshot restore /s --record r", "--lazy"),
            ("lacuna snapshot restore /s --replay r", "--lazy"),
            (
                "lacuna snapshot restore /s --lazy --record-for 1s",
                "--record",
            ),
            (
                "lacuna snapshot restore /s --lazy --record r --replay r",
                "cannot be used with",
            ),
            ("lacuna snapshot restore /s --vcpus 2", "--vcpus"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
