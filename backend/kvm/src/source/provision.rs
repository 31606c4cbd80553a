//! The provided pages of a VM with a page source, and the way they are put in place.
//!
//! ```text
//!  Missing ──► Held ──► Asked            Held: a thread waits, and the source was not asked
//!     └─────────┴─────────┴──► Filling ──► Provided
//!                         └──► Lost
//! ```
//! Any thread may fill a page: the answering thread, or one of the VMM. It claims the page
//! (`Filling`) and copies by `UFFDIO_COPY`, which wakes the threads that wait for the page. So an
//! answer needs no other thread, and answers of several threads do not wait for each other. The
//! page source's thread is notified afterwards, because it counts resident pages. Only a claim
//! permits a fill, because Linux would also fill an evicted page, which it sees as missing.
//!
//! | `UFFDIO_COPY` | outcome |
//! |---|---|
//! | `EEXIST` | the page keeps its content and counts as provided before; threads are woken |
//! | `EAGAIN`, `ENOMEM` | tried again, for [`SHORTAGE_MAX`](super::SHORTAGE_MAX); then as others |
//! | `ENOENT`, `ESRCH`, others | the VM fails |
//! | the descriptor is closed | the VM has failed or ended |

use super::shared::{Failure, SourceShared, count};
use super::{Page, RETRY, SHORTAGE_MAX};
use crate::memory::{self, Memory};
use crate::slots::SlotTable;
use crate::tokens::Tokens;
use lacuna_addr::{Gpa, PAGE_SIZE};
use lacuna_apf::Completion;
use lacuna_machine::{Answer, FailureKind, FaultToken, PageSource, Provided};
use lacuna_slots::SlotFlags;
use lacuna_source::{PageRequest, PageRequester, SourcePage};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use lacuna_sys::{Errno, Userfaultfd, Waiters};
use std::collections::HashMap;
use std::ops::Range;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Instant;

/// The state of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum PageState {
    /// It was never provided, and no known thread waits for it.
    Missing,
    /// A thread waits for it, and the VMM got an exit.
    Held,
    /// The source was asked for it.
    Asked,
    /// A thread puts it in place.
    Filling,
    /// It was provided. It may be evicted.
    Provided,
    /// The source has lost it.
    Lost,
}

const STATES: [PageState; 6] = [
    PageState::Missing,
    PageState::Held,
    PageState::Asked,
    PageState::Filling,
    PageState::Provided,
    PageState::Lost,
];

impl PageState {
    /// Whether the page still has to be provided.
    pub const fn is_missing(self) -> bool {
        matches!(self, Self::Missing | Self::Held | Self::Asked)
    }
}

/// Whether the page source's thread counts resident pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Budget {
    /// All pages fit.
    All,
    /// Pages may have to be evicted.
    Some,
}

/// The pages of a VM's boot layout.
pub struct Provision {
    states: Box<[AtomicU8]>,
    arrivals: Box<[AtomicU8]>,
    memory: Arc<Memory>,
    slots: Arc<SlotTable>,
    /// Closed when the page source's thread ends.
    uffd: Weak<Userfaultfd>,
    shared: Arc<SourceShared>,
    budget: Budget,
    /// The source's name.
    source: String,
    pub tokens: Tokens,
    /// Tokens and completions that become ready when a page has arrived, by page.
    ready_later: Mutex<HashMap<Page, Vec<Later>>, lock_order::KvmReadyLater>,
    /// Whether the host side of the guest's async page faults is in this process.
    notifies_guest: AtomicBool,
}

/// A token or completion that becomes ready when a page has arrived.
enum Later {
    /// An accepted exit.
    Token(FaultToken),
    /// A page that arrives without the VMM.
    Completion(Completion),
}

/// Why a page cannot be put in place.
pub type Unfilled = String;

impl Provision {
    pub fn new(
        memory: Arc<Memory>,
        slots: Arc<SlotTable>,
        uffd: Weak<Userfaultfd>,
        shared: Arc<SourceShared>,
        budget: Budget,
        source: String,
    ) -> Self {
        let pages = memory.guest.range().pages();
        let vcpus = shared.kicks.count();
        Self {
            states: (0..pages).map(|_| AtomicU8::new(0)).collect(),
            arrivals: (0..pages).map(|_| AtomicU8::new(0)).collect(),
            memory,
            slots,
            uffd,
            shared,
            budget,
            source,
            tokens: Tokens::new(vcpus),
            ready_later: Mutex::default(),
            notifies_guest: AtomicBool::new(false),
        }
    }

    /// From now on, vCPUs leave the guest to notify it of missing pages.
    pub fn tell_guest(&self) {
        self.notifies_guest.store(true, Ordering::Release);
    }

    /// Whether [`Provision::tell_guest`] was called.
    pub fn notifies_guest(&self) -> bool {
        self.notifies_guest.load(Ordering::Acquire)
    }

    pub fn state(&self, page: Page) -> PageState {
        STATES[usize::from(self.states[page as usize].load(Ordering::SeqCst))]
    }

    /// Whether this call has changed the state of `page` from one of `from`.
    fn change(&self, page: Page, from: &[PageState], to: PageState) -> bool {
        let word = &self.states[page as usize];
        from.iter().any(|from| {
            let order = Ordering::SeqCst;
            word.compare_exchange(*from as u8, to as u8, order, order)
                .is_ok()
        })
    }

    fn set(&self, page: Page, to: PageState) {
        self.states[page as usize].store(to as u8, Ordering::SeqCst);
    }

    /// A thread waits for `page`, and the VMM gets an exit. Returns whether it is the first.
    pub fn hold(&self, page: Page) -> bool {
        self.change(page, &[PageState::Missing], PageState::Held)
    }

    /// The guest address of `page`, if the page is missing in a slot that exits.
    pub fn exits(&self, page: Page) -> Option<Gpa> {
        if !self.state(page).is_missing() {
            return None;
        }
        let (slot, gpa) = self.slots.at(self.memory.guest.page(page))?;
        slot.flags
            .contains(SlotFlags::EXIT_ON_MISSING)
            .then_some(gpa)
    }

    /// The pages in `state`.
    pub fn in_state(&self, state: PageState) -> impl Iterator<Item = Page> {
        let pages = 0..self.states.len() as Page;
        pages.filter(move |page| self.state(*page) == state)
    }

    /// Provides pages from `first` on. Pages provided before keep their content.
    pub fn fill(&self, first: Page, content: &[[u8; PAGE_SIZE]]) -> Result<Provided, Unfilled> {
        let (mut provided, mut at) = (Provided::default(), 0);
        while at < content.len() {
            let page = first + at as Page;
            match self.claim(page, content.len() - at) {
                0 if self.state(page) == PageState::Lost => return Err(self.why_lost()),
                0 => {
                    provided.late += 1;
                    at += 1;
                }
                run => {
                    let filled = self.fill_claimed(page, &content[at..at + run])?;
                    provided.taken += filled.taken;
                    provided.late += filled.late;
                    at += run;
                }
            }
        }
        Ok(provided)
    }

    /// Claims missing pages from `first` on, at most `max`, and returns their number.
    fn claim(&self, first: Page, max: usize) -> usize {
        const FROM: [PageState; 3] = [PageState::Missing, PageState::Held, PageState::Asked];
        // A state only moves forward, so if the attempt fails for all three, another thread has
        // claimed the page.
        let claimed = |page: &Page| self.change(*page, &FROM, PageState::Filling);
        (first..).take(max).take_while(claimed).count()
    }

    /// Why no page can be provided any more: a page is lost only with its VM.
    fn why_lost(&self) -> Unfilled {
        let failure = self.shared.failure();
        failure.map_or("the VM has ended".into(), |failure| failure.cause)
    }

    fn fill_claimed(&self, first: Page, content: &[[u8; PAGE_SIZE]]) -> Result<Provided, Unfilled> {
        let end = first + content.len() as Page;
        let Some(uffd) = self.uffd.upgrade() else {
            (first..end).for_each(|page| self.set(page, PageState::Lost));
            return Err(self.why_lost());
        };
        let (mut provided, mut page, since) = (Provided::default(), first, Instant::now());
        while page < end {
            let rest = &content[(page - first) as usize..];
            let placed = uffd.place(rest, self.memory.guest.page(page), Waiters::Wake);
            let done = placed.map_or_else(|partial| partial.done, |()| rest.len());
            self.have_come(page..page + done as Page);
            count(&self.shared.counters.first_touches, done as u64);
            provided.taken += done as u64;
            page += done as Page;
            match placed.map_err(|partial| partial.errno) {
                Ok(()) => {}
                Err(Errno::EXIST) => {
                    self.have_come(page..page + 1);
                    // A failed copy wakes no thread. Linux may have swapped the page out.
                    let hva = self.memory.guest.page(page);
                    let _ = uffd.wake(hva);
                    let _ = memory::populate(hva, 1);
                    provided.late += 1;
                    page += 1;
                }
                Err(Errno::AGAIN | Errno::NOMEM) if since.elapsed() < SHORTAGE_MAX => {
                    thread::sleep(RETRY);
                }
                Err(errno) => {
                    (page..end).for_each(|page| self.set(page, PageState::Lost));
                    let cause = format!("cannot put the page in place: {errno}");
                    self.fail(page, FailureKind::Lost, cause.clone());
                    return Err(cause);
                }
            }
        }
        Ok(provided)
    }

    /// `pages` are in place.
    fn have_come(&self, pages: Range<Page>) {
        if pages.is_empty() {
            return;
        }
        for page in pages.clone() {
            self.set(page, PageState::Provided);
        }
        if self.budget == Budget::Some {
            self.shared.arrived(pages.clone());
        }
        pages.for_each(|page| self.arrived(page));
    }

    /// The number of arrivals of `page`, modulo 256.
    pub fn arrivals(&self, page: Page) -> u8 {
        self.arrivals[page as usize].load(Ordering::SeqCst)
    }

    /// Counts an arrival of `page`.
    pub fn arrived(&self, page: Page) {
        self.arrivals[page as usize].fetch_add(1, Ordering::SeqCst);
        self.complete_waiting(page);
    }

    /// Completes the tokens and completions that wait for `page`.
    fn complete_waiting(&self, page: Page) {
        let waiting = self.ready_later().remove(&page);
        for later in waiting.into_iter().flatten() {
            match later {
                // The call fails if the token is already completed.
                Later::Token(token) => _ = self.tokens.ready(token),
                Later::Completion(completion) => completion.complete(),
            }
        }
    }

    fn ready_later(&self) -> MutexGuard<'_, HashMap<Page, Vec<Later>>> {
        self.ready_later.lock().expect("no panic under this lock")
    }

    /// Reports `token` ready when `page` has arrived. A page keeps each token once, and no
    /// completed token, so endless calls do not use endless memory.
    pub fn ready_when_arrived(&self, page: Page, token: FaultToken) {
        if !self.tokens.is_open(token) {
            return;
        }
        let waiting = |later: &Later| match later {
            Later::Token(token) => Some(*token),
            Later::Completion(_) => None,
        };
        let all = self.ready_later();
        let kept = all.get(&page).into_iter().flatten();
        let mut gone: Vec<_> = kept.filter_map(waiting).collect();
        // Tokens have a lock of their own.
        drop(all);
        gone.retain(|other| *other == token || !self.tokens.is_open(*other));
        let mut all = self.ready_later();
        let kept = all.entry(page).or_default();
        kept.retain(|later| waiting(later).is_none_or(|token| !gone.contains(&token)));
        kept.push(Later::Token(token));
        drop(all);
        // The page may have arrived before the entry existed.
        if self.state(page) == PageState::Provided {
            self.complete_waiting(page);
        }
    }

    /// Completes `completion` when `page`, which arrives without the VMM, has arrived once more
    /// than `arrivals`.
    pub fn complete_later(&self, page: Page, arrivals: u8, completion: Completion) {
        let completion = Later::Completion(completion);
        self.ready_later().entry(page).or_default().push(completion);
        // The page may have arrived before the entry existed. If it was evicted since, no thread
        // waits for it, and it does not arrive again.
        if self.arrivals(page) != arrivals {
            self.complete_waiting(page);
        }
    }

    /// The number of tokens and completions that wait for `page`.
    #[cfg(test)]
    pub fn waiting_for(&self, page: Page) -> usize {
        self.ready_later
            .lock()
            .unwrap()
            .get(&page)
            .map_or(0, Vec::len)
    }

    fn lose(&self, page: Page, failure: lacuna_source::Failure<'_>) -> Answer {
        if !self.change(page, &[PageState::Asked], PageState::Lost) {
            return Answer::Late;
        }
        let cause = format!("{} cannot provide it: {failure}", self.source);
        self.fail(page, failure.kind, cause);
        Answer::Taken
    }

    fn fail(&self, page: Page, kind: FailureKind, cause: String) {
        let lost = self.slots.at(self.memory.guest.page(page));
        self.shared.fail(Failure {
            lost: lost.map(|(_, gpa)| gpa),
            kind,
            cause,
        });
    }
}

/// Takes the answers to requests. Does not keep the VM alive.
struct Answers(Weak<Provision>);

impl PageRequester for Answers {
    fn answer(
        &self,
        key: u64,
        content: Result<&[u8; PAGE_SIZE], lacuna_source::Failure<'_>>,
    ) -> Answer {
        let provision = self
            .0
            .upgrade()
            .filter(|all| (key as usize) < all.states.len());
        let Some(provision) = provision else {
            return Answer::Late;
        };
        match content {
            Ok(content) => match provision.fill(key as Page, slice::from_ref(content)) {
                Ok(Provided { taken: 1, .. }) => Answer::Taken,
                _ => Answer::Late,
            },
            Err(failure) => provision.lose(key as Page, failure),
        }
    }
}

/// A page source, and the pages that it provides.
pub struct Provider {
    pub provision: Arc<Provision>,
    source: Arc<dyn PageSource>,
    answers: Arc<dyn PageRequester>,
}

impl Provider {
    pub fn new(provision: Provision, source: Arc<dyn PageSource>) -> Self {
        let provision = Arc::new(provision);
        Self {
            answers: Arc::new(Answers(Arc::downgrade(&provision))),
            provision,
            source,
        }
    }

    /// Asks the source for `page`, unless the page is present or already requested.
    pub fn ask(&self, page: Page) {
        const FROM: [PageState; 2] = [PageState::Missing, PageState::Held];
        if !self.provision.change(page, &FROM, PageState::Asked) {
            return;
        }
        let number = SourcePage(u64::from(page));
        let request = PageRequest::new(Arc::clone(&self.answers), u64::from(page), number);
        request.send(&*self.source);
    }
}
