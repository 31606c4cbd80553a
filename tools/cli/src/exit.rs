//! How commands end: codes that scripts can use.

use std::process::ExitCode;

use lacuna::ErrorKind;
use lacuna::migrate::transport::TransportError;
use lacuna_control::{AskError, Refused};
use lacuna_lab::experiment::LabError;

use crate::signals::Signal;

/// What `--help` says of exit codes; docs/commands.md has the same words.
pub const EXIT_CODES: &str = "\
Exit codes:
  0 done, or the guest has moved elsewhere;
  1 the guest failed, or pager-test found a mistake;
  2 wrong arguments or image;
  3 this host could not do it (memory, disk, a page that swap lost),
    or the result could not be written;
  4 the guest was stopped, or its migration or save was cancelled, through
    its control socket;
  5 the other side of a migration has ended, has refused the guest,
    or has sent damaged data;
  129 interrupted by SIGHUP (the terminal was closed);
  130 by Ctrl-C (SIGINT);
  143 by SIGTERM.";

/// How a command ended.
///
/// | code | meaning | for example |
/// |---|---|---|
/// | 0 | done, and the guest said so; or the guest has moved | `lacuna migrate` |
/// | 1 | the guest failed, or a tested handler | a failed check, a triple fault, a hang |
/// | 2 | wrong arguments or image | not an ELF, too little memory for it |
/// | 3 | this host could not do it | no memory, a full swap device, a page that swap lost |
/// | 4 | stopped or cancelled through the control socket | `lacuna migrate --cancel` |
/// | 5 | the other side of a migration failed or refused | it was killed; its swap is full |
/// | 129, 130, 143 | interrupted by SIGHUP, SIGINT, SIGTERM | Ctrl-C |
///
/// A page that the swap device lost is the host's failure, not the guest's. The guest was stopped
/// before it could read the page, and the same run may succeed with another swap folder. So after 1
/// a script looks at the guest's output, after 3 at its machine, and after 5 at the other side's
/// machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// Done.
    Done,
    /// The guest failed, or the handler that `lacuna pager-test` has tested.
    GuestFailed,
    /// Wrong arguments or image; `clap` uses the same code.
    Usage,
    /// The host could not do it.
    Host,
    /// A client of the control socket asked for the end of the run, the save or the migration.
    Stopped,
    /// The other side of a migration has failed, or has refused.
    Peer,
    /// A signal asked for the end; the results until then have been printed.
    Interrupted(Signal),
}

impl Exit {
    /// The process exit code. A signal's code is the one that a shell reports for a process killed
    /// by it.
    pub const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::GuestFailed => 1,
            Self::Usage => 2,
            Self::Host => 3,
            Self::Stopped => 4,
            Self::Peer => 5,
            Self::Interrupted(signal) => signal.exit_code(),
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

impl From<ErrorKind> for Exit {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Request => Self::Usage,
            ErrorKind::Guest => Self::GuestFailed,
            ErrorKind::Host => Self::Host,
            ErrorKind::Peer => Self::Peer,
            ErrorKind::Cancelled => Self::Stopped,
        }
    }
}

/// The exit code and the text for the user.
pub(crate) fn transport_refusal(error: TransportError) -> (Exit, String) {
    (error.kind().into(), error.to_string())
}

/// The exit code and the text for the user.
pub(crate) fn refusal(refused: Refused) -> (Exit, String) {
    (refused.kind.into(), refused.text)
}

/// The exit code and the text for the user.
pub(crate) fn no_answer(error: AskError) -> (Exit, String) {
    (error.kind().into(), error.to_string())
}

impl From<&LabError> for Exit {
    fn from(error: &LabError) -> Self {
        error.kind().into()
    }
}
