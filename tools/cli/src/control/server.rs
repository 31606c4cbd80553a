//! The socket of a running guest, its connections, and their lines.

use super::controlled::Controlled;
use super::ends::Ends;
use super::message::{Answer, LINE_MAX, Refused, Request};
use crate::exit::Exit;
use crate::run::Refusal;
use crate::socket::Socket;
use lacuna_machine::Vm;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, Scope, ScopedJoinHandle, scope, sleep};
use std::time::Duration;

/// Most connections at a time. Each has a thread.
const CLIENTS: usize = 16;
/// How often a paused guest is looked at, whether its run has ended.
const LOOK: Duration = Duration::from_millis(100);
/// How long a client may leave an answer unread when the socket's buffer is full.
const UNREAD: Duration = Duration::from_secs(1);

/// The control socket of one run, which is removed when the value is dropped.
pub struct ControlSocket<'a> {
    socket: Socket<'a>,
    /// Wakes the thread that accepts, for the end.
    bell: OwnedFd,
    is_over: AtomicBool,
    ends: Ends,
}

/// A connection.
struct Open<'scope> {
    stream: UnixStream,
    thread: ScopedJoinHandle<'scope, ()>,
}

impl<'a> ControlSocket<'a> {
    /// Makes the socket, which this user alone can connect to. Clients wait until
    /// [`ControlSocket::serve`].
    ///
    /// # Errors
    /// The exit code and the text for the user.
    pub fn open(path: &'a Path) -> Result<Self, Refusal> {
        let socket = Socket::bind(path)?;
        let failed = |error: io::Error| {
            let text = format!("the control socket {}: {error}", path.display());
            (Exit::Host, text)
        };
        socket.listener().set_nonblocking(true).map_err(failed)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC);
        Ok(Self {
            socket,
            bell: bell.map_err(|errno| failed(errno.into()))?,
            is_over: AtomicBool::new(false),
            ends: Ends::default(),
        })
    }

    /// How clients have ended the run.
    pub fn ends(&self) -> &Ends {
        &self.ends
    }

    /// Serves clients until [`ControlSocket::end`]. Then all connections are closed.
    pub fn serve<V: Vm>(&self, guest: &Controlled<'_, V>) {
        scope(|scope| {
            let mut open = Vec::new();
            while !self.is_over.load(Ordering::Acquire) {
                guest.release_at_the_end();
                let mut fds = [
                    PollFd::new(self.socket.listener(), PollFlags::IN),
                    PollFd::new(&self.bell, PollFlags::IN),
                ];
                let look = Timespec::try_from(LOOK).expect("a tenth of a second");
                // Interrupted: as if a client had come.
                let _ = poll(&mut fds, Some(&look));
                match self.socket.listener().accept() {
                    Ok((stream, _)) => connect(scope, stream, guest, &mut open),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // No descriptor is left: another one may be closed meanwhile.
                    Err(_) => sleep(LOOK),
                }
            }
            for Open { stream, .. } in &open {
                // The connection's thread reads no further request, and ends after an answer that
                // it is about to write. It fails only if the client has closed it before.
                let _ = stream.shutdown(Shutdown::Read);
            }
        });
    }

    /// [`ControlSocket::serve`] returns soon.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        // It fails only if the counter is full: then the thread is woken anyway.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

/// Starts a connection. A client that gets none is told why, if that is possible.
fn connect<'scope, V: Vm>(
    scope: &'scope Scope<'scope, '_>,
    stream: UnixStream,
    guest: &'scope Controlled<'_, V>,
    open: &mut Vec<Open<'scope>>,
) {
    open.retain(|open: &Open<'_>| !open.thread.is_finished());
    // On Linux an accepted connection does not inherit the listener's mode.
    let _ = stream.set_write_timeout(Some(UNREAD));
    if open.len() >= CLIENTS {
        let text = format!("{CLIENTS} clients are connected, which is the most: try again later");
        let _ = tell(&stream, &Answer::Error(Refused::request(text)));
        return;
    }
    let Ok(copy) = stream.try_clone() else {
        return;
    };
    let named = Builder::new().name("lacuna-control".into());
    if let Ok(thread) = named.spawn_scoped(scope, move || talk(&copy, guest)) {
        open.push(Open { stream, thread });
    }
}

/// Answers the lines of a client until it closes the connection, or no longer reads.
fn talk<V: Vm>(stream: &UnixStream, guest: &Controlled<'_, V>) {
    let mut lines = BufReader::new(stream);
    loop {
        let answer = match read_line(&mut lines) {
            Line::Request(request) => {
                guest.answer(request, &mut |progress| tell(stream, &progress))
            }
            Line::Wrong(text) => Answer::Error(Refused::request(text)),
            Line::TooLong => {
                let text = format!("a line has at most {LINE_MAX} bytes; the connection is closed");
                let _ = tell(stream, &Answer::Error(Refused::request(text)));
                return end(stream);
            }
            Line::End => return end(stream),
        };
        if tell(stream, &answer).is_break() {
            return end(stream);
        }
    }
}

/// Closes the connection, of which the accepting thread has a descriptor too.
fn end(stream: &UnixStream) {
    let _ = stream.shutdown(Shutdown::Both);
}

enum Line {
    Request(Request),
    Wrong(String),
    TooLong,
    /// The client has closed the connection. A line without its end is no request.
    End,
}

fn read_line(from: &mut impl BufRead) -> Line {
    let mut line = Vec::new();
    let mut bounded = from.take(LINE_MAX as u64);
    match bounded.read_until(b'\n', &mut line) {
        Ok(_) if line.last() == Some(&b'\n') => {}
        Ok(LINE_MAX) => return Line::TooLong,
        _ => return Line::End,
    }
    match serde_json::from_slice(&line) {
        Ok(request) => Line::Request(request),
        Err(error) => Line::Wrong(format!(
            "this line is no request: {error}; a request is one line, such as \
             {{\"command\":\"status\"}}"
        )),
    }
}

/// Sends an answer. `Break`: the client has gone, or does not read.
fn tell(mut stream: &UnixStream, answer: &Answer) -> ControlFlow<()> {
    let mut line = serde_json::to_vec(answer).expect("every field has a JSON form");
    line.push(b'\n');
    match stream.write_all(&line) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded_and_have_an_end() {
        let long = [b'x'; LINE_MAX];
        for (bytes, expected) in [
            (&b"{\"command\":\"stop\"}\n"[..], "Request"),
            (b"{\"command\":\"stop\"}", "End"),
            (b"", "End"),
            (b"\n", "Wrong"),
            (b"\xff\xfe\n", "Wrong"),
            (&long, "TooLong"),
            (&long[1..], "End"),
        ] {
            let found = match read_line(&mut &*bytes) {
                Line::Request(_) => "Request",
                Line::Wrong(_) => "Wrong",
                Line::TooLong => "TooLong",
                Line::End => "End",
            };
            assert_eq!(found, expected, "{:?}", bytes.escape_ascii().to_string());
        }
        let deep = [b"[".repeat(LINE_MAX / 2), b"\n".to_vec()].concat();
        assert!(matches!(read_line(&mut &*deep), Line::Wrong(_)));
    }
}
