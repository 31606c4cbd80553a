//! Pages from another process: a plain model, broken connections, and misbehaving peers.

use crate::common;

use common::{Answers, Bytes, PAGE, bytes_of, page};
use lacuna_addr::PageCount;
use lacuna_source::wire::{Decoder, HELLO, Hello, Message, encode};
use lacuna_source::{
    Faults, Injected, MemoryId, PageRequest, PageSource, Peer, PeerError, Policy, Server,
    SourcePage, WhenGone, serve,
};
use proptest::prelude::*;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tempfile::TempDir;

const PAGES: u64 = 4096;
const LONG: Duration = Duration::from_secs(600);

fn hello(pages: u64) -> [u8; HELLO] {
    let memory = MemoryId::default();
    Hello { pages, memory }.bytes()
}

/// Page 10 is zeros, page 11 cannot be provided; the others contain their number.
struct Numbers;

impl PageSource for Numbers {
    fn describe(&self) -> String {
        "numbers".into()
    }

    fn fetch(&self, request: PageRequest) {
        let _ = match request.page().0 {
            10 => request.provide(&[0; PAGE]),
            11 => request.fail("it was lost long ago"),
            number => request.provide(&page(number)),
        };
    }
}

fn expected(number: u64) -> Result<Bytes, String> {
    match number {
        10 => Ok(Bytes::from(&[0; PAGE])),
        11 => Err("it was lost long ago".into()),
        number => Ok(bytes_of(number)),
    }
}

fn socket() -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("peer");
    (folder, path)
}

fn policy(patience: Duration, when_gone: WhenGone) -> Policy {
    Policy {
        patience,
        when_gone,
    }
}

fn connect(path: &Path, patience: Duration) -> Result<Peer, PeerError> {
    let policy = policy(patience, WhenGone::Poison);
    Peer::connect(path, PageCount::new(PAGES), policy)
}

fn serves(path: &Path, source: impl PageSource + 'static) -> Server {
    let listener = UnixListener::bind(path).unwrap();
    serve(listener, PageCount::new(PAGES), Arc::new(source)).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Every page arrives with its own content, over a link that delays, loses and reorders, while
    /// connections break.
    #[test]
    fn every_page_is_that_of_the_server(
        seed in any::<u64>(),
        numbers in prop::collection::btree_set(0..PAGES, 1..1500),
        hang_ups in 0..4usize,
    ) {
        let (_folder, path) = socket();
        let faults = Faults {
            seed,
            latency: Duration::ZERO..Duration::from_millis(2),
            loss: 0.1,
            resend: Duration::from_millis(1),
            reordering: 0.3,
        };
        let server = serves(&path, Injected::new(Numbers, faults).unwrap());
        let peer = connect(&path, LONG).unwrap();
        let answers = Answers::new();
        for (index, &number) in numbers.iter().enumerate() {
            answers.ask(&peer, number);
            if hang_ups > 0 && index % (1 + numbers.len() / hang_ups) == 0 {
                server.hang_up();
            }
        }
        for &number in &numbers {
            prop_assert_eq!(answers.of(number), expected(number), "page {}", number);
        }
        prop_assert_eq!(answers.count(), numbers.len());
    }
}

#[test]
fn two_requests_for_one_page_are_both_answered() {
    let (_folder, path) = socket();
    let slow = Faults::latency(Duration::from_millis(5));
    let _server = serves(&path, Injected::new(Numbers, slow).unwrap());
    let peer = connect(&path, LONG).unwrap();
    let both = [Answers::new(), Answers::new()];
    both.iter().for_each(|answers| answers.ask(&peer, 3));
    both.iter()
        .for_each(|answers| assert_eq!(answers.of(3), expected(3)));
}

#[test]
fn a_peer_that_comes_back_within_the_deadline_loses_nothing() {
    let (_folder, path) = socket();
    let server = serves(&path, Silent::default());
    let peer = connect(&path, LONG).unwrap();
    let answers = Answers::new();
    (0..100).for_each(|number| answers.ask(&peer, number));
    drop(server);
    std::fs::remove_file(&path).unwrap();
    (100..200).for_each(|number| answers.ask(&peer, number));
    assert_eq!(answers.count(), 0);
    let _server = serves(&path, Numbers);
    (0..200).for_each(|number| assert_eq!(answers.of(number), expected(number)));
}

/// Servers of two memories swap their sockets. The client takes no page of the other memory. Pages
/// in flight arrive when the first server is back.
#[test]
fn pages_of_another_memory_are_not_taken() {
    let (_folder, path) = socket();
    let policy = policy(Duration::from_millis(20), WhenGone::Hold);
    let first = serves(&path, Silent::default());
    let peer = Peer::connect(&path, PageCount::new(PAGES), policy).unwrap();
    assert_eq!(peer.memory_id(), Numbers.memory_id());
    let answers = Answers::new();
    (3..5).for_each(|number| answers.ask(&peer, number));
    drop(first);
    std::fs::remove_file(&path).unwrap();
    let other = serves(&path, Other);
    let is_told = |peer: &Peer| {
        peer.trouble()
            .is_some_and(|t| t.contains("another guest's memory"))
    };
    while !is_told(&peer) || other.accepted() < 3 {
        thread::yield_now();
    }
    assert_eq!(answers.count(), 0);
    drop(other);
    std::fs::remove_file(&path).unwrap();
    let _server = serves(&path, Numbers);
    (3..5).for_each(|number| assert_eq!(answers.of(number), expected(number)));
}

/// Another guest's memory.
struct Other;

impl PageSource for Other {
    fn describe(&self) -> String {
        "other".into()
    }

    fn fetch(&self, request: PageRequest) {
        let _ = request.provide(&page(request.page().0 + 1));
    }
}

/// Keeps every request for pages of [`Numbers`].
#[derive(Default)]
struct Silent(Mutex<Vec<PageRequest>>);

impl PageSource for Silent {
    fn describe(&self) -> String {
        "silent".into()
    }

    fn memory_id(&self) -> MemoryId {
        Numbers.memory_id()
    }

    fn fetch(&self, request: PageRequest) {
        self.0.lock().unwrap().push(request);
    }
}

#[test]
fn each_policy_has_its_outcome_when_the_peer_never_answers() {
    let (_folder, path) = socket();
    let server = serves(&path, Silent::default());
    let short = Duration::from_millis(50);
    let pages = PageCount::new(PAGES);
    let connect = |when_gone| Peer::connect(&path, pages, policy(short, when_gone)).unwrap();

    let lost = Answers::fetch(&connect(WhenGone::Poison), 1).unwrap_err();
    assert!(
        lost.starts_with("the peer has not sent page 1 for "),
        "{lost}"
    );

    let (sender, reasons) = channel();
    let sender = Mutex::new(sender);
    let kill = WhenGone::Kill(Arc::new(move |reason: &str| {
        sender.lock().unwrap().send(reason.to_owned()).unwrap();
    }));
    let peer = connect(kill);
    let lost = Answers::fetch(&peer, 1).unwrap_err();
    assert_eq!(reasons.try_recv(), Ok(lost));
    Answers::fetch(&peer, 2).unwrap_err();
    assert!(reasons.try_recv().is_err(), "the run is ended once");

    let peer = connect(WhenGone::Hold);
    let held = Answers::new();
    (0..5).for_each(|number| held.ask(&peer, number));
    // Each further connection follows a missed deadline.
    let before = server.accepted();
    while server.accepted() < before + 3 {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(held.count(), 0);
    drop(server);
    std::fs::remove_file(&path).unwrap();
    let _server = serves(&path, Numbers);
    (0..5).for_each(|number| assert_eq!(held.of(number), expected(number)));
}

#[test]
fn dropping_a_peer_fails_what_it_was_asked_for() {
    let (_folder, path) = socket();
    let _server = serves(&path, Silent::default());
    let peer = connect(&path, LONG).unwrap();
    let answers = Answers::new();
    (0..2000).for_each(|number| answers.ask(&peer, number));
    drop(peer);
    for number in 0..2000 {
        assert_eq!(answers.of(number), Err("it dropped the request".into()));
    }
}

#[test]
fn peers_that_cannot_serve_the_guest_are_refused_at_the_start() {
    let (_folder, path) = socket();
    let refused = || connect(&path, Duration::from_millis(50)).err().unwrap();
    assert!(matches!(refused(), PeerError::Io(_)), "no socket");
    let listener = UnixListener::bind(&path).unwrap();
    let silent = refused();
    assert!(
        silent.to_string().contains("timed out"),
        "no hello: {silent}"
    );
    drop(listener);
    std::fs::remove_file(&path).unwrap();
    let _few = serve(
        UnixListener::bind(&path).unwrap(),
        PageCount::new(7),
        Arc::new(Numbers),
    );
    let error = connect(&path, LONG).err().unwrap();
    assert!(matches!(
        error,
        PeerError::TooFewPages {
            has: 7,
            needs: PAGES
        }
    ));
}

/// A peer's bytes for the first request of a connection.
type Wrong = fn(u64) -> Vec<u8>;

fn bytes(message: &Message<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(message, &mut bytes);
    bytes
}

fn content(number: u64) -> Vec<u8> {
    bytes(&Message::Content(SourcePage(number), &page(number)))
}

/// A peer that answers wrongly once on each of its first `bad` connections, and rightly later.
struct Hostile {
    _thread: JoinHandle<()>,
    accepted: Arc<AtomicUsize>,
}

impl Hostile {
    fn new(path: &Path, bad: usize, wrong: Wrong) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let accepted = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&accepted);
        let _thread = thread::spawn(move || {
            for socket in listener.incoming() {
                let number = counts.fetch_add(1, Ordering::Relaxed);
                let wrong = (number < bad).then_some(wrong);
                // The test is over, or the client has closed the connection.
                let _ = answer(&mut socket.unwrap(), wrong);
            }
        });
        Self { _thread, accepted }
    }
}

fn answer(socket: &mut UnixStream, wrong: Option<Wrong>) -> std::io::Result<()> {
    let mut theirs = [0; HELLO];
    socket.read_exact(&mut theirs)?;
    socket.write_all(&hello(PAGES))?;
    let (mut decoder, mut buffer, mut first) = (Decoder::default(), [0; 4096], true);
    loop {
        match socket.read(&mut buffer)? {
            0 => return Ok(()),
            length => decoder.push(&buffer[..length]),
        }
        while let Some(Message::Request(page)) = decoder.decode().unwrap() {
            match wrong {
                Some(wrong) if first => socket.write_all(&wrong(page.0))?,
                Some(_) => {}
                None => socket.write_all(&content(page.0))?,
            }
            first = false;
        }
    }
}

/// Each misbehaviour, and its error text.
const WRONGS: [(&str, Wrong, &str); 7] = [
    (
        "twice",
        |n| [content(n), content(n)].concat(),
        "which it was not asked for, or has sent",
    ),
    (
        "wrong page",
        |n| content(n + 1000),
        "which it was not asked for",
    ),
    (
        "short",
        |n| {
            let mut short = content(n);
            short[4..8].copy_from_slice(&100u32.to_le_bytes());
            short.truncate(116);
            short
        },
        "sent 100 bytes for page 5",
    ),
    (
        "long",
        |n| {
            let mut long = content(n);
            long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
            long
        },
        "sent 4294967295 bytes for page 5",
    ),
    ("garbage", |_| vec![0xff; 64], "a message of kind 65535"),
    (
        "a request",
        |n| bytes(&Message::Request(SourcePage(n))),
        "a message of kind 1",
    ),
    (
        "half of an answer",
        |n| content(n)[..2000].to_vec(),
        "has not sent page 5 for",
    ),
];

#[test]
fn a_peer_that_does_wrong_loses_nothing_if_it_does_right_later() {
    for (name, wrong, _) in WRONGS {
        let (_folder, path) = socket();
        let hostile = Hostile::new(&path, 3, wrong);
        // The client notices half an answer when the patience is over, and holds the request.
        let policy = policy(Duration::from_millis(100), WhenGone::Hold);
        let peer = Peer::connect(&path, PageCount::new(PAGES), policy).unwrap();
        let answers = Answers::new();
        (0..50).for_each(|number| answers.ask(&peer, number));
        (0..50).for_each(|number| assert_eq!(answers.of(number), Ok(bytes_of(number)), "{name}"));
        assert!(hostile.accepted.load(Ordering::Relaxed) > 1, "{name}");
    }
}

#[test]
fn a_peer_that_always_does_wrong_has_one_error_for_each_wrong() {
    for (name, wrong, expected) in WRONGS {
        let (_folder, path) = socket();
        let _hostile = Hostile::new(&path, usize::MAX, wrong);
        let policy = policy(Duration::from_millis(50), WhenGone::Hold);
        let peer = Peer::connect(&path, PageCount::new(PAGES), policy).unwrap();
        let answers = Answers::new();
        answers.ask(&peer, 5);
        // On a busy host a slow peer may lose its connection; the next one follows.
        while !peer
            .trouble()
            .is_some_and(|reason| reason.contains(expected))
        {
            thread::yield_now();
        }
        // The first of two answers counts; the second one ends the connection.
        assert_eq!(answers.count() == 1, name == "twice", "{name}");
    }
}

#[test]
fn an_answer_that_is_late_meets_a_new_connection() {
    let (_folder, path) = socket();
    let late = Late::default();
    let requests = Arc::clone(&late.0);
    let _server = serves(&path, late);
    let peer = connect(&path, Duration::from_millis(50)).unwrap();
    Answers::fetch(&peer, 7).unwrap_err();
    // The connection of these requests is closed: the answers go nowhere.
    for request in std::mem::take(&mut *requests.lock().unwrap()) {
        let _ = request.provide(&page(1));
    }
    let answers = Answers::new();
    answers.ask(&peer, 8);
    loop {
        for request in std::mem::take(&mut *requests.lock().unwrap()) {
            let _ = request.provide(&page(request.page().0));
        }
        if answers.count() > 0 {
            break;
        }
        thread::yield_now();
    }
    // Page 8 has its own content, never another page's, or is lost: the peer counted as gone.
    match answers.of(8) {
        Ok(content) => assert_eq!(content, bytes_of(8)),
        Err(reason) => assert!(reason.contains("has not sent"), "{reason}"),
    }
}

#[derive(Default)]
struct Late(Arc<Mutex<Vec<PageRequest>>>);

impl PageSource for Late {
    fn describe(&self) -> String {
        "late".into()
    }

    fn fetch(&self, request: PageRequest) {
        self.0.lock().unwrap().push(request);
    }
}

/// A misbehaving client sees its connection end; other clients are still served.
#[test]
fn clients_that_do_wrong_are_hung_up_on() {
    let (_folder, path) = socket();
    let _server = serves(&path, Silent::default());
    let greedy: Vec<u8> = (0..1500)
        .flat_map(|n| bytes(&Message::Request(SourcePage(n))))
        .collect();
    let hello = hello(1).to_vec();
    for wrong in [
        vec![0; HELLO],
        [hello.clone(), vec![0xff; 64]].concat(),
        [hello.clone(), content(1)].concat(),
        [hello, greedy].concat(),
    ] {
        let mut client = UnixStream::connect(&path).unwrap();
        // The server may close the connection before all is written.
        let _ = client.write_all(&wrong);
        let mut rest = Vec::new();
        // The connection is reset if the server closes it with unread bytes.
        let _ = client.read_to_end(&mut rest);
        assert!(rest.len() <= HELLO);
    }
}

#[test]
fn a_client_that_does_not_read_delays_no_other() {
    let (_folder, path) = socket();
    let _server = serves(&path, Numbers);
    let mut deaf = UnixStream::connect(&path).unwrap();
    deaf.write_all(&hello(1)).unwrap();
    for number in 0..1000 {
        deaf.write_all(&bytes(&Message::Request(SourcePage(number))))
            .unwrap();
    }
    let peer = connect(&path, LONG).unwrap();
    assert_eq!(Answers::fetch(&peer, 3), expected(3));
}

#[test]
fn faults_are_those_of_the_seed() {
    let faults = |seed| Faults {
        seed,
        latency: Duration::from_millis(1)..Duration::from_millis(3),
        loss: 0.2,
        resend: Duration::from_millis(10),
        reordering: 0.2,
    };
    let fates = |seed| {
        (0..2000)
            .map(|page| faults(seed).of(page))
            .collect::<Vec<_>>()
    };
    assert_eq!(fates(1), fates(1));
    assert_ne!(fates(1), fates(2));
    let fates = fates(1);
    let lost = fates.iter().filter(|fate| fate.losses > 0).count();
    assert!((300..500).contains(&lost), "{lost} of 2000 at 20 %");
    for fate in fates {
        let least = Duration::from_millis(1) + Duration::from_millis(10) * fate.losses;
        assert!(fate.delay >= least && fate.delay < least + Duration::from_millis(5));
    }
    let plain = Faults::latency(Duration::from_millis(1)).of(3);
    assert_eq!((plain.delay, plain.losses), (Duration::from_millis(1), 0));
}

#[test]
fn a_link_that_ends_fails_what_it_holds() {
    let hour = Faults::latency(Duration::from_secs(3600));
    let link = Injected::new(Numbers, hour).unwrap();
    let answers = Answers::new();
    (0..10).for_each(|number| answers.ask(&link, number));
    drop(link);
    (0..10).for_each(|number| _ = answers.of(number).unwrap_err());
}
