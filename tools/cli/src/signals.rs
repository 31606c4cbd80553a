//! Signals: the first one asks a command to end, the second ends it.
//!
//! ```text
//! Ctrl-C      the guest is stopped, or the experiment; the result so far is told; exit code 130
//! again       the process ends at once with the same code
//! ```
//! The second is for a command that is stuck where it does not look, as behind a swap device that
//! answers no more.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;

/// A signal that asks for the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// SIGINT: Ctrl-C on a terminal.
    Interrupt,
    /// SIGTERM: `kill`, a service manager, a batch system.
    Terminate,
}

impl Signal {
    const ALL: [Self; 2] = [Self::Interrupt, Self::Terminate];

    const fn number(self) -> i32 {
        match self {
            Self::Interrupt => SIGINT,
            Self::Terminate => SIGTERM,
        }
    }

    /// 128 + its number.
    pub const fn exit_code(self) -> u8 {
        128 + self.number() as u8
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
        })
    }
}

/// Whether a signal has asked for the end.
#[derive(Clone, Default)]
pub struct Signals {
    /// The number of the last signal; 0 for none.
    caught: Arc<AtomicUsize>,
}

impl Signals {
    /// From here on [`Signal`]s are caught; the first also sets `stop`.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn catch(stop: &Arc<AtomicBool>) -> io::Result<Self> {
        let signals = Self::default();
        for signal in Signal::ALL {
            let number = signal.number();
            // Actions run in this order: the first signal finds `stop` unset, the second set.
            let code = i32::from(signal.exit_code());
            flag::register_conditional_shutdown(number, code, Arc::clone(stop))?;
            let caught = Arc::clone(&signals.caught);
            flag::register_usize(number, caught, number as usize)?;
            flag::register(number, Arc::clone(stop))?;
        }
        Ok(signals)
    }

    /// The signal that came, if one did.
    pub fn caught(&self) -> Option<Signal> {
        let number = self.caught.load(Ordering::Relaxed);
        let is_it = |signal: &Signal| signal.number() as usize == number;
        Signal::ALL.into_iter().find(is_it)
    }
}

/// A write beyond the limit on file sizes (`ulimit -f`) is refused from here on, as one to a full
/// disk is. By default the kernel would kill the process for it.
///
/// # Errors
/// The system's refusal.
pub fn survive_file_size_limit() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}
