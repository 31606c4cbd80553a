//! Connections between the two sides of a migration.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;

/// Ends a connection from another thread.
pub type HangUp = Box<dyn Fn() + Send + Sync>;

/// One connection: a UNIX or TCP socket, or TLS above one.
///
/// A failed read or write is a cut, a timeout included. Only while a silent connection is normal,
/// because the guest needs nothing, may reads time out any number of times. So timeouts of some
/// seconds find a hung peer, and TCP's keep-alive finds a lost host.
pub trait Connection: Read + Write + Send {
    /// A function that ends the connection, so that waiting reads and writes return.
    ///
    /// # Errors
    /// No file descriptor is left.
    fn hang_up(&self) -> io::Result<HangUp>;
}

/// Provides connections: the source makes them, and the destination accepts them. A migration takes
/// one, up to [`STREAMS_MAX`](super::STREAMS_MAX) - 1 more for pages, two more in a post-copy or a
/// hybrid, and new ones after a cut. Without a cut, the source makes all of them before it pauses
/// the guest. The two of a hybrid are silent until then.
pub trait Connections: Sync {
    /// The next connection. The wait must have a limit: while the destination waits here for a
    /// further connection, it does not notice a cut of the first one.
    ///
    /// # Errors
    /// There is none: the other side does not answer, or has not connected in time.
    fn open(&self) -> io::Result<Box<dyn Connection>>;
}

impl Connection for UnixStream {
    fn hang_up(&self) -> io::Result<HangUp> {
        let stream = self.try_clone()?;
        // It fails only if the other side has ended the connection.
        Ok(Box::new(move || _ = stream.shutdown(Shutdown::Both)))
    }
}

impl Connection for TcpStream {
    fn hang_up(&self) -> io::Result<HangUp> {
        let stream = self.try_clone()?;
        Ok(Box::new(move || _ = stream.shutdown(Shutdown::Both)))
    }
}
