//! Requests to a source, and the outcome of its answers.

use crate::{External, MemoryId};
use lacuna_addr::PAGE_SIZE;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

/// A page's number in its source, from 0: its offset in a memory file, divided by 4 KiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub struct SourcePage(pub u64);

impl fmt::Display for SourcePage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {}", self.0)
    }
}

/// Provides the pages of a VM's memory: a peer, a snapshot file, an external handler. A memory
/// manager calls it with no lock held, from several threads at once.
pub trait PageSource: Send + Sync {
    /// Its name in error messages, such as `snapshot in /var/lib/vm`.
    fn describe(&self) -> String;

    /// Requests a page, at most once for each page. The source answers `request` now or later, on
    /// any thread. This call does not wait: the caller may be the thread of a vCPU, whose guest
    /// keeps running.
    ///
    /// If this panics, the request fails with [`Failure::PANICKED`]: that is an error of the
    /// program, and the VM fails with it. The panic itself ends here, because the caller may be any
    /// thread.
    fn fetch(&self, request: PageRequest);

    /// The identity of its memory. The default follows from its name.
    fn memory_id(&self) -> MemoryId {
        MemoryId::of(&[self.describe().as_bytes()])
    }

    /// Why it provides no page at present, in a message; `None` while it may provide one. Meanwhile
    /// a thread that needs a page waits, as long as the source's policy says.
    fn outage(&self) -> Option<String> {
        None
    }

    /// Its handler, if it fills memory from outside. Linux memory is then registered with the
    /// handler's userfaultfds, and [`PageSource::fetch`] is not called.
    fn external(&self) -> Option<&External> {
        None
    }
}

impl<S: PageSource + ?Sized> PageSource for Box<S> {
    fn describe(&self) -> String {
        (**self).describe()
    }

    fn fetch(&self, request: PageRequest) {
        (**self).fetch(request);
    }

    fn memory_id(&self) -> MemoryId {
        (**self).memory_id()
    }

    fn outage(&self) -> Option<String> {
        (**self).outage()
    }

    fn external(&self) -> Option<&External> {
        (**self).external()
    }
}

impl<S: PageSource + ?Sized> PageSource for Arc<S> {
    fn describe(&self) -> String {
        (**self).describe()
    }

    fn fetch(&self, request: PageRequest) {
        (**self).fetch(request);
    }

    fn memory_id(&self) -> MemoryId {
        (**self).memory_id()
    }

    fn outage(&self) -> Option<String> {
        (**self).outage()
    }

    fn external(&self) -> Option<&External> {
        (**self).external()
    }
}

/// The memory manager that makes requests and takes the answers.
pub trait PageRequester: Send + Sync {
    /// Takes an answer: the page's content, or why there is none. `key` is the requester's own name
    /// for the page. The calling thread may run callbacks, so it holds no lock.
    fn answer(&self, key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer;
}

impl fmt::Debug for dyn PageSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageSource({})", self.describe())
    }
}

/// Why a source does not provide a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure<'a> {
    /// For messages.
    pub reason: &'a str,
    /// Whether the source or the program failed.
    pub kind: FailureKind,
}

/// The kind of a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FailureKind {
    /// The page is lost.
    Lost,
    /// The source has panicked, which is an error of the program. The page is not lost: the source
    /// has not finished looking for it.
    Panicked,
}

impl Failure<'static> {
    /// The reason of requests whose source has panicked.
    pub const PANICKED: Self = Self {
        reason: "the page source has panicked, and the panic's own message says where",
        kind: FailureKind::Panicked,
    };
}

/// The page is lost for this reason.
impl<'a> From<&'a str> for Failure<'a> {
    fn from(reason: &'a str) -> Self {
        let kind = FailureKind::Lost;
        Self { reason, kind }
    }
}

impl fmt::Display for Failure<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason)
    }
}

/// A request for a page. A clone is the same request. The request fails when its last clone is
/// dropped without an answer, so an ending source leaves no thread waiting.
#[derive(Clone)]
pub struct PageRequest(Arc<Asked>);

struct Asked {
    requester: Arc<dyn PageRequester>,
    key: u64,
    page: SourcePage,
}

/// The outcome of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Answer {
    /// It counts: the page is in place, or it is lost for the given reason.
    Taken,
    /// It changes nothing: the page was answered before, or its memory is gone.
    Late,
}

impl PageRequest {
    /// A request by `requester`, whose name for the page is `key`.
    pub fn new(requester: Arc<dyn PageRequester>, key: u64, page: SourcePage) -> Self {
        Self(Arc::new(Asked {
            requester,
            key,
            page,
        }))
    }

    /// Sends the request to `source`, for memory managers. If the source panics, the request fails
    /// with [`Failure::PANICKED`], unless it was answered.
    pub fn send(self, source: &dyn PageSource) {
        let kept = self.clone();
        if catch_unwind(AssertUnwindSafe(|| source.fetch(self))).is_err() {
            // Late, if the source has answered before.
            let _ = kept.pass(Failure::PANICKED);
        }
    }

    /// The page.
    pub fn page(&self) -> SourcePage {
        self.0.page
    }

    /// Provides the page's content. Wakes the threads that wait for the page. Callbacks run on the
    /// calling thread, which holds no lock.
    pub fn provide(&self, content: &[u8; PAGE_SIZE]) -> Answer {
        self.0.requester.answer(self.0.key, Ok(content))
    }

    /// Reports that the page is lost. As [`PageRequest::provide`] otherwise.
    pub fn fail(&self, reason: &str) -> Answer {
        self.pass(reason.into())
    }

    /// As [`PageRequest::fail`], for a source that asks another source: passes its failure on.
    pub fn pass(&self, failure: Failure<'_>) -> Answer {
        self.0.requester.answer(self.0.key, Err(failure))
    }
}

impl fmt::Debug for PageRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageRequest({})", self.0.page)
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let failure = match thread::panicking() {
            true => Failure::PANICKED,
            false => "it dropped the request".into(),
        };
        // Late, unless no clone was answered.
        let _ = self.requester.answer(self.key, Err(failure));
    }
}
