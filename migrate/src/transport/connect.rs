//! The source's side: makes connections.

use super::command::execute;
use super::inherited::inherited;
use super::link::{LOOK, Link};
use super::stream::{Socket, Stream};
use super::tls::Tls;
use super::{Address, HostPort, TlsFiles, TransportError};
use crate::stream::{Connection, Connections};
use lacuna_sync::{Mutex, lock, lock_order};
use std::io;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// How long a host may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// Makes connections to one destination.
pub struct Connector {
    to: Address,
    tls: Option<Tls>,
    link: Arc<Link>,
    /// The first connection, until the migration takes it.
    first: Mutex<Option<Box<dyn Connection>>, lock_order::FirstConnection>,
    /// A connection was made.
    is_used: AtomicBool,
}

impl Connector {
    /// Connections to `to`. `tls` has the files for it, if the address needs some.
    ///
    /// # Errors
    /// [`TransportError`].
    pub fn new(to: Address, tls: Option<&TlsFiles>) -> Result<Self, TransportError> {
        to.check_tls(tls)?;
        Ok(Self {
            to,
            tls: tls.map(Tls::load).transpose()?,
            link: Arc::new(Link::of_source()),
            first: Mutex::new(None),
            is_used: AtomicBool::new(false),
        })
    }

    /// Makes the first connection, so that its error is known before the migration begins.
    ///
    /// # Errors
    /// [`TransportError::Connect`].
    pub(crate) fn connect_first(&self) -> Result<(), TransportError> {
        let connected = self.connect()?;
        *lock(&self.first) = Some(connected);
        Ok(())
    }

    /// The destination.
    pub fn to(&self) -> &Address {
        &self.to
    }

    /// The shared part of its connections.
    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// Whether it can make this many connections.
    pub(crate) fn check_connections(&self, needed: u32) -> Result<(), TransportError> {
        match self.to {
            Address::Fd(_) if needed > 1 => Err(TransportError::Single(self.to.clone())),
            _ => Ok(()),
        }
    }

    fn connect(&self) -> Result<Box<dyn Connection>, TransportError> {
        if self.is_used.swap(true, Ordering::Relaxed) {
            self.check_connections(2)?;
        }
        let stream = self
            .dial()
            .and_then(|socket| Stream::new(socket, Arc::clone(&self.link)));
        let secured = stream.and_then(|stream| match (&self.tls, &self.to) {
            (Some(tls), Address::Tls(place)) => tls.connect(stream, &place.host),
            _ => Ok(Box::new(stream) as Box<dyn Connection>),
        });
        secured.map_err(|error| TransportError::Connect {
            to: self.to.clone(),
            advice: advice(&self.to, &error),
            error,
        })
    }
}

impl Connector {
    /// Dials on a thread of its own. The system may take long to find a host, or to connect to it;
    /// this wait ends when the link says so.
    fn dial(&self) -> io::Result<Socket> {
        let (sender, dialled) = channel();
        let to = self.to.clone();
        let named = thread::Builder::new().name("lacuna-dial".into());
        named.spawn(move || {
            // If nothing waits for the connection any more, it ends.
            let _ = sender.send(dial(&to));
        })?;
        let began = Instant::now();
        loop {
            match dialled.recv_timeout(LOOK) {
                Ok(dialled) => return dialled,
                Err(RecvTimeoutError::Timeout) => self.link.check(began.elapsed())?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(io::Error::other("the thread that dials has failed"));
                }
            }
        }
    }
}

impl Connections for Connector {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        let first = lock(&self.first).take();
        match first {
            Some(stream) => Ok(stream),
            None => self.connect().map_err(io::Error::other),
        }
    }
}

fn dial(to: &Address) -> io::Result<Socket> {
    match to {
        Address::Unix(path) => UnixStream::connect(path).map(Socket::Unix),
        Address::Tcp(place) | Address::Tls(place) => connect(place).map(Socket::Tcp),
        Address::Fd(number) => inherited(*number),
        Address::Exec(command) => {
            execute(command).map(|(stream, end)| Socket::Command(stream, end))
        }
    }
}

/// Tries each address of the host.
fn connect(place: &HostPort) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in (place.host.as_str(), place.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn advice(to: &Address, error: &io::Error) -> &'static str {
    if let Some(advice) = to.advice() {
        return advice;
    }
    match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => {
            "start the destination first, and give the address at which it waits"
        }
        io::ErrorKind::PermissionDenied => "use the user that runs the destination",
        io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable => {
            "see whether the host runs, and whether a firewall lets this port through"
        }
        _ => "see what the destination says",
    }
}
