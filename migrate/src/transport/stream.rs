//! One connection, which waits for a silent peer in short steps.

use super::command::CommandEnd;
use super::introduction::Introduction;
use super::link::{LOOK, Link};
use crate::stream::{Connection, HangUp};
use rustix::net::sockopt;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The idle time after which a connection is probed.
const IDLE: Duration = Duration::from_secs(5);
/// The time between two probes.
const PROBES: Duration = Duration::from_secs(5);
/// After so many probes without an answer the host of the peer is gone.
const PROBES_MAX: u32 = 3;
/// How long the bytes of a refused peer are read.
const DRAIN: Duration = Duration::from_secs(1);

/// A socket whose calls end when its [`Link`] says so.
pub struct Stream {
    socket: Socket,
    link: Arc<Link>,
    /// `None`: this side has made the connection.
    introduction: Option<Introduction>,
}

pub(super) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
    /// The stdin and stdout of a command.
    Command(UnixStream, CommandEnd),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) | Self::Command(stream, _) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Socket {
    /// The error, or the exit status if it is the end of a command.
    fn with_status(&self, error: io::Error) -> io::Error {
        match (self, error.kind()) {
            (
                Self::Command(_, end),
                kind @ (io::ErrorKind::UnexpectedEof
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::ConnectionReset),
            ) => io::Error::new(kind, end.in_words()),
            _ => error,
        }
    }
}

impl Stream {
    /// An open connection.
    pub(super) fn new(socket: Socket, link: Arc<Link>) -> io::Result<Self> {
        match &socket {
            Socket::Unix(stream) | Socket::Command(stream, _) => {
                stream.set_read_timeout(Some(LOOK))?;
                stream.set_write_timeout(Some(LOOK))?;
            }
            Socket::Tcp(stream) => {
                stream.set_read_timeout(Some(LOOK))?;
                stream.set_write_timeout(Some(LOOK))?;
                // An answer is 12 bytes long, and the other side waits for it.
                stream.set_nodelay(true)?;
                sockopt::set_socket_keepalive(stream, true)?;
                sockopt::set_tcp_keepidle(stream, IDLE)?;
                sockopt::set_tcp_keepintvl(stream, PROBES)?;
                sockopt::set_tcp_keepcnt(stream, PROBES_MAX)?;
            }
        }
        Ok(Self {
            socket,
            link,
            introduction: None,
        })
    }

    /// A connection that a peer has made. The peer has to introduce itself.
    pub(super) fn accepted(
        socket: Socket,
        link: Arc<Link>,
        introduction: Introduction,
    ) -> io::Result<Self> {
        let mut stream = Self::new(socket, link)?;
        stream.introduction = Some(introduction);
        Ok(stream)
    }

    /// The time in which its peer has to introduce itself.
    pub(super) fn introduction(&self) -> Option<&Introduction> {
        self.introduction.as_ref()
    }

    /// Ends an accepted connection, so that a refused peer can read the written bytes. The system
    /// discards these if bytes of the peer are unread, so this side reads the peer's bytes for a
    /// short time.
    pub(super) fn end_gently(mut self) {
        // It fails only if the other side has ended the connection.
        let _ = match &self.socket {
            Socket::Unix(stream) | Socket::Command(stream, _) => stream.shutdown(Shutdown::Write),
            Socket::Tcp(stream) => stream.shutdown(Shutdown::Write),
        };
        let introduction = self.introduction.as_ref();
        self.introduction = introduction.map(|left| left.shortened(DRAIN));
        while self.read(&mut [0; 4096]).is_ok() {}
    }
}

impl Connection for Stream {
    fn hang_up(&self) -> io::Result<HangUp> {
        // It fails only if the other side has ended the connection.
        Ok(match &self.socket {
            Socket::Unix(stream) | Socket::Command(stream, _) => {
                let stream = stream.try_clone()?;
                Box::new(move || _ = stream.shutdown(Shutdown::Both))
            }
            Socket::Tcp(stream) => {
                let stream = stream.try_clone()?;
                Box::new(move || _ = stream.shutdown(Shutdown::Both))
            }
        })
    }
}

/// Repeats `call` until it ends, or until `link` or the peer's introduction ends the wait.
fn patiently<T>(
    link: &Link,
    introduction: Option<&Introduction>,
    mut call: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let began = Instant::now();
    loop {
        link.check(began.elapsed())?;
        introduction.map_or(Ok(()), Introduction::check)?;
        match call() {
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::TimedOut
                | io::ErrorKind::Interrupted => {}
                _ => return Err(error),
            },
            done => return done,
        }
    }
}

/// The end of the stream is an error: neither side closes it before it has all answers.
impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Self {
            socket,
            link,
            introduction,
        } = self;
        let read = patiently(link, introduction.as_ref(), || match socket {
            Socket::Unix(stream) | Socket::Command(stream, _) => stream.read(buffer),
            Socket::Tcp(stream) => stream.read(buffer),
        });
        let read = read.map_err(|error| socket.with_status(error))?;
        if read == 0 && !buffer.is_empty() {
            let closed = "the other side has closed it";
            return Err(socket.with_status(io::Error::new(io::ErrorKind::UnexpectedEof, closed)));
        }
        link.has_received(read);
        Ok(read)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let Self {
            socket,
            link,
            introduction,
        } = self;
        let written = patiently(link, introduction.as_ref(), || match socket {
            Socket::Unix(stream) | Socket::Command(stream, _) => stream.write_vectored(slices),
            Socket::Tcp(stream) => stream.write_vectored(slices),
        });
        let written = written.map_err(|error| socket.with_status(error))?;
        link.has_sent(written);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that neither reads nor writes is given up in both directions.
    #[test]
    fn a_silent_peer_is_given_up() {
        let (here, _there) = UnixStream::pair().unwrap();
        let link = Arc::new(Link::of_source());
        link.hurry();
        let mut stream = Stream::new(Socket::Unix(here), Arc::clone(&link)).unwrap();
        let error = stream.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        link.renew();
        link.hurry();
        let error = stream.write_all(&vec![0; 64 << 20]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        assert!(link.bytes() > 0);
    }

    #[test]
    fn a_closed_connection_is_told_in_words() {
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        let mut stream = Stream::new(Socket::Unix(here), Arc::new(Link::of_source())).unwrap();
        let error = stream.read_exact(&mut [0; 4]).unwrap_err().to_string();
        assert_eq!(error, "the other side has closed it");
    }
}
