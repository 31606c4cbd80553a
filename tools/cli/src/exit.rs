//! How commands end: codes that scripts can use.

use std::process::ExitCode;

/// How a command ended.
///
/// | code | meaning | for example |
/// |---|---|---|
/// | 0 | done, and the guest said so | |
/// | 1 | the guest failed | a failed check, a triple fault, a lost page |
/// | 2 | wrong arguments or image | not an ELF, too little memory for it |
/// | 3 | this host could not do it | no memory, the swap folder cannot be written |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// Done.
    Done,
    /// The guest failed.
    GuestFailed,
    /// Wrong arguments or image; `clap` uses the same code.
    Usage,
    /// The host could not do it.
    Host,
}

impl Exit {
    /// The process exit code.
    pub const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::GuestFailed => 1,
            Self::Usage => 2,
            Self::Host => 3,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}
