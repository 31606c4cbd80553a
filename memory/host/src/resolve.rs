//! From an address to a frame: the fault path. It never sleeps and does no I/O.

use crate::core::Core;
use crate::counters::FaultCounters;
use crate::error::LostPage;
use crate::host::Host;
use crate::per_cpu_pages::PerCpuPages;
use crate::region::{HugePages, Region};
use crate::ticket::Ticket;
use lacuna_addr::{Access, BackingAddr, Level, Pfn};
use lacuna_frames::{
    BlockNo, BlockWord, Dirt, Marked, PageBlockState, PageNo, PageState, PageWord,
};
use lacuna_sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A page's frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame {
    /// The frame of this very page.
    pub pfn: Pfn,
    /// Above [`Level::L4K`]: all of the 2 MiB or 1 GiB around the page, as the region numbers
    /// pages, is in consecutive frames that are aligned alike, and may be mapped as one.
    pub level: Level,
}

/// The state of a page, for a caller that wants to use it.
#[derive(Debug)]
#[must_use]
pub enum Resolution {
    /// In this frame, until the region's MMU notifier is called for the page.
    Ready(Frame),
    /// In flight. Pass the ticket to [`Host::start`] or [`Host::wait`], then resolve again. The
    /// read does not begin before that.
    Pending(Ticket),
    /// Never provided, and the region has a page source. The ticket is used as in `Pending`; a VMM
    /// may instead provide the page itself.
    Missing(Ticket),
    /// Another thread discards the page's bytes ([`Host::discard`], [`Host::make_missing`]) or
    /// pages it out ([`Host::page_out`]), and waits for vCPUs: a vCPU goes offline, then resolves
    /// again.
    Busy,
    /// No frame is free: release all locks, call [`Host::reclaim_direct`], then resolve again.
    NoMemory,
    /// Its content is lost, or the address is in no region.
    Lost(LostPage),
}

impl Host {
    /// Finds or makes the frame of the page at `addr`, and *pins* the page in `cache` until
    /// [`PerCpuPages::unpin_all`].
    ///
    /// [`Access::Write`] marks the page dirty before it is ready. Only then may the caller map the
    /// frame writable. A caller that maps a page read-only, and later lets it be written, must then
    /// call [`Host::mark_dirty`].
    ///
    /// A ready page may be evicted a moment later. So the caller reads the invalidation sequence
    /// before this call, and installs the frame only if the sequence has not moved.
    ///
    /// `max_level` is the largest leaf that the caller can map there. If the page was never
    /// touched, the host makes a page of at most that size.
    ///
    /// # Panics
    /// If `cache` is another host's: its frames are not in this host's pool.
    // Always inlined, with its callees: the fault paths of the table formats are compiled in one
    // crate. The compiler inlines a function of this size into one caller, but into none of two.
    #[inline(always)]
    pub fn resolve(
        &self,
        addr: BackingAddr,
        access: Access,
        max_level: Level,
        cache: &mut PerCpuPages,
    ) -> Resolution {
        assert!(
            std::sync::Arc::ptr_eq(&self.core, &cache.core),
            "another host's cache"
        );
        self.core
            .resolve(PageNo::of(addr), access, max_level, cache)
    }

    /// The size of `addr`'s huge page, if it is in one, and the frame of `addr`'s block there. A
    /// compound page may be split a moment later; the split calls its notifier's
    /// [`crate::MmuNotifier::split_huge`]. A huge page of hugetlbfs stays whole.
    pub fn huge_page(&self, addr: BackingAddr) -> Option<Frame> {
        let page = PageNo::of(addr);
        let region = self.core.regions.find(page)?;
        let (pfn, level) = match region.block_word(page).map(BlockWord::load) {
            Some(PageBlockState::Compound { block }) => (block.frame(0), Level::L2M),
            Some(_) => return None,
            None => {
                let level = region.linux.as_ref()?.page_size();
                (region.linux_frame(page.block_start())?, level)
            }
        };
        (level > Level::L4K).then_some(Frame { pfn, level })
    }
}

impl Core {
    #[inline(always)]
    fn resolve(
        &self,
        page: PageNo,
        access: Access,
        max_level: Level,
        cache: &mut PerCpuPages,
    ) -> Resolution {
        cache.shared.pin(page);
        if cache.find(page).is_none() {
            return Resolution::Lost(self.lost_page(page));
        }
        loop {
            // A caller that can map 2 MiB reads the block word first. The page words of a compound
            // page are then never read, so the kernel need not back them.
            if max_level >= Level::L2M
                && self.huge() != HugePages::Never
                && let Some(block_word) = cache.region().block_word(page).map(BlockWord::load)
                && block_word != PageBlockState::Split
            {
                match self.by_block_word(page, block_word, access, max_level, cache) {
                    Some(resolution) => return resolution,
                    None => continue,
                }
            }
            let Some(state) = cache.region().word(page).map(PageWord::load) else {
                return Resolution::Lost(self.lost_page(page));
            };
            let step = match state {
                PageState::Resident { frame, .. } => {
                    FaultCounters::bump(&cache.shared.count.resident);
                    Some(self.ready(page, frame, access))
                }
                PageState::Empty => match cache.region().block_word(page).map(BlockWord::load) {
                    Some(PageBlockState::Split) => match &cache.region().origin {
                        None => self.fill(page, PageState::Empty, access, cache),
                        Some(_) => self.begin_fetch(page, cache),
                    },
                    None => self.touch_without_block(page, access, cache),
                    Some(block_word) => {
                        self.by_block_word(page, block_word, access, max_level, cache)
                    }
                },
                PageState::Evicting { .. } | PageState::Writeback { .. } => {
                    self.rescue(page, state, access, cache)
                }
                PageState::Swapped { .. } => self.begin_read(page, state, cache),
                PageState::Reading { .. } => self.join(page, cache).map(Resolution::Pending),
                PageState::Fetching { .. } => self.join(page, cache).map(Resolution::Missing),
                PageState::Zero => self.refill(page, access, cache),
                PageState::Collapsed => {
                    let block_word = cache.region().block_word(page).map(BlockWord::load);
                    let block_word = block_word.expect("a collapsed page is in a block");
                    self.by_block_word(page, block_word, access, max_level, cache)
                }
                PageState::Discarding => Some(Resolution::Busy),
                PageState::InPlace | PageState::PagedOut | PageState::PagingIn => {
                    self.resolve_linux(page, state, cache)
                }
                PageState::Lost | PageState::Gone => Some(Resolution::Lost(self.lost_page(page))),
            };
            // None: another thread changed the page meanwhile; look again.
            if let Some(resolution) = step {
                return resolution;
            }
        }
    }

    #[inline]
    fn ready(&self, page: PageNo, frame: Pfn, access: Access) -> Resolution {
        if access.is_write() {
            self.frames.desc(frame).mark_dirty();
        }
        self.note_use(page, frame);
        Resolution::Ready(small(frame))
    }

    /// Resolves a page whose word refers to the block word, which says `block_word`. Out of line,
    /// so that the path of a resident 4 KiB page is shorter.
    #[inline(never)]
    fn by_block_word(
        &self,
        page: PageNo,
        block_word: PageBlockState,
        access: Access,
        max_level: Level,
        cache: &mut PerCpuPages,
    ) -> Option<Resolution> {
        match block_word {
            PageBlockState::Untouched => self.fill_block(page, access, max_level, cache),
            PageBlockState::Compound { block } => {
                FaultCounters::bump(&cache.shared.count.resident);
                Some(self.ready_in(block, page, access))
            }
            // Either a collapse is in progress, which ends within microseconds. Or the block has
            // been split since the page word was read.
            PageBlockState::Split => {
                drop(lock(&self.collapsing));
                None
            }
            PageBlockState::Gone => Some(Resolution::Lost(self.lost_page(page))),
        }
    }

    /// The page is part of a compound page.
    fn ready_in(&self, block: BlockNo, page: PageNo, access: Access) -> Resolution {
        let pfn = block.frame_of(page);
        if access.is_write() && self.frames.block(block).mark_dirty() == Marked::Split {
            // Only this page is marked, so the caller may not map the others for writes.
            return self.ready(page, pfn, access);
        }
        let level = Level::L2M;
        Resolution::Ready(Frame { pfn, level })
    }

    /// First touch of a block: makes a compound page of zeros if the policy wants one and a block
    /// of frames is free. Otherwise the block word becomes Split, and the caller looks again.
    fn fill_block(
        &self,
        page: PageNo,
        access: Access,
        max_level: Level,
        cache: &PerCpuPages,
    ) -> Option<Resolution> {
        let region = cache.region();
        let block_word = region.block_word(page)?;
        let mut block = None;
        let zeros = region.origin.is_none();
        if zeros && max_level >= Level::L2M && region.wants_huge(self.huge(), page) {
            block = self.frames.take_block();
            if block.is_none() {
                FaultCounters::bump(&cache.shared.count.huge_fallback);
            }
        }
        let Some(block) = block else {
            // Another thread may have changed it: the caller looks again.
            let _ = block_word.change(PageBlockState::Untouched, PageBlockState::Split);
            return None;
        };
        let begun = self.clock.now();
        // SAFETY: the block was taken from the free map and no block word names it yet.
        unsafe { self.frames.pool.zero_block(block) };
        let zeroing = self.clock.now().since(begun);
        FaultCounters::add(&cache.shared.count.zeroing_ns, zeroing);
        let desc = self.frames.block(block);
        desc.prepare(page.block_start(), Dirt::Clean);
        // Two vCPUs may both reach this line; then one of them has zeroed a block in vain. With a
        // lock, a vCPU would wait for another vCPU's zeroing more often.
        if block_word
            .change(
                PageBlockState::Untouched,
                PageBlockState::Compound { block },
            )
            .is_err()
        {
            self.frames.give_block(block);
            return None;
        }
        desc.publish();
        region.add_resident(Level::L2M.pages() as i64);
        self.stats.add_compound();
        FaultCounters::bump(&cache.shared.count.huge_fill);
        Some(self.ready_in(block, page, access))
    }

    /// Gives a dropped page of zeros a frame of zeros. Out of line, so that only a first touch has
    /// a copy of [`Self::fill`] in the fault path.
    #[cold]
    fn refill(&self, page: PageNo, access: Access, cache: &mut PerCpuPages) -> Option<Resolution> {
        self.fill_cold(page, PageState::Zero, access, cache)
    }

    /// The first touch of a page outside of all blocks: at the end of a region, or in Linux memory.
    #[cold]
    fn touch_without_block(
        &self,
        page: PageNo,
        access: Access,
        cache: &mut PerCpuPages,
    ) -> Option<Resolution> {
        match &cache.region().origin {
            Some(_) if cache.region().linux.is_none() => self.begin_fetch(page, cache),
            _ => self.fill_cold(page, PageState::Empty, access, cache),
        }
    }

    #[cold]
    fn fill_cold(
        &self,
        page: PageNo,
        from: PageState,
        access: Access,
        cache: &mut PerCpuPages,
    ) -> Option<Resolution> {
        match cache.region().linux {
            None => self.fill(page, from, access, cache),
            Some(_) => self.resolve_linux(page, from, cache),
        }
    }

    /// A frame of zeros for a page without a frame.
    #[inline(always)]
    fn fill(
        &self,
        page: PageNo,
        from: PageState,
        access: Access,
        cache: &mut PerCpuPages,
    ) -> Option<Resolution> {
        let Some(frame) = cache.take() else {
            return Some(Resolution::NoMemory);
        };
        // SAFETY: this thread took the frame from its own `cache`, and no page word names it yet.
        unsafe { self.frames.pool.zero(frame) };
        let dirt = if access.is_write() {
            Dirt::Dirty
        } else {
            Dirt::Clean
        };
        let desc = self.frames.desc(frame);
        desc.prepare(page, dirt);
        let word = cache.region().word(page)?;
        // Release order: a thread that sees the word sees the zeros.
        if word
            .change(from, PageState::Resident { frame, entry: None })
            .is_err()
        {
            cache.untake(frame);
            return None;
        }
        desc.publish();
        cache.shared.allocated();
        FaultCounters::bump(&cache.shared.count.zero_fill);
        Some(Resolution::Ready(small(frame)))
    }

    /// The page is being evicted but still has its frame.
    #[cold]
    fn rescue(
        &self,
        page: PageNo,
        state: PageState,
        access: Access,
        cache: &PerCpuPages,
    ) -> Option<Resolution> {
        let frame = state.frame()?;
        cache
            .region()
            .word(page)?
            .change(state, state.rescued()?)
            .ok()?;
        FaultCounters::bump(&cache.shared.count.rescued);
        Some(self.ready(page, frame, access))
    }

    /// Gives a swapped-out page a frame and a ticket.
    #[cold]
    fn begin_read(
        &self,
        page: PageNo,
        state: PageState,
        cache: &mut PerCpuPages,
    ) -> Option<Resolution> {
        let Some(frame) = cache.take() else {
            return Some(Resolution::NoMemory);
        };
        self.frames.desc(frame).prepare(page, Dirt::Clean);
        let ticket = self.take_off(page, state, state.read_started(frame)?, cache)?;
        self.swapped_out_now.fetch_sub(1, Ordering::Relaxed);
        cache.shared.allocated();
        FaultCounters::bump(&cache.shared.count.swap_in);
        Some(Resolution::Pending(ticket))
    }

    /// A free frame for a page of a split block. If the policy wants the block to be a compound
    /// page, and memory is plenty, the frame is at the page's own place in a block of frames: in
    /// its neighbours' block, or in a free one. So a collapse needs no copy and no free block.
    pub fn frame_for(&self, page: PageNo, cache: &mut PerCpuPages) -> Option<Pfn> {
        self.own_place(page, cache).or_else(|| cache.take())
    }

    fn own_place(&self, page: PageNo, cache: &PerCpuPages) -> Option<Pfn> {
        let region = cache.region();
        if !region.wants_huge(self.huge(), page) || !self.frames.has_plenty() {
            return None;
        }
        let frames = region
            .span(page)?
            .words
            .iter()
            .map(|word| word.load().frame());
        let placed = frames.enumerate().find_map(|(place, frame)| {
            let block = BlockNo::of(frame?);
            (block.frame(place) == frame?).then_some(block)
        });
        self.frames.take_at(page.in_block(), placed)
    }

    /// Gives a never provided page a frame and a ticket. The source's bytes are in no swap entry,
    /// so the page is dirty.
    #[cold]
    fn begin_fetch(&self, page: PageNo, cache: &mut PerCpuPages) -> Option<Resolution> {
        let Some(frame) = self.frame_for(page, cache) else {
            return Some(Resolution::NoMemory);
        };
        self.frames.desc(frame).prepare(page, Dirt::Dirty);
        let state = PageState::Empty;
        let ticket = self.take_off(page, state, state.fetch_started(frame)?, cache)?;
        cache.shared.allocated();
        FaultCounters::bump(&cache.shared.count.missing);
        Some(Resolution::Missing(ticket))
    }

    /// Changes the page word to a state in flight, and makes the ticket. Gives the frame back if
    /// another thread has changed the page.
    fn take_off(
        &self,
        page: PageNo,
        from: PageState,
        to: PageState,
        cache: &mut PerCpuPages,
    ) -> Option<Ticket> {
        let ticket = self.put_in_flight(page, from, to, cache.region());
        if ticket.is_none() {
            cache.untake(to.frame()?);
        }
        ticket
    }

    /// As [`Core::take_off`], for a page whose frame is not in the budget.
    pub fn put_in_flight(
        &self,
        page: PageNo,
        from: PageState,
        to: PageState,
        region: &Arc<Region>,
    ) -> Option<Ticket> {
        let frame = to.frame().or_else(|| region.linux_frame(page));
        let ticket = Ticket::new(page, region.clone(), frame?);
        // Under one lock, so that a thread that sees the new state finds the ticket.
        let mut tickets = lock(&self.tickets);
        region.word(page)?.change(from, to).ok()?;
        tickets.insert(page, ticket.clone());
        Some(ticket)
    }

    /// The ticket that another fault has made; `None` if the page has arrived since.
    #[cold]
    pub fn join(&self, page: PageNo, cache: &PerCpuPages) -> Option<Ticket> {
        let tickets = lock(&self.tickets);
        let ticket = tickets.get(&page).cloned()?;
        if ticket.region().linux.is_none() {
            self.asked_for(page, ticket.frame());
        }
        drop(tickets);
        FaultCounters::bump(&cache.shared.count.shared_ticket);
        Some(ticket)
    }
}

#[inline]
pub(crate) const fn small(pfn: Pfn) -> Frame {
    let level = Level::L4K;
    Frame { pfn, level }
}
