//! The manager's books, audited: for tests, between steps, when nobody else is in it.

use crate::desc::FrameState;
use crate::host::{Core, Host, lock};
use crate::residency::PageState;
use std::collections::{BTreeMap, BTreeSet};

impl Host {
    /// Walks everything and panics at the first contradiction:
    /// * every frame is in exactly one place: free list, magazine, page, swap store;
    /// * a page's word and its frame's descriptor name each other;
    /// * every slot in use belongs to exactly one page or one write in flight;
    /// * reads in flight and tickets are the same set; the counts are right.
    ///
    /// Only while no other thread uses the host. Operations in flight are allowed.
    pub fn verify(&self) {
        self.core.verify();
    }
}

impl Core {
    fn verify(&self) {
        let used = self.verify_pages();
        let mut count = BTreeMap::new();
        for index in 0..self.frames.len() {
            let state = self
                .frames
                .desc(lacuna_addr::Pfn::new(index as u32))
                .state();
            *count.entry(state as u8).or_insert(0usize) += 1;
            let in_page = used.contains(&index);
            match state {
                FrameState::Used | FrameState::Isolated => {
                    assert!(in_page, "frame {index} is {state:?}, but no page has it");
                }
                FrameState::Free | FrameState::Store => {
                    assert!(!in_page, "frame {index} is {state:?}, but a page has it");
                }
                // A magazine's, or one being read into.
                FrameState::Cached => {}
            }
        }
        let of = |state: FrameState| count.get(&(state as u8)).copied().unwrap_or(0);
        let free: BTreeSet<u32> = self.frames.free_list().into_iter().collect();
        assert_eq!(
            free.len(),
            of(FrameState::Free),
            "free list against descriptors"
        );
        assert_eq!(free.len(), self.frames.free_now(), "free count");
        assert_eq!(
            of(FrameState::Store),
            self.frames.in_store(),
            "the store's frames"
        );
        let magazines: usize = self.with_caches(|caches| {
            let cached = |cache: &std::sync::Arc<crate::cache::Shared>| {
                cache.cached.load(std::sync::atomic::Ordering::Relaxed) as usize
            };
            caches.iter().map(cached).sum()
        });
        let reading = lock(&self.tickets).len();
        assert_eq!(
            of(FrameState::Cached),
            magazines + reading,
            "magazines and reads"
        );
        let total = free.len() + magazines + used.len() + self.frames.in_store();
        assert_eq!(total, self.frames.len(), "every frame is somewhere");
    }

    /// The frames that pages have.
    fn verify_pages(&self) -> BTreeSet<usize> {
        let (mut frames, mut slots) = (BTreeSet::new(), BTreeSet::new());
        let (mut reading, mut resident, mut reported) = (0, 0, 0);
        for region in self.regions.snapshot().iter() {
            reported += region.resident();
            reported += self.with_caches(|caches| {
                caches
                    .iter()
                    .map(|cache| cache.unreported_to(region))
                    .sum::<i64>()
            });
            for (page, word) in region.pages() {
                let state = word.load();
                if let Some(frame) = state.frame() {
                    resident += 1;
                    assert!(frames.insert(frame.index()), "{frame:?} has two pages");
                    let desc = self.frames.desc(frame);
                    assert_eq!(desc.owner(), page, "{frame:?} belongs to another page");
                    self.verify_frame_state(state, desc.state());
                }
                if let Some(slot) = state.slot() {
                    assert!(slots.insert(slot), "{slot:?} has two pages");
                    assert!(
                        lock(&self.slots).is_used(slot),
                        "{slot:?} of {page:?} is free"
                    );
                }
                if matches!(state, PageState::Reading { .. }) {
                    reading += 1;
                    assert!(
                        lock(&self.tickets).contains_key(&page),
                        "{page:?} has no ticket"
                    );
                }
            }
        }
        assert_eq!(reported, resident, "pages counted as resident");
        assert_eq!(
            reading,
            lock(&self.tickets).len(),
            "tickets against pages being read"
        );
        // Slots of writes that were overtaken by a rescue are freed when the write completes.
        let used = lock(&self.slots).used();
        let writing = self.writing.load(std::sync::atomic::Ordering::Relaxed);
        assert!(slots.len() <= used, "a page's slot is not counted");
        assert!(
            used == slots.len() || writing > 0,
            "{} slots leaked",
            used - slots.len()
        );
        frames
    }

    fn verify_frame_state(&self, page: PageState, frame: FrameState) {
        let agree = match page {
            PageState::Resident { .. } => {
                matches!(frame, FrameState::Used | FrameState::Isolated)
            }
            PageState::Evicting { .. } | PageState::Writeback { .. } => {
                frame == FrameState::Isolated
            }
            PageState::Reading { .. } => frame == FrameState::Cached,
            PageState::Empty | PageState::Swapped { .. } | PageState::Lost | PageState::Gone => {
                false
            }
        };
        assert!(agree, "page {page:?} in a frame that is {frame:?}");
    }
}
