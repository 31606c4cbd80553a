//! The destination's side: accepts connections.

use super::introduction::{Introduced, Introduction};
use super::link::LOOK;
use super::stream::Socket;
use super::{Link, Stream, Tls, TransportError};
use crate::args::{Address, HostPort, TlsFiles};
use crate::socket::Socket as Named;
use lacuna_migrate::stream::{Connection, Connections};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::io;
use std::iter::once;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a source may take for each further connection.
const FURTHER: Duration = Duration::from_secs(30);
/// The most connections that are kept while their peers send nothing.
const SILENT_MAX: usize = 16;

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
                let named = Named::bind(path);
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
        while !cut.load(Ordering::Relaxed) {
            first_readable(once(self.waits.as_fd()));
            let Some((socket, from)) = self.try_accept()? else {
                continue;
            };
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

    /// The next connection with the name of its other end. `None`: there is none now.
    fn try_accept(&self) -> io::Result<Option<(Socket, String)>> {
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
            Ok(accepted) => Ok(Some(accepted)),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::Interrupted
                | io::ErrorKind::ConnectionAborted => Ok(None),
                _ => Err(error),
            },
        }
    }
}

impl AsFd for Waits<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(named) => named.listener().as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

/// Waits for a short time until a socket or a listener in `fds` has something. The position of the
/// first one that has.
fn first_readable<'fd>(fds: impl Iterator<Item = BorrowedFd<'fd>>) -> Option<usize> {
    let mut fds: Vec<_> = fds
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    let look = Timespec::try_from(LOOK).expect("a tenth of a second");
    // Interrupted: as if the time had passed.
    poll(&mut fds, Some(&look)).ok()?;
    fds.iter().position(|fd| !fd.revents().is_empty())
}

/// The connections of one migration, of which the first one has been accepted.
pub struct Accepted<'a> {
    listener: &'a Listener<'a>,
    link: Arc<Link>,
    first: Mutex<Option<Box<dyn Connection>>>,
    /// Connections of which the peers have sent nothing yet, the oldest first. They stay here from
    /// one [`Connections::open`] to the next: each of them may be the source's.
    silent: Mutex<VecDeque<(Socket, Introduction)>>,
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
            silent: Mutex::default(),
        })
    }

    /// What its connections share.
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// The oldest connection of which the peer has sent something, or has ended it. `None`: there
    /// was none for a short time, or a new connection came and is now one of the silent ones.
    fn next_spoken(&self) -> io::Result<Option<(Socket, Introduction)>> {
        let mut silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        silent.retain(|(_, introduction)| introduction.is_open());
        let sockets = silent.iter().map(|(socket, _)| socket.as_fd());
        let ready = first_readable(sockets.chain(once(self.listener.waits.as_fd())));
        // The listener's position is behind the last socket.
        if let Some(spoken) = ready.and_then(|ready| silent.remove(ready)) {
            return Ok(Some(spoken));
        }
        // One connection is accepted between two polls, and only if no peer has spoken. So only a
        // silent connection is closed for a new one. And while a peer that has spoken stalls, the
        // time of the connections in the backlog has not begun.
        if let Some((socket, _)) = self.listener.try_accept()? {
            if silent.len() == SILENT_MAX {
                silent.pop_front();
            }
            silent.push_back((socket, Introduction::begins()));
        }
        Ok(None)
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
        while self.link.is_open() && Instant::now() < deadline {
            let Some((socket, introduction)) = self.next_spoken()? else {
                continue;
            };
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
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::path::PathBuf;
    use std::thread;

    /// A source that has made its first connection, and the destination that has taken it.
    fn begin<'a>(listener: &'a Listener<'a>) -> (Connector, Accepted<'a>) {
        let to = listener.address().clone();
        let source = Connector::new(to, None, Arc::new(Link::of_source())).unwrap();
        let _first = source.open().unwrap();
        let (stream, _) = listener.accept(&Arc::default()).unwrap().unwrap();
        let accepted = Accepted::new(listener, stream).unwrap();
        drop(accepted.open().unwrap());
        (source, accepted)
    }

    /// Peers that say nothing.
    fn strangers(listener: &Listener<'_>, count: usize) -> Vec<TcpStream> {
        let Address::Tcp(place) = listener.address() else {
            panic!("{}", listener.address());
        };
        let connect = |_| TcpStream::connect((place.host.as_str(), place.port)).unwrap();
        (0..count).map(connect).collect()
    }

    /// What the peer of the next connection says.
    fn next_says(accepted: &Accepted<'_>) -> [u8; 5] {
        let mut bytes = [0; 5];
        accepted.open().unwrap().read_exact(&mut bytes).unwrap();
        bytes
    }

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
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/it/migrate/certificates/"
        );
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

    /// A connection that speaks late is kept while another one is taken.
    #[test]
    fn idle_strangers_do_not_keep_the_source_waiting() {
        let any = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = Listener::open(&any, None).unwrap();
        let (source, accepted) = begin(&listener);
        let _strangers = strangers(&listener, 3);
        let mut late = source.open().unwrap();
        let mut second = source.open().unwrap();
        second.write_all(b"guest").unwrap();
        assert_eq!(next_says(&accepted), *b"guest");
        late.write_all(b"later").unwrap();
        assert_eq!(next_says(&accepted), *b"later");
    }

    #[test]
    fn the_oldest_of_too_many_strangers_is_closed() {
        let any = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = Listener::open(&any, None).unwrap();
        let (source, accepted) = begin(&listener);
        let mut strangers = strangers(&listener, SILENT_MAX);
        let mut second = source.open().unwrap();
        second.write_all(b"guest").unwrap();
        assert_eq!(next_says(&accepted), *b"guest");
        assert_eq!(strangers[0].read(&mut [0]).unwrap(), 0, "closed");
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
