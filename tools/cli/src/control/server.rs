//! The socket of a running guest, and its connections.

use super::client_actions::ClientActions;
use super::lines::{Line, Lines};
use super::message::{Answer, LINE_MAX, Refused, Request};
use crate::exit::{Exit, transport_refusal};
use crate::run::Refusal;
use lacuna::migrate::transport::PrivateSocket;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io::{self, Write};
use std::net::Shutdown;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle, scope, sleep};
use std::time::Duration;

/// Most connections at a time. Each has a thread.
const CLIENTS: usize = 16;
/// The time between two checks whether the run of a paused guest has ended.
const LOOK: Duration = Duration::from_millis(100);
/// How long a client may leave an answer unread when the socket's buffer is full.
const UNREAD: Duration = Duration::from_secs(1);

/// Answers the requests of clients.
pub trait Answers: Sync {
    /// Does what `request` says. Meanwhile `send` gets messages of progress; it returns `Break`
    /// when the client has disconnected.
    fn answer(&self, request: Request, send: &mut dyn FnMut(Answer) -> ControlFlow<()>) -> Answer;

    /// Is called ten times a second.
    fn look(&self) {}
}

/// The control socket of one run, which is removed when the value is dropped.
pub struct ControlSocket {
    socket: PrivateSocket,
    /// Wakes all threads, for the end.
    bell: OwnedFd,
    phase: AtomicU8,
    /// Connections that the last [`ControlSocket::serve`] has left to the next one.
    left: Mutex<Vec<Lines>>,
    actions: ClientActions,
}

/// Requests are answered.
const SERVES: u8 = 0;
/// The connections stay open for the next [`ControlSocket::serve`].
const HANDS_OVER: u8 = 1;
/// The connections are closed.
const OVER: u8 = 2;

/// A connection.
struct Open<'scope> {
    stream: UnixStream,
    /// Returns the connection if it shall stay open.
    thread: ScopedJoinHandle<'scope, Option<Lines>>,
}

impl ControlSocket {
    /// Makes the socket. This user alone can connect to it. Clients wait until
    /// [`ControlSocket::serve`].
    ///
    /// # Errors
    /// The exit code and the text for the user.
    pub fn open(path: &Path) -> Result<Self, Refusal> {
        let socket = PrivateSocket::bind(path).map_err(transport_refusal)?;
        let failed = |error: io::Error| {
            let text = format!("the control socket {}: {error}", path.display());
            (Exit::Host, text)
        };
        socket.listener().set_nonblocking(true).map_err(failed)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC);
        Ok(Self {
            socket,
            bell: bell.map_err(|errno| failed(errno.into()))?,
            phase: AtomicU8::new(SERVES),
            left: Mutex::default(),
            actions: ClientActions::default(),
        })
    }

    /// How clients have ended the run.
    pub fn actions(&self) -> &ClientActions {
        &self.actions
    }

    /// Serves clients until [`ControlSocket::end`], which closes all connections, or
    /// [`ControlSocket::hand_over`].
    pub fn serve(&self, guest: &impl Answers) {
        let left = scope(|scope| {
            let mut open = Vec::new();
            for lines in self.take_left() {
                self.begin(scope, lines, guest, &mut open);
            }
            while self.phase() == SERVES {
                guest.look();
                let mut fds = [
                    PollFd::new(self.socket.listener(), PollFlags::IN),
                    PollFd::new(&self.bell, PollFlags::IN),
                ];
                let look = Timespec::try_from(LOOK).expect("a tenth of a second");
                // After an interruption the loop continues, as after a new client.
                let _ = poll(&mut fds, Some(&look));
                match self.socket.listener().accept() {
                    Ok((stream, _)) => self.connect(scope, stream, guest, &mut open),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // No descriptor is left: another one may be closed meanwhile.
                    Err(_) => sleep(LOOK),
                }
            }
            if self.phase() == OVER {
                for Open { stream, .. } in &open {
                    // The connection's thread reads no further bytes, and ends after its answers to
                    // the lines that it has. The call fails only if the client has closed the
                    // connection before.
                    let _ = stream.shutdown(Shutdown::Read);
                }
            }
            let ended = open.into_iter().map(|open| open.thread.join());
            let lines = ended.map(|lines| lines.unwrap_or_else(|panic| resume_unwind(panic)));
            lines.flatten().collect()
        });
        if self.phase() == HANDS_OVER {
            *self.left.lock().unwrap_or_else(PoisonError::into_inner) = left;
            // The bell was rung once.
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
            self.phase.store(SERVES, Ordering::Release);
        }
    }

    /// [`ControlSocket::serve`] returns soon.
    pub fn end(&self) {
        self.ring(OVER);
    }

    /// [`ControlSocket::serve`] returns soon. The next call of it has the same connections.
    pub fn hand_over(&self) {
        self.ring(HANDS_OVER);
    }

    fn ring(&self, phase: u8) {
        self.phase.store(phase, Ordering::Release);
        // The write fails only if the counter is full: then the threads are woken anyway.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn phase(&self) -> u8 {
        self.phase.load(Ordering::Acquire)
    }

    fn take_left(&self) -> Vec<Lines> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *left)
    }

    /// Takes a connection. A refused client gets the reason, if possible.
    fn connect<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        stream: UnixStream,
        guest: &'scope impl Answers,
        open: &mut Vec<Open<'scope>>,
    ) {
        // A connection that its thread has handed over is finished too, and kept.
        open.retain(|open: &Open<'_>| !open.thread.is_finished() || self.phase() == HANDS_OVER);
        // On Linux an accepted connection does not inherit the listener's mode.
        let _ = stream.set_write_timeout(Some(UNREAD));
        if open.len() >= CLIENTS {
            let text =
                format!("{CLIENTS} clients are connected, which is the most: try again later");
            let _ = send(&stream, &Answer::Error(Refused::request(text)));
            return;
        }
        self.begin(scope, Lines::of(stream), guest, open);
    }

    /// Starts a connection's thread.
    fn begin<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        lines: Lines,
        guest: &'scope impl Answers,
        open: &mut Vec<Open<'scope>>,
    ) {
        let Ok(stream) = lines.stream().try_clone() else {
            return;
        };
        let named = Builder::new().name("lacuna-control".into());
        if let Ok(thread) = named.spawn_scoped(scope, move || self.talk(lines, guest)) {
            open.push(Open { stream, thread });
        }
    }

    /// Answers the lines of a client until it closes the connection, or no longer reads. Returns
    /// the connection if it shall stay open.
    fn talk(&self, mut lines: Lines, guest: &impl Answers) -> Option<Lines> {
        loop {
            let line = loop {
                match lines.next() {
                    Some(line) => break line,
                    None if !self.waits_for(lines.stream()) => return Some(lines),
                    None => lines.read(),
                }
            };
            let stream = lines.stream();
            let answer = match line {
                Line::Request(request) => {
                    guest.answer(request, &mut |progress| send(stream, &progress))
                }
                Line::Wrong(text) => Answer::Error(Refused::request(text)),
                Line::TooLong => {
                    let text =
                        format!("a line has at most {LINE_MAX} bytes; the connection is closed");
                    let _ = send(stream, &Answer::Error(Refused::request(text)));
                    end(stream);
                    return None;
                }
                Line::End => {
                    end(stream);
                    return None;
                }
            };
            if send(stream, &answer).is_break() {
                end(stream);
                return None;
            }
        }
    }

    /// Waits for bytes of a client. `false`: the connection is handed over.
    fn waits_for(&self, stream: &UnixStream) -> bool {
        let mut fds = [
            PollFd::new(stream, PollFlags::IN),
            PollFd::new(&self.bell, PollFlags::IN),
        ];
        // After an interruption the read waits.
        let _ = poll(&mut fds, None);
        self.phase() != HANDS_OVER
    }
}

/// Closes the connection. The accepting thread has a descriptor of it too.
fn end(stream: &UnixStream) {
    let _ = stream.shutdown(Shutdown::Both);
}

/// Sends an answer. `Break`: the client has gone, or does not read.
fn send(mut stream: &UnixStream, answer: &Answer) -> ControlFlow<()> {
    let mut line = serde_json::to_vec(answer).expect("every field has a JSON form");
    line.push(b'\n');
    match stream.write_all(&line) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    }
}
