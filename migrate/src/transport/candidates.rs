//! Connections whose peers have not introduced themselves yet. A thread waits for each of them, so
//! no stranger delays another peer.
//!
//! ```text
//! accepted ─► thread: handshake of TLS, first message ─► introduced, or failed
//!                │ bell
//!                └─────► the thread that takes connections
//! ```

use super::introduction::{Introduced, Introduction};
use super::link::Link;
use super::stream::{Socket, Stream};
use super::tls::Tls;
use crate::stream::{Connection, HangUp, first_message};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// The most open connections whose peers have not introduced themselves.
pub(super) const CANDIDATES_MAX: usize = 16;

/// A connection that a peer has made.
pub struct Candidate {
    /// The name of its other end.
    pub from: String,
    /// Its first message can be read without waiting. An error: the peer has no TLS, or not the
    /// right certificate, or it has not sent a whole message in time.
    pub connection: io::Result<Box<dyn Connection>>,
}

/// All connections whose peers have not introduced themselves.
pub(super) struct Candidates {
    tls: Option<Arc<Tls>>,
    link: Arc<Link>,
    /// Candidates with running threads, the oldest first: the number of each, and the call that
    /// ends it.
    waiting: VecDeque<(u64, HangUp)>,
    accepted: u64,
    /// Counts the candidates in `done`.
    bell: Arc<OwnedFd>,
    sender: Sender<(u64, Candidate)>,
    done: Receiver<(u64, Candidate)>,
}

impl Candidates {
    /// No candidates yet. Their waits end when `link` says so.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn new(tls: Option<Tls>, link: Arc<Link>) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let (sender, done) = channel();
        Ok(Self {
            tls: tls.map(Arc::new),
            link,
            waiting: VecDeque::new(),
            accepted: 0,
            bell: Arc::new(eventfd(0, flags)?),
            sender,
            done,
        })
    }

    /// Waits for the first message of the peer of `socket`. If there are too many such peers, the
    /// oldest one is given up.
    ///
    /// # Errors
    /// The peer may be gone already, or no thread is left.
    pub fn add(&mut self, socket: Socket, from: String) -> io::Result<()> {
        let stream = Stream::accepted(socket, Arc::clone(&self.link), Introduction::begins())?;
        let hang_up = stream.hang_up()?;
        let (tls, bell, sender) = (
            self.tls.clone(),
            Arc::clone(&self.bell),
            self.sender.clone(),
        );
        let number = self.accepted;
        let named = thread::Builder::new().name("lacuna-stranger".into());
        // The process may end before the thread does.
        named.spawn(move || {
            let connection = introduce(tls.as_deref(), stream);
            let _ = sender.send((number, Candidate { from, connection }));
            // The write fails only if the counter is full.
            let _ = rustix::io::write(&bell, &1_u64.to_ne_bytes());
        })?;
        self.accepted += 1;
        if self.waiting.len() == CANDIDATES_MAX
            && let Some((_, hang_up)) = self.waiting.pop_front()
        {
            hang_up();
        }
        self.waiting.push_back((number, hang_up));
        Ok(())
    }

    /// The next candidate whose peer has introduced itself, or has failed to.
    pub fn next(&mut self) -> Option<Candidate> {
        while rustix::io::read(&self.bell, &mut [0; 8]).is_ok() {
            let (number, candidate) = self.done.try_recv().ok()?;
            let place = self.waiting.iter().position(|(waits, _)| *waits == number);
            // Otherwise the candidate was given up.
            if let Some(place) = place {
                self.waiting.remove(place);
                return Some(candidate);
            }
        }
        None
    }
}

impl AsFd for Candidates {
    /// Readable if there is a [`Candidates::next`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// The connection above `stream`, whose first message has arrived.
fn introduce(tls: Option<&Tls>, stream: Stream) -> io::Result<Box<dyn Connection>> {
    let introduction = stream.introduction().cloned();
    let introduction = introduction.unwrap_or_else(Introduction::begins);
    let mut connection: Box<dyn Connection> = match tls {
        Some(tls) => tls.accept(stream).map_err(|(stream, error)| {
            stream.end_gently();
            error
        })?,
        None => Box::new(stream),
    };
    let first = first_message(&mut connection)?;
    Ok(Box::new(Introduced::new(connection, introduction, first)))
}
