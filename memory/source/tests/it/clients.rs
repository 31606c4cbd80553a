//! A server's clients that leave or stay silent; paths and times at their limits.

use crate::common;

use common::{Answers, PAGE};
use lacuna_addr::PageCount;
use lacuna_source::wire::{HELLO, Hello, Message, encode};
use lacuna_source::{
    Faults, Injected, MemoryId, PageRequest, PageSource, Peer, PeerError, Policy, Server,
    SourcePage, WhenGone, Zeros, serve,
};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

const PAGES: PageCount = PageCount::new(4096);

/// A client's hello.
fn hello() -> [u8; HELLO] {
    let memory = MemoryId::default();
    Hello { pages: 1, memory }.bytes()
}

fn socket() -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("peer");
    (folder, path)
}

fn serves(path: &Path, source: impl PageSource + 'static) -> Server {
    serve(UnixListener::bind(path).unwrap(), PAGES, Arc::new(source)).unwrap()
}

fn longest(when_gone: WhenGone) -> Policy {
    Policy {
        patience: Duration::MAX,
        when_gone,
    }
}

/// A client that sends only half of a hello occupies the server for some seconds.
#[test]
fn a_client_that_says_nothing_is_hung_up_on() {
    let (_folder, path) = socket();
    let _server = serves(&path, Zeros);
    for begun in [0, HELLO / 2] {
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(&hello()[..begun]).unwrap();
        assert_eq!(all_answers(&mut client), HELLO, "{begun} bytes");
    }
}

/// The number of bytes that the server sends before it hangs up.
fn all_answers(client: &mut UnixStream) -> usize {
    let limit = Some(Duration::from_secs(60));
    client.set_read_timeout(limit).unwrap();
    let mut answers = Vec::new();
    // The connection is reset if the server closes it with unread bytes.
    match client.read_to_end(&mut answers) {
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        read => _ = read.unwrap(),
    }
    answers.len()
}

/// A hello in single bytes must be whole in time.
#[test]
fn a_client_that_says_its_hello_slowly_is_hung_up_on() {
    let (_folder, path) = socket();
    let _server = serves(&path, Zeros);
    let mut client = UnixStream::connect(&path).unwrap();
    // After its own hello, the server waits less than 2 s.
    client.read_exact(&mut [0; HELLO]).unwrap();
    let mut request = Vec::new();
    encode(&Message::Request(SourcePage(1)), &mut request);
    for byte in hello().into_iter().chain(request) {
        std::thread::sleep(Duration::from_secs(3) / HELLO as u32);
        // The server may have hung up.
        let _ = client.write_all(&[byte]);
    }
    assert_eq!(all_answers(&mut client), 0);
}

/// Keeps every request.
#[derive(Clone, Default)]
struct Keeps(Arc<Mutex<Vec<PageRequest>>>);

impl PageSource for Keeps {
    fn describe(&self) -> String {
        "keeps".into()
    }

    fn fetch(&self, request: PageRequest) {
        self.0.lock().unwrap().push(request);
    }
}

/// The threads of this process that serve clients.
fn serving() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
    // A thread may end between the two calls.
    let serves = |name: &String| name.trim_end() == "lacuna-serve";
    names.flatten().filter(serves).count()
}

/// A slow source keeps the requests of clients that have left. It keeps none of their threads, and
/// a bounded number of requests.
#[test]
fn clients_that_leave_keep_no_thread() {
    const MOST: usize = 128;
    let (_folder, path) = socket();
    let keeps = Keeps::default();
    let _server = serves(&path, keeps.clone());
    let mut request = Vec::new();
    encode(&Message::Request(SourcePage(1)), &mut request);
    let ask = || -> std::io::Result<()> {
        let mut client = UnixStream::connect(&path)?;
        client.write_all(&hello())?;
        client.read_exact(&mut [0; HELLO])?;
        client.write_all(&request)?;
        client.shutdown(std::net::Shutdown::Write)?;
        client.read_to_end(&mut Vec::new()).map(drop)
    };
    // The server refuses the clients beyond its limit.
    let served = (0..2 * MOST).filter(|_| ask().is_ok()).count();
    assert!((MOST / 2..=MOST).contains(&served), "{served} served");
    while serving() > MOST / 2 {
        std::thread::yield_now();
    }
    let kept = std::mem::take(&mut *keeps.0.lock().unwrap());
    assert_eq!(kept.len(), served);
    drop(kept);
    // Their places are free again.
    let peer = Peer::connect(&path, PAGES, Policy::default()).unwrap();
    let answers = Answers::new();
    answers.ask(&peer, 7);
    while keeps.0.lock().unwrap().is_empty() {
        std::thread::yield_now();
    }
    let _ = keeps.0.lock().unwrap()[0].provide(&[7; PAGE]);
    assert!(answers.of(7).is_ok());
}

#[test]
fn the_longest_times_do_not_overflow() {
    let (_folder, path) = socket();
    let _server = serves(&path, Zeros);
    for when_gone in [WhenGone::Poison, WhenGone::Hold] {
        let peer = Peer::connect(&path, PAGES, longest(when_gone)).unwrap();
        assert!(Answers::fetch(&peer, 3).is_ok());
    }
    let faults = Faults {
        loss: 1.0,
        resend: Duration::MAX,
        reordering: 1.0,
        ..Faults::latency(Duration::MAX)
    };
    let link = Injected::new(Zeros, faults).unwrap();
    let answers = Answers::new();
    answers.ask(&link, 3);
    drop(link);
    assert_eq!(answers.of(3), Err("it dropped the request".into()));
}

/// A client does not wait for a peer whose path cannot name a socket.
#[test]
fn a_path_that_no_socket_can_have_is_refused_at_once() {
    let path = PathBuf::from("/").join("long".repeat(50));
    let refused = Peer::connect(&path, PAGES, longest(WhenGone::Poison));
    assert!(matches!(refused, Err(PeerError::Path(201))));
}
