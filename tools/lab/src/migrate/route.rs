//! The routes of connections of a migration in this process.
//!
//! ```text
//! tcp    TCP over the loopback device
//! unix   UNIX sockets
//! link   bytes in this process's memory, which come later, and at a limited rate
//! ```

use super::link;
use crate::experiment::LabError;
use lacuna_migrate::stream::{Connection, Connections};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The source's end of a route.
pub type Source = Box<dyn Connections + Send>;

/// The ways from a source to a destination.
pub struct Route {
    /// Makes connections.
    pub source: Source,
    /// Accepts them.
    pub listening: Box<dyn Connections + Send>,
}

impl Route {
    /// TCP over the loopback device.
    ///
    /// # Errors
    /// The system refuses a port.
    pub fn tcp() -> Result<Self, LabError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let both = listener.and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = both.map_err(refused)?;
        Ok(Self {
            source: Box::new(Connecting(address)),
            listening: Box::new(Listening(listener)),
        })
    }

    /// A UNIX socket at `path`, where there is no file.
    ///
    /// # Errors
    /// The system refuses it.
    pub fn unix(path: &Path) -> Result<Self, LabError> {
        let listener = UnixListener::bind(path).map_err(refused)?;
        Ok(Self {
            source: Box::new(ConnectingUnix(path.to_owned())),
            listening: Box::new(ListeningUnix(listener)),
        })
    }

    /// A delaying link.
    pub fn link(speed: link::Speed) -> Self {
        let (source, listening) = link::link(speed);
        Self {
            source: Box::new(source),
            listening: Box::new(listening),
        }
    }
}

fn refused(source: io::Error) -> LabError {
    LabError::Io {
        what: "listen on this host".into(),
        source,
    }
}

struct Connecting(SocketAddr);

struct Listening(TcpListener);

struct ConnectingUnix(PathBuf);

struct ListeningUnix(UnixListener);

fn without_delay(stream: TcpStream) -> io::Result<Box<dyn Connection>> {
    stream.set_nodelay(true)?;
    Ok(Box::new(stream))
}

impl Connections for Connecting {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        without_delay(TcpStream::connect(self.0)?)
    }
}

impl Connections for Listening {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        without_delay(self.0.accept()?.0)
    }
}

impl Connections for ConnectingUnix {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        Ok(Box::new(UnixStream::connect(&self.0)?))
    }
}

impl Connections for ListeningUnix {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        Ok(Box::new(self.0.accept()?.0))
    }
}
