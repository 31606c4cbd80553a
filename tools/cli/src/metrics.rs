//! `--metrics`: answers HTTP requests for the counters of a running guest.

use crate::exit::Exit;
use crate::output::complain;
use lacuna::metrics::Metrics;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

/// The time between two looks whether the run is over.
const LOOK: Duration = Duration::from_millis(100);
/// How long one client may take. There is one at a time.
const LIMIT: Duration = Duration::from_secs(1);
/// The longest head of a request.
const HEAD_MAX: usize = 8 << 10;

/// The socket of one command. One run after the other answers its clients.
pub struct MetricsSocket {
    listener: TcpListener,
    is_over: AtomicBool,
}

/// Ends the socket's thread.
pub struct Serving<'a>(&'a MetricsSocket);

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

impl MetricsSocket {
    /// Listens at `address`. Says on stderr where that is. Clients wait until
    /// [`MetricsSocket::start`].
    ///
    /// # Errors
    /// The exit code and the text for the user.
    pub fn open(address: SocketAddr) -> Result<Self, (Exit, String)> {
        let failed = |error: io::Error| (Exit::Host, format!("--metrics {address}: {error}"));
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let at = listener.local_addr().map_err(failed)?;
        complain(&format!("metrics at http://{at}/metrics"));
        Ok(Self {
            listener,
            is_over: AtomicBool::new(false),
        })
    }

    /// Starts a thread that answers requests by what `read` returns, until the value is dropped.
    ///
    /// # Errors
    /// The host has no thread.
    pub fn start<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        read: &'scope (dyn Fn() -> Metrics + Sync),
    ) -> io::Result<Serving<'scope>> {
        self.is_over.store(false, Ordering::Relaxed);
        let named = thread::Builder::new().name("lacuna-metrics".into());
        named.spawn_scoped(scope, || self.serve(read))?;
        Ok(Serving(self))
    }

    fn serve(&self, read: &dyn Fn() -> Metrics) {
        let look = Timespec::try_from(LOOK).expect("a tenth of a second");
        while !self.is_over.load(Ordering::Relaxed) {
            let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
            // After an interruption the loop continues, as without a client.
            let _ = poll(&mut fds, Some(&look));
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let client = Client {
                        stream,
                        until: Instant::now() + LIMIT,
                        is_over: &self.is_over,
                    };
                    // The client has gone, or is too slow.
                    let _ = client.answer(read);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // No descriptor is left: another one may be closed meanwhile.
                Err(_) => thread::sleep(LOOK),
            }
        }
    }
}

/// A connection. Its reads and writes end at a time limit, and with the run.
struct Client<'a> {
    stream: TcpStream,
    until: Instant,
    is_over: &'a AtomicBool,
}

impl Client<'_> {
    fn answer(mut self, read: &dyn Fn() -> Metrics) -> io::Result<()> {
        self.stream.set_read_timeout(Some(LOOK))?;
        self.stream.set_write_timeout(Some(LOOK))?;
        let head = self.head()?;
        let (status, body) = match head.split(' ').take(2).collect::<Vec<_>>()[..] {
            ["GET", "/metrics"] => ("200 OK", read().to_string()),
            ["GET", _] => ("404 Not Found", "try /metrics\n".to_owned()),
            _ => ("400 Bad Request", "try GET /metrics\n".to_owned()),
        };
        let bytes = body.len();
        let answer = format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n\
             Content-Length: {bytes}\r\nConnection: close\r\n\r\n{body}"
        );
        let mut rest = answer.as_bytes();
        while !rest.is_empty() {
            let written = self.in_time(|stream| stream.write(rest))?;
            rest = &rest[written..];
        }
        Ok(())
    }

    /// The head of a request, up to the empty line.
    fn head(&mut self) -> io::Result<String> {
        let mut head = Vec::new();
        let mut bytes = [0; 1024];
        while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < HEAD_MAX {
            match self.in_time(|stream| stream.read(&mut bytes))? {
                0 => break,
                read => head.extend_from_slice(&bytes[..read]),
            }
        }
        Ok(String::from_utf8_lossy(&head).into_owned())
    }

    /// Repeats a call that was not possible yet.
    fn in_time(
        &mut self,
        mut call: impl FnMut(&mut TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            if self.is_over.load(Ordering::Relaxed) || Instant::now() > self.until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match call(&mut self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }
}
