//! Pages of Linux memory that the kernel has taken away: poisoned, or impossible to allocate.
//!
//! ```text
//! access: SIGBUS -> recorded, then zeros in its place (`lacuna_sys::TakenPages`)
//!   a copy, a vCPU's stay in guest code ... any loss since?    Host::losses
//!                       | yes
//! settle: page words InPlace -> Lost     a fault from here on resolves to Lost
//!         the list of losses             which VMs have read zeros, or what was made of them
//! invalidate                             no vCPU has the page any more
//! ```
//! Only the first thread that accesses the page gets the signal. Another thread may read the zeros
//! without a signal. So each use of Linux memory ends with a check of the count, and the read bytes
//! count only if no loss is unsettled. The count moves before the zeros are mapped, so no thread
//! that has read them finds the old count.

use crate::core::Core;
use crate::error::{HostError, LostPage};
use crate::host::Host;
use crate::linux::loss_list::{List, Loss, SeenLosses};
use crate::region::{MmuNotifier, Region};
use lacuna_addr::{BackingAddr, BackingRange, Pfn};
use lacuna_frames::{PageNo, PageState, PageWord};
use lacuna_sync::lock;
use lacuna_sys::TakenPages;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The most ranges that one call unmaps. The MMU counts the ranges in progress under each of its
/// range locks, up to 32767.
const RANGES_AT_ONCE: usize = 1024;

/// The reason of a loss, for pages that the kernel has taken away.
const REASON: &str = "Linux has taken its memory away: a memory error, a memory file that became \
                      shorter, or no huge page left";

impl Host {
    /// Called before a thread accesses frames of Linux memory. From now on the thread takes
    /// `SIGBUS`, even if its creator has blocked the signal: otherwise a page that the kernel has
    /// taken away would end the process.
    #[inline]
    pub fn unblock_sigbus(&self) {
        if !self.core.frames.pool.linux().is_empty() {
            TakenPages::unblock_signal();
        }
    }

    /// How often the kernel has taken pages of Linux memory away so far. Bytes that a thread has
    /// read from Linux memory count only if this number has not moved after the read.
    #[inline]
    pub fn losses(&self) -> u64 {
        self.core.losses_counted()
    }

    /// The loss of the page at `addr`, for which a thread sleeps, if its word says that it is in
    /// place, but its file has it no longer: another process has removed it.
    pub fn find_removed(&self, addr: BackingAddr) -> Option<LostPage> {
        let page = PageNo::of(addr);
        let region = self.core.regions.find(page)?;
        let linux = region.linux.as_ref()?;
        // A page that this process discards has another word before it leaves the file.
        let _user = linux.enter();
        if region.word(page).map(PageWord::load) != Some(PageState::InPlace) {
            return None;
        }
        let is_removed = linux.is_removed(region.index_of(page));
        is_removed.then(|| LostPage::new(addr, "it was removed from the memory file"))
    }

    /// The losses so far, for a reader that does not ask for the single ones.
    pub fn seen_losses(&self) -> SeenLosses {
        self.losses_since(SeenLosses::default(), |_| ()).0
    }

    /// The first page that the kernel has taken away since `seen`, and that a vCPU may have read.
    /// Only pages whose mappings `notifier` handles count. On return no leaf maps them.
    ///
    /// Waits for vCPUs as [`MmuNotifier::invalidate`] does. The caller holds no lock.
    pub fn lost_since(
        &self,
        seen: &mut SeenLosses,
        notifier: &dyn MmuNotifier,
    ) -> Option<LostPage> {
        let mut lost = Vec::new();
        (*seen, ()) = self.losses_since(*seen, |loss| {
            if loss.read && std::ptr::addr_eq(loss.owner.as_ptr(), notifier) {
                lost.push(loss.pages);
            }
        });
        unmap(notifier, &mut lost);
        Some(self.core.lost_page(PageNo::of(lost.first()?.start())))
    }

    fn losses_since(&self, seen: SeenLosses, each: impl FnMut(&Loss)) -> (SeenLosses, ()) {
        let count = self.losses();
        self.core.settle_losses();
        let list = lock(&self.core.losses.list);
        let new = list.lost.partition_point(|loss| loss.number < seen.listed);
        list.lost[new..].iter().for_each(each);
        let listed = list.count;
        (SeenLosses { count, listed }, ())
    }

    /// Makes the kernel take away the pages of `range`, which lies in one region of Linux memory:
    /// an access gets `SIGBUS`, as at an uncorrectable memory error. For tests, and for a VMM that
    /// injects such errors.
    ///
    /// # Errors
    /// The range is not inside such a region, or Linux refuses.
    pub fn take_away(&self, range: BackingRange) -> Result<(), HostError> {
        let first = PageNo::of(range.start());
        let region = self.core.regions.find(first);
        let region = region.filter(|region| region.range().intersect(range) == Some(range));
        let region = region.ok_or(HostError::NoSuchRegion(range.start()))?;
        let refused = |reason: String| HostError::Discard {
            from: range.start(),
            reason,
        };
        let linux = region.linux.as_ref();
        let linux = linux.ok_or_else(|| refused("they are not Linux memory".into()))?;
        let _user = linux.enter();
        // A removal changes all words before it waits for users. After it another region may have
        // the addresses.
        if region.word(first).map(PageWord::load) == Some(PageState::Gone) {
            return Err(HostError::NoSuchRegion(range.start()));
        }
        let pfn = linux.pfn(region.index_of(first));
        let taken = self
            .core
            .frames
            .pool
            .break_linux(pfn, range.pages() as usize);
        taken.map_err(|errno| refused(errno.to_string()))
    }
}

/// Sorts and unmaps `ranges`. Ranges that meet become one, so that a huge leaf is removed as a
/// whole. A page that was lost more than once is in more than one range.
fn unmap(notifier: &dyn MmuNotifier, ranges: &mut Vec<BackingRange>) {
    ranges.sort_unstable_by_key(|range| range.start());
    ranges.dedup_by(|next, last| {
        let joined = last.join(*next);
        *last = joined.unwrap_or(*last);
        joined.is_some()
    });
    for some in ranges.chunks(RANGES_AT_ONCE) {
        notifier.invalidate(some);
    }
}

impl Core {
    #[inline]
    pub fn losses_counted(&self) -> u64 {
        self.frames.pool.taken_count()
    }

    /// Whether the page words of all pages that the kernel has taken away say Lost.
    #[inline]
    pub fn losses_are_settled(&self) -> bool {
        self.losses_counted() == self.losses.settled.load(Ordering::Acquire)
    }

    /// Makes the page words of taken pages say Lost, and unmaps those pages. The caller holds no
    /// lock.
    #[cold]
    pub fn settle_losses(&self) {
        let mut list = lock(&self.losses.list);
        let count = self.losses_counted();
        let List {
            regions,
            lost,
            count: number,
        } = &mut *list;
        let before = lost.len();
        let mut unmapped: Vec<(Arc<dyn MmuNotifier>, Vec<BackingRange>)> = Vec::new();
        self.frames.pool.take_taken(|pfn| {
            let Some((region, page)) = find(regions, pfn) else {
                return;
            };
            let loss = Loss {
                number: *number,
                pages: page.range(),
                read: region.lose(page),
                owner: Arc::downgrade(&region.notifier),
            };
            let last = lost[before..].last_mut();
            if !last.is_some_and(|last| last.join(&loss)) {
                lost.push(loss);
                *number += 1;
            }
        });
        for loss in &lost[before..] {
            let Some(owner) = loss.owner.upgrade() else {
                continue;
            };
            match unmapped.last_mut() {
                Some((last, ranges)) if Arc::ptr_eq(last, &owner) => ranges.push(loss.pages),
                _ => unmapped.push((owner, vec![loss.pages])),
            }
        }
        // Stored under the lock: no thread may see the count before all words are changed.
        self.losses.settled.store(count, Ordering::Release);
        drop(list);
        for (owner, mut ranges) in unmapped {
            unmap(&*owner, &mut ranges);
        }
    }

    /// As [`Core::settle_losses`], for an unused region. Forgets it.
    pub fn forget_linux(&self, region: &Region) {
        self.settle_losses();
        self.losses.remove(region);
    }

    /// As [`Core::reason_of_loss`], also for an unsettled loss. The caller holds no lock.
    pub fn reason_of_new_loss(&self, page: PageNo) -> Option<&'static str> {
        if self.losses_counted() == 0 {
            return None;
        }
        if !self.losses_are_settled() {
            self.settle_losses();
        }
        self.reason_of_loss(page)
    }

    /// The reason of `page`'s loss, if the kernel has taken it away.
    pub fn reason_of_loss(&self, page: PageNo) -> Option<&'static str> {
        let list = lock(&self.losses.list);
        let taken = list
            .lost
            .iter()
            .any(|loss| loss.pages.contains(page.addr()));
        taken.then_some(REASON)
    }
}

/// The region of frame `pfn`, and its page there.
fn find(regions: &[Arc<Region>], pfn: Pfn) -> Option<(&Region, PageNo)> {
    regions.iter().find_map(|region| {
        let linux = region.linux.as_ref()?;
        let index = pfn.get().checked_sub(linux.first.get())?;
        (index < region.range().pages()).then(|| {
            let first = PageNo::of(region.range().start());
            (&**region, first.plus(index as usize))
        })
    })
}

impl Region {
    /// Records that the kernel has taken `page` away. Returns whether a vCPU may have read zeros
    /// there. A page that is being discarded keeps its state: it reads as zeros anyway. If the page
    /// was in flight or paged out, no vCPU has touched it.
    fn lose(&self, page: PageNo) -> bool {
        let Some(word) = self.word(page) else {
            return false;
        };
        // A huge page is lost as a whole. A thread that puts one in place may not have written all
        // of its words yet.
        let lost = match self.has_units() {
            false => word.advance(PageState::taken),
            true => word.advance(PageState::taken_with_others),
        };
        if let (Ok(PageState::InPlace), Some(linux)) = (lost, &self.linux) {
            linux.note_lost();
        }
        !matches!(
            lost,
            Ok(PageState::PagedOut) | Err(PageState::Fetching { .. } | PageState::PagingIn)
        )
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{FaultyStore, HostConfig, HugePages, Io, Resolution};
    use lacuna_addr::{Access, Level, PageCount};
    use lacuna_sync::HostClock;
    use std::sync::mpsc;

    /// Sends the ranges of each call.
    struct NoMmu(mpsc::Sender<Vec<BackingRange>>);

    impl MmuNotifier for NoMmu {
        fn invalidate(&self, ranges: &[BackingRange]) {
            let _ = self.0.send(ranges.to_vec());
        }
        fn age(&self, _: &[BackingRange], _: &mut [bool]) {}
        fn split_huge(&self, _: BackingRange) {}
        fn end_of_aging(&self) {}
    }

    fn host() -> Arc<Host> {
        let config = HostConfig {
            budget: PageCount::new(Host::minimum_budget(2).get()),
            huge: HugePages::Never,
            swap: Box::new(FaultyStore::new(PageCount::new(100))),
            io: Io::Threads { readers: 1 },
            clock: Arc::new(HostClock::default()),
        };
        Host::with_linux_memory(config, PageCount::new(512)).unwrap()
    }

    fn range(page: u64, pages: u64) -> BackingRange {
        BackingRange::new(PageNo::new(page).addr(), pages).unwrap()
    }

    #[test]
    fn ranges_that_meet_are_unmapped_as_one() {
        let (sender, calls) = mpsc::channel();
        let mmu = NoMmu(sender);
        let mut ranges = vec![range(9, 1), range(3, 2), range(5, 1), range(4, 1)];
        unmap(&mmu, &mut ranges);
        assert_eq!(calls.try_recv().unwrap(), [range(3, 3), range(9, 1)]);
        let mut apart: Vec<_> = (0..2500).map(|page| range(2 * page + 1, 1)).collect();
        unmap(&mmu, &mut apart);
        let calls: Vec<_> = calls.try_iter().collect();
        assert!(calls.iter().all(|ranges| ranges.len() <= RANGES_AT_ONCE));
        assert_eq!(calls.concat(), apart);
    }

    /// A vCPU reads zeros in pages that the kernel has taken away, and finds out afterwards.
    #[test]
    fn consecutive_lost_pages_are_one_loss() {
        let host = host();
        let (sender, calls) = mpsc::channel();
        let vm: Arc<dyn MmuNotifier> = Arc::new(NoMmu(sender));
        let memory = host.add_linux_region(None, PageCount::new(64), Arc::clone(&vm));
        let memory = memory.unwrap();
        let pages = range(PageNo::of(memory.start()).get() + 7, 40);
        let at = |page| pages.start().checked_add_pages(page).unwrap();
        let mut cache = host.per_cpu_pages().unwrap();
        let mut seen = host.seen_losses();
        let frames: Vec<_> = (0..40)
            .map(
                |page| match host.resolve(at(page), Access::Write, Level::L4K, &mut cache) {
                    Resolution::Ready(frame) => frame.pfn,
                    other => panic!("{other:?}"),
                },
            )
            .collect();
        host.take_away(pages).unwrap();
        for frame in frames {
            host.frame(frame).read(0, &mut [1; 8]);
        }
        assert_eq!(host.losses(), 40);
        assert_eq!(host.lost_since(&mut seen, &*vm).unwrap().page, at(0));
        assert!(calls.try_iter().all(|ranges| ranges == [pages]));
        assert_eq!(lock(&host.core.losses.list).lost.len(), 1);
        let reason = |page| host.core.reason_of_loss(PageNo::of(page));
        assert!((0..40).all(|page| reason(at(page)).is_some()));
        assert_eq!(reason(pages.end()), None);
        host.verify();
    }

    /// VMs are made, lose a page, and are dropped with their losses. Later losses are still found.
    #[test]
    fn losses_go_with_their_vms() {
        let host = host();
        let mut seen = host.seen_losses();
        for _ in 0..20 {
            let vm: Arc<dyn MmuNotifier> = Arc::new(NoMmu(mpsc::channel().0));
            let range = host.add_linux_region(None, PageCount::new(4), Arc::clone(&vm));
            let range = range.unwrap();
            host.copy_in(range.start(), &[1; 8]).unwrap();
            host.take_away(range).unwrap();
            assert!(host.copy_out(range.start(), &mut [0; 8]).is_err());
            host.remove_region(range).unwrap();
            let lost = host.lost_since(&mut seen, &*vm).unwrap();
            assert_eq!(lost.page, range.start());
            assert!(lock(&host.core.losses.list).lost.len() <= 2);
        }
        host.verify();
    }
}
