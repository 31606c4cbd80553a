//! The pages of an image that its clones share: one memory file, filled once from the source.
//!
//! ```text
//! fault of a clone ──► filled, or zeros? ─yes─────────────────────────────► answer
//!                          └no─► asked already? ─yes─► wait ────────────────► answer
//!                                     └no─► ask the source ─► fill the file ─► answer
//! ```
//! The file's own state is not trusted: another process can make a page of zeros appear in it. A
//! page is shared only after this process has filled it, as `states` says.

use crate::config::Report;
use crate::image::Image;
use lacuna_addr::PAGE_SIZE;
use lacuna_source::{
    Answer, Failure, MemoryId, PageRequest, PageRequester, PageSource, SourcePage,
};
use lacuna_sync::{Mutex, lock, lock_order};
use lacuna_sys::{Errno, SharedFile};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Weak};

/// What the image's clones get for one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum SharedState {
    /// The source must be asked.
    Unknown,
    /// The page of the file.
    Filled,
    /// The kernel's page of zeros. The file has no page.
    Zeros,
}

/// A page source whose pages are kept in a memory file. It asks the image's source at most once at
/// a time for each page, and never again for a filled one.
pub struct SharedPages {
    this: Weak<Self>,
    source: Arc<dyn PageSource>,
    file: SharedFile,
    /// A [`SharedState`] for each page. It changes under the lock of `asked`.
    states: Box<[AtomicU8]>,
    /// The requests that wait for the source's answer, by page.
    asked: Mutex<HashMap<SourcePage, Vec<PageRequest>>, lock_order::PagerShared>,
    report: Report,
    has_reported: AtomicBool,
}

impl SharedPages {
    /// A file without a filled page.
    ///
    /// # Errors
    /// This host has no such file.
    pub fn new(image: &Image, report: Report) -> Result<Arc<Self>, Errno> {
        let pages = image.pages.get();
        let file = SharedFile::new(pages)?;
        let states = (0..pages).map(|_| AtomicU8::new(SharedState::Unknown as u8));
        let (states, source) = (states.collect(), Arc::clone(&image.source));
        Ok(Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            source,
            file,
            states,
            asked: Mutex::default(),
            report,
            has_reported: AtomicBool::new(false),
        }))
    }

    /// A descriptor of the file for a VMM, which can only read it.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn reader(&self) -> Result<OwnedFd, Errno> {
        self.file.reader()
    }

    /// Whether the page is in the file, with its content.
    pub fn has(&self, page: SourcePage) -> bool {
        self.state(page) == SharedState::Filled
    }

    fn state(&self, page: SourcePage) -> SharedState {
        match self.states[page.0 as usize].load(Ordering::Acquire) {
            0 => SharedState::Unknown,
            1 => SharedState::Filled,
            _ => SharedState::Zeros,
        }
    }

    /// Takes the content of a page, which a fill has brought.
    pub fn fill(&self, page: SourcePage, content: &[u8; PAGE_SIZE]) {
        if self.state(page) == SharedState::Unknown {
            // Late: no VM waits for it.
            let _ = self.keep(page, Ok(content));
        }
    }

    /// Takes the source's answer. All requests for the page get it.
    fn keep(&self, page: SourcePage, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        let state = match content {
            // A fault and a fill may both have asked for it: the first content stays.
            _ if self.state(page) != SharedState::Unknown => self.state(page),
            Ok(content) if is_zeros(content) => SharedState::Zeros,
            // Without a page in the file, each of the VMs gets a copy of its own.
            Ok(content) => match self.file.fill(page.0, content) {
                Ok(()) => SharedState::Filled,
                Err(errno) => self.short(errno),
            },
            Err(_) => SharedState::Unknown,
        };
        let mut asked = lock(&self.asked);
        // A failure does not undo what another thread has filled meanwhile.
        if state != SharedState::Unknown {
            self.states[page.0 as usize].store(state as u8, Ordering::Release);
        }
        let requests = asked.remove(&page);
        drop(asked);
        let mut answer = Answer::Late;
        for request in requests.into_iter().flatten() {
            let one = match content {
                Ok(content) => request.provide(content),
                Err(failure) => request.pass(failure),
            };
            if one == Answer::Taken {
                answer = one;
            }
        }
        answer
    }

    fn short(&self, errno: Errno) -> SharedState {
        let text = format!(
            "a page of {} is copied into each VM: the host has no memory for a shared one \
             ({errno}); raise the limit of the pager's memory",
            self.source.describe()
        );
        tracing::warn!(target: "lacuna::pager", "{text}");
        if !self.has_reported.swap(true, Ordering::Relaxed) {
            (self.report)(&text);
        }
        SharedState::Unknown
    }
}

impl PageSource for SharedPages {
    fn describe(&self) -> String {
        self.source.describe()
    }

    fn memory_id(&self) -> MemoryId {
        self.source.memory_id()
    }

    fn outage(&self) -> Option<String> {
        self.source.outage()
    }

    fn fetch(&self, request: PageRequest) {
        let page = request.page();
        let mut asked = lock(&self.asked);
        let state = self.state(page);
        if state == SharedState::Unknown {
            let waiting = asked.entry(page).or_default();
            waiting.push(request);
            if waiting.len() > 1 {
                return;
            }
        } else {
            drop(asked);
            // Late, as all of them: the VM has ended, or has taken the page away.
            let _ = match state {
                SharedState::Zeros => request.provide(&[0; PAGE_SIZE]),
                _ => match self.file.read(page.0) {
                    Ok(content) => request.provide(&content),
                    Err(errno) => request.fail(&format!("the shared file cannot be read: {errno}")),
                },
            };
            return;
        }
        drop(asked);
        let Some(pages) = self.this.upgrade() else {
            return;
        };
        let is_answered = AtomicBool::new(false);
        let asking = Arc::new(Asking { pages, is_answered });
        PageRequest::new(asking, page.0, page).send(&self.source);
    }
}

/// One request to the image's source, for all VMs that wait for the page.
struct Asking {
    pages: Arc<SharedPages>,
    is_answered: AtomicBool,
}

impl PageRequester for Asking {
    fn answer(&self, key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        // The end of a request calls this with a failure, also after an answer.
        match self.is_answered.swap(true, Ordering::AcqRel) {
            true => Answer::Late,
            false => self.pages.keep(SourcePage(key), content),
        }
    }
}

/// Whether a page has zeros alone.
pub fn is_zeros(content: &[u8; PAGE_SIZE]) -> bool {
    let (words, _) = content.as_chunks::<8>();
    words.iter().all(|word| u64::from_ne_bytes(*word) == 0)
}
