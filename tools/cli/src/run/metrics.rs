//! `--metrics`: answers HTTP requests for the counters of a running guest.

use super::Refusal;
use crate::exit::Exit;
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
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest head of a request.
const HEAD_MAX: usize = 8 << 10;

/// The socket of one run.
pub(super) struct MetricsSocket {
    listener: TcpListener,
    is_over: AtomicBool,
}

/// Ends the socket's thread.
pub(super) struct Serving<'a>(&'a MetricsSocket);

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

impl MetricsSocket {
    /// Listens at `address`. Says on stderr where that is.
    pub fn open(address: SocketAddr) -> Result<Self, Refusal> {
        let failed = |error: io::Error| (Exit::Host, format!("--metrics {address}: {error}"));
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let at = listener.local_addr().map_err(failed)?;
        eprintln!("lacuna: metrics at http://{at}/metrics");
        Ok(Self {
            listener,
            is_over: AtomicBool::new(false),
        })
    }

    /// Starts a thread that answers requests by what `read` returns.
    pub fn start<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        read: &'scope (dyn Fn() -> Metrics + Sync),
    ) -> io::Result<Serving<'scope>> {
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
            if let Ok((stream, _)) = self.listener.accept() {
                // The client has gone, or is too slow.
                let _ = answer(stream, read);
            }
        }
    }
}

fn answer(mut stream: TcpStream, read: &dyn Fn() -> Metrics) -> io::Result<()> {
    stream.set_read_timeout(Some(LOOK))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let (status, body) = match head(&mut stream)?.split(' ').take(2).collect::<Vec<_>>()[..] {
        ["GET", "/metrics"] => ("200 OK", read().to_string()),
        ["GET", _] => ("404 Not Found", "try /metrics\n".to_owned()),
        _ => ("400 Bad Request", "try GET /metrics\n".to_owned()),
    };
    let bytes = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n\
         Content-Length: {bytes}\r\nConnection: close\r\n\r\n{body}"
    )
}

/// The head of a request, up to the empty line.
fn head(stream: &mut TcpStream) -> io::Result<String> {
    let (began, mut head) = (Instant::now(), Vec::new());
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let mut bytes = [0; 1024];
        match stream.read(&mut bytes) {
            Ok(0) => break,
            Ok(read) => head.extend_from_slice(&bytes[..read]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if began.elapsed() > PATIENCE || head.len() > HEAD_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}
