//! From an address to a frame: the fault path. It never sleeps and does no I/O.

use crate::cache::{FaultCounters, FrameCache};
use crate::desc::Dirt;
use crate::error::LostPage;
use crate::host::{Core, Host, lock};
use crate::residency::{PageNo, PageState, PageWord};
use crate::ticket::Ticket;
use lacuna_addr::{Access, Hva, Pfn};

/// Where a page is, for whoever wants to use it.
#[derive(Debug)]
#[must_use]
pub enum Resolution {
    /// In this frame, until its listener is told otherwise.
    Ready(Pfn),
    /// On its way in. Hand the ticket to [`Host::start`] or [`Host::wait`], then resolve again.
    /// Until somebody does, nobody reads.
    Pending(Ticket),
    /// No frame is free: let go of locks, call [`Host::reclaim_direct`], then resolve again.
    NoMemory,
    /// Its content cannot be had any more, or it never was a page.
    Lost(LostPage),
}

impl Host {
    /// Finds or makes the frame of the page at `hva`. The page is *held* in `cache` from here on:
    /// see [`FrameCache::release_holds`].
    ///
    /// [`Access::Write`] marks the page dirty before it is ready. The caller may map the frame
    /// writable only then; one that maps a page read-only first and lets it be written later
    /// reports that by [`Host::mark_dirty`]. What is ready may be on its way out a moment later:
    /// install it under the protection of the invalidation sequence that was read before this call.
    ///
    /// `cache` must be one of this host's.
    #[inline]
    pub fn resolve(&self, hva: Hva, access: Access, cache: &mut FrameCache) -> Resolution {
        debug_assert!(
            std::sync::Arc::ptr_eq(&self.core, &cache.core),
            "another host's cache"
        );
        self.core.resolve(PageNo::of(hva), access, cache)
    }
}

impl Core {
    #[inline]
    pub fn resolve(&self, page: PageNo, access: Access, cache: &mut FrameCache) -> Resolution {
        cache.shared.hold(page);
        if cache.find(page).is_none() {
            return Resolution::Lost(self.lost_page(page));
        }
        loop {
            let Some(state) = cache.region().word(page).map(PageWord::load) else {
                return Resolution::Lost(self.lost_page(page));
            };
            let step = match state {
                PageState::Resident { frame, .. } => {
                    FaultCounters::bump(&cache.shared.count.resident);
                    Some(self.ready(frame, access))
                }
                PageState::Empty => self.fill(page, access, cache),
                PageState::Evicting { .. } | PageState::Writeback { .. } => {
                    self.rescue(page, state, access, cache)
                }
                PageState::Swapped { .. } => self.begin_read(page, state, cache),
                PageState::Reading { .. } => self.join_read(page, cache),
                PageState::Lost | PageState::Gone => Some(Resolution::Lost(self.lost_page(page))),
            };
            // None: somebody changed the page meanwhile; look again.
            if let Some(resolution) = step {
                return resolution;
            }
        }
    }

    #[inline]
    fn ready(&self, frame: Pfn, access: Access) -> Resolution {
        if access.is_write() {
            self.frames.desc(frame).mark_dirty();
        }
        Resolution::Ready(frame)
    }

    /// First touch: a frame of zeros.
    #[inline]
    fn fill(&self, page: PageNo, access: Access, cache: &mut FrameCache) -> Option<Resolution> {
        let Some(frame) = cache.take() else {
            return Some(Resolution::NoMemory);
        };
        // SAFETY: the frame comes from this vCPU's magazine and no page word names it yet.
        unsafe { self.frames.pool.zero(frame) };
        let dirt = if access.is_write() {
            Dirt::Dirty
        } else {
            Dirt::Clean
        };
        let desc = self.frames.desc(frame);
        desc.prepare(page, dirt);
        let word = cache.region().word(page)?;
        // Release order: whoever sees the word sees the zeros.
        if word
            .change(PageState::Empty, PageState::Resident { frame, slot: None })
            .is_err()
        {
            cache.untake(frame);
            return None;
        }
        desc.publish();
        cache.shared.allocated();
        FaultCounters::bump(&cache.shared.count.zero_fill);
        Some(Resolution::Ready(frame))
    }

    /// The page is on its way out but still has its frame.
    #[cold]
    fn rescue(
        &self,
        page: PageNo,
        state: PageState,
        access: Access,
        cache: &FrameCache,
    ) -> Option<Resolution> {
        let frame = state.frame()?;
        cache
            .region()
            .word(page)?
            .change(state, state.rescued()?)
            .ok()?;
        FaultCounters::bump(&cache.shared.count.rescued);
        Some(self.ready(frame, access))
    }

    /// Gives a swapped page a frame and a ticket.
    #[cold]
    fn begin_read(
        &self,
        page: PageNo,
        state: PageState,
        cache: &mut FrameCache,
    ) -> Option<Resolution> {
        let slot = state.slot()?;
        let Some(frame) = cache.take() else {
            return Some(Resolution::NoMemory);
        };
        self.frames.desc(frame).prepare(page, Dirt::Clean);
        let ticket = Ticket::new(page, cache.region().clone(), frame, slot);
        {
            // The lock makes word and ticket one: whoever sees Reading finds the ticket under it.
            let mut tickets = lock(&self.tickets);
            let word = cache.region().word(page)?;
            if word.change(state, state.read_started(frame)?).is_err() {
                drop(tickets);
                cache.untake(frame);
                return None;
            }
            tickets.insert(page, ticket.clone());
        }
        cache.shared.allocated();
        FaultCounters::bump(&cache.shared.count.swap_in);
        Some(Resolution::Pending(ticket))
    }

    /// Somebody else's fault has made a ticket; `None` if the page has arrived since.
    #[cold]
    fn join_read(&self, page: PageNo, cache: &FrameCache) -> Option<Resolution> {
        let ticket = lock(&self.tickets).get(&page).cloned()?;
        FaultCounters::bump(&cache.shared.count.shared_ticket);
        Some(Resolution::Pending(ticket))
    }
}
