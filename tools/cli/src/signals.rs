//! SIGHUP, SIGINT and SIGTERM: the first asks a command to end, the second ends the process.
//!
//! ```text
//! first     the command stops the guest or the experiment and prints the result so far;
//!           exit code 129 for SIGHUP, 130 for SIGINT (Ctrl-C), 143 for SIGTERM
//! second    the process ends at once; nothing is printed; exit code likewise
//! ```
//! A command started with SIGHUP ignored, as `nohup` does, ignores it.
//!
//! The second signal is for a command that cannot react to the first, for example because it waits
//! for an unresponsive swap device.

use std::fmt;
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nix::sys::signal::{SIGHUP, SIGINT, SIGTERM, SigSet, SigmaskHow};
use signal_hook::consts::SIGXFSZ;
use signal_hook::flag;

/// A signal that asks a command to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// SIGHUP: the terminal was closed.
    Hangup,
    /// SIGINT: Ctrl-C on a terminal.
    Interrupt,
    /// SIGTERM: `kill`, a service manager, a batch system.
    Terminate,
}

impl Signal {
    const ALL: [Self; 3] = [Self::Hangup, Self::Interrupt, Self::Terminate];

    /// For `kill(2)`.
    pub const fn of_kernel(self) -> nix::sys::signal::Signal {
        match self {
            Self::Hangup => SIGHUP,
            Self::Interrupt => SIGINT,
            Self::Terminate => SIGTERM,
        }
    }

    const fn number(self) -> i32 {
        self.of_kernel() as i32
    }

    /// 128 + the signal's number, as a shell reports a process that the signal killed.
    pub const fn exit_code(self) -> u8 {
        128 + self.number() as u8
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hangup => "SIGHUP",
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
        })
    }
}

/// The caught signals so far.
#[derive(Clone, Default)]
pub struct Signals {
    /// The number of the last signal, or 0.
    caught: Arc<AtomicUsize>,
}

impl Signals {
    /// Installs handlers for every [`Signal`]. The first signal sets `stop`; a signal that finds
    /// `stop` set, by a signal or by the caller, ends the process. No other thread runs yet, except
    /// a main thread that waits for this one. A signal that comes meanwhile waits until its handler
    /// is complete.
    ///
    /// # Errors
    /// The kernel refuses a handler.
    pub fn catch(stop: &Arc<AtomicBool>) -> io::Result<Self> {
        let all: SigSet = Signal::ALL.into_iter().map(Signal::of_kernel).collect();
        let before = all.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let signals = Self::default();
        let registered = signals.register(stop);
        before.thread_set_mask()?;
        // A waiting main thread does not block signals. A signal that it took before the last
        // action was registered has not set `stop`.
        if signals.caught().is_some() {
            stop.store(true, Ordering::SeqCst);
        }
        registered.map(|()| signals)
    }

    fn register(&self, stop: &Arc<AtomicBool>) -> io::Result<()> {
        for number in wanted() {
            // Actions run in the order of their registration. So the first signal does not exit,
            // because `stop` is set only after the check; the second exits.
            flag::register_usize(number, Arc::clone(&self.caught), number as usize)?;
            let code = 128 + number;
            flag::register_conditional_shutdown(number, code, Arc::clone(stop))?;
            flag::register(number, Arc::clone(stop))?;
        }
        Ok(())
    }

    /// A flag that each signal sets. It is set already if there was one.
    ///
    /// # Errors
    /// The kernel refuses a handler.
    pub fn flag(&self) -> io::Result<Arc<AtomicBool>> {
        let set = Arc::<AtomicBool>::default();
        for number in wanted() {
            flag::register(number, Arc::clone(&set))?;
        }
        if self.caught().is_some() {
            set.store(true, Ordering::SeqCst);
        }
        Ok(set)
    }

    /// The last signal, if there was one.
    pub fn caught(&self) -> Option<Signal> {
        let number = self.caught.load(Ordering::Relaxed);
        let is_it = |signal: &Signal| signal.number() as usize == number;
        Signal::ALL.into_iter().find(is_it)
    }
}

/// The numbers of the signals to catch.
fn wanted() -> impl Iterator<Item = i32> {
    let numbers = Signal::ALL.into_iter().map(Signal::number);
    let is_ignored = |number| has_signal("self", "SigIgn:", number);
    numbers.filter(move |number| *number != SIGHUP as i32 || !is_ignored(*number))
}

/// Whether the process `pid` catches `signal`. Before, the signal would kill it.
pub fn is_caught_by(pid: u32, signal: Signal) -> bool {
    has_signal(&pid.to_string(), "SigCgt:", signal.number())
}

/// Whether a mask of the process, `field` of proc(5), has the signal `number`.
fn has_signal(process: &str, field: &str, number: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mut lines = status.lines();
    let mask = lines.find_map(|line| line.strip_prefix(field));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or(0) >> (number - 1) & 1 == 1
}

/// Catches SIGXFSZ, so that a write beyond the file size limit (`ulimit -f`) fails with EFBIG. By
/// default the signal kills the process. The caller then handles the error like a full disk.
///
/// # Errors
/// The kernel refuses the handler.
pub fn survive_file_size_limit() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}
