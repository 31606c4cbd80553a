//! A process of the network between two sides: it passes on connections, and cuts them.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// What happens at a moment.
type Event = Box<dyn FnOnce() + Send>;

/// A moment of a migration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// So many bytes have gone through, in both directions of all connections.
    Bytes(u64),
    /// A frame of this kind has arrived (docs/formats.md), and is not passed on yet.
    Frame(u8),
}

/// Passes connections from an address of its own on to another one, until it is dropped.
pub struct Proxy {
    pub address: String,
    shared: Arc<ProxyState>,
}

struct ProxyState {
    to: String,
    /// Bytes in both directions of all connections.
    bytes: AtomicU64,
    /// `event` is called at that moment, once.
    at: Mutex<Option<(Moment, Event)>>,
    open: Mutex<Vec<Socket>>,
    is_down: AtomicBool,
    cuts: AtomicU32,
}

impl Proxy {
    /// A proxy to `to`, over a socket of the same kind.
    pub fn start(folder: &Path, to: &str) -> Self {
        let shared = Arc::new(ProxyState {
            to: to.to_owned(),
            bytes: AtomicU64::new(0),
            at: Mutex::new(None),
            open: Mutex::default(),
            is_down: AtomicBool::new(false),
            cuts: AtomicU32::new(0),
        });
        let (address, accept) = listen(folder, to);
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            while let Ok(source) = accept() {
                if !accepting.is_down.load(Ordering::SeqCst) {
                    accepting.pass_on(&source);
                }
            }
        });
        Self { address, shared }
    }

    /// Calls `event` at that moment.
    pub fn at(&self, moment: Moment, event: impl FnOnce() + Send + 'static) {
        *self.shared.at.lock().unwrap() = Some((moment, Box::new(event)));
    }

    /// Bytes that have gone through, in both directions.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::SeqCst)
    }

    /// What cuts all connections. Later ones pass.
    pub fn cutter(&self) -> impl Fn() + Send + use<> {
        let shared = Arc::clone(&self.shared);
        move || shared.cut()
    }

    /// From now on no connection passes, or connections pass again.
    pub fn set_down(&self, is_down: bool) {
        self.shared.is_down.store(is_down, Ordering::SeqCst);
        if is_down {
            self.shared.cut();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.set_down(true);
    }
}

impl ProxyState {
    fn cut(&self) {
        self.cuts.fetch_add(1, Ordering::SeqCst);
        for socket in self.open.lock().unwrap().drain(..) {
            socket.shut();
        }
    }

    fn pass_on(self: &Arc<Self>, source: &Socket) {
        let Ok(destination) = Socket::connect(&self.to) else {
            return source.shut();
        };
        let mut open = self.open.lock().unwrap();
        open.extend([source.clone(), destination.clone()]);
        drop(open);
        for (from, to) in [(source, &destination), (&destination, source)] {
            let (shared, from, to) = (Arc::clone(self), from.clone(), to.clone());
            thread::spawn(move || {
                let _ = shared.copy(&from, &to);
                from.shut();
                to.shut();
            });
        }
    }

    fn copy(&self, from: &Socket, to: &Socket) -> io::Result<()> {
        let (mut buffer, cuts) = (vec![0; 16 << 10], self.cuts.load(Ordering::SeqCst));
        let mut frames = FrameStarts::default();
        loop {
            let read = from.read(&mut buffer)?;
            let before = self.bytes.fetch_add(read as u64, Ordering::SeqCst);
            let starts = frames.of(&buffer[..read]);
            let place = |moment: Moment| match moment {
                Moment::Bytes(after) => {
                    let left = usize::try_from(after.saturating_sub(before)).unwrap_or(usize::MAX);
                    (left < read).then_some(left)
                }
                Moment::Frame(kind) => starts.iter().find(|at| buffer[**at] == kind).copied(),
            };
            let mut passed = 0;
            let due = {
                let mut at = self.at.lock().unwrap();
                at.take_if(|(moment, _)| place(*moment).is_some())
            };
            if let Some((moment, event)) = due {
                passed = place(moment).unwrap_or_default();
                to.write(&buffer[..passed])?;
                event();
            }
            // Bytes are passed on unchanged, or not at all.
            if read == 0 || self.cuts.load(Ordering::SeqCst) != cuts {
                return Ok(());
            }
            to.write(&buffer[passed..read])?;
        }
    }
}

/// Where the frames of a direction begin: each has its kind in the first byte, and the length of
/// its payload in bytes 4 to 7 of 12.
#[derive(Default)]
struct FrameStarts {
    head: Vec<u8>,
    /// Bytes of the payload that have not arrived.
    left: usize,
}

impl FrameStarts {
    /// The places in `bytes`, the next ones.
    fn of(&mut self, bytes: &[u8]) -> Vec<usize> {
        let (mut starts, mut at) = (Vec::new(), 0);
        while at < bytes.len() {
            let payload = self.left.min(bytes.len() - at);
            (self.left, at) = (self.left - payload, at + payload);
            if self.left > 0 || at == bytes.len() {
                break;
            }
            if self.head.is_empty() {
                starts.push(at);
            }
            self.head.push(bytes[at]);
            at += 1;
            if let [.., a, b, c, d, _, _, _, _] = self.head[..]
                && self.head.len() == 12
            {
                self.left = u32::from_le_bytes([a, b, c, d]) as usize;
                self.head.clear();
            }
        }
        starts
    }
}

/// A connection.
#[derive(Clone)]
enum Socket {
    Unix(Arc<UnixStream>),
    Tcp(Arc<TcpStream>),
}

impl Socket {
    fn connect(to: &str) -> io::Result<Self> {
        match to.split_once(':').unwrap() {
            ("unix", path) => UnixStream::connect(path).map(|s| Self::Unix(Arc::new(s))),
            (_, place) => TcpStream::connect(place).map(|s| Self::Tcp(Arc::new(s))),
        }
    }

    fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => (&**stream).read(buffer),
            Self::Tcp(stream) => (&**stream).read(buffer),
        }
    }

    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Unix(stream) => (&**stream).write_all(bytes),
            Self::Tcp(stream) => (&**stream).write_all(bytes),
        }
    }

    fn shut(&self) {
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

type Accept = Box<dyn Fn() -> io::Result<Socket> + Send>;

/// Listens at an address of the kind of `to`.
fn listen(folder: &Path, to: &str) -> (String, Accept) {
    if to.starts_with("unix:") {
        let path = folder.join("proxy");
        let listener = UnixListener::bind(&path).unwrap();
        let accept = move || listener.accept().map(|(s, _)| Socket::Unix(Arc::new(s)));
        (format!("unix:{}", path.display()), Box::new(accept))
    } else {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:{}", listener.local_addr().unwrap());
        let accept = move || listener.accept().map(|(s, _)| Socket::Tcp(Arc::new(s)));
        (address, Box::new(accept))
    }
}
