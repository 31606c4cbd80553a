//! A VMM provides pages by address, without a previous fault.
//!
//! The fill takes a frame that no page word names, copies into it, and then changes the page word
//! from Empty to Resident. So it takes no shared lock and makes no ticket. If two threads provide
//! one page, the second gets [`Answer::Late`].

use crate::core::Core;
use crate::counters::FaultCounters;
use crate::error::HostError;
use crate::host::Host;
use crate::per_cpu_pages::PerCpuPages;
use crate::region::Region;
use crate::resolve::Resolution;
use crate::settled::{NEVER, TICK};
use crate::ticket::Ticket;
use lacuna_addr::{Access, BackingAddr, BackingRange, Level, PAGE_SIZE};
use lacuna_frames::{BlockWord, Dirt, PageBlockState, PageNo, PageState, PageWord};
use lacuna_source::Answer;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

/// When the guest needs a filled page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needed {
    /// A vCPU may wait for it, and may need some time until it retries: reclaim's clock hand spares
    /// the page for one turn.
    Soon,
    /// As any other page.
    Later,
}

/// The most pages that [`Host::populate`] waits for at once.
const AT_ONCE: usize = 32;

impl Host {
    /// Whether the page at `addr` was never provided: its region has a page source, and neither the
    /// source nor [`Host::provide`] has supplied the page. A provided page stays provided.
    #[inline]
    pub fn is_missing(&self, addr: BackingAddr, cache: &mut PerCpuPages) -> bool {
        self.core.is_never_provided(PageNo::of(addr), cache)
    }

    /// Whether no frame holds the page at `addr`: it is missing, swapped or paged out, being read,
    /// or was dropped as zeros. False for a lost or removed page, because no thread can bring it
    /// back.
    pub fn is_nonresident(&self, addr: BackingAddr, cache: &mut PerCpuPages) -> bool {
        let page = PageNo::of(addr);
        cache.find(page).is_some() && cache.region().lacks_frame(page)
    }

    /// Whether the page at `addr` reads as zeros because no thread has touched it: its region has
    /// no page source. A page of zeros that was touched and dropped is none.
    pub fn is_untouched(&self, addr: BackingAddr, cache: &mut PerCpuPages) -> bool {
        let page = PageNo::of(addr);
        cache.find(page).is_some() && cache.region().is_untouched(page)
    }

    /// As [`Host::is_missing`], for a thread that has no page cache.
    pub fn was_never_provided(&self, addr: BackingAddr) -> bool {
        let page = PageNo::of(addr);
        let region = self.core.regions.find(page);
        region.is_some_and(|region| region.lacks(page))
    }

    /// Provides the page at `addr`. If a thread waits for the page, or the source has a request for
    /// it, this counts as the source's answer. [`Answer::Late`]: the page was already provided, or
    /// its region has no source; nothing has changed.
    ///
    /// The call may reclaim, and wait for it. It also waits while another thread discards the page
    /// ([`Host::make_missing`]), which waits for vCPUs. The caller holds no lock.
    ///
    /// # Errors
    /// No frame can be freed, no region has the page, or it is lost.
    pub fn provide(
        &self,
        addr: BackingAddr,
        content: &[u8; PAGE_SIZE],
    ) -> Result<Answer, HostError> {
        let mut cache = self.borrow_cache();
        let answer = self.provide_with(PageNo::of(addr), content, &mut cache);
        self.spare_caches.put(cache);
        answer
    }

    fn provide_with(
        &self,
        page: PageNo,
        content: &[u8; PAGE_SIZE],
        cache: &mut PerCpuPages,
    ) -> Result<Answer, HostError> {
        loop {
            match self.core.provide(page, content, cache) {
                Some(answer) => return answer,
                None => drop(self.reclaim_direct(cache)?),
            }
        }
    }

    /// Provides the pages from `addr` on, which lie in one region, and returns how many of them
    /// were [`Answer::Taken`]. In Linux memory, one system call puts each run of missing pages in
    /// place. In memory in huge pages ([`SharedMemory::huge`](crate::SharedMemory::huge)), a huge
    /// page is in place when its last part has arrived. This process keeps the parts until then, in
    /// up to 2 MiB for each huge page. As [`Host::provide`] otherwise.
    ///
    /// # Errors
    /// As [`Host::provide`]; pages before the failed one are provided.
    pub fn provide_pages(
        &self,
        addr: BackingAddr,
        pages: &[[u8; PAGE_SIZE]],
    ) -> Result<usize, HostError> {
        let mut cache = self.borrow_cache();
        let taken = self.provide_all(PageNo::of(addr), pages, &mut cache);
        self.spare_caches.put(cache);
        taken
    }

    fn provide_all(
        &self,
        first: PageNo,
        pages: &[[u8; PAGE_SIZE]],
        cache: &mut PerCpuPages,
    ) -> Result<usize, HostError> {
        let (mut at, mut taken) = (0, 0);
        while at < pages.len() {
            let run = self.core.provide_run(first.plus(at), &pages[at..], cache)?;
            (at, taken) = (at + run.len, taken + run.taken);
            // The next page is not part of a run.
            if let Some(page) = pages.get(at) {
                let answer = self.provide_with(first.plus(at), page, cache)?;
                taken += usize::from(answer == Answer::Taken);
                at += 1;
            }
        }
        Ok(taken)
    }

    /// Requests the page at `addr` from the source if it is missing and not yet requested, or
    /// begins to read it back. Returns the ticket; `None` if the page is there. The call may wait
    /// for free memory. The caller holds no lock.
    ///
    /// # Errors
    /// The page is lost, or no frame can be freed.
    pub fn fetch(&self, addr: BackingAddr) -> Result<Option<Ticket>, HostError> {
        self.fetch_until(addr, &NEVER)
    }

    /// As [`Host::fetch`]. Also returns `None` if `stop` is set while the call waits for free
    /// memory, or for the end of a discard.
    ///
    /// # Errors
    /// As [`Host::fetch`].
    pub fn fetch_until(
        &self,
        addr: BackingAddr,
        stop: &AtomicBool,
    ) -> Result<Option<Ticket>, HostError> {
        let mut cache = self.borrow_cache();
        let ticket = loop {
            let resolution = self.resolve(addr, Access::Read, Level::L4K, &mut cache);
            cache.unpin_all();
            match resolution {
                Resolution::Ready(_) => break None,
                Resolution::Pending(ticket) | Resolution::Missing(ticket) => break Some(ticket),
                Resolution::NoMemory if stop.load(Ordering::Acquire) => break None,
                Resolution::NoMemory => drop(self.reclaim_direct_until(&mut cache, stop)?),
                Resolution::Busy if stop.load(Ordering::Acquire) => break None,
                Resolution::Busy => std::thread::yield_now(),
                Resolution::Lost(lost) => return Err(lost.into()),
            }
        };
        self.spare_caches.put(cache);
        ticket.iter().for_each(|ticket| self.start(ticket));
        Ok(ticket)
    }

    /// Brings every page of `range` in: requests missing pages from the source, and reads back
    /// evicted ones, several at a time. Returns when all have arrived. Reclaim may have evicted
    /// some again. The caller holds no lock.
    ///
    /// # Errors
    /// A page is lost, or no frame can be freed.
    pub fn populate(&self, range: BackingRange) -> Result<(), HostError> {
        let mut cache = self.borrow_cache();
        let populated = self.populate_with(range, &mut cache);
        self.spare_caches.put(cache);
        populated
    }

    fn populate_with(&self, range: BackingRange, cache: &mut PerCpuPages) -> Result<(), HostError> {
        let mut coming = VecDeque::with_capacity(AT_ONCE);
        let mut page = 0;
        while page < range.pages() {
            let addr = range.start().checked_add_pages(page);
            let addr = addr.expect("in the range");
            let resolution = self.resolve(addr, Access::Read, Level::L4K, cache);
            cache.unpin_all();
            match resolution {
                Resolution::Ready(_) => page += 1,
                Resolution::Pending(ticket) | Resolution::Missing(ticket) => {
                    self.start(&ticket);
                    coming.push_back(ticket);
                    page += 1;
                    if coming.len() == AT_ONCE {
                        coming
                            .pop_front()
                            .map_or(Ok(()), |ticket| self.wait(&ticket))?;
                    }
                }
                // Pages in flight keep their frames until they have arrived.
                Resolution::NoMemory => match coming.pop_front() {
                    Some(ticket) => self.wait(&ticket)?,
                    None => drop(self.reclaim_direct(cache)?),
                },
                Resolution::Busy => std::thread::yield_now(),
                Resolution::Lost(lost) => return Err(lost.into()),
            }
        }
        coming.iter().try_for_each(|ticket| self.wait(ticket))
    }

    /// Calls `use_cache` with a page cache that no vCPU has, for a thread that resolves pages now
    /// and then.
    pub fn with_spare_cache<T>(&self, use_cache: impl FnOnce(&mut PerCpuPages) -> T) -> T {
        let mut cache = self.borrow_cache();
        let result = use_cache(&mut cache);
        self.spare_caches.put(cache);
        result
    }

    /// A page cache for one operation of a thread that is not a vCPU's.
    pub(crate) fn borrow_cache(&self) -> PerCpuPages {
        let spare = self.spare_caches.take();
        spare.unwrap_or_else(|| PerCpuPages::new(self.core.clone()))
    }
}

impl Region {
    /// Whether its source, or the VMM, has yet to provide `page`.
    #[inline]
    fn lacks(&self, page: PageNo) -> bool {
        if self.origin.is_none() {
            return false;
        }
        match self.word(page).map(PageWord::load) {
            Some(PageState::Fetching { .. }) => true,
            state => state == Some(PageState::Empty) && self.word_counts(page),
        }
    }

    fn lacks_frame(&self, page: PageNo) -> bool {
        match self.word(page).map(PageWord::load) {
            Some(PageState::Empty) => self.word_counts(page),
            Some(
                PageState::Fetching { .. }
                | PageState::Zero
                | PageState::Swapped { .. }
                | PageState::Reading { .. }
                | PageState::PagedOut
                | PageState::PagingIn,
            ) => true,
            _ => false,
        }
    }

    fn is_untouched(&self, page: PageNo) -> bool {
        let is_empty = || self.word(page).map(PageWord::load) == Some(PageState::Empty);
        self.origin.is_none() && is_empty() && self.word_counts(page)
    }

    /// Whether the page's own word says where it is: its block is neither compound nor gone.
    fn word_counts(&self, page: PageNo) -> bool {
        !matches!(
            self.block_word(page).map(BlockWord::load),
            Some(PageBlockState::Compound { .. } | PageBlockState::Gone)
        )
    }
}

impl Core {
    #[inline]
    fn is_never_provided(&self, page: PageNo, cache: &mut PerCpuPages) -> bool {
        cache.find(page).is_some() && cache.region().lacks(page)
    }

    /// `None`: no frame is free.
    fn provide(
        &self,
        page: PageNo,
        content: &[u8; PAGE_SIZE],
        cache: &mut PerCpuPages,
    ) -> Option<Result<Answer, HostError>> {
        let lost = || Some(Err(self.lost_page(page).into()));
        if cache.find(page).is_none() {
            return lost();
        }
        if cache.region().origin.is_none() {
            return Some(Ok(Answer::Late));
        }
        if cache.region().linux.is_some() {
            return Some(self.provide_linux(page, content, cache));
        }
        loop {
            match cache.region().word(page).map(PageWord::load) {
                Some(PageState::Empty) => {}
                // If another thread is answering now, its content counts.
                Some(PageState::Fetching { .. }) => {
                    return Some(Ok(self.answer(page, Ok(content))));
                }
                // It may be missing afterwards.
                Some(PageState::Discarding) => {
                    self.settled.wait_past(self.settled.generation(), TICK);
                    continue;
                }
                None | Some(PageState::Gone | PageState::Lost) => return lost(),
                Some(_) => return Some(Ok(Answer::Late)),
            }
            let block_word = cache.region().block_word(page);
            match block_word.map(BlockWord::load) {
                None | Some(PageBlockState::Split) => {}
                Some(PageBlockState::Untouched) => {
                    // Another thread may have changed it: the loop looks again.
                    let (from, to) = (PageBlockState::Untouched, PageBlockState::Split);
                    let _ = block_word.map(|word| word.change(from, to));
                    continue;
                }
                Some(PageBlockState::Compound { .. }) => return Some(Ok(Answer::Late)),
                Some(PageBlockState::Gone) => return lost(),
            }
            if self.fill_with(page, content, Needed::Soon, cache)? == Answer::Taken {
                FaultCounters::bump(&cache.shared.count.provided);
                return Some(Ok(Answer::Taken));
            }
        }
    }

    /// Gives the empty page a frame with `content`. `None` if no frame is free; [`Answer::Late`] if
    /// the page is no longer empty.
    fn fill_with(
        &self,
        page: PageNo,
        content: &[u8; PAGE_SIZE],
        needed: Needed,
        cache: &mut PerCpuPages,
    ) -> Option<Answer> {
        let frame = self.frame_for(page, cache)?;
        // SAFETY: this thread took the frame, and no page word names it yet.
        unsafe { self.frames.pool.exclusive(frame) }
            .0
            .copy_from_slice(content);
        let desc = self.frames.desc(frame);
        // No swap entry has these bytes, so the page is dirty.
        desc.prepare(page, Dirt::Dirty);
        if needed == Needed::Soon {
            desc.mark_recent();
        }
        let resident = PageState::Resident { frame, entry: None };
        // Release order: a thread that sees the word sees the bytes.
        let changed = cache
            .region()
            .word(page)?
            .change(PageState::Empty, resident);
        if changed.is_err() {
            cache.untake(frame);
            return Some(Answer::Late);
        }
        desc.publish();
        cache.shared.allocated();
        Some(Answer::Taken)
    }

    /// Writes a whole untouched page: its frame gets `content`, without zeroing before. `false`:
    /// nothing has happened, because the page has a frame or a source, its block may become a
    /// compound page, or no frame is free.
    pub fn fill_untouched(
        &self,
        page: PageNo,
        content: &[u8; PAGE_SIZE],
        cache: &mut PerCpuPages,
    ) -> bool {
        if cache.find(page).is_none() {
            return false;
        }
        let region = cache.region();
        let is_plain = region.origin.is_none() && region.linux.is_none();
        let is_split = region.block_word(page).map(BlockWord::load) == Some(PageBlockState::Split);
        let is_empty = region.word(page).map(PageWord::load) == Some(PageState::Empty);
        if !(is_plain && is_split && is_empty) {
            return false;
        }
        let filled = self.fill_with(page, content, Needed::Later, cache) == Some(Answer::Taken);
        if filled {
            FaultCounters::bump(&cache.shared.count.zero_fill);
        }
        filled
    }
}
