//! A link between both ends of a migration, in one process. A test cuts it after a number of bytes.

use lacuna_migrate::stream::{Connection, Connections, HangUp};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};

/// All connections are cut when one side has written this many bytes on all of them together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut(pub u64);

pub const UNCUT: Cut = Cut(u64::MAX);

/// Which side of the link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Source,
    Destination,
}

/// The connections of one link share this. The connections after a cut are a new link.
struct Wire {
    left: [u64; 2],
    written: [u64; 2],
    streams: Vec<UnixStream>,
    /// The cuts of the links that follow.
    next: VecDeque<[Cut; 2]>,
    is_cut: bool,
    /// The side to kill at the last cut.
    victim: Option<Side>,
    is_killed: bool,
    /// The number of connections made.
    made: usize,
    late: Option<Arc<LateComplete>>,
}

/// As between TCP connections, `Complete` may arrive on the source's first connection after the
/// destination has ended the others. It is lost if the first connection ends before.
#[derive(Default)]
struct LateComplete {
    /// Which connections the source has ended. The order is the order of their making.
    ended: Mutex<[bool; 3]>,
    changed: Condvar,
}

impl LateComplete {
    fn end(&self, index: usize) {
        self.ended.lock().unwrap()[index] = true;
        self.changed.notify_all();
    }

    fn wait(&self) -> io::Result<()> {
        let ended = self.ended.lock().unwrap();
        let ended = self
            .changed
            .wait_while(ended, |ended| !ended[0] && !ended[2]);
        match ended.unwrap()[0] {
            true => Err(io::ErrorKind::ConnectionReset.into()),
            false => Ok(()),
        }
    }
}

impl Wire {
    /// Lets a side write `wanted` bytes, or fewer before a cut.
    fn spend(&mut self, side: Side, wanted: usize) -> usize {
        let left = &mut self.left[side as usize];
        let bytes = wanted.min((*left).try_into().unwrap_or(usize::MAX));
        *left -= bytes as u64;
        self.written[side as usize] += bytes as u64;
        bytes
    }

    fn cut(&mut self) {
        self.is_cut = true;
        self.is_killed = self.next.is_empty() && self.victim.is_some();
        for stream in self.streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// The link is in order again.
    fn mend(&mut self) {
        if self.is_killed {
            return;
        }
        self.is_cut = false;
        let [Cut(source), Cut(destination)] = self.next.pop_front().unwrap_or([UNCUT; 2]);
        self.left = [source, destination];
    }
}

/// One side's end of a connection.
struct Cable {
    stream: UnixStream,
    wire: Arc<Mutex<Wire>>,
    side: Side,
    /// Of the source.
    late: Option<(usize, Arc<LateComplete>)>,
    is_end_sent: bool,
}

impl Read for Cable {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if let Some((0, late)) = &self.late
            && self.is_end_sent
        {
            late.wait()?;
        }
        self.stream.read(buf)
    }
}

impl Write for Cable {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let bytes = self.wire.lock().unwrap().spend(self.side, buf.len());
        if bytes == 0 && !buf.is_empty() {
            self.wire.lock().unwrap().cut();
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        self.stream.write_all(&buf[..bytes])?;
        // The head of `End`, a frame without payload.
        self.is_end_sent |= matches!(buf, [15, 0, 0, 0, 0, 0, 0, 0, _, _, _, _]);
        Ok(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl Connection for Cable {
    fn hang_up(&self) -> io::Result<HangUp> {
        let end = self.stream.hang_up()?;
        let late = self.late.clone();
        Ok(Box::new(move || {
            late.iter().for_each(|(index, late)| late.end(*index));
            end();
        }))
    }
}

/// The source's end of the link: makes connections.
pub struct SourceEnd {
    wire: Arc<Mutex<Wire>>,
    arrivals: Sender<Cable>,
}

/// The destination's end: gets the connections, until the source's end is gone.
pub struct DestinationEnd(Mutex<Receiver<Cable>>);

/// A link with the cuts `cuts`, one pair after the other. The last cut kills `victim`: no
/// connection is restored.
pub fn link(cuts: &[[Cut; 2]], victim: Option<Side>) -> (SourceEnd, DestinationEnd) {
    let mut wire = Wire {
        left: [0; 2],
        written: [0; 2],
        streams: Vec::new(),
        next: cuts.iter().copied().collect(),
        is_cut: false,
        victim,
        is_killed: false,
        made: 0,
        late: None,
    };
    wire.mend();
    let (arrivals, receiver) = channel();
    let wire = Arc::new(Mutex::new(wire));
    (
        SourceEnd { wire, arrivals },
        DestinationEnd(Mutex::new(receiver)),
    )
}

impl SourceEnd {
    /// Bytes written by source and destination.
    pub fn written(&self) -> [u64; 2] {
        self.wire.lock().unwrap().written
    }

    /// From now on `Complete` arrives late: [`LateComplete`].
    pub fn complete_late(&self) {
        self.wire.lock().unwrap().late = Some(Arc::default());
    }

    /// The killed side.
    pub fn killed(&self) -> Option<Side> {
        let wire = self.wire.lock().unwrap();
        wire.victim.filter(|_| wire.is_killed)
    }
}

impl Connections for SourceEnd {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        let (here, there) = UnixStream::pair()?;
        let mut wire = self.wire.lock().unwrap();
        if wire.is_cut {
            wire.mend();
        }
        if wire.is_killed {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        wire.streams.extend([here.try_clone()?, there.try_clone()?]);
        let late = wire.late.clone().map(|late| (wire.made, late));
        wire.made += 1;
        drop(wire);
        let end = |stream, side, late| Cable {
            stream,
            wire: Arc::clone(&self.wire),
            side,
            late,
            is_end_sent: false,
        };
        let sent = self.arrivals.send(end(there, Side::Destination, None));
        sent.map_err(|_| io::ErrorKind::ConnectionRefused)?;
        Ok(Box::new(end(here, Side::Source, late)))
    }
}

impl Connections for DestinationEnd {
    fn open(&self) -> io::Result<Box<dyn Connection>> {
        let next = self.0.lock().unwrap().recv();
        Ok(Box::new(next.map_err(|_| io::ErrorKind::NotConnected)?))
    }
}
