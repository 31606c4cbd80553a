//! The source: sends requests to a peer, and repeats them after each broken connection.
//!
//! ```text
//! fetch, on the caller's thread ─► in flight, and 16 bytes into the socket (it does not wait)
//! the source's thread: poll ─► answers ─► provide          no connection ─► connect, hello,
//!                       └─ overdue, or any PeerError ─► close ─►            ask for all in flight
//! ```
//! The caller's thread writes the request itself, so the peer gets it before any other thread has
//! to wake up. One thread reads, because answers come in any order. A page counts as in flight
//! until its answer is taken, so a broken connection loses nothing. After an error the connection
//! is closed: no answer of an earlier connection can be taken for an answer of a later one.

use super::wire::{Decoder, HELLO, Hello, Message, encode};
use super::{HELLO_WAIT, IN_FLIGHT, PeerError};
use crate::policy::{Asked, Outage, Policy, WhenGone};
use crate::{MemoryId, PageRequest, PageSource, SourcePage};
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_sync::{Mutex, MutexGuard, join, lock_order};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time between two tries to connect.
const PAUSE: Duration = Duration::from_millis(20);
const ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// Pages from another process.
pub struct Peer {
    shared: Arc<ClientShared>,
    thread: Option<JoinHandle<()>>,
}

struct ClientShared {
    path: PathBuf,
    pages: PageCount,
    outage: Outage,
    /// The peer's memory, once the first connection is open.
    memory: OnceLock<MemoryId>,
    link: Mutex<Link, lock_order::SourceLink>,
    /// Wakes the thread: the socket has not taken all bytes, or the source ends.
    bell: OwnedFd,
    stop: AtomicBool,
}

#[derive(Default)]
struct Link {
    /// The connection, after the hellos.
    socket: Option<Arc<OwnedFd>>,
    /// Bytes that the socket has not taken.
    unsent: VecDeque<u8>,
    /// Requested pages, and pages to be requested once there is a connection.
    in_flight: BTreeMap<u64, Vec<Asked>>,
    /// Requests beyond [`IN_FLIGHT`].
    waiting: VecDeque<Asked>,
    /// The error of the last connection, or of the last try to connect.
    trouble: Option<String>,
}

impl Peer {
    /// Connects to the peer at `path`, which must have the guest's `pages` pages. Tries until
    /// `policy.patience` is over.
    ///
    /// # Errors
    /// The peer cannot be reached, or cannot serve this guest.
    pub fn connect(path: &Path, pages: PageCount, policy: Policy) -> Result<Self, PeerError> {
        let shared = Arc::new(ClientShared {
            path: path.to_owned(),
            pages,
            outage: Outage::new(policy),
            memory: OnceLock::new(),
            link: Mutex::default(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(io::Error::from)?,
            stop: AtomicBool::new(false),
        });
        let end = Instant::now().checked_add(shared.outage.policy().patience);
        let socket = loop {
            match shared.connect() {
                Ok(socket) => break socket,
                Err(error) if error.is_final() || end.is_some_and(|end| Instant::now() >= end) => {
                    return Err(error);
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        };
        let runs = Arc::clone(&shared);
        let named = std::thread::Builder::new().name("lacuna-source".into());
        let thread = named.spawn(move || runs.run(socket))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }
}

impl Peer {
    /// The most unanswered requests. Others wait for room.
    pub const IN_FLIGHT: usize = IN_FLIGHT;

    /// The error of the last ended connection, or of the last try to connect; `None` while the
    /// first connection is in use.
    pub fn trouble(&self) -> Option<String> {
        self.shared.link().trouble.clone()
    }
}

impl PageSource for Peer {
    fn describe(&self) -> String {
        format!("the peer at {}", self.shared.path.display())
    }

    fn memory_id(&self) -> MemoryId {
        let memory = self.shared.memory.get();
        *memory.expect("`connect` has had a connection")
    }

    fn outage(&self) -> Option<String> {
        self.shared.outage.reason()
    }

    fn fetch(&self, request: PageRequest) {
        let shared = &*self.shared;
        let page = request.page();
        if page.0 >= shared.pages.get() {
            let pages = shared.pages.get();
            let _ = request.fail(&format!("{page} is beyond the guest's {pages} pages"));
            return;
        }
        let mut link = shared.link();
        link.ask(Asked::now(request));
        let rest = !link.unsent.is_empty();
        drop(link);
        if rest {
            shared.ring_bell();
        }
    }
}

impl Drop for Peer {
    /// Ends the thread; unanswered requests fail.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.ring_bell();
        self.thread.take().into_iter().for_each(join);
    }
}

impl Link {
    /// Requests a page, now or when there is room.
    fn ask(&mut self, asked: Asked) {
        let page = asked.request.page();
        if let Some(others) = self.in_flight.get_mut(&page.0) {
            others.push(asked);
        } else if self.in_flight.len() < IN_FLIGHT {
            self.in_flight.insert(page.0, vec![asked]);
            self.request(page);
        } else {
            self.waiting.push_back(asked);
        }
    }

    fn request(&mut self, page: SourcePage) {
        // Without a connection, the next connection begins by requesting all pages in flight.
        if self.socket.is_some() {
            let mut bytes = Vec::with_capacity(16);
            encode(&Message::Request(page), &mut bytes);
            self.unsent.extend(bytes);
            self.flush();
        }
    }

    /// Sends as much as the socket takes without waiting.
    fn flush(&mut self) {
        let Some(socket) = &self.socket else { return };
        while !self.unsent.is_empty() {
            let bytes = self.unsent.make_contiguous();
            match send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(Errno::INTR) => {}
                // Full; or broken, which the reading thread will see.
                Err(_) => return,
            }
        }
    }

    /// Takes the requests for `page`, which the peer has answered.
    fn answered(&mut self, page: SourcePage) -> Option<Vec<Asked>> {
        let asked = self.in_flight.remove(&page.0)?;
        self.refill();
        Some(asked)
    }

    /// Requests the pages that waited for room. The peer's time for them begins now.
    fn refill(&mut self) {
        while self.in_flight.len() < IN_FLIGHT
            && let Some(next) = self.waiting.pop_front()
        {
            self.ask(Asked::now(next.request));
        }
    }

    /// Uses a new connection. Returns whether the peer has no page to send on it yet.
    fn open(&mut self, socket: Arc<OwnedFd>) -> bool {
        self.socket = Some(socket);
        self.unsent.clear();
        let pages: Vec<u64> = self.in_flight.keys().copied().collect();
        for page in pages {
            self.request(SourcePage(page));
        }
        self.refill();
        self.in_flight.is_empty()
    }

    fn close(&mut self) {
        self.socket = None;
        self.unsent.clear();
    }

    /// The page that has waited longest for the peer.
    fn oldest(&self) -> Option<&Asked> {
        let asked = self.in_flight.values().flatten();
        asked.min_by_key(|asked| asked.at)
    }

    /// Takes the requests for which `is_over` is true.
    fn take(&mut self, is_over: impl Fn(&Asked) -> bool) -> Vec<Asked> {
        let mut over: Vec<_> = Vec::new();
        self.in_flight.retain(|_, asked| {
            over.extend(asked.extract_if(.., |asked| is_over(asked)));
            !asked.is_empty()
        });
        let waiting = std::mem::take(&mut self.waiting);
        let (late, rest): (VecDeque<_>, _) = waiting.into_iter().partition(is_over);
        self.waiting = rest;
        over.extend(late);
        over
    }
}

impl ClientShared {
    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring_bell(&self) {
        // It fails only if the counter is full: then the thread wakes up anyway.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn stops(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// The period of the search for overdue requests.
    fn tick(&self) -> Duration {
        let patience = self.outage.policy().patience;
        (patience / 8).clamp(Duration::from_millis(5), Duration::from_millis(500))
    }

    /// The thread's loop.
    fn run(&self, first: OwnedFd) {
        let mut socket = Some(first);
        while !self.stops() {
            let connected = socket.take().map_or_else(|| self.connect(), Ok);
            let error = match connected {
                Ok(socket) => {
                    let socket = Arc::new(socket);
                    if self.link().open(Arc::clone(&socket)) {
                        self.outage.ended();
                    }
                    let error = self.exchange(socket.as_fd());
                    self.link().close();
                    error
                }
                Err(error) => error,
            };
            let reason = error.to_string();
            self.outage.failed(&reason);
            self.link().trouble = Some(reason);
            self.give_up(&error, |at| self.outage.deadline_after_failure(at));
            if !self.stops() {
                let _ = self.wait(None, PAUSE);
            }
        }
        let link = std::mem::take(&mut *self.link());
        // Dropped requests fail, and that takes other locks.
        drop(link);
    }

    /// Fails the requests past their deadline. Held requests get a new deadline, so that the next
    /// connection has time to answer.
    fn give_up(&self, error: &PeerError, deadline: impl Fn(Instant) -> Option<Instant>) {
        let now = Instant::now();
        let mut link = self.link();
        let over = link.take(|asked| deadline(asked.at).is_some_and(|deadline| deadline <= now));
        if let WhenGone::Hold = self.outage.policy().when_gone {
            let link = &mut *link;
            let held = link.in_flight.values_mut().flatten();
            held.chain(&mut link.waiting)
                .for_each(|asked| asked.at = now);
        }
        drop(link);
        let reason = error.to_string();
        over.iter()
            .for_each(|asked| self.outage.give_up(&asked.request, &reason));
    }

    /// Waits until `socket` or the bell is ready, but at most `patience`. Returns whether the
    /// socket has something to read.
    fn wait(&self, socket: Option<(BorrowedFd<'_>, PollFlags)>, patience: Duration) -> bool {
        let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN)];
        fds.extend(socket.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        let patience = Timespec::try_from(patience).ok();
        // An interrupt counts as the end of the time.
        let _ = poll(&mut fds, patience.as_ref());
        if !fds[0].revents().is_empty() {
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        }
        let woken = fds.get(1).map(PollFd::revents);
        woken.is_some_and(|events| !(events - PollFlags::OUT).is_empty())
    }

    /// Takes answers until the connection fails; returns the reason.
    fn exchange(&self, socket: BorrowedFd<'_>) -> PeerError {
        let mut decoder = Decoder::default();
        let mut buffer = vec![0; 16 * PAGE_SIZE];
        let mut look = Instant::now() + self.tick();
        loop {
            if self.stops() {
                return PeerError::Closed;
            }
            let mut link = self.link();
            link.flush();
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, !link.unsent.is_empty());
            drop(link);
            if self.wait(Some((socket, flags)), self.tick()) {
                let received = recv(socket, &mut *buffer, RecvFlags::DONTWAIT);
                match received.map(|(length, _)| length) {
                    Ok(0) => return PeerError::Closed,
                    Ok(length) => decoder.push(&buffer[..length]),
                    Err(Errno::INTR | Errno::AGAIN) => {}
                    Err(errno) => return PeerError::Io(errno.into()),
                }
                if let Err(error) = self.take_answers(&mut decoder) {
                    return error;
                }
            }
            // Look for overdue requests now: answers may arrive without a pause between them.
            if look <= Instant::now() {
                if let Some(error) = self.overdue() {
                    return error;
                }
                look = Instant::now() + self.tick();
            }
        }
    }

    fn take_answers(&self, decoder: &mut Decoder) -> Result<(), PeerError> {
        while let Some(message) = decoder.decode()? {
            let (page, content) = match message {
                Message::Content(page, content) => (page, Ok(content)),
                Message::Zeros(page) => (page, Ok(&ZEROS)),
                Message::Failure(page, reason) => (page, Err(String::from_utf8_lossy(reason))),
                Message::Request(_) => return Err(PeerError::Kind(message.kind())),
            };
            let asked = self.link().answered(page);
            let asked = asked.ok_or(PeerError::NotAsked(page))?;
            self.outage.provided();
            for Asked { request, .. } in asked {
                // Late: the page was provided in another way, or its memory is gone.
                let _ = match &content {
                    Ok(content) => request.provide(content),
                    Err(reason) => request.fail(reason),
                };
            }
        }
        Ok(())
    }

    /// The error if the peer is late with a page.
    fn overdue(&self) -> Option<PeerError> {
        let link = self.link();
        let oldest = link.oldest()?;
        let waited = oldest.at.elapsed();
        let page = oldest.request.page();
        (waited >= self.outage.policy().patience).then_some(PeerError::Silent { page, waited })
    }

    /// A new connection, after the hellos.
    fn connect(&self) -> Result<OwnedFd, PeerError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let made = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = made.map_err(io::Error::from)?;
        let address = SocketAddrUnix::new(&self.path).map_err(|errno| match errno {
            Errno::NAMETOOLONG => PeerError::Path(self.path.as_os_str().len()),
            errno => io::Error::from(errno).into(),
        })?;
        // A full backlog is EAGAIN, because the socket does not wait.
        connect(&socket, &address).map_err(io::Error::from)?;
        let mine = Hello {
            pages: self.pages.get(),
            memory: MemoryId::default(),
        };
        // An empty socket has room for a hello.
        send(&socket, &mine.bytes(), SendFlags::NOSIGNAL).map_err(io::Error::from)?;
        let theirs = self.hello(socket.as_fd())?;
        let (has, needs) = (theirs.pages, self.pages.get());
        if has < needs {
            return Err(PeerError::TooFewPages { has, needs });
        }
        let theirs = theirs.memory;
        match *self.memory.get_or_init(|| theirs) {
            ours if ours == theirs => Ok(socket),
            ours => Err(PeerError::OtherMemory { theirs, ours }),
        }
    }

    fn hello(&self, socket: BorrowedFd<'_>) -> Result<Hello, PeerError> {
        let end = Instant::now() + HELLO_WAIT;
        let (mut bytes, mut have) = ([0; HELLO], 0);
        while have < HELLO {
            let left = end.saturating_duration_since(Instant::now());
            let silent = || io::Error::from(io::ErrorKind::TimedOut).into();
            if left.is_zero() || self.stops() {
                return Err(silent());
            }
            self.give_up(&silent(), |at| self.outage.deadline(at));
            let _ = self.wait(Some((socket, PollFlags::IN)), left.min(self.tick()));
            match recv(socket, &mut bytes[have..], RecvFlags::DONTWAIT).map(|(length, _)| length) {
                Ok(0) => return Err(PeerError::Closed),
                Ok(length) => have += length,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => return Err(PeerError::Io(errno.into())),
            }
            Hello::check(&bytes[..have])?;
        }
        Hello::parse(&bytes)
    }
}
