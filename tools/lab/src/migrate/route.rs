//! The routes of a migration in this process: TCP over the loopback device, a UNIX socket, or a
//! link as slow as one between two machines.
//!
//! ```text
//! source ─► socket ─► waits until the line is free ─► length / rate ─► latency ─► destination
//! ```
//! Each direction of each connection of a link is a line of its own, as fast as the link. So an
//! answer never waits behind pushed pages on the line.

use crate::experiment::{LabError, LabResult};
use lacuna::migrate::session::Destination;
use lacuna::migrate::transport::{Address, Connector, Listener, TransportError};
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Both ends of a route.
pub struct Route {
    pub source: Connector,
    pub destination: Destination,
    _link: Option<Link>,
}

impl Route {
    /// TCP over the loopback device.
    pub fn tcp() -> LabResult<Self> {
        let at = "tcp:127.0.0.1:0".parse();
        Self::to(&at.expect("an address"), None)
    }

    /// A UNIX socket at `path`, where there is no file; with a `link`, through it.
    pub fn unix(path: &Path, link: Option<Speed>) -> LabResult<Self> {
        let link = link.map(|speed| Link::to(path.to_owned(), speed));
        Self::to(&Address::Unix(path.to_owned()), link.transpose()?)
    }

    fn to(at: &Address, link: Option<Link>) -> LabResult<Self> {
        let listener = Listener::open(at, None, Arc::default()).map_err(refused)?;
        let to = match &link {
            Some(link) => Address::Unix(link.near.clone()),
            None => listener.address().clone(),
        };
        Ok(Self {
            source: Connector::new(to, None).map_err(refused)?,
            destination: Destination::new(listener, |_| ()),
            _link: link,
        })
    }
}

/// The error of a transport.
pub fn refused(error: TransportError) -> LabError {
    LabError::io("connect two ends on this host")(io::Error::other(error))
}

/// How long bytes take.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// From one end to the other.
    pub latency: Duration,
    /// Of each connection in each direction.
    pub bytes_per_second: f64,
}

/// How far a sender may be ahead of the line, as in a socket's buffer.
const AHEAD: Duration = Duration::from_millis(2);
/// The most bytes forwarded at once.
const PIECE: usize = 64 << 10;

/// Forwards connections to another UNIX socket.
struct Link {
    near: PathBuf,
    is_over: Arc<AtomicBool>,
    _folder: TempDir,
}

impl Link {
    fn to(far: PathBuf, speed: Speed) -> LabResult<Self> {
        let started = || {
            let folder = tempfile::tempdir()?;
            let near = folder.path().join("near");
            let listener = UnixListener::bind(&near)?;
            let is_over = Arc::<AtomicBool>::default();
            let link = Self {
                near,
                is_over: Arc::clone(&is_over),
                _folder: folder,
            };
            thread::Builder::new().spawn(move || {
                while let Ok((source, _)) = listener.accept()
                    && !is_over.load(Ordering::Relaxed)
                {
                    // Without a destination, the source's connection is closed.
                    let _ = UnixStream::connect(&far).and_then(|destination| {
                        line(source.try_clone()?, destination.try_clone()?, speed)?;
                        line(destination, source, speed)
                    });
                }
            })?;
            Ok(link)
        };
        started().map_err(LabError::io::<io::Error>("make a link"))
    }
}

/// Ends the thread that accepts connections. The lines end with their connections.
impl Drop for Link {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // It fails only if the thread has ended.
        let _ = UnixStream::connect(&self.near);
    }
}

/// Starts one direction of a connection.
fn line(mut from: UnixStream, mut to: UnixStream, speed: Speed) -> io::Result<()> {
    let (sender, pieces) = channel::<(Instant, Vec<u8>)>();
    let end = from.try_clone()?;
    thread::Builder::new().spawn(move || {
        let (mut piece, mut free) = (vec![0; PIECE], Instant::now());
        while let Ok(count @ 1..) = from.read(&mut piece) {
            let now = Instant::now();
            let takes = Duration::from_secs_f64(count as f64 / speed.bytes_per_second);
            free = free.max(now) + takes;
            let sent = sender.send((free + speed.latency, piece[..count].to_vec()));
            if sent.is_err() {
                break;
            }
            thread::sleep(free.saturating_duration_since(now + AHEAD));
        }
    })?;
    thread::Builder::new().spawn(move || {
        for (arrives, piece) in pieces {
            thread::sleep(arrives.saturating_duration_since(Instant::now()));
            if to.write_all(&piece).is_err() {
                break;
            }
        }
        // They fail only if a side has ended the connection.
        let _ = to.shutdown(Shutdown::Write);
        let _ = end.shutdown(Shutdown::Read);
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_link_come_in_order_and_not_before_their_time() {
        let speed = Speed {
            latency: Duration::from_millis(20),
            bytes_per_second: 1e6,
        };
        let (mut source, near) = UnixStream::pair().unwrap();
        let (far, mut destination) = UnixStream::pair().unwrap();
        line(near.try_clone().unwrap(), far.try_clone().unwrap(), speed).unwrap();
        line(far, near, speed).unwrap();
        let sent: Vec<u8> = (0..100_000_u32).map(|at| at as u8).collect();
        let began = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| source.write_all(&sent).unwrap());
            let mut got = vec![0; sent.len()];
            destination.read_exact(&mut got[..1]).unwrap();
            assert!(began.elapsed() >= speed.latency);
            destination.read_exact(&mut got[1..]).unwrap();
            // 100 kB at 1 MB a second.
            assert!(began.elapsed() >= Duration::from_millis(100) + speed.latency);
            assert_eq!(got, sent);
        });
        destination.write_all(b"an answer").unwrap();
        let mut answer = [0; 9];
        source.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"an answer");
        // Both sides notice the end of the other.
        drop(destination);
        assert_eq!(source.read(&mut answer).unwrap(), 0);
    }
}
