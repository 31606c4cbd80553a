//! The options of `lacuna ctl`.

use super::Output;
use crate::exit::EXIT_CODES;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// `lacuna ctl`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct CtlArgs {
    /// The control socket of the guest, as in lacuna run --control SOCKET
    #[arg(value_name = "SOCKET")]
    pub control: PathBuf,
    /// What the guest does
    #[arg(value_enum)]
    pub command: CtlCommand,
    /// Where the result goes
    #[command(flatten)]
    pub output: Output,
}

/// The request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum CtlCommand {
    /// Nothing: show its state
    Status,
    /// It is paused until a resume, also after this command has ended
    Pause,
    /// It runs again, or begins if it was started with --paused
    Resume,
    /// Its run ends
    Stop,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::parse;

    #[test]
    fn a_socket_and_a_request() {
        let cli = parse("lacuna ctl /run/c pause --json -").unwrap();
        let Some(Command::Ctl(args)) = cli.command else {
            panic!("{cli:?}");
        };
        assert_eq!(args.control, PathBuf::from("/run/c"));
        assert_eq!(args.command, CtlCommand::Pause);
        for (line, reason) in [
            ("lacuna ctl /run/c", "<COMMAND>"),
            ("lacuna ctl status", "<COMMAND>"),
            (
                "lacuna ctl /run/c fly",
                "[possible values: status, pause, resume, stop]",
            ),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
