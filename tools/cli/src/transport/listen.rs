//! The destination's side: accepts connections.

use super::introduction::{Introduced, Introduction};
use super::link::LOOK;
use super::stream::Socket;
use super::{Link, Stream, Tls, TransportError};
use crate::args::{Address, HostPort, TlsFiles};
use crate::socket::Socket as Named;
use lacuna_migrate::stream::{Connection, Connections};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a source may take for each further connection.
const FURTHER: Duration = Duration::from_secs(30);

/// Accepts connections at one address. The socket's file is removed when the value is dropped.
pub struct Listener<'a> {
    at: Address,
    tls: Option<Tls>,
    waits: Waits<'a>,
}

enum Waits<'a> {
    Unix(Named<'a>),
    Tcp(TcpListener),
}

impl<'a> Listener<'a> {
    /// Listens at `at`. A UNIX socket is for this user alone. `tls` has the files for it, if the
    /// address needs some.
    ///
    /// # Errors
    /// [`TransportError`].
    pub fn open(at: &'a Address, tls: Option<&TlsFiles>) -> Result<Self, TransportError> {
        let tls = tls.map(Tls::load).transpose()?;
        let failed = |error: io::Error| TransportError::Listen {
            at: at.clone(),
            advice: advice(&error),
            error,
        };
        let (at, waits) = match at {
            Address::Unix(path) => {
                let named = Named::bind_private(path);
                let named = named.map_err(|(exit, text)| TransportError::Socket(exit, text))?;
                named.listener().set_nonblocking(true).map_err(failed)?;
                (at.clone(), Waits::Unix(named))
            }
            Address::Tcp(place) => {
                let (listener, place) = listen(place).map_err(failed)?;
                (Address::Tcp(place), Waits::Tcp(listener))
            }
            Address::Tls(place) => {
                let (listener, place) = listen(place).map_err(failed)?;
                (Address::Tls(place), Waits::Tcp(listener))
            }
        };
        Ok(Self { at, tls, waits })
    }

    /// The address, with the port that the system has chosen for port 0.
    pub fn address(&self) -> &Address {
        &self.at
    }

    /// Waits for a connection, and returns it with the name of its other end. `None`: a thread or a
    /// signal has set `cut`.
    ///
    /// # Errors
    /// No connection can be accepted.
    pub fn accept(&self, cut: &Arc<AtomicBool>) -> io::Result<Option<(Stream, String)>> {
        let is_wanted = || !cut.load(Ordering::Relaxed);
        while let Some((socket, from)) = self.next(&is_wanted)? {
            let link = Arc::new(Link::of_destination(Arc::clone(cut)));
            // A peer may be gone already.
            if let Ok(stream) = Stream::accepted(socket, link, Introduction::begins()) {
                return Ok(Some((stream, from)));
            }
        }
        Ok(None)
    }

    /// The connection above `stream`.
    fn secure(&self, stream: Stream) -> io::Result<Box<dyn Connection>> {
        let introduction = stream.introduction().cloned();
        let connection: Box<dyn Connection> = match &self.tls {
            Some(tls) => tls.accept(stream)?,
            None => Box::new(stream),
        };
        match introduction {
            Some(introduction) => Ok(Box::new(Introduced::new(connection, introduction))),
            None => Ok(connection),
        }
    }

    /// The next connection. `None`: none `is_wanted` any more.
    fn next(&self, is_wanted: &dyn Fn() -> bool) -> io::Result<Option<(Socket, String)>> {
        while is_wanted() {
            self.wait();
            let accepted = match &self.waits {
                Waits::Unix(named) => named
                    .listener()
                    .accept()
                    .map(|(stream, _)| (Socket::Unix(stream), "a process of this host".into())),
                Waits::Tcp(listener) => listener
                    .accept()
                    .map(|(stream, from)| (Socket::Tcp(stream), from.to_string())),
            };
            match accepted {
                Ok(accepted) => return Ok(Some(accepted)),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock
                    | io::ErrorKind::Interrupted
                    | io::ErrorKind::ConnectionAborted => {}
                    _ => return Err(error),
                },
            }
        }
        Ok(None)
    }

    /// Returns when there may be a connection, and after a short time.
    fn wait(&self) {
        // Interrupted: as if a connection had come.
        let _ = is_readable(match &self.waits {
            Waits::Unix(named) => named.listener().as_fd(),
            Waits::Tcp(listener) => listener.as_fd(),
        });
    }
}

/// Whether something can be read from `fd`, or accepted. Waits for a short time.
fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let look = Timespec::try_from(LOOK).expect("a tenth of a second");
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&look)).is_ok_and(|ready| ready > 0)
}

/// Waits until a peer sends something, or ends the connection, for as long as that is wanted.
fn speaks(socket: &Socket, is_wanted: &dyn Fn() -> bool) -> bool {
    while is_wanted() {
        let fd = match socket {
            Socket::Unix(stream) => stream.as_fd(),
            Socket::Tcp(stream) => stream.as_fd(),
        };
        if is_readable(fd) {
            return true;
        }
    }
    false
}

/// The connections of one migration, of which the first one has been accepted.
pub struct Accepted<'a> {
    listener: &'a Listener<'a>,
    link: Arc<Link>,
    first: Mutex<Option<Box<dyn Connection>>>,
}

impl<'a> Accepted<'a> {
    /// Begins with `first`. A wait for another one ends when its [`Link`] says so.
    ///
    /// # Errors
    /// The other side has no TLS, or not the right certificate.
    pub fn new(listener: &'a Listener<'a>, first: Stream) -> io::Result<Self> {
        let link = Arc::clone(first.link());
        let first = listener.secure(first)?;
        Ok(Self {
            listener,
            link,
            first: Mutex::new(Some(first)),
        })
    }

    /// What its connections share.
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }
}

impl Connections for Accepted<'_> {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        let first = self
            .first
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(first) = first {
            return Ok(first);
        }
        let deadline = Instant::now() + FURTHER;
        let is_wanted = || self.link.is_open() && Instant::now() < deadline;
        while let Some((socket, _)) = self.listener.next(&is_wanted)? {
            // A stranger that says nothing must not keep the source waiting for long.
            let introduction = Introduction::begins();
            if !speaks(&socket, &|| is_wanted() && introduction.is_open()) {
                continue;
            }
            // A stranger may be gone, or have no TLS. The source may be the next peer.
            let stream = Stream::accepted(socket, Arc::clone(&self.link), introduction);
            if let Ok(connection) = stream.and_then(|stream| self.listener.secure(stream)) {
                return Ok(connection);
            }
        }
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the other side made no further connection",
        ))
    }
}

fn listen(place: &HostPort) -> io::Result<(TcpListener, HostPort)> {
    let listener = TcpListener::bind((place.host.as_str(), place.port))?;
    listener.set_nonblocking(true)?;
    let port = listener.local_addr()?.port();
    let host = place.host.clone();
    Ok((listener, HostPort { host, port }))
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "another process has this port: choose another one",
        io::ErrorKind::PermissionDenied => "choose a port from 1024 on",
        _ => "give an address of this host, such as 0.0.0.0 for all of them",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Connector;
    use std::cell::Cell;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;
    use std::thread;

    #[test]
    fn a_port_that_the_system_chooses_is_named() {
        let any = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = Listener::open(&any, None).unwrap();
        assert_ne!(listener.address(), &any);
        let link = Arc::new(Link::of_source());
        let to = listener.address().clone();
        let mut there = Connector::new(to, None, Arc::clone(&link))
            .unwrap()
            .open()
            .unwrap();
        there.write_all(b"guest").unwrap();
        let (mut here, _) = listener.accept(&Arc::default()).unwrap().unwrap();
        let mut bytes = [0; 5];
        here.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"guest");
        assert_eq!((here.link().bytes(), link.bytes()), (5, 5));
        let error = Listener::open(listener.address(), None)
            .map(drop)
            .unwrap_err();
        assert!(error.to_string().contains("choose another one"), "{error}");
    }

    /// A probe of the port between two connections of a migration.
    #[test]
    fn a_stranger_without_tls_does_not_end_a_migration() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/migrate/certificates/");
        let file = |name: &str| PathBuf::from(folder).join(name);
        let files = TlsFiles {
            ca: file("authority.pem"),
            cert: file("host.pem"),
            key: file("host.key"),
        };
        let any = "tls:127.0.0.1:0".parse().unwrap();
        let listener = Listener::open(&any, Some(&files)).unwrap();
        let to = listener.address().clone();
        let Address::Tls(place) = &to else {
            panic!("{to}");
        };
        let place = (place.host.clone(), place.port);
        let link = Arc::new(Link::of_source());
        let connector = Connector::new(to, Some(&files), link).unwrap();
        thread::scope(|scope| {
            let source = scope.spawn(move || {
                let first = connector.open().unwrap();
                drop(TcpStream::connect(place).unwrap());
                let mut second = connector.open().unwrap();
                second.write_all(b"guest").unwrap();
                (first, second)
            });
            let (stream, _) = listener.accept(&Arc::default()).unwrap().unwrap();
            let accepted = Accepted::new(&listener, stream).unwrap();
            let _first = accepted.open().unwrap();
            let mut second = accepted.open().unwrap();
            let mut bytes = [0; 5];
            second.read_exact(&mut bytes).unwrap();
            assert_eq!(&bytes, b"guest");
            accepted.link().check(Duration::from_secs(2)).unwrap();
            drop(source.join().unwrap());
        });
    }

    #[test]
    fn a_flag_ends_the_waiting() {
        let any = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = Listener::open(&any, None).unwrap();
        let cut = Arc::new(AtomicBool::new(true));
        assert!(listener.accept(&cut).unwrap().is_none());
    }

    #[test]
    fn a_peer_that_says_nothing_is_not_waited_for() {
        let (here, there) = UnixStream::pair().unwrap();
        let here = Socket::Unix(here);
        let looks = Cell::new(3);
        assert!(!speaks(&here, &|| looks.replace(looks.get() - 1) > 0));
        (&there).write_all(b"x").unwrap();
        assert!(speaks(&here, &|| true));
        assert!(!speaks(&here, &|| false));
    }

    #[test]
    fn errors_say_what_to_do() {
        for (text, told) in [
            ("unix:/nowhere/socket", "start lacuna run --incoming"),
            ("tcp:127.0.0.1:1", "start lacuna run --incoming"),
        ] {
            let to: Address = text.parse().unwrap();
            let connector = Connector::new(to, None, Arc::new(Link::of_source())).unwrap();
            let error = connector.connect_first().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains(told), "{error}");
        }
        let at = "unix:/nowhere/socket".parse().unwrap();
        let error = Listener::open(&at, None).map(drop).unwrap_err().to_string();
        assert!(error.contains("name a socket in a folder"), "{error}");
    }
}
