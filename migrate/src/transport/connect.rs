//! The source's side: makes connections.

use super::dial::dial;
use super::dialer::ask;
use super::link::{LOOK, Link};
use super::stream::{Socket, Stream};
use super::tls::Tls;
use super::{Address, TlsFiles, TransportError};
use crate::stream::{Connection, Connections};
use lacuna_sync::{Mutex, lock, lock_order};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Instant;

/// Makes connections to one destination.
pub struct Connector {
    to: Address,
    tls: Option<Tls>,
    /// The process that makes the connections, if this one does not.
    dialer: Option<Arc<OwnedFd>>,
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
        let tls = tls.map(Tls::load).transpose()?;
        Ok(Self::of(to, tls, None))
    }

    /// As [`Connector::new`], for a process in a sandbox. Another process makes the connections
    /// ([`Dialer`](super::Dialer)), and has opened the files that `tls` names: the authority's, the
    /// certificate's and the key's.
    ///
    /// # Errors
    /// [`TransportError`].
    pub fn dialled_by(
        dialer: OwnedFd,
        to: Address,
        tls: Option<(&TlsFiles, [File; 3])>,
    ) -> Result<Self, TransportError> {
        to.check_tls(tls.as_ref().map(|(names, _)| *names))?;
        let tls = tls.map(|(names, files)| Tls::read(names, &files));
        Ok(Self::of(to, tls.transpose()?, Some(Arc::new(dialer))))
    }

    fn of(to: Address, tls: Option<Tls>, dialer: Option<Arc<OwnedFd>>) -> Self {
        Self {
            to,
            tls,
            dialer,
            link: Arc::new(Link::of_source()),
            first: Mutex::new(None),
            is_used: AtomicBool::new(false),
        }
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
        let (to, dialer) = (self.to.clone(), self.dialer.clone());
        let named = thread::Builder::new().name("lacuna-dial".into());
        named.spawn(move || {
            // If nothing waits for the connection any more, it ends.
            let _ = sender.send(match dialer {
                Some(dialer) => ask(&dialer),
                None => dial(&to),
            });
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
