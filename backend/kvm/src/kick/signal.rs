//! The signal that kicks vCPUs: one for the process.
//!
//! UNSAFETY: a signal handler, which does nothing.

use std::os::raw::c_int;
use std::sync::{Once, OnceLock};

static SIGNAL: OnceLock<c_int> = OnceLock::new();

/// Why a signal cannot be the one that kicks vCPUs.
#[derive(Debug, thiserror::Error, Clone, Copy, PartialEq, Eq)]
pub enum KickSignalError {
    /// It is no real-time signal, or one of the C library's.
    #[error("signal {0} is no real-time signal: choose one from SIGRTMIN to SIGRTMAX")]
    NotRealTime(i32),
    /// The process has a VM of this backend already, or has chosen before.
    #[error("signal {0} kicks vCPUs already: choose once, before the first VM")]
    Chosen(i32),
}

/// Chooses the signal that kicks vCPUs, in place of `SIGRTMIN+4`, and installs its handler. Call
/// this before the first VM of any backend: memory that another process fills takes a free signal.
///
/// # Errors
/// [`KickSignalError`].
pub fn set_kick_signal(signal: i32) -> Result<(), KickSignalError> {
    choose(&SIGNAL, signal)?;
    install_handler();
    Ok(())
}

fn choose(chosen: &OnceLock<c_int>, signal: c_int) -> Result<(), KickSignalError> {
    if !(libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&signal) {
        return Err(KickSignalError::NotRealTime(signal));
    }
    let set = chosen.set(signal);
    set.map_err(|_| KickSignalError::Chosen(number(chosen)))
}

/// By default the fifth real-time signal that the C library leaves to programs: other code in this
/// process may use the first four.
fn number(chosen: &OnceLock<c_int>) -> c_int {
    *chosen.get_or_init(|| libc::SIGRTMIN() + 4)
}

pub(crate) fn signal() -> c_int {
    number(&SIGNAL)
}

extern "C" fn nothing(_: c_int) {}

pub(crate) fn install_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: 1. all zeros is a valid `sigaction`: an empty mask, and no flags, so that the
        // signal ends system calls with EINTR. 2. The handler does nothing, which is
        // async-signal-safe.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(c_int) as usize;
            libc::sigaction(signal(), &action, std::ptr::null_mut())
        };
        debug_assert_eq!(result, 0, "a valid signal");
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_real_time_signal_is_chosen_before_it_is_used() {
        let last = libc::SIGRTMAX();
        let chosen = OnceLock::new();
        for no in [0, libc::SIGUSR1, libc::SIGRTMIN() - 1, last + 1] {
            assert_eq!(choose(&chosen, no), Err(KickSignalError::NotRealTime(no)));
        }
        assert_eq!(choose(&chosen, last), Ok(()));
        assert_eq!(number(&chosen), last);
        assert_eq!(choose(&chosen, last), Err(KickSignalError::Chosen(last)));

        let used = OnceLock::new();
        let default = number(&used);
        assert_eq!(choose(&used, last), Err(KickSignalError::Chosen(default)));
    }
}
