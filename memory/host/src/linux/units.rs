//! Huge pages of hugetlbfs: their pages are filled together, as one *unit*. A unit has 512 pages,
//! or 262144 without a page source.
//!
//! ```text
//! fault on any page of the unit, never provided
//!   word of the first page: Empty -> Fetching; one ticket     Missing(ticket), for each page of it
//!   Host::start: the source is asked for the 512 pages
//!     511 answers: gathered in the ticket
//!     the last one: UFFDIO_COPY of 2 MiB
//!     or one fails: the unit is lost
//!   word of the first page: InPlace, or Lost
//!   words of the others follow: Empty -> InPlace, or Lost     then the ticket is done
//! ```
//! The first page's word decides which thread puts the unit in place. The other words change after
//! it, never before. A thread that takes a unit away also changes the first word first. Each other
//! word has then either moved or is still Empty: the thread takes both. It takes no word of a unit
//! that is in flight or lost. It gives the words back in the opposite order.
//!
//! A fault that finds the first word InPlace, and its own word still Empty, moves its own word. A
//! thread that moves words because the first one says InPlace is a user of the region meanwhile, so
//! that they do not move after the unit is missing again.

use crate::core::Core;
use crate::counters::FaultCounters;
use crate::error::{HostError, LostPage};
use crate::host::Host;
use crate::per_cpu_pages::PerCpuPages;
use crate::region::Region;
use crate::resolve::Resolution;
use crate::ticket::Ticket;
use lacuna_addr::{BackingAddr, BackingRange, Level, PAGE_SIZE};
use lacuna_frames::{BLOCK, PageNo, PageState};
use lacuna_linux::{LinuxMemory, reserve_of};
use lacuna_source::{Answer, Failure, Gathered, UnitContent};
use lacuna_sync::lock;
use lacuna_sys::Errno;
use std::sync::atomic::Ordering;

/// A run of pages that one system call put in place.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Run {
    pub len: usize,
    /// The number of pages whose content counts.
    pub taken: usize,
}

impl Region {
    /// The number of pages that are filled together: a hugetlbfs page's pages, or one.
    pub fn unit(&self) -> u64 {
        self.linux.as_ref().map_or(1, LinuxMemory::unit)
    }

    /// Whether pages are filled together.
    pub fn has_units(&self) -> bool {
        self.unit() > 1
    }

    /// The pages that are filled together with `page`.
    pub fn unit_of(&self, page: PageNo) -> BackingRange {
        let unit = self.unit();
        // The region begins with a unit.
        let first = PageNo::new(page.get() - page.get() % unit);
        BackingRange::new(first.addr(), unit).expect("in the region")
    }

    /// The size of the leaf that may map `page`, which is in place, in a region of Linux memory.
    pub fn level_of(&self, page: PageNo) -> Level {
        let level = self
            .linux
            .as_ref()
            .map_or(Level::L4K, LinuxMemory::page_size);
        let first = PageNo::of(self.unit_of(page).start());
        // The first word moves last (`zeros_for_unit`): no page of the leaf is read as zeros
        // because of its word.
        let is_whole = || {
            self.word(first)
                .is_some_and(|word| word.load() == PageState::InPlace)
        };
        match level {
            Level::L1G if !is_whole() => Level::L2M,
            level => level,
        }
    }
}

impl Host {
    /// The pages that are provided together with the page at `addr`: all pages of its huge page
    /// ([`SharedMemory::huge`](crate::SharedMemory::huge)), or only that page.
    pub fn provided_with(&self, addr: BackingAddr) -> BackingRange {
        let page = PageNo::of(addr);
        let region = self.core.regions.find(page);
        region.map_or(page.range(), |region| region.unit_of(page))
    }
}

impl Core {
    /// A fault on an empty page of a region with a source; `cache` has found the region. `None`:
    /// look again.
    pub fn resolve_in_unit(&self, page: PageNo, cache: &PerCpuPages) -> Option<Resolution> {
        let region = cache.region();
        let linux = region.linux.as_ref()?;
        let first = page.block_start();
        match region.word(first)?.load() {
            PageState::Empty => {
                let frame = region.linux_frame(first)?;
                let fetching = PageState::Fetching { frame };
                let ticket =
                    self.put_in_flight(first, PageState::Empty, fetching, cache.region())?;
                FaultCounters::bump(&cache.shared.count.missing);
                Some(Resolution::Missing(ticket))
            }
            PageState::Fetching { .. } => self.join(first, cache).map(Resolution::Missing),
            PageState::InPlace => {
                let _user = linux.enter();
                if region.word(first)?.load() != PageState::InPlace {
                    return None;
                }
                let word = region.word(page)?;
                if word.change(PageState::Empty, PageState::InPlace).is_ok() {
                    linux.note_in_place(1);
                }
                None
            }
            // The other words follow.
            PageState::Lost | PageState::Gone => Some(Resolution::Lost(self.lost_page(first))),
            // Another thread takes the unit away, and will soon change this word.
            _ => Some(Resolution::Busy),
        }
    }

    /// A fault on a page of a discarded unit, or of a new one without a source: zeros, or what the
    /// file has.
    pub fn zeros_for_unit(
        &self,
        page: PageNo,
        state: PageState,
        cache: &PerCpuPages,
    ) -> Option<Resolution> {
        let region = cache.region();
        let linux = region.linux.as_ref()?;
        let _user = linux.enter();
        if region.word(page)?.load() != state {
            return None;
        }
        let unit = region.unit_of(page);
        let first = PageNo::of(unit.start());
        // A new unit was allocated with its region. If the file is shorter now, an access finds
        // that.
        if state == PageState::Zero
            && let Err(errno) = linux.allocate_unit(region.index_of(first))
        {
            return Some(Resolution::Lost(not_filled(linux, page, errno)));
        }
        let pages = (0..unit.pages() as usize).rev();
        let words = pages.filter_map(|at| region.word(first.plus(at)));
        let moved = words.filter(|word| word.change(state, PageState::InPlace).is_ok());
        let moved = moved.count();
        linux.note_in_place(moved as i64);
        FaultCounters::add(&cache.shared.count.zero_fill, moved as u64);
        None
    }

    /// Provides pages from `first` on, as whole units and parts of them; `cache` has found the
    /// region.
    pub fn provide_units(
        &self,
        first: PageNo,
        pages: &[[u8; PAGE_SIZE]],
        cache: &PerCpuPages,
    ) -> Result<Run, HostError> {
        let lost = || HostError::from(self.lost_page(first));
        let linux = cache.region().linux.as_ref().ok_or_else(lost)?;
        let mut run = Run::default();
        while run.len < pages.len() {
            let at = first.plus(run.len);
            let len = (BLOCK - at.in_block()).min(pages.len() - run.len);
            let now = &pages[run.len..run.len + len];
            // Pages that have arrived keep their content.
            let has_parts = || {
                self.ticket_with(at)
                    .is_some_and(|ticket| ticket.has_parts())
            };
            run.taken += match len == BLOCK && !has_parts() {
                true => self.provide_unit(at, now, (cache, linux))?,
                false => self.provide_part(at, now, (cache, linux))?,
            };
            run.len += len;
        }
        Ok(run)
    }

    /// Provides a part of a unit, from `first` on. The unit's ticket keeps it until the rest
    /// arrives, from the VMM or, once a thread needs the unit, from the source.
    pub(super) fn provide_part(
        &self,
        first: PageNo,
        pages: &[[u8; PAGE_SIZE]],
        (cache, linux): (&PerCpuPages, &LinuxMemory),
    ) -> Result<usize, HostError> {
        let unit = first.block_start();
        let lost = || HostError::from(self.lost_page(unit));
        let word = cache.region().word(unit).ok_or_else(lost)?;
        let frame = linux.pfn(cache.region().index_of(unit));
        let mut taken = 0;
        for (page, content) in pages.iter().enumerate() {
            let (user, state) = self.enter_after_discards(linux, word);
            drop(user);
            if state == PageState::Empty {
                // If another thread is first, the page goes to that thread's ticket.
                let fetching = PageState::Fetching { frame };
                let _ = self.put_in_flight(unit, PageState::Empty, fetching, cache.region());
            }
            let answer = self.answer(first.plus(page), Ok(content));
            taken += usize::from(answer == Answer::Taken);
        }
        match word.load() {
            PageState::Gone | PageState::Lost => Err(lost()),
            _ => Ok(taken),
        }
    }

    fn provide_unit(
        &self,
        first: PageNo,
        content: &[[u8; PAGE_SIZE]],
        (cache, linux): (&PerCpuPages, &LinuxMemory),
    ) -> Result<usize, HostError> {
        let region = cache.region();
        let lost = || HostError::from(self.lost_page(first));
        let word = region.word(first).ok_or_else(lost)?;
        let (_user, state) = self.enter_after_discards(linux, word);
        match state {
            PageState::Empty | PageState::Fetching { .. } => {}
            PageState::Gone | PageState::Lost => return Err(lost()),
            _ => return Ok(0),
        }
        let filled = linux.fill(region.index_of(first), content);
        let filled = filled.map_err(|errno| not_filled(linux, first, errno))?;
        let answer = self.note_filled(first, word, filled, linux);
        // Otherwise another thread is answering. It finds the unit in place, and moves the words.
        if word.load() == PageState::InPlace {
            self.follow(region, first, &Ok(()));
        }
        let taken = match answer {
            Answer::Taken => BLOCK,
            Answer::Late => 0,
        };
        FaultCounters::add(&cache.shared.count.provided, taken as u64);
        Ok(taken)
    }

    /// The source's answer for `page`, which is filled together with the other pages of `ticket`.
    pub fn answer_in_unit(
        &self,
        ticket: &Ticket,
        page: PageNo,
        content: Result<&[u8; PAGE_SIZE], Failure<'_>>,
    ) -> Answer {
        match content {
            Ok(content) => match ticket.gather(page.in_block(), content) {
                Gathered::Late => Answer::Late,
                Gathered::Partly => Answer::Taken,
                Gathered::Wholly(pages) => {
                    self.complete_unit(ticket, UnitContent::Pages(pages.all()))
                }
            },
            // An answered request does not fail when it is dropped.
            Err(_) if ticket.has_gathered(page.in_block()) => Answer::Late,
            Err(Failure { reason, kind }) => {
                let reason = &format!("{reason} (page {} of its 2 MiB)", page.addr());
                self.complete_unit(ticket, UnitContent::Fails(Failure { reason, kind }))
            }
        }
    }

    /// Ends the fetch of a unit, unless another thread does.
    pub fn complete_unit(&self, ticket: &Ticket, content: UnitContent<'_>) -> Answer {
        let Some(linux) = &ticket.region().linux else {
            return Answer::Late;
        };
        if !ticket.answer() {
            return Answer::Late;
        }
        // Counted before the ticket is removed: see `in_flight`.
        self.completing.fetch_add(1, Ordering::Relaxed);
        let (answer, result) = match content {
            UnitContent::Pages(pages) => self.fill_in_place(ticket, linux, pages),
            UnitContent::Zeros => {
                let first = ticket.number();
                let filled = linux.allocate_unit(ticket.region().index_of(first));
                let filled = filled.map_err(|errno| not_filled(linux, first, errno));
                if let Err(lost) = &filled {
                    self.note_lost(first, lost);
                }
                (Answer::Taken, filled)
            }
            UnitContent::Fails(failure) => {
                (Answer::Taken, Err(self.lost_by_source(ticket, failure)))
            }
        };
        self.settle(ticket, result);
        self.completing.fetch_sub(1, Ordering::Release);
        answer
    }

    /// Moves the other words if they are still empty, after the word of the unit's first page. The
    /// caller is a user of the region.
    pub fn follow(&self, region: &Region, first: PageNo, result: &Result<(), LostPage>) {
        let mut in_place = 0;
        for page in (1..BLOCK).map(|at| first.plus(at)) {
            let Some(word) = region.word(page) else {
                continue;
            };
            match result {
                Ok(()) => {
                    let moved = word.change(PageState::Empty, PageState::InPlace);
                    in_place += i64::from(moved.is_ok());
                }
                Err(lost) => {
                    // Record the reason before the word says Lost: a thread that sees the word asks
                    // for the reason.
                    self.note_lost(page, lost);
                    if word.change(PageState::Empty, PageState::Lost).is_err() {
                        lock(&self.lost).remove(&page);
                    }
                }
            }
        }
        if let Some(linux) = &region.linux {
            linux.note_in_place(in_place);
        }
    }
}

/// The loss of `page`, which Linux cannot put in place.
pub(super) fn not_filled(linux: &LinuxMemory, page: PageNo, errno: Errno) -> LostPage {
    let help = match errno {
        Errno::NOMEM | Errno::NOSPC if linux.unit() > 1 => {
            let (size, reserve) = reserve_of(linux.page_size());
            format!("; no huge page of {size} is free: reserve more of them ({reserve})")
        }
        _ => String::new(),
    };
    let reason = format!("Linux cannot put it in place: {errno}{help}");
    LostPage::new(page.addr(), reason)
}
