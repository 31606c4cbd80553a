//! The options of `lacuna offload`.

use super::Output;
use crate::exit::EXIT_CODES;
use crate::size::{parse_duration, parse_rate};
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

/// `lacuna offload`.
#[derive(Clone, PartialEq, Debug, Args)]
pub struct OffloadArgs {
    /// Save or restore
    #[command(subcommand)]
    pub what: OffloadCommand,
}

/// The subcommands of `lacuna offload`.
#[derive(Clone, PartialEq, Debug, Subcommand)]
pub enum OffloadCommand {
    /// Receive a VM of Cloud Hypervisor as a migration, and save it to a folder
    Save(OffloadSaveArgs),
    /// Send a saved VM as a migration to a Cloud Hypervisor that waits for one
    Restore(OffloadRestoreArgs),
}

/// `lacuna offload save`.
#[derive(Clone, PartialEq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct OffloadSaveArgs {
    /// The socket to make: the destination_url of ch-remote send-migration, behind unix:
    #[arg(long, value_name = "SOCKET")]
    pub socket: PathBuf,
    /// The folder to make; it must not exist
    #[arg(long, value_name = "FOLDER")]
    pub to: PathBuf,
    /// What concerns the VMM, and the result
    #[command(flatten)]
    pub on: OffloadOn,
}

/// `lacuna offload restore`.
#[derive(Clone, PartialEq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct OffloadRestoreArgs {
    /// A folder of lacuna offload save
    #[arg(long, value_name = "FOLDER")]
    pub from: PathBuf,
    /// The socket of ch-remote receive-migration, without unix:
    #[arg(long, value_name = "SOCKET")]
    pub to: PathBuf,
    /// Resume the VM before its memory is in place: the VMM needs memory_mode=postcopy, and the VM
    /// needs this process until it ends
    #[arg(long)]
    pub on_demand: bool,
    /// The most that is read in the background, such as 100M/s; 0: only what the VM needs
    /// [default: no limit]
    #[arg(long, value_name = "SIZE/s", requires = "on_demand", value_parser = parse_fill)]
    pub fill: Option<u64>,
    /// What concerns the VMM, and the result
    #[command(flatten)]
    pub on: OffloadOn,
}

/// What both have.
#[derive(Clone, PartialEq, Debug, Args)]
pub struct OffloadOn {
    /// How long the VMM may be silent in the middle of the migration [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub patience: Option<Duration>,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
}

fn parse_fill(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        _ => match parse_rate(text) {
            Ok(rate) => Ok(rate.get()),
            Err(error) => Err(format!("{error}; or 0")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::parse;

    #[test]
    fn save_and_restore() {
        let restore = |options: &str| {
            let line = format!("lacuna offload restore --from f --to s {options}");
            match parse(&line).unwrap().command {
                Some(Command::Offload(OffloadArgs {
                    what: OffloadCommand::Restore(args),
                })) => args,
                other => panic!("{other:?}"),
            }
        };
        assert!(!restore("").on_demand);
        assert_eq!(restore("--on-demand --fill 0").fill, Some(0));
        assert_eq!(restore("--on-demand --fill 1M/s").fill, Some(1 << 20));
        let patience = restore("--patience 2s").on.patience;
        assert_eq!(patience, Some(Duration::from_secs(2)));
        for (line, reason) in [
            ("lacuna offload", "save"),
            ("lacuna offload save --socket s", "--to <FOLDER>"),
            ("lacuna offload restore --from f", "--to <SOCKET>"),
            (
                "lacuna offload restore --from f --to s --fill 0",
                "--on-demand",
            ),
            (
                "lacuna offload restore --from f --to s --on-demand --fill 1M",
                "no size a second",
            ),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
