//! The peer with a guest's pages, and the source by which a VM asks it.
//!
//! ```text
//! vCPU, or its VMM ─► Pages ─► demand connection ─► server ─► delay ─► content ─┐
//! push thread      ─►       ─► push connection   ─► server ─► delay ─► content ─┤
//!                  page in place ◄── the connection's reader thread ◄───────────┘
//! ```
//! Demands and pushed pages have a connection each, so that a demand waits in no socket behind
//! pushed pages. A page that was requested on one of them is not requested on the other. A delay is
//! a queue by time ([`Injected`]), so any number of requests overlap: the link has latency and
//! unlimited bandwidth. The peer lives in this process, on threads of its own.

use crate::experiment::{LabError, LabResult};
use crate::guests::folder;
use lacuna::source::{
    Answer, Failure, Faults, Injected, Measured, PageRequest, PageRequester, PageSource, Peer,
    Policy, Server, serve,
};
use lacuna::{PAGE_SIZE, PageCount};
use std::cell::Cell;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use tempfile::TempDir;

/// The content of the pages of a booting guest.
static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
/// The content of all pages after that. The protocol sends a page of zeros without its bytes.
static CONTENT: [u8; PAGE_SIZE] = [0xa5; PAGE_SIZE];

thread_local! {
    /// The purpose of this thread's requests.
    static PURPOSE: Cell<Purpose> = const { Cell::new(Purpose::Demand) };
}

/// The purpose of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// A vCPU needs it.
    Demand,
    /// The page is the next one to push.
    Push,
}

/// From now on this thread asks pages for `purpose`.
pub fn ask_for(purpose: Purpose) {
    PURPOSE.set(purpose);
}

/// A peer with all pages of any guest.
pub struct Remote {
    demand: Endpoint,
    push: Endpoint,
    _folder: TempDir,
}

struct Endpoint {
    path: PathBuf,
    _server: Server,
}

impl Remote {
    /// Starts a peer that answers `latency` after each request.
    pub fn start(latency: Duration) -> LabResult<Self> {
        let folder = folder()?;
        let endpoint = |name: &str| {
            let path = folder.path().join(name);
            let listener = UnixListener::bind(&path)?;
            let far = Injected::new(Content, Faults::latency(latency))?;
            // No guest is larger.
            let pages = PageCount::from_bytes(1 << 40);
            let server = serve(listener, pages, Arc::new(far))?;
            Ok(Endpoint {
                path,
                _server: server,
            })
        };
        let started: io::Result<_> =
            endpoint("demand").and_then(|demand| Ok((demand, endpoint("push")?)));
        let (demand, push) = started.map_err(LabError::io("start a peer"))?;
        Ok(Self {
            demand,
            push,
            _folder: folder,
        })
    }

    /// Connects a guest of `pages` pages; at most `window` of them are pushed at a time.
    pub fn connect(&self, pages: PageCount, window: u64) -> LabResult<Arc<Pages>> {
        let connect = |endpoint: &Endpoint| {
            let peer = Peer::connect(&endpoint.path, pages, Policy::default());
            let peer = peer.map_err(|error| io::Error::other(error.to_string()));
            peer.map_err(LabError::io("connect to the lab's peer"))
        };
        Ok(Arc::new(Pages {
            pages,
            is_far: AtomicBool::new(false),
            demand: Measured::new(connect(&self.demand)?),
            push: Measured::new(connect(&self.push)?),
            window: Arc::new(Window {
                size: window,
                inside: Mutex::default(),
                changed: Condvar::new(),
            }),
        }))
    }
}

/// The server's source. It answers at once.
struct Content;

impl PageSource for Content {
    fn describe(&self) -> String {
        "the lab's pages".into()
    }

    fn fetch(&self, request: PageRequest) {
        // Late: the client has closed the connection.
        let _ = request.provide(&CONTENT);
    }
}

/// The pages of one guest, from a [`Remote`].
pub struct Pages {
    pages: PageCount,
    is_far: AtomicBool,
    demand: Measured<Peer>,
    push: Measured<Peer>,
    window: Arc<Window>,
}

impl Pages {
    /// From now on the peer is asked. Until then the guest boots, and gets zeros at once.
    pub fn set_far(&self) {
        self.is_far.store(true, Ordering::Relaxed);
    }

    /// The number of its pages.
    pub fn count(&self) -> u64 {
        self.pages.get()
    }

    /// The numbers of demanded pages and of pushed pages that have arrived.
    pub fn provided(&self) -> [u64; 2] {
        [&self.demand, &self.push].map(|peer| peer.stats().provided)
    }

    /// Waits until at most half of the window is in flight; returns how many more pages may be
    /// pushed.
    pub fn room(&self) -> u64 {
        let full = |inside: &mut Inside| inside.in_flight > self.window.size / 2;
        let inside = self.window.changed.wait_while(self.window.lock(), full);
        self.window.size - inside.expect("no panic under this lock").in_flight
    }

    /// The pages that the peer was asked to push so far.
    pub fn asked_to_push(&self) -> u64 {
        self.window.lock().asked
    }
}

impl PageSource for Pages {
    fn describe(&self) -> String {
        "the lab's peer".into()
    }

    fn fetch(&self, request: PageRequest) {
        match PURPOSE.get() {
            // Late: another thread has provided the page.
            _ if !self.is_far.load(Ordering::Relaxed) => _ = request.provide(&ZEROS),
            Purpose::Demand => self.demand.fetch(request),
            Purpose::Push => {
                let page = request.page();
                let mut inside = self.window.lock();
                inside.in_flight += 1;
                inside.asked += 1;
                drop(inside);
                let window = Arc::clone(&self.window);
                let pushed = Arc::new(Pushed { request, window });
                self.push.fetch(PageRequest::new(pushed, page.0, page));
            }
        }
    }
}

/// Pushed pages in flight.
struct Window {
    /// The most of them.
    size: u64,
    inside: Mutex<Inside>,
    changed: Condvar,
}

/// The data under the lock of a [`Window`].
#[derive(Default)]
struct Inside {
    in_flight: u64,
    asked: u64,
}

impl Window {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().expect("no panic under this lock")
    }
}

/// A request for a pushed page. It is dropped when the page is in place.
struct Pushed {
    request: PageRequest,
    window: Arc<Window>,
}

impl PageRequester for Pushed {
    fn answer(&self, _key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        match content {
            Ok(content) => self.request.provide(content),
            Err(failure) => self.request.pass(failure),
        }
    }
}

impl Drop for Pushed {
    fn drop(&mut self) {
        let mut inside = self.window.lock();
        inside.in_flight -= 1;
        // A wake-up for each page would cost as much as the page.
        if inside.in_flight == self.window.size / 2 {
            self.window.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};
    use std::time::Instant;

    struct Keep(Mutex<Sender<(u64, u8, Instant)>>);

    impl PageRequester for Keep {
        fn answer(&self, key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
            let sender = self.0.lock().unwrap();
            // The end of the request is a late answer.
            content.map_or(Answer::Late, |content| {
                sender.send((key, content[0], Instant::now())).unwrap();
                Answer::Taken
            })
        }
    }

    /// Pages are zeros at first. A far peer answers after the latency, to both purposes.
    #[test]
    fn a_far_peer_answers_after_its_latency() {
        let latency = Duration::from_millis(50);
        let remote = Remote::start(latency).unwrap();
        let pages = remote.connect(PageCount::new(100), 64).unwrap();
        let (sender, answers) = channel();
        let keep = Arc::new(Keep(Mutex::new(sender)));
        let ask = |page: u64, purpose| {
            ask_for(purpose);
            let requester = Arc::clone(&keep) as Arc<dyn PageRequester>;
            pages.fetch(PageRequest::new(
                requester,
                page,
                lacuna::source::SourcePage(page),
            ));
            ask_for(Purpose::Demand);
        };
        ask(1, Purpose::Demand);
        let (page, first, _) = answers.recv().unwrap();
        assert_eq!((page, first), (1, 0));
        pages.set_far();
        let began = Instant::now();
        (10..20).for_each(|page| ask(page, Purpose::Demand));
        (20..30).for_each(|page| ask(page, Purpose::Push));
        let got: Vec<_> = (0..20).map(|_| answers.recv().unwrap()).collect();
        for (page, first, at) in &got {
            assert!((10..30).contains(page) && *first == CONTENT[0]);
            assert!(*at - began >= latency, "page {page} came too early");
        }
        // An answer is counted after its arrival, and before its request is dropped.
        while Arc::strong_count(&keep) > 1 {
            std::thread::yield_now();
        }
        assert_eq!((pages.provided(), pages.room()), ([10, 10], 64));
        assert_eq!(pages.asked_to_push(), 10);
    }
}
