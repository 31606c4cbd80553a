//! The time in which a connected peer has to introduce itself to a destination.
//!
//! Its first message announces a machine, or says to which migration the connection belongs. The
//! destination writes nothing before it has read that message, except for the handshake of TLS. So
//! the first write above TLS ends the introduction. Until then the time is absolute: a peer that
//! sends a byte now and then gets no more time.

use crate::stream::{Connection, HangUp};
use std::io::{self, IoSlice, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a connected peer may take.
const GREETING: Duration = Duration::from_secs(10);

/// The time of one peer. Clones belong to the same peer.
#[derive(Clone)]
pub(super) struct Introduction {
    until: Instant,
    is_over: Arc<AtomicBool>,
}

impl Introduction {
    /// The introduction of a peer that connects now.
    pub fn begins() -> Self {
        Self {
            until: Instant::now() + GREETING,
            is_over: Arc::default(),
        }
    }

    /// The introduction of a peer whose time has passed.
    #[cfg(test)]
    pub fn passed() -> Self {
        Self {
            until: Instant::now(),
            is_over: Arc::default(),
        }
    }

    /// The remaining time, at most `most`, for a peer that never introduces itself.
    pub fn shortened(&self, most: Duration) -> Self {
        Self {
            until: self.until.min(Instant::now() + most),
            is_over: Arc::default(),
        }
    }

    /// The peer has introduced itself.
    pub fn ends(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Whether its time has not passed, or it has introduced itself.
    pub fn is_open(&self) -> bool {
        self.is_over.load(Ordering::Relaxed) || Instant::now() < self.until
    }

    /// Whether a call may keep waiting.
    pub fn check(&self) -> io::Result<()> {
        match self.is_open() {
            true => Ok(()),
            false => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the other side did not introduce itself within {GREETING:?}"),
            )),
        }
    }
}

/// A connection whose first write ends the introduction.
pub(super) struct Introduced {
    connection: Box<dyn Connection>,
    introduction: Introduction,
    /// Bytes that were read from it, and are returned next.
    first: io::Cursor<Vec<u8>>,
}

impl Introduced {
    /// `connection` lies above a stream of this introduction. The bytes of `first` were read from
    /// it, and are read again.
    pub fn new(
        connection: Box<dyn Connection>,
        introduction: Introduction,
        first: Vec<u8>,
    ) -> Self {
        Self {
            connection,
            introduction,
            first: io::Cursor::new(first),
        }
    }
}

impl Read for Introduced {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.first.read(buffer)? {
            0 => self.connection.read(buffer),
            read => Ok(read),
        }
    }
}

impl Write for Introduced {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.introduction.ends();
        self.connection.write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.introduction.ends();
        self.connection.write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.connection.flush()
    }
}

impl Connection for Introduced {
    fn hang_up(&self) -> io::Result<HangUp> {
        self.connection.hang_up()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::link::Link;
    use crate::transport::stream::{Socket, Stream};
    use std::os::unix::net::UnixStream;

    /// Received bytes give a stranger no more time. The destination's first answer does.
    #[test]
    fn a_stranger_has_little_time() {
        let (here, mut there) = UnixStream::pair().unwrap();
        there.write_all(b"abc").unwrap();
        let introduction = Introduction::passed();
        let link = Arc::new(Link::of_destination(Arc::default()));
        let stream = Stream::accepted(Socket::Unix(here), link, introduction.clone()).unwrap();
        let mut stream = Introduced::new(Box::new(stream), introduction, b"xyz".into());
        let mut bytes = [0; 3];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"xyz", "what has arrived before");
        let error = stream.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        let expected = "did not introduce itself within 10s";
        assert!(error.to_string().contains(expected), "{error}");
        stream.write_all(b"welcome").unwrap();
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"abc");
    }

    #[test]
    fn a_peer_that_has_just_connected_may_speak() {
        let introduction = Introduction::begins();
        introduction.check().unwrap();
        let passed = introduction.shortened(Duration::ZERO);
        assert!(!passed.is_open() && introduction.is_open());
        passed.check().unwrap_err();
        let passed = Introduction::passed().shortened(GREETING);
        assert!(!passed.is_open(), "it does not become longer");
    }

    /// An endlessly sending peer does not keep this side from ending.
    #[test]
    fn a_refused_peer_is_read_for_a_short_time() {
        let (here, mut there) = UnixStream::pair().unwrap();
        there.write_all(b"more").unwrap();
        let link = Arc::new(Link::of_destination(Arc::default()));
        let stream = Stream::accepted(Socket::Unix(here), link, Introduction::passed()).unwrap();
        stream.end_gently();
        there.write_all(b"more").unwrap_err();
    }
}
