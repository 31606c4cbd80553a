//! Pages out Linux memory, and brings it back outside of guest code.
//!
//! ```text
//! page words InPlace -> Discarding   a fault from here on is Busy: its vCPU goes offline and tries
//!                                    again
//! invalidate                         no vCPU has a page any more
//! MADV_PAGEOUT
//! page words -> PagedOut             or InPlace, where this process still has the page
//!
//! fault on a PagedOut page: PagingIn, and a ticket: Pending(ticket), as for a page in swap
//!   Host::start, wait                a reader thread, or the waiting thread, touches the page
//! page word -> InPlace               the ticket is done
//! ```
//! Without the intermediate state, this race would be possible: a fault brings a page back, and its
//! vCPU continues; then `MADV_PAGEOUT` takes the page, and the guest's next access reads it inside
//! of guest code.
//!
//! Linux may keep a page in its page cache or swap cache, where no mapping shows it. Then the touch
//! ends soon, and the polling vCPU sees the page's arrival before it notifies its guest.

use crate::core::Core;
use crate::counters::{Counters, FaultCounters};
use crate::error::{HostError, LostPage};
use crate::host::Host;
use crate::per_cpu_pages::PerCpuPages;
use crate::region::Region;
use crate::resolve::Resolution;
use crate::ticket::Ticket;
use lacuna_addr::{BackingRange, PageCount};
use lacuna_frames::{BLOCK, PageNo, PageState};
use lacuna_linux::{LinuxBacking, LinuxMemory};
use lacuna_swap::SwapError;
use lacuna_sys::{Errno, Pagemap, TakenPages};
use std::sync::atomic::Ordering;

/// The most pages paged out at once, 2 MiB. A vCPU that needs one of them waits meanwhile.
const AT_ONCE: usize = BLOCK;

impl Host {
    /// Pages out the pages of `range` that are in place, and that no instruction in progress needs.
    /// The range lies in one region of Linux memory. Returns how many pages have left; Linux keeps
    /// a page that it has no place for.
    ///
    /// From then on an access of a vCPU is [`Resolution::Pending`], until a thread that the ticket
    /// was given to has brought the page back. Linux may bring a page back or page it out by
    /// itself at any time; only a vCPU's access to a page of the latter kind reads it inside of
    /// guest code.
    ///
    /// Waits for vCPUs as [`MmuNotifier::invalidate`](crate::MmuNotifier::invalidate) does, and for
    /// Linux, which may write to a swap device. The caller holds no lock.
    ///
    /// # Errors
    /// The range is not inside one such region. Its memory is in huge pages, or locked (mlock(2)).
    pub fn page_out(&self, range: BackingRange) -> Result<PageCount, HostError> {
        let first = PageNo::of(range.start());
        let refused = |reason: &str| HostError::PageOut {
            from: range.start(),
            reason: reason.into(),
        };
        let region = self.core.regions.find(first);
        let region = region.filter(|region| region.range().intersect(range) == Some(range));
        let region = region.ok_or(HostError::NoSuchRegion(range.start()))?;
        let linux = region.linux.as_ref();
        let linux = linux.ok_or_else(|| refused("they are in the budget, which has reclaim"))?;
        if region.has_units() {
            return Err(refused("Linux does not page out huge pages of hugetlbfs"));
        }
        let mut left = 0;
        for at in (0..range.pages() as usize).step_by(AT_ONCE) {
            let pages = AT_ONCE.min(range.pages() as usize - at);
            let pages = (at..at + pages).map(|at| first.plus(at)).collect();
            let gone = self.core.page_out(&region, linux, pages);
            left += gone.map_err(|errno| refused(&errno.to_string()))?;
        }
        Ok(PageCount::new(left))
    }
}

impl Core {
    /// Pages out those of the ascending `pages` of `region` that can leave; returns how many have
    /// left.
    pub fn page_out(
        &self,
        region: &Region,
        linux: &LinuxMemory,
        mut pages: Vec<PageNo>,
    ) -> Result<u64, Errno> {
        let pinned = self.pinned_pages();
        let change = |page, from, to| {
            let word = region.word(page);
            word.is_some_and(|word| word.change(from, to).is_ok())
        };
        pages.retain(|page| {
            pinned.binary_search(page).is_err()
                && change(*page, PageState::InPlace, PageState::Discarding)
        });
        if pages.is_empty() {
            return Ok(0);
        }
        let runs = || pages.chunk_by(|a, b| a.plus(1) == *b);
        let ranges = runs().filter_map(|run| BackingRange::new(run[0].addr(), run.len() as u64));
        region.notifier.invalidate(&ranges.collect::<Vec<_>>());
        // A thread that has found a page in place may still touch it.
        linux.wait_for_users();
        let mut left = 0;
        let mut result = self.read_singly(region, linux);
        let pagemap = Pagemap::open();
        for run in runs() {
            let from = linux.pfn(region.index_of(run[0]));
            result = result.and(self.frames.pool.page_out_linux(from, run.len()));
            // Without `/proc`, no page counts as mapped. Its next access finds it at once.
            let addresses = self.frames.pool.range(from, run.len());
            let mapped = pagemap.as_ref().ok();
            let mapped = mapped.and_then(|pagemap| pagemap.mapped(addresses).ok());
            let mapped = mapped.unwrap_or_else(|| vec![false; run.len()]);
            for (page, mapped) in run.iter().zip(mapped) {
                let to = match mapped {
                    // The kernel may have taken the page away just before.
                    _ if self.reason_of_new_loss(*page).is_some() => PageState::Lost,
                    true => PageState::InPlace,
                    false => PageState::PagedOut,
                };
                left += u64::from(to == PageState::PagedOut);
                linux.note_in_place(-i64::from(to != PageState::InPlace));
                let ended = change(*page, PageState::Discarding, to);
                debug_assert!(ended, "only this thread ends it");
            }
        }
        Counters::add(&self.stats.linux_paged_out, left);
        self.settled.bump();
        result.map(|()| left)
    }

    /// From now on, a page of a private file that comes back does not bring its neighbours, which
    /// no word would record. A page of the region is Discarding, so the region is not removed.
    fn read_singly(&self, region: &Region, linux: &LinuxMemory) -> Result<(), Errno> {
        let is_private = matches!(linux.backing, LinuxBacking::Private(_));
        match is_private && !linux.is_read_singly.swap(true, Ordering::Relaxed) {
            true => {
                let all = region.range().pages() as usize;
                self.frames.pool.read_singly(linux.first, all)
            }
            false => Ok(()),
        }
    }

    /// The first fault on a paged-out page.
    #[cold]
    pub fn begin_page_in(&self, page: PageNo, cache: &PerCpuPages) -> Option<Resolution> {
        let (from, to) = (PageState::PagedOut, PageState::PagingIn);
        let ticket = self.put_in_flight(page, from, to, cache.region())?;
        FaultCounters::bump(&cache.shared.count.swap_in);
        Some(Resolution::Pending(ticket))
    }

    /// Lets Linux bring the page of `ticket` back. The caller has claimed the ticket, and is not
    /// inside of guest code.
    pub fn touch_paged_out(&self, ticket: &Ticket, linux: &LinuxMemory) {
        TakenPages::unblock_signal();
        Counters::add(&self.stats.linux_paged_in, 1);
        let pfn = linux.pfn(ticket.region().index_of(ticket.number()));
        self.frames.pool.frame(pfn).read(0, &mut [0]);
    }

    /// Completes the ticket of a paged-out page, which was touched, or is no longer needed.
    pub fn complete_page_in(&self, ticket: &Ticket, touched: Result<(), SwapError>) {
        let page = ticket.number();
        let failed = touched.err().map(|error| error.to_string());
        let taken = || self.reason_of_new_loss(page).map(str::to_owned);
        let result = match failed.or_else(taken) {
            None => Ok(()),
            Some(reason) => Err(LostPage::new(page.addr(), reason)),
        };
        if let Err(lost) = &result {
            self.note_lost(page, lost);
        }
        self.settle(ticket, result);
    }
}
