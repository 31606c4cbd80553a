//! The process at the other end of a UNIX socket. `rustix` takes its number to be nonzero, but the
//! number of a process in a foreign PID namespace is 0.
//!
//! UNSAFETY: two options of a socket that have no safe form.

use rustix::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use rustix::io::Errno;
use std::ffi::c_int;

/// `SO_PEERPIDFD`, since Linux 6.5.
const SO_PEERPIDFD: c_int = 77;

/// The process that has made a connection, as it was then.
#[derive(Debug)]
pub struct PeerCredentials {
    /// Its number; `None` if this process's PID namespace has no number for it.
    pub pid: Option<i32>,
    /// Its effective user.
    pub user: u32,
    /// The process itself: a later one with the same number is another. `None` before Linux 6.5, or
    /// if no descriptor is left.
    pub pidfd: Option<OwnedFd>,
}

impl PeerCredentials {
    /// The process at the other end of `socket`.
    ///
    /// # Errors
    /// `NOTSOCK`: it is no socket.
    pub fn of(socket: BorrowedFd<'_>) -> Result<Self, Errno> {
        let nobody = libc::ucred {
            pid: 0,
            uid: u32::MAX,
            gid: u32::MAX,
        };
        // SAFETY: 1. all values are valid for the three integers of a `ucred`.
        let peer = unsafe { option(socket, libc::SO_PEERCRED, nobody) }?;
        // SAFETY: 1. all values are valid for an integer.
        let pidfd = unsafe { option::<c_int>(socket, SO_PEERPIDFD, -1) };
        let pidfd = pidfd.ok().filter(|fd| *fd >= 0);
        Ok(Self {
            pid: (peer.pid != 0).then_some(peer.pid),
            user: peer.uid,
            // SAFETY: 1. the kernel has just made the descriptor, which no other code owns.
            pidfd: pidfd.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
        })
    }
}

/// The value of an option of level `SOL_SOCKET`.
///
/// # Safety
/// All values are valid for a `T`.
unsafe fn option<T>(socket: BorrowedFd<'_>, name: c_int, mut value: T) -> Result<T, Errno> {
    let mut bytes = size_of::<T>() as libc::socklen_t;
    let at = (&raw mut value).cast();
    // SAFETY: 1. the kernel writes at most `bytes` bytes at `at`, which has as many.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            at,
            &raw mut bytes,
        )
    };
    match result {
        0 => Ok(value),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};
    use std::thread;

    /// Set for a child in another PID namespace, whose standard input is a socket of this process.
    const CHILD: &str = "LACUNA_PEER_CHILD";

    #[test]
    fn this_process_is_the_peer() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = PeerCredentials::of(a.as_fd()).unwrap();
        assert_eq!(peer.pid, Some(std::process::id() as i32));
        assert_eq!(peer.user, rustix::process::geteuid().as_raw());
        let (file, _other) = std::io::pipe().unwrap();
        assert_eq!(
            PeerCredentials::of(file.as_fd()).unwrap_err(),
            Errno::NOTSOCK
        );
    }

    /// The child, whose PID namespace has no number for its parent.
    #[test]
    fn child_process() {
        if std::env::var_os(CHILD).is_some() {
            let peer = PeerCredentials::of(std::io::stdin().as_fd()).unwrap();
            assert_eq!(peer.pid, None);
        }
    }

    #[test]
    fn a_peer_in_another_pid_namespace_has_no_number() {
        let (a, _b) = UnixStream::pair().unwrap();
        let child = thread::spawn(|| {
            use rustix::thread::{UnshareFlags, unshare_unsafe};
            // SAFETY: 1. the flag concerns the children of this thread, which ends here.
            unsafe { unshare_unsafe(UnshareFlags::NEWPID) }?;
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "peer::tests::child_process"]);
            command.env(CHILD, "1").stdin(Stdio::from(OwnedFd::from(a)));
            Ok::<_, Errno>(command.output().unwrap())
        });
        match child.join().unwrap() {
            Err(errno) => lacuna_skip::skip(errno),
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stdout);
                assert!(
                    output.status.success() && text.contains("1 passed"),
                    "{text}"
                );
            }
        }
    }
}
