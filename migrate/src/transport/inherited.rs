//! A connected socket that this process has inherited.

use super::stream::Socket;
use rustix::fs::OFlags;
use rustix::net::{AddressFamily, SocketType, getpeername, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::io;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// A duplicate of the socket with this number, which this process has inherited.
pub(super) fn inherited(number: i32) -> io::Result<Socket> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what);
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"));
    let info = info.map_err(|_| wrong("no such descriptor is open"))?;
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok());
    // All own descriptors of this process are closed when it executes a program. A client of the
    // control socket, for example, must not name another client's connection.
    if flags.is_none_or(|flags| flags & OFlags::CLOEXEC.bits() != 0) {
        return Err(wrong(
            "the descriptor is this process's own, and not inherited",
        ));
    }
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    connected(pidfd_getfd(this, number, PidfdGetfdFlags::empty())?)
}

/// The connected socket `fd`, which another process has passed.
pub(super) fn connected(fd: OwnedFd) -> io::Result<Socket> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what);
    if sockopt::socket_type(&fd) != Ok(SocketType::STREAM) {
        return Err(wrong("the descriptor is no stream socket"));
    }
    if getpeername(&fd).is_err() {
        return Err(wrong("the descriptor is a socket that is not connected"));
    }
    // The process that made it may have used it without waiting.
    rustix::io::ioctl_fionbio(&fd, false)?;
    match sockopt::socket_domain(&fd)? {
        AddressFamily::UNIX => Ok(Socket::Unix(UnixStream::from(fd))),
        AddressFamily::INET | AddressFamily::INET6 => Ok(Socket::Tcp(TcpStream::from(fd))),
        _ => Err(wrong("the descriptor is neither a UNIX nor a TCP socket")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{FdFlags, fcntl_setfd};
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::os::fd::{AsRawFd as _, OwnedFd};

    #[test]
    fn an_inherited_descriptor_is_a_connected_stream_socket() {
        let refused = |number| {
            let refused = inherited(number).map(drop);
            refused.expect_err("refused").to_string()
        };
        let inherit = |fd: &OwnedFd| {
            fcntl_setfd(fd, FdFlags::empty()).unwrap();
            fd.as_raw_fd()
        };
        let (here, mut there) = UnixStream::pair().unwrap();
        let here = OwnedFd::from(here);
        assert!(refused(here.as_raw_fd()).contains("not inherited"));
        let Ok(Socket::Unix(mut socket)) = inherited(inherit(&here)) else {
            panic!("no UNIX socket");
        };
        socket.write_all(b"abc").unwrap();
        let mut bytes = [0; 3];
        there.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"abc");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let tcp = OwnedFd::from(tcp);
        assert!(matches!(inherited(inherit(&tcp)), Ok(Socket::Tcp(_))));
        let listener = OwnedFd::from(listener);
        assert!(refused(inherit(&listener)).contains("not connected"));
        let (datagrams, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
        assert!(refused(inherit(&OwnedFd::from(datagrams))).contains("no stream socket"));
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        assert!(refused(inherit(&file)).contains("no stream socket"));
        assert!(refused(1 << 20).contains("no such descriptor"));
    }
}
