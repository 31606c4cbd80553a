//! The options of `lacuna ctl`.

use super::{DIRTY, JsonTarget, Output};
use crate::exit::EXIT_CODES;
use crate::size::{Size, parse_duration};
use clap::{Args, Subcommand};
use lacuna::dirty::Detection;
use lacuna_lab::options::{Value, named};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

/// `lacuna ctl`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct CtlArgs {
    /// The control socket of the guest, as in lacuna run --control SOCKET
    #[arg(value_name = "SOCKET")]
    pub control: PathBuf,
    /// The request
    #[command(subcommand)]
    pub command: CtlCommand,
}

/// The request.
#[derive(Clone, PartialEq, Eq, Debug, Subcommand)]
pub enum CtlCommand {
    /// Show the guest's state
    Status(Output),
    /// Pause the guest until a resume, also after this command has ended
    Pause(Output),
    /// Resume the guest, or begin its run if it was started with --paused
    Resume(Output),
    /// End the guest's run
    Stop(Output),
    /// Show the rates of the guest's counters, period by period
    Stat(Pacing),
    /// Change settings while the guest runs; without an option, show them
    Set(SetArgs),
    /// Show live what the guest does, its memory and its settings; keys change the settings
    Top(ViewArgs),
    /// Track the guest's writes, and show how many pages it writes, period by period
    Dirty(WritesArgs),
}

/// How often a monitor shows something, and where.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub struct Pacing {
    /// The length of a period
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1s")]
    pub every: Duration,
    /// End after this many periods; without it, when the guest ends
    #[arg(long, value_name = "N")]
    pub count: Option<NonZeroU64>,
    /// Write a line of JSON for each period to this file; - is stdout, which then gets no text
    #[arg(long, value_name = "FILE")]
    pub json: Option<JsonTarget>,
}

/// `lacuna ctl SOCKET top`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub struct ViewArgs {
    /// The control socket on the other side of a migration, to show both sides
    #[arg(long, value_name = "SOCKET")]
    pub other: Option<PathBuf>,
}

/// `lacuna ctl SOCKET dirty`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub struct WritesArgs {
    /// Its periods
    #[command(flatten)]
    pub pacing: Pacing,
    /// The time of the working set: the pages that the guest has written in it count once
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10s")]
    pub window: Duration,
    /// How writes are detected meanwhile, on soft: pml (each vCPU logs the pages that it writes) or
    /// wp (write protection) [default: as lacuna run --dirty says]
    #[arg(long, value_name = "pml|wp", value_parser = named(DIRTY))]
    pub dirty: Option<Detection>,
}

/// `lacuna ctl SOCKET set`. A setting that is fixed here is refused by name, and nothing changes.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub struct SetArgs {
    /// Whether the guest gets asynchronous page faults
    #[arg(long, value_name = "on|off", value_parser = named(ON_OFF))]
    pub async_faults: Option<bool>,
    /// Whether faults and collapse make huge pages; existing ones stay until they are split
    #[arg(long, value_name = "on|off", value_parser = named(ON_OFF))]
    pub huge_pages: Option<bool>,
    /// How writes are detected while they are logged, on soft
    #[arg(long, value_name = "pml|wp", value_parser = named(DIRTY))]
    pub dirty: Option<Detection>,
    /// How much of its memory may be in the host's memory, at most as much as at its start
    #[arg(long, value_name = "SIZE")]
    pub resident: Option<Size>,
    /// A delay added to each swap transfer and to each page of a page source, to test a slow one
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub source_delay: Option<Duration>,
    /// Where the settings are written
    #[command(flatten)]
    pub output: Output,
}

/// `on` and `off`.
const ON_OFF: [Value<bool>; 2] = [("on", true, "On"), ("off", false, "Off")];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::parse;

    #[test]
    fn a_socket_and_a_request() {
        let parsed = |line| match parse(line).unwrap().command {
            Some(Command::Ctl(args)) => args,
            other => panic!("{other:?}"),
        };
        let args = parsed("lacuna ctl /run/c pause --json -");
        assert_eq!(args.control, PathBuf::from("/run/c"));
        let output = Output {
            json: Some(JsonTarget::Stdout),
            quiet: false,
        };
        assert_eq!(args.command, CtlCommand::Pause(output));
        let args = parsed("lacuna ctl /run/c dirty --count 3 --window 2min --dirty wp");
        let CtlCommand::Dirty(args) = args.command else {
            panic!("{args:?}");
        };
        let pacing = Pacing {
            every: Duration::from_secs(1),
            count: NonZeroU64::new(3),
            json: None,
        };
        assert_eq!(
            (args.pacing, args.dirty),
            (pacing, Some(Detection::WriteProtect))
        );
        assert_eq!(args.window, Duration::from_secs(120));
        let args = parsed("lacuna ctl /run/c set --huge-pages off --resident 8M");
        let CtlCommand::Set(args) = args.command else {
            panic!("{args:?}");
        };
        assert_eq!(
            (args.huge_pages, args.resident, args.async_faults),
            (Some(false), Some(Size(8 << 20)), None)
        );
        for (line, reason) in [
            ("lacuna ctl /run/c", "<COMMAND>"),
            ("lacuna ctl status", "<COMMAND>"),
            ("lacuna ctl /run/c fly", "unexpected argument 'fly' found"),
            ("lacuna ctl /run/c stat --count 0", "'0'"),
            ("lacuna ctl /run/c stat --every 5", "\"5\" has no unit"),
            ("lacuna ctl /run/c set --dirty ring", "'ring'"),
            ("lacuna ctl /run/c pause --every 1s", "'--every'"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
