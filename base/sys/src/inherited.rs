//! Descriptors that a service manager keeps for a process, and gives to its next start:
//! `sd_listen_fds(3)`.
//!
//! UNSAFETY: numbers become descriptors, and a child changes its own before it executes a program.

use rustix::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_getfd, fcntl_setfd};
use std::io;
use std::iter::repeat_n;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// `SD_LISTEN_FDS_START`.
const FIRST: i32 = 3;
/// The kernel's limit on the descriptors of a process is `fs.nr_open`, 2^20.
const MOST: usize = 1 << 20;

static TAKEN: AtomicBool = AtomicBool::new(false);

/// The descriptors that a service manager has given to this process, with their names:
/// `LISTEN_FDS`, `LISTEN_FDNAMES` and `LISTEN_PID`. A second call returns none.
pub fn inherited_descriptors() -> Vec<(String, OwnedFd)> {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let is_for_this_process = variable("LISTEN_PID") == std::process::id().to_string();
    if !is_for_this_process || TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let count = variable("LISTEN_FDS").parse().unwrap_or(0).min(MOST);
    let names = variable("LISTEN_FDNAMES");
    let names = names.split(':').chain(repeat_n("unknown", count));
    let all = (FIRST..).zip(names).take(count);
    all.filter_map(|(number, name)| Some((name.to_owned(), inherited(number)?)))
        .collect()
}

/// The descriptor `number`, if this process has inherited it.
fn inherited(number: i32) -> Option<OwnedFd> {
    // SAFETY: 1. if there is none with the number, or it is not taken, it is given back unused.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    // The library's own descriptors are closed on exec. So this one was open when this program
    // was executed, and no other code owns it.
    match fcntl_getfd(&fd) {
        Ok(flags) if !flags.contains(FdFlags::CLOEXEC) => {}
        _ => {
            let _ = fd.into_raw_fd();
            return None;
        }
    }
    let _ = fcntl_setfd(&fd, FdFlags::CLOEXEC);
    Some(fd)
}

/// `command` will inherit `fds` as its descriptors 3, 4 and so on. The caller sets the variables.
///
/// # Errors
/// No descriptor is left.
pub fn pass_descriptors(command: &mut Command, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    // Behind the numbers that the child overwrites.
    let behind = FIRST + i32::try_from(fds.len()).map_err(|_| Errno::MFILE)?;
    let copies = fds.iter().map(|fd| fcntl_dupfd_cloexec(fd, behind));
    let copies = copies.collect::<Result<Vec<_>, _>>()?;
    let pass = move || {
        for (number, fd) in (FIRST..).zip(&copies) {
            // SAFETY: 1. the child has no other thread, and executes a program behind this: no
            // code of it uses the descriptor that had the number.
            if unsafe { libc::dup2(fd.as_raw_fd(), number) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: 1. behind a fork, `dup2` may be called: it is async-signal-safe.
    unsafe { command.pre_exec(pass) };
    Ok(())
}
