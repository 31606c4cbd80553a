//! A link between two ends in this process, as slow as a link between two machines.
//!
//! ```text
//! write ─► waits until the line is free ─► length / rate ─► latency ─► read
//! ```
//! Each direction of each connection is a line of its own, as fast as the link. So an answer never
//! waits behind pushed pages on the line.

use lacuna_migrate::stream::{Connection, Connections, HangUp};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long bytes take.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// From one end to the other.
    pub latency: Duration,
    /// Of each connection in each direction.
    pub bytes_per_second: f64,
}

/// Bytes that a sender may be ahead of the line, as in a socket's buffer.
const AHEAD: Duration = Duration::from_millis(2);
/// The most bytes written at once.
const PIECE: usize = 64 << 10;

/// One direction of a connection.
struct Line {
    speed: Speed,
    state: Mutex<LinkState>,
    changed: Condvar,
}

struct LinkState {
    /// Bytes in flight, with their times of arrival.
    pieces: VecDeque<(Instant, Vec<u8>)>,
    /// Read bytes of the first piece.
    read: usize,
    /// When the last byte has left.
    free: Instant,
    is_ended: bool,
}

/// One end of a connection.
struct Half {
    from: Arc<Line>,
    to: Arc<Line>,
}

/// The end that makes connections.
pub struct Calling {
    speed: Speed,
    sender: Mutex<Sender<Half>>,
}

/// The end that takes them.
pub struct Called(Mutex<Receiver<Half>>);

/// Both ends of a link.
pub fn link(speed: Speed) -> (Calling, Called) {
    let (sender, receiver) = channel();
    let calling = Calling {
        speed,
        sender: Mutex::new(sender),
    };
    (calling, Called(Mutex::new(receiver)))
}

impl Line {
    fn new(speed: Speed) -> Arc<Self> {
        Arc::new(Self {
            speed,
            state: Mutex::new(LinkState {
                pieces: VecDeque::new(),
                read: 0,
                free: Instant::now(),
                is_ended: false,
            }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, LinkState>,
        time: Duration,
    ) -> MutexGuard<'a, LinkState> {
        let waited = self.changed.wait_timeout(state, time);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn end(&self) {
        self.lock().is_ended = true;
        self.changed.notify_all();
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(PIECE)];
        let mut state = self.lock();
        loop {
            if state.is_ended {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let now = Instant::now();
            let ahead = state.free.saturating_duration_since(now);
            if ahead <= AHEAD {
                state.free = now + ahead;
                break;
            }
            state = self.wait(state, ahead - AHEAD);
        }
        state.free += Duration::from_secs_f64(piece.len() as f64 / self.speed.bytes_per_second);
        let comes = state.free + self.speed.latency;
        state.pieces.push_back((comes, piece.to_vec()));
        self.changed.notify_all();
        Ok(piece.len())
    }

    fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let time = match state.pieces.front() {
                Some((comes, _)) if *comes <= now => break,
                Some((comes, _)) => *comes - now,
                None if state.is_ended => return Ok(0),
                None => Duration::from_secs(3600),
            };
            state = self.wait(state, time);
        }
        let LinkState { pieces, read, .. } = &mut *state;
        let (_, piece) = &pieces[0];
        let left = &piece[*read..];
        let count = left.len().min(into.len());
        into[..count].copy_from_slice(&left[..count]);
        *read += count;
        if *read == piece.len() {
            pieces.pop_front();
            *read = 0;
        }
        Ok(count)
    }
}

impl Read for Half {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.from.read(into)
    }
}

impl Write for Half {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        self.from.end();
        self.to.end();
    }
}

impl Connection for Half {
    fn hang_up(&self) -> io::Result<HangUp> {
        let lines = [&self.from, &self.to].map(Arc::clone);
        Ok(Box::new(move || lines.iter().for_each(|line| line.end())))
    }
}

impl Connections for Calling {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        let [there, back] = [0, 1].map(|_| Line::new(self.speed));
        let half = |from: &Arc<Line>, to: &Arc<Line>| Half {
            from: Arc::clone(from),
            to: Arc::clone(to),
        };
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = |_| io::Error::from(io::ErrorKind::ConnectionRefused);
        sender.send(half(&there, &back)).map_err(refused)?;
        Ok(Box::new(half(&back, &there)))
    }
}

impl Connections for Called {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        let receiver = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let next = receiver.recv();
        let half = next.map_err(|_| io::Error::from(io::ErrorKind::NotConnected))?;
        Ok(Box::new(half))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const SPEED: Speed = Speed {
        latency: Duration::from_millis(20),
        bytes_per_second: 1e6,
    };

    #[test]
    fn bytes_come_in_order_and_not_before_their_time() {
        let (calling, called) = link(SPEED);
        let mut source = calling.open().unwrap();
        let mut destination = called.open().unwrap();
        let sent: Vec<u8> = (0..100_000_u32).map(|at| at as u8).collect();
        let began = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| source.write_all(&sent).unwrap());
            let mut first = [0];
            destination.read_exact(&mut first).unwrap();
            assert!(began.elapsed() >= SPEED.latency);
            let mut rest = vec![0; sent.len() - 1];
            destination.read_exact(&mut rest).unwrap();
            // 100 kB at 1 MB a second.
            assert!(began.elapsed() >= Duration::from_millis(100) + SPEED.latency);
            assert!(first[0] == sent[0] && rest == sent[1..]);
        });
        destination.write_all(b"an answer").unwrap();
        let mut answer = [0; 9];
        source.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"an answer");
    }

    #[test]
    fn both_ends_notice_the_end() {
        let (calling, called) = link(SPEED);
        let mut source = calling.open().unwrap();
        let mut destination = called.open().unwrap();
        source.write_all(b"last").unwrap();
        let end = source.hang_up().unwrap();
        let mut got = Vec::new();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| destination.read_to_end(&mut got).unwrap());
            end();
            assert_eq!(waiting.join().unwrap(), 4);
        });
        assert_eq!(got, b"last");
        destination.write_all(b"more").unwrap_err();
        drop(called);
        assert!(calling.open().is_err());
    }
}
