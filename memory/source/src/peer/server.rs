//! The side that has the pages: serves any [`PageSource`] to peers.
//!
//! Each connection has two threads. One reads requests and asks the source. The source's threads
//! only queue the answers; the other thread writes them. So a client that does not read delays no
//! other client, and holds at most [`IN_FLIGHT`] answers.
//!
//! Both threads end with the connection. Its requests stay with the source, which may take any time
//! to answer, so a connection counts as one of the [`CLIENTS`] until its last request has ended.

use super::wire::{Decoder, HELLO, Hello, Message, encode};
use super::{HELLO_WAIT, IN_FLIGHT, PeerError};
use crate::{Answer, Failure, MemoryId, PageRequest, PageRequester, PageSource, SourcePage};
use lacuna_addr::{PAGE_SIZE, PageCount};
use lacuna_sync::{Mutex, MutexGuard, join, lock_order};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// From this many bytes on, a write takes no more answers.
const WRITE: usize = 64 << 10;
/// The most connections at a time. Others are closed at once, and may try again.
const CLIENTS: usize = 128;

/// Serves pages until it is dropped.
pub struct Server {
    shared: Arc<ServerShared>,
    thread: Option<JoinHandle<()>>,
}

struct ServerShared {
    listener: UnixListener,
    pages: PageCount,
    memory: MemoryId,
    source: Arc<dyn PageSource>,
    /// Wakes the accepting thread at the end.
    bell: OwnedFd,
    stop: AtomicBool,
    accepted: AtomicU64,
    /// Open connections, and closed ones with requests at the source.
    clients: Arc<AtomicUsize>,
    /// The open connections, to be closed at the end.
    connections: Mutex<BTreeMap<u64, Open>, lock_order::SourceConnections>,
}

struct Open {
    socket: UnixStream,
    thread: JoinHandle<()>,
}

/// Serves the `pages` pages of `source` to the clients of `listener`, on threads of its own.
///
/// # Errors
/// No descriptor or thread is left.
pub fn serve(
    listener: UnixListener,
    pages: PageCount,
    source: Arc<dyn PageSource>,
) -> io::Result<Server> {
    listener.set_nonblocking(true)?;
    let shared = Arc::new(ServerShared {
        listener,
        pages,
        memory: source.memory_id(),
        source,
        bell: eventfd(0, EventfdFlags::CLOEXEC)?,
        stop: AtomicBool::new(false),
        accepted: AtomicU64::new(0),
        clients: Arc::default(),
        connections: Mutex::default(),
    });
    let accepts = Arc::clone(&shared);
    let named = std::thread::Builder::new().name("lacuna-serve".into());
    let thread = named.spawn(move || accepts.accept())?;
    Ok(Server {
        shared,
        thread: Some(thread),
    })
}

impl Server {
    /// Connections so far.
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::Relaxed)
    }

    /// Closes the open connections. Clients may connect again.
    pub fn hang_up(&self) {
        self.shared.connections().values().for_each(Open::close);
    }
}

impl Drop for Server {
    /// Closes all connections and ends the threads.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // It fails only if the counter is full: then the thread wakes up anyway.
        let _ = rustix::io::write(&self.shared.bell, &1u64.to_ne_bytes());
        self.thread.take().into_iter().for_each(join);
        let open = std::mem::take(&mut *self.shared.connections());
        open.values().for_each(Open::close);
        open.into_values().for_each(|open| join(open.thread));
    }
}

impl Open {
    fn close(&self) {
        // It fails only if the other side has closed the connection.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl ServerShared {
    fn connections(&self) -> MutexGuard<'_, BTreeMap<u64, Open>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The accepting thread's loop.
    fn accept(self: Arc<Self>) {
        while !self.stop.load(Ordering::Acquire) {
            let mut fds = [
                PollFd::new(&self.listener, PollFlags::IN),
                PollFd::new(&self.bell, PollFlags::IN),
            ];
            // An interrupt counts as a new client.
            let _ = poll(&mut fds, None);
            match self.listener.accept() {
                // A client that cannot be served sees the connection close.
                Ok((socket, _)) => _ = self.open(socket),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // No descriptor is left: other connections may close.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn open(self: &Arc<Self>, socket: UnixStream) -> io::Result<()> {
        let Some(place) = ClientPlace::take(&self.clients) else {
            return Ok(());
        };
        socket.set_nonblocking(false)?;
        let number = self.accepted.fetch_add(1, Ordering::Relaxed);
        let (shared, reads) = (Arc::clone(self), socket.try_clone()?);
        let named = std::thread::Builder::new().name("lacuna-serve".into());
        let mut connections = self.connections();
        let thread = named.spawn(move || {
            // The error concerns only the client, which sees the connection end.
            let _ = Connection::serve(&shared, &reads, place);
            let _ = reads.shutdown(Shutdown::Both);
            // The entry is missing if the server has taken it to wait for this thread.
            let _ = shared.connections().remove(&number);
        })?;
        connections.insert(number, Open { socket, thread });
        Ok(())
    }
}

/// One of the [`CLIENTS`].
struct ClientPlace(Arc<AtomicUsize>);

impl ClientPlace {
    fn take(all: &Arc<AtomicUsize>) -> Option<Self> {
        let place = Self(Arc::clone(all));
        (all.fetch_add(1, Ordering::Relaxed) < CLIENTS).then_some(place)
    }
}

impl Drop for ClientPlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Takes the source's answers for one client.
struct Connection {
    _place: ClientPlace,
    /// Unanswered requests, by number. Numbers are not used twice, so a second answer to a request
    /// is never taken for the answer to a later request.
    asked: Mutex<BTreeMap<u64, SourcePage>, lock_order::SourceServed>,
    /// Requests whose answers are not yet written.
    unwritten: Arc<AtomicUsize>,
    /// Messages; an empty message ends the writing thread.
    answers: Sender<Vec<u8>>,
}

impl Connection {
    /// Serves a client until it closes the connection, or must not be served.
    fn serve(
        shared: &ServerShared,
        mut socket: &UnixStream,
        place: ClientPlace,
    ) -> Result<(), PeerError> {
        let end = Instant::now() + HELLO_WAIT;
        let mine = Hello {
            pages: shared.pages.get(),
            memory: shared.memory,
        };
        // Sent first, so that a client of another version learns this side's version. An empty
        // socket has room for a hello.
        socket.write_all(&mine.bytes())?;
        receive_hello(socket, end)?;
        let (answers, written) = channel();
        let unwritten = Arc::new(AtomicUsize::new(0));
        let (writes, count) = (socket.try_clone()?, Arc::clone(&unwritten));
        let named = std::thread::Builder::new().name("lacuna-serve".into());
        named.spawn(move || write(&writes, &written, &count))?;
        let connection = Arc::new(Self {
            _place: place,
            asked: Mutex::default(),
            unwritten,
            answers,
        });
        let end = connection.read(shared, socket);
        // An error means that the thread has ended.
        let _ = connection.answers.send(Vec::new());
        end
    }

    fn read(
        self: &Arc<Self>,
        shared: &ServerShared,
        mut socket: &UnixStream,
    ) -> Result<(), PeerError> {
        let mut decoder = Decoder::default();
        let mut buffer = vec![0; PAGE_SIZE];
        let mut number = 0;
        loop {
            match socket.read(&mut buffer)? {
                0 => return Ok(()),
                length => decoder.push(&buffer[..length]),
            }
            while let Some(message) = decoder.decode()? {
                let Message::Request(page) = message else {
                    return Err(PeerError::Kind(message.kind()));
                };
                if self.unwritten.fetch_add(1, Ordering::Relaxed) >= IN_FLIGHT {
                    return Err(PeerError::Greedy(page));
                }
                number += 1;
                self.asked().insert(number, page);
                let requester = Arc::clone(self) as Arc<dyn PageRequester>;
                let request = PageRequest::new(requester, number, page);
                match page.0 < shared.pages.get() {
                    true => shared.source.fetch(request),
                    false => _ = request.fail("it is beyond the end of the memory"),
                }
            }
        }
    }

    fn asked(&self) -> MutexGuard<'_, BTreeMap<u64, SourcePage>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Receives a client's hello; all of it must arrive before `end`.
fn receive_hello(mut socket: &UnixStream, end: Instant) -> Result<Hello, PeerError> {
    let (mut bytes, mut have) = ([0; HELLO], 0);
    while have < HELLO {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut bytes[have..]) {
            Ok(0) => return Err(PeerError::Closed),
            Ok(length) => have += length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
        Hello::check(&bytes[..have])?;
    }
    socket.set_read_timeout(None)?;
    Hello::parse(&bytes)
}

impl PageRequester for Connection {
    fn answer(&self, key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        let Some(page) = self.asked().remove(&key) else {
            return Answer::Late;
        };
        let message = match content {
            Ok([0, rest @ ..]) if rest.iter().all(|byte| *byte == 0) => Message::Zeros(page),
            Ok(content) => Message::Content(page, content),
            Err(failure) => Message::Failure(page, failure.reason.as_bytes()),
        };
        let mut bytes = Vec::new();
        encode(&message, &mut bytes);
        match self.answers.send(bytes) {
            Ok(()) => Answer::Taken,
            // The writer has ended: the client is gone.
            Err(_) => Answer::Late,
        }
    }
}

/// The loop of the thread that writes to a client.
fn write(mut socket: &UnixStream, answers: &Receiver<Vec<u8>>, unwritten: &AtomicUsize) {
    for mut bytes in answers {
        let (mut count, mut is_over) = (1, bytes.is_empty());
        // One call writes all queued answers.
        while bytes.len() < WRITE
            && let Ok(more) = answers.try_recv()
        {
            is_over |= more.is_empty();
            bytes.extend(more);
            count += 1;
        }
        // Count before the write: the client may see an answer and send more requests.
        unwritten.fetch_sub(count, Ordering::Relaxed);
        if socket.write_all(&bytes).is_err() || is_over {
            return;
        }
    }
}
