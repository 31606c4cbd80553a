//! Pages of Linux memory come: by the VMM, by an answer of the source, or as zeros.
//!
//! Two threads may fill one page at once. The kernel lets one of them put its page in place, and
//! the other gets `EEXIST`. The content that is in place counts: the thread that has put it there
//! gets [`Answer::Taken`].

use super::LinuxMemory;
use crate::error::{HostError, LostPage};
use crate::host::{Core, lock};
use crate::per_cpu_pages::{FaultCounters, PerCpuPages};
use crate::pool::FramePtr;
use crate::residency::{PageNo, PageState, PageWord};
use crate::resolve::{Resolution, small};
use crate::stats::Counters;
use crate::ticket::Ticket;
use lacuna_addr::PAGE_SIZE;
use lacuna_source::Answer;
use lacuna_sys::{Errno, Waiters};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How often a fill is tried that the kernel answers with `EAGAIN`.
const ATTEMPTS: usize = 1 << 16;

const ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// A run of pages that one system call has put in place.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Run {
    pub len: usize,
    /// How many of them count.
    pub taken: usize,
}

/// The result of a fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Filled {
    /// This thread's content is in place.
    Here,
    /// Another thread was first.
    Before,
}

impl LinuxMemory {
    /// Puts `content` in place at `index` of the region, unless a page is there.
    fn fill(&self, index: u64, content: &[u8; PAGE_SIZE]) -> Result<Filled, Errno> {
        let Some(uffd) = &self.uffd else {
            // Only a region with a userfaultfd has pages that are missing.
            return Ok(Filled::Before);
        };
        let page = self.hva(index);
        for _ in 0..ATTEMPTS {
            // No thread touches a missing page, so none waits in the kernel.
            match uffd.place(std::slice::from_ref(content), page, Waiters::LeaveAsleep) {
                Ok(()) => return Ok(Filled::Here),
                Err(partial) => match partial.errno {
                    Errno::EXIST => return Ok(Filled::Before),
                    // The address space of this process is changing.
                    Errno::AGAIN => std::thread::yield_now(),
                    errno => return Err(errno),
                },
            }
        }
        Err(Errno::AGAIN)
    }

    fn note_in_place(&self) {
        self.in_place.fetch_add(1, Ordering::Relaxed);
    }
}

impl Core {
    /// The first fault on a page that has never been in place.
    #[cold]
    pub fn resolve_linux(
        &self,
        page: PageNo,
        state: PageState,
        cache: &mut PerCpuPages,
    ) -> Option<Resolution> {
        let region = cache.region();
        let linux = region.linux.as_ref()?;
        let frame = region.linux_frame(page)?;
        match state {
            PageState::InPlace => {
                FaultCounters::bump(&cache.shared.count.resident);
                Some(Resolution::Ready(small(frame)))
            }
            PageState::Empty if region.origin.is_some() => {
                let fetching = PageState::Fetching { frame };
                let ticket = self.put_in_flight(page, PageState::Empty, fetching, cache)?;
                FaultCounters::bump(&cache.shared.count.missing);
                Some(Resolution::Missing(ticket))
            }
            PageState::Empty | PageState::Zero => {
                let _user = linux.enter();
                let word = region.word(page)?;
                if word.load() != state {
                    return None;
                }
                if let Err(errno) = linux.fill(region.index_of(page), &ZEROS) {
                    return Some(Resolution::Lost(not_filled(page, errno)));
                }
                if word.change(state, PageState::InPlace).is_ok() {
                    linux.note_in_place();
                    FaultCounters::bump(&cache.shared.count.zero_fill);
                }
                None
            }
            _ => Some(Resolution::Busy),
        }
    }

    /// As [`Core::provide`], for a page of Linux memory whose region `cache` has found.
    pub fn provide_linux(
        &self,
        page: PageNo,
        content: &[u8; PAGE_SIZE],
        cache: &PerCpuPages,
    ) -> Result<Answer, HostError> {
        let region = cache.region();
        let (Some(linux), Some(word)) = (&region.linux, region.word(page)) else {
            return Ok(Answer::Late);
        };
        let user = linux.enter();
        match word.load() {
            PageState::Empty => {}
            // If another thread is answering at this moment, its content counts.
            PageState::Fetching { .. } => {
                drop(user);
                return Ok(self.answer(page, Ok(content)));
            }
            PageState::Gone => return Err(self.lost_page(page).into()),
            _ => return Ok(Answer::Late),
        }
        let filled = linux.fill(region.index_of(page), content);
        let filled = filled.map_err(|errno| not_filled(page, errno))?;
        Ok(self.note_filled(page, word, filled, linux))
    }

    /// After a fill of `page`, whose word said Empty: the page is in place, unless it is not wanted
    /// any more. The caller is a user of the region.
    fn note_filled(
        &self,
        page: PageNo,
        word: &PageWord,
        filled: Filled,
        linux: &LinuxMemory,
    ) -> Answer {
        match word.change(PageState::Empty, PageState::InPlace) {
            Ok(()) => linux.note_in_place(),
            // A fault has made a ticket meanwhile. Its page is there.
            Err(PageState::Fetching { .. }) => self.arrived_without_answer(page),
            Err(PageState::InPlace) => {}
            // It was discarded, or its source has failed: the content does not count.
            Err(_) => return Answer::Late,
        }
        match filled {
            Filled::Here => {
                Counters::add(&self.stats.provided, 1);
                Answer::Taken
            }
            Filled::Before => Answer::Late,
        }
    }

    /// Puts the empty pages at `first`, up to the first page that is not, in place by one system
    /// call. The run has no page where that is not possible.
    pub fn provide_run(&self, first: PageNo, pages: &[[u8; PAGE_SIZE]]) -> Result<Run, HostError> {
        let region = self.regions.find(first);
        let mut run = Run::default();
        let Some((region, uffd)) = region.as_ref().and_then(|region| {
            let linux = region.linux.as_ref()?;
            Some((region, linux.uffd.as_ref()?))
        }) else {
            return Ok(run);
        };
        let linux = region.linux.as_ref().expect("it has a userfaultfd");
        let words = || (0..pages.len()).map_while(|i| region.word(first.plus(i)));
        let user = linux.enter();
        let empty = words()
            .take_while(|word| word.load() == PageState::Empty)
            .count();
        let to = linux.hva(region.index_of(first));
        run.len = match uffd.place(&pages[..empty], to, Waiters::LeaveAsleep) {
            Ok(()) => empty,
            // The caller tries the next page by itself.
            Err(partial) => partial.done,
        };
        for (i, word) in words().take(run.len).enumerate() {
            let answer = self.note_filled(first.plus(i), word, Filled::Here, linux);
            run.taken += usize::from(answer == Answer::Taken);
        }
        drop(user);
        Ok(run)
    }

    /// Completes a fetch whose page another thread has put in place, unless a thread is answering:
    /// that one finds the page in place, and completes the fetch.
    fn arrived_without_answer(&self, page: PageNo) {
        let ticket = lock(&self.tickets).get(&page).cloned();
        let ticket = ticket.filter(|ticket| self.is_missing(ticket));
        if let Some(ticket) = ticket.filter(Ticket::answer) {
            self.completing.fetch_add(1, Ordering::Relaxed);
            self.settle(&ticket, Ok(()));
            self.completing.fetch_sub(1, Ordering::Release);
        }
    }

    /// Fills the page of `ticket`, for which the caller has won [`Ticket::answer`].
    pub fn fill_in_place(
        &self,
        ticket: &Ticket,
        linux: &LinuxMemory,
        content: &[u8; PAGE_SIZE],
    ) -> (Answer, Result<(), LostPage>) {
        let page = ticket.number();
        // The page word says Fetching, so no thread takes the page away before it is settled.
        match linux.fill(ticket.region().index_of(page), content) {
            Ok(Filled::Here) => {
                Counters::add(&self.stats.provided, 1);
                (Answer::Taken, Ok(()))
            }
            Ok(Filled::Before) => (Answer::Late, Ok(())),
            Err(errno) => {
                let lost = not_filled(page, errno);
                self.note_lost(page, Arc::clone(&lost.reason));
                (Answer::Taken, Err(lost))
            }
        }
    }

    /// As [`Core::settle`], for a page of Linux memory.
    pub fn settle_linux(&self, ticket: &Ticket, linux: &LinuxMemory, result: Result<(), LostPage>) {
        let page = ticket.number();
        let Some(word) = ticket.region().word(page) else {
            return;
        };
        let moved = match &result {
            Ok(()) => word.advance(PageState::arrived_in_place),
            Err(_) => word.advance(PageState::arrival_failed),
        };
        debug_assert!(moved.is_ok(), "only the caller completes this ticket");
        if result.is_ok() {
            linux.note_in_place();
        }
        lock(&self.tickets).remove(&page);
        ticket.complete(result);
        self.settled.bump();
    }

    /// Runs `copy` on a page of Linux memory while no other thread can take the page away. `None`
    /// if it is not in place.
    pub fn while_in_place(&self, page: PageNo, copy: impl FnOnce(FramePtr<'_>)) -> Option<()> {
        let region = self.regions.find(page)?;
        let linux = region.linux.as_ref()?;
        let _user = linux.enter();
        let in_place = region.word(page).map(PageWord::load) == Some(PageState::InPlace);
        in_place.then(|| copy(self.frames.pool.frame(linux.pfn(region.index_of(page)))))
    }
}

fn not_filled(page: PageNo, errno: Errno) -> LostPage {
    LostPage {
        page: page.addr(),
        reason: format!("Linux cannot put it in place: {errno}").into(),
    }
}
