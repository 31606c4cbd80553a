//! The socket of a running guest, and its connections.

use crate::client::Client;
use crate::client_actions::ClientActions;
use crate::lines::{Line, Lines};
use crate::message::{Answer, LINE_MAX, Progress, Request};
use crate::refused::Refused;
use crate::threads::lock;
use lacuna::ErrorKind;
use lacuna::migrate::session::Migrated;
use lacuna::migrate::transport::PrivateSocket;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io::{self, Write};
use std::net::Shutdown;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, Scope, ScopedJoinHandle, scope, sleep};
use std::time::Duration;

/// Most connections at a time. Each has a thread.
const CLIENTS: usize = 16;
/// The time between two checks whether the run of a paused guest has ended.
const LOOK: Duration = Duration::from_millis(100);
/// How long a client may leave an answer unread when the socket's buffer is full.
const UNREAD: Duration = Duration::from_secs(1);

/// Sends progress to a client. `Break`: the client has disconnected.
pub(crate) type Send<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<()>;

/// Does what a request says, with the descriptors that came with it, and returns the last answer.
pub(crate) type Answering<'a> = &'a (dyn Fn(Request, Vec<OwnedFd>, Send<'_>) -> Answer + Sync);

/// The control socket of one run, which is removed when the value is dropped.
pub struct ControlSocket {
    /// `None`: only clients of this process.
    socket: Option<PrivateSocket>,
    /// Wakes all threads, for the end.
    bell: OwnedFd,
    phase: AtomicU8,
    /// Connections that the last `serve` has left to the next one.
    left: Mutex<Vec<Lines>>,
    actions: ClientActions,
    /// Where a request may make files and connections, if not everywhere.
    places: Option<Vec<PathBuf>>,
}

/// Requests are answered.
const SERVES: u8 = 0;
/// The connections stay open for the next `serve`.
const HANDS_OVER: u8 = 1;
/// The connections are closed.
const OVER: u8 = 2;

/// A connection.
struct Open<'scope> {
    stream: Arc<UnixStream>,
    /// Returns the connection if it shall stay open.
    thread: ScopedJoinHandle<'scope, Option<Lines>>,
}

impl ControlSocket {
    /// Makes the socket. This user alone can connect to it. Clients wait until they are served.
    ///
    /// # Errors
    /// The path cannot be used, or is taken. The host has no descriptor.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Refused> {
        let path = path.as_ref();
        let socket = PrivateSocket::bind(path)?;
        let failed = |error: io::Error| {
            let text = format!("the control socket {}: {error}", path.display());
            Refused::of(ErrorKind::Host, text)
        };
        socket.listener().set_nonblocking(true).map_err(failed)?;
        Self::of(Some(socket)).map_err(failed)
    }

    /// Makes a socket without a name. [`ControlSocket::client`] connects its clients.
    ///
    /// # Errors
    /// The host has no descriptor.
    pub fn unnamed() -> io::Result<Self> {
        Self::of(None)
    }

    fn of(socket: Option<PrivateSocket>) -> io::Result<Self> {
        Ok(Self {
            socket,
            bell: eventfd(0, EventfdFlags::CLOEXEC)?,
            phase: AtomicU8::new(SERVES),
            left: Mutex::default(),
            actions: ClientActions::default(),
            places: None,
        })
    }

    /// This process is in a sandbox. A request without descriptors may save the guest below
    /// `places` alone, absolute folders or URLs of object stores, and cannot move it.
    pub fn confined_to(self, places: Vec<PathBuf>) -> Self {
        Self {
            places: Some(places),
            ..self
        }
    }

    /// Refuses a request to make files at `place`, or a connection to it, without descriptors.
    pub(crate) fn check_place(&self, place: &Path) -> Result<(), Refused> {
        match &self.places {
            Some(places) if !places.iter().any(|allowed| place.starts_with(allowed)) => {
                let place = place.display();
                Err(Refused::request(format!(
                    "{place}: this VM is in a sandbox, and opens no files and makes no connections \
                     for a request: use lacuna snapshot save or lacuna migrate, which pass them \
                     (docs/control.md), or start the VM with --allow-save or --no-sandbox"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Connects a client of this process. Call it before the socket is served: the client's
    /// requests wait for the next service.
    ///
    /// # Errors
    /// The host has no descriptor.
    pub fn client(&self) -> io::Result<Client> {
        let (ours, theirs) = UnixStream::pair()?;
        theirs.set_write_timeout(Some(UNREAD))?;
        lock(&self.left).push(Lines::of(theirs));
        Ok(Client::of(ours))
    }

    pub(crate) fn actions(&self) -> &ClientActions {
        &self.actions
    }

    /// Whether a client has ended the run.
    pub fn has_stopped(&self) -> bool {
        self.actions.has_stopped()
    }

    /// How a client has moved the guest elsewhere.
    pub fn moved(&self) -> Option<&Migrated> {
        self.actions.moved()
    }

    /// Calls `end`, unless the guest runs elsewhere, or may, and needs pages of this process. The
    /// guest does not begin to need them meanwhile. Returns whether `end` was called.
    pub fn unless_needed(&self, end: impl FnOnce()) -> bool {
        self.actions.unless_needed(end)
    }

    /// Serves clients until `is_over`, which is called ten times a second, or
    /// [`ControlSocket::end`]: then all connections are closed; or until
    /// [`ControlSocket::hand_over`].
    pub(crate) fn serve(&self, answer: Answering<'_>, is_over: &dyn Fn() -> bool) {
        let left = scope(|scope| {
            let mut open = Vec::new();
            for lines in std::mem::take(&mut *lock(&self.left)) {
                self.begin(scope, lines, answer, &mut open);
            }
            while self.phase() == SERVES {
                if is_over() {
                    self.end();
                    break;
                }
                let listener = self.socket.as_ref().map(PrivateSocket::listener);
                let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN)];
                fds.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
                let look = Timespec::try_from(LOOK).expect("a tenth of a second");
                // After an interruption the loop continues, as after a new client.
                let _ = poll(&mut fds, Some(&look));
                let Some(listener) = listener else {
                    continue;
                };
                match listener.accept() {
                    Ok((stream, _)) => self.connect(scope, stream, answer, &mut open),
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
            *lock(&self.left) = left;
            // The bell was rung once.
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
            self.change(HANDS_OVER, SERVES);
        }
    }

    /// After [`ControlSocket::end`] nothing changes any more.
    fn change(&self, from: u8, to: u8) {
        let _ = self
            .phase
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Whether requests are answered.
    pub(crate) fn serves(&self) -> bool {
        self.phase() == SERVES
    }

    /// Ends the service of clients soon, and closes their connections. The socket serves no more.
    pub fn end(&self) {
        self.phase.store(OVER, Ordering::Release);
        self.ring();
    }

    /// Ends the service of clients soon. They stay connected, and the next service answers them.
    pub fn hand_over(&self) {
        self.change(SERVES, HANDS_OVER);
        self.ring();
    }

    fn ring(&self) {
        // The write fails only if the counter is full: then the threads are woken anyway.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn phase(&self) -> u8 {
        self.phase.load(Ordering::Acquire)
    }

    /// Takes a connection. A refused client gets the reason, if possible.
    fn connect<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        stream: UnixStream,
        answer: Answering<'scope>,
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
        self.begin(scope, Lines::of(stream), answer, open);
    }

    /// Starts a connection's thread.
    fn begin<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        lines: Lines,
        answer: Answering<'scope>,
        open: &mut Vec<Open<'scope>>,
    ) {
        let Ok(stream) = lines.stream().try_clone() else {
            return;
        };
        let stream = Arc::new(stream);
        let guard = CloseOnPanic(Arc::clone(&stream));
        let named = Builder::new().name("lacuna-control".into());
        let talk = move || {
            let _guard = guard;
            self.talk(lines, answer)
        };
        if let Ok(thread) = named.spawn_scoped(scope, talk) {
            open.push(Open { stream, thread });
        }
    }

    /// Answers the lines of a client until it closes the connection, or no longer reads. Returns
    /// the connection if it shall stay open.
    fn talk(&self, mut lines: Lines, answer: Answering<'_>) -> Option<Lines> {
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
                Line::Request(request, descriptors) => answer(request, descriptors, &mut |now| {
                    send(stream, &Answer::Progress(now))
                }),
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

/// Closes the connection if the thread panics: the client would wait for its answer otherwise.
struct CloseOnPanic(Arc<UnixStream>);

impl Drop for CloseOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            end(&self.0);
        }
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
