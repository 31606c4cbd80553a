//! The destination's side: accepts connections.

use super::candidates::{Candidate, Candidates};
use super::command::execute;
use super::inherited::inherited;
use super::link::{LOOK, Link};
use super::stream::Socket;
use super::tls::Tls;
use super::{Address, HostPort, PrivateSocket, TlsFiles, TransportError};
use crate::stream::{Connection, Connections};
use lacuna_sync::{Mutex, lock, lock_order};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// How long a source may take for each further connection.
const FURTHER: Duration = Duration::from_secs(30);

/// Accepts connections at one address. The socket's file is removed when the value is dropped.
pub struct Listener {
    at: Address,
    link: Arc<Link>,
    candidates: Mutex<(Waits, Candidates), lock_order::IncomingConnections>,
}

enum Waits {
    Unix(PrivateSocket),
    Tcp(TcpListener),
    /// The only connection. It counts as accepted when its peer has sent something. `None`: it was
    /// accepted.
    Single(Option<Socket>),
}

impl Listener {
    /// Listens at `at`. A UNIX socket is for this user alone. `tls` has the files for it, if the
    /// address needs some. When `interrupted` is set, every wait ends, until a guest runs here.
    ///
    /// # Errors
    /// [`TransportError`].
    pub fn open(
        at: &Address,
        tls: Option<&TlsFiles>,
        interrupted: Arc<AtomicBool>,
    ) -> Result<Self, TransportError> {
        at.check_tls(tls)?;
        let tls = tls.map(Tls::load).transpose()?;
        let failed = |error: io::Error| TransportError::Listen {
            at: at.to_string(),
            advice: advice(at, &error),
            error,
        };
        let (at, waits) = match at {
            Address::Unix(path) => {
                let named = PrivateSocket::bind(path)?;
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
            Address::Fd(number) => {
                let socket = inherited(*number).map_err(failed)?;
                (at.clone(), Waits::Single(Some(socket)))
            }
            Address::Exec(_) => (at.clone(), Waits::Single(None)),
        };
        let link = Arc::new(Link::of_destination(interrupted));
        let candidates = Candidates::new(tls, Arc::clone(&link)).map_err(failed)?;
        Ok(Self {
            at,
            link,
            candidates: Mutex::new((waits, candidates)),
        })
    }

    /// The address, with the port that the system has chosen for port 0.
    pub fn address(&self) -> &Address {
        &self.at
    }

    /// The shared part of its connections.
    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// Whether its address is one connection.
    pub(crate) fn is_single(&self) -> bool {
        matches!(self.at, Address::Fd(_) | Address::Exec(_))
    }

    /// Begins to wait for a guest. A command is started for it, and an inherited socket may have
    /// had its only guest.
    pub(crate) fn begin(&self) -> Result<(), TransportError> {
        let failed = |error: io::Error| TransportError::Listen {
            at: self.at.to_string(),
            advice: advice(&self.at, &error),
            error,
        };
        if let Waits::Single(accepted @ None) = &mut lock(&self.candidates).0 {
            *accepted = match &self.at {
                Address::Exec(command) => {
                    let (stream, end) = execute(command).map_err(failed)?;
                    Some(Socket::Command(stream, end))
                }
                _ => return Err(TransportError::Single(self.at.clone())),
            };
        }
        Ok(())
    }

    /// The next connection whose peer has introduced itself, or has failed to. `None`: there was
    /// none for a short time.
    ///
    /// # Errors
    /// No connection can be accepted.
    pub(crate) fn next(&self) -> io::Result<Option<Candidate>> {
        let (waits, candidates) = &mut *lock(&self.candidates);
        if let Some(candidate) = candidates.next() {
            return Ok(Some(candidate));
        }
        is_readable(waits.fd().into_iter().chain([candidates.as_fd()]), LOOK);
        if let Some(candidate) = candidates.next() {
            return Ok(Some(candidate));
        }
        if let Some((socket, from)) = waits.try_accept()? {
            // A peer may be gone already. Without a thread for it, the source connects again.
            let _ = candidates.add(socket, from);
        }
        Ok(None)
    }
}

impl Waits {
    /// Readable if there may be a connection.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Unix(named) => Some(named.listener().as_fd()),
            Self::Tcp(listener) => Some(listener.as_fd()),
            Self::Single(socket) => socket.as_ref().map(AsFd::as_fd),
        }
    }

    /// The next connection with the name of its other end. `None`: there is none now.
    fn try_accept(&mut self) -> io::Result<Option<(Socket, String)>> {
        let accepted = match self {
            Self::Unix(named) => named
                .listener()
                .accept()
                .map(|(stream, _)| (Socket::Unix(stream), "a process of this host".into())),
            Self::Tcp(listener) => listener
                .accept()
                .map(|(stream, from)| (Socket::Tcp(stream), from.to_string())),
            Self::Single(socket) => {
                let accepted = socket.take_if(|it| is_readable([it.as_fd()], Duration::ZERO));
                return Ok(accepted.map(|socket| (socket, "the only connection".into())));
            }
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

/// Waits for at most `time` until one of these is readable. An interruption counts as the end of
/// the time.
fn is_readable<'f>(fds: impl IntoIterator<Item = BorrowedFd<'f>>, time: Duration) -> bool {
    let poll_fd = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
    let mut fds: Vec<_> = fds.into_iter().map(poll_fd).collect();
    let time = Timespec::try_from(time).expect("a short time");
    poll(&mut fds, Some(&time)).is_ok_and(|readable| readable > 0)
}

/// The connections of one migration. The first one has been accepted.
pub struct Accepted<'a> {
    listener: &'a Listener,
    first: Mutex<Option<Box<dyn Connection>>, lock_order::FirstConnection>,
}

impl<'a> Accepted<'a> {
    /// Begins with `first`. A wait for another one ends when the listener's [`Link`] says so.
    pub fn new(listener: &'a Listener, first: Box<dyn Connection>) -> Self {
        let first = Mutex::new(Some(first));
        Self { listener, first }
    }

    /// The shared part of its connections.
    pub(crate) fn link(&self) -> &Arc<Link> {
        self.listener.link()
    }
}

impl Connections for Accepted<'_> {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        let first = lock(&self.first).take();
        if let Some(first) = first {
            return Ok(first);
        }
        if self.listener.is_single() {
            let single = TransportError::Single(self.listener.address().clone());
            return Err(io::Error::other(single));
        }
        let deadline = Instant::now() + FURTHER;
        while self.link().is_open() && Instant::now() < deadline {
            // A stranger may be gone, or have no TLS. The source may be the next peer.
            if let Some(Candidate {
                connection: Ok(connection),
                ..
            }) = self.listener.next()?
            {
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

fn advice(at: &Address, error: &io::Error) -> &'static str {
    if let Some(advice) = at.advice() {
        return advice;
    }
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
    use crate::transport::candidates::CANDIDATES_MAX;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::path::PathBuf;
    use std::thread;

    /// The first message of a source, as far as this side looks at it: a frame without a payload.
    const FIRST: [u8; 12] = [1, 0, 0, 0, 0, 0, 0, 0, b'g', b'u', b's', b't'];

    fn listener(at: &Address, tls: Option<&TlsFiles>) -> Listener {
        Listener::open(at, tls, Arc::default()).unwrap()
    }

    fn source(listener: &Listener, tls: Option<&TlsFiles>) -> Connector {
        let to = listener.address().clone();
        Connector::new(to, tls).unwrap()
    }

    /// Silent peers.
    fn strangers(listener: &Listener, count: usize) -> Vec<TcpStream> {
        let (Address::Tcp(place) | Address::Tls(place)) = listener.address() else {
            panic!("{}", listener.address());
        };
        let connect = |_| TcpStream::connect((place.host.as_str(), place.port)).unwrap();
        (0..count).map(connect).collect()
    }

    /// The next peer that has introduced itself.
    fn next(listener: &Listener) -> Candidate {
        loop {
            if let Some(candidate) = listener.next().unwrap() {
                return candidate;
            }
        }
    }

    /// The first message of the next peer.
    fn next_says(connection: io::Result<Box<dyn Connection>>) -> [u8; 12] {
        let mut bytes = [0; 12];
        connection.unwrap().read_exact(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_port_that_the_system_chooses_is_named() {
        let any = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = listener(&any, None);
        assert_ne!(listener.address(), &any);
        let source = source(&listener, None);
        source.open().unwrap().write_all(&FIRST).unwrap();
        let Candidate { connection, from } = next(&listener);
        assert!(from.starts_with("127.0.0.1:"), "{from}");
        assert_eq!(next_says(connection), FIRST);
        assert_eq!((listener.link().bytes(), source.link().bytes()), (12, 12));
        let error = Listener::open(listener.address(), None, Arc::default())
            .map(drop)
            .unwrap_err();
        assert!(error.to_string().contains("choose another one"), "{error}");
    }

    fn certificates() -> TlsFiles {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/certificates/");
        let file = |name: &str| PathBuf::from(folder).join(name);
        TlsFiles {
            ca: file("authority.pem"),
            cert: file("host.pem"),
            key: file("host.key"),
        }
    }

    /// Silent strangers connect before the first connection of a migration, and others before the
    /// second one.
    #[test]
    fn idle_strangers_do_not_keep_the_source_waiting() {
        let began = Instant::now();
        let tls = cfg!(feature = "tls").then(|| ("tls:127.0.0.1:0", Some(certificates())));
        for (at, tls) in [("tcp:127.0.0.1:0", None)].into_iter().chain(tls) {
            let any = at.parse().unwrap();
            let listener = listener(&any, tls.as_ref());
            let _strangers = strangers(&listener, 5);
            let source = source(&listener, tls.as_ref());
            let stranger = strangers(&listener, 1);
            thread::scope(|scope| {
                let speaking = scope.spawn(|| {
                    let mut first = source.open().unwrap();
                    first.write_all(&FIRST).unwrap();
                    drop(stranger);
                    let mut second = source.open().unwrap();
                    second.write_all(&FIRST).unwrap();
                    (first, second)
                });
                let first = loop {
                    // The stranger that has ended its connection.
                    match next(&listener).connection {
                        Ok(first) => break first,
                        Err(error) => assert!(error.to_string().contains("closed"), "{error}"),
                    }
                };
                let accepted = Accepted::new(&listener, first);
                assert_eq!(next_says(accepted.open()), FIRST);
                assert_eq!(next_says(accepted.open()), FIRST);
                speaking.join().unwrap();
            });
        }
        let waited = began.elapsed();
        assert!(waited < Duration::from_secs(10), "{waited:?}");
    }

    /// A connection that speaks late is kept while another one is taken.
    #[test]
    fn a_late_peer_is_kept() {
        let any = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = listener(&any, None);
        let source = source(&listener, None);
        let mut late = source.open().unwrap();
        // Half of its message.
        late.write_all(&FIRST[..5]).unwrap();
        source.open().unwrap().write_all(&FIRST).unwrap();
        assert_eq!(next_says(next(&listener).connection), FIRST);
        late.write_all(&FIRST[5..]).unwrap();
        assert_eq!(next_says(next(&listener).connection), FIRST);
    }

    #[test]
    fn the_oldest_of_too_many_strangers_is_closed() {
        let any = "tcp:127.0.0.1:0".parse().unwrap();
        let listener = listener(&any, None);
        let mut strangers = strangers(&listener, CANDIDATES_MAX);
        let source = source(&listener, None);
        source.open().unwrap().write_all(&FIRST).unwrap();
        assert_eq!(next_says(next(&listener).connection), FIRST);
        assert_eq!(strangers[0].read(&mut [0]).unwrap(), 0, "closed");
    }

    #[test]
    fn errors_say_what_to_do() {
        for (text, expected) in [
            ("unix:/nowhere/socket", "start the destination first"),
            ("tcp:127.0.0.1:1", "start the destination first"),
        ] {
            let to: Address = text.parse().unwrap();
            let connector = Connector::new(to, None).unwrap();
            let error = connector.connect_first().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains(expected), "{error}");
        }
        let at = "unix:/nowhere/socket".parse().unwrap();
        let error = Listener::open(&at, None, Arc::default()).map(drop);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("name a socket in a folder"), "{error}");
    }
}
