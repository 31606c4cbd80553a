//! Checks the manager's data structures: for tests, between steps, while no other thread uses it.

use crate::core::Core;
use crate::host::Host;
use crate::region::Region;
use crate::shared_cache::SharedCache;
use lacuna_addr::Pfn;
use lacuna_frames::{
    BLOCK, BlockNo, FrameBlockState, FrameState, PageBlockState, PageNo, PageState, PageWord, Span,
};
use lacuna_linux::LinuxMemory;
use lacuna_swap::SwapEntry;
use lacuna_sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

impl Host {
    /// Reads all data structures and panics at the first contradiction:
    /// * every frame is in exactly one place: free map, per-CPU page cache, page, whole block,
    ///   swap store;
    /// * a page word and a frame descriptor name each other, and so do a block word and a block of
    ///   frames;
    /// * the words of a block match its block word;
    /// * every entry in use belongs to exactly one page or one write in flight;
    /// * reads in flight and tickets are the same set; the counts are right.
    ///
    /// Only while no other thread uses the host. Operations in flight are allowed.
    pub fn verify(&self) {
        self.core.verify();
    }
}

/// The state according to the pages.
#[derive(Default)]
struct Found {
    /// Frames of single pages.
    frames: BTreeSet<usize>,
    blocks: BTreeSet<usize>,
    entries: BTreeSet<SwapEntry>,
    reading: usize,
    /// Pages of Linux memory in flight.
    linux_in_flight: usize,
    swapped_out: i64,
}

impl Found {
    fn resident(&self) -> usize {
        self.frames.len() + self.blocks.len() * BLOCK
    }
}

impl Core {
    fn verify(&self) {
        let found = self.verify_pages();
        self.verify_blocks(&found);
        let mut count = BTreeMap::new();
        let mut resting = 0;
        for index in 0..self.frames.total() {
            let frame = Pfn::new(index as u32);
            let state = self.frames.desc(frame).state();
            *count.entry(state as u8).or_insert(0usize) += 1;
            let in_page = found.frames.contains(&index);
            let in_block = found.blocks.contains(&BlockNo::of(frame).index());
            let free = self.frames.is_free(frame);
            resting += usize::from(in_block);
            match state {
                FrameState::Used | FrameState::Isolated => {
                    assert!(in_page, "frame {index} is {state:?}, but no page has it");
                }
                FrameState::Free => assert!(
                    free != in_block && !in_page,
                    "frame {index} is Free: free {free}, in a page {in_page}, block {in_block}"
                ),
                FrameState::Store => {
                    assert!(!in_page, "frame {index} is {state:?}, but a page has it");
                }
                // In a per-CPU page cache, or the target of a read.
                FrameState::Cached => {}
            }
            assert!(
                state == FrameState::Free || !free && !in_block,
                "frame {index} is {state:?}, but free {free}, in a block {in_block}"
            );
        }
        let of = |state: FrameState| count.get(&(state as u8)).copied().unwrap_or(0);
        let free = self.frames.verify_free();
        let frees = of(FrameState::Free);
        assert_eq!(free + resting, frees, "free map against descriptors");
        assert_eq!(free, self.frames.free_now(), "free count");
        let store = self.frames.in_store();
        assert_eq!(of(FrameState::Store), store, "the store's frames");
        let cached_free: usize = self.with_caches(|caches| {
            let cached = caches.iter().map(|cache| &cache.cached);
            cached.map(|n| n.load(Ordering::Relaxed) as usize).sum()
        });
        let cached = of(FrameState::Cached);
        assert_eq!(
            cached,
            cached_free + found.reading,
            "per-CPU page caches and reads"
        );
        let total = free + cached_free + found.resident() + store;
        assert_eq!(total, self.frames.total(), "every frame is somewhere");
    }

    /// Compares every block descriptor with the block words.
    fn verify_blocks(&self, found: &Found) {
        for index in 0..self.frames.total() / BLOCK {
            let state = self.frames.block(BlockNo::new(index as u32)).state();
            assert_eq!(
                state != FrameBlockState::Split,
                found.blocks.contains(&index),
                "block {index} is {state:?}"
            );
        }
        let whole = self.stats.huge_pages.load(Ordering::Relaxed);
        assert_eq!(whole, found.blocks.len() as u64, "whole blocks");
    }

    fn verify_pages(&self) -> Found {
        let mut found = Found::default();
        let mut reported = 0;
        for region in self.regions.snapshot().iter() {
            reported += region.resident() + self.unreported_to(region);
            if let Some(linux) = &region.linux {
                self.verify_linux(region, linux, &mut found);
                continue;
            }
            for (page, word) in region.tail() {
                self.verify_page(page, word, &mut found);
            }
            for span in region.spans() {
                self.verify_span(span, &mut found);
            }
        }
        assert_eq!(
            reported,
            found.resident() as i64,
            "pages counted as resident"
        );
        let tickets = lock(&self.tickets).len();
        assert_eq!(
            found.reading + found.linux_in_flight,
            tickets,
            "tickets against pages being read"
        );
        let swapped_out = self.swapped_out_now.load(Ordering::Relaxed);
        assert_eq!(
            found.swapped_out, swapped_out,
            "pages counted as in swap alone"
        );
        // A fault may rescue a page during its write. Its entry is freed when the write completes.
        let used = lock(&self.entries).used();
        let entries = found.entries.len();
        let writing = self.writing.load(Ordering::Relaxed);
        assert!(entries <= used, "a page's entry is not counted");
        assert!(
            used == entries || writing > 0,
            "{} entries leaked",
            used - entries
        );
        found
    }

    fn unreported_to(&self, region: &Region) -> i64 {
        self.with_caches(|caches| {
            let unreported = |cache: &std::sync::Arc<SharedCache>| cache.unreported_to(region);
            caches.iter().map(unreported).sum()
        })
    }

    fn verify_linux(&self, region: &Region, linux: &LinuxMemory, found: &mut Found) {
        let mut in_place = 0;
        let comes_in_units = region.has_units() && region.origin.is_some();
        for (page, word) in region.tail() {
            if let Some(first) = region.word(page.block_start()).filter(|_| comes_in_units) {
                let first = first.load();
                let is_coming = matches!(first, PageState::Empty | PageState::Fetching { .. });
                let is_empty = word.load() == PageState::Empty;
                assert!(
                    is_empty == is_coming || page == page.block_start(),
                    "{page:?} is empty {is_empty}, but the first page of its unit is {first:?}"
                );
            }
            match word.load() {
                PageState::Empty | PageState::Zero | PageState::PagedOut | PageState::Lost => {}
                PageState::InPlace => in_place += 1,
                state @ (PageState::Fetching { .. } | PageState::PagingIn) => {
                    found.linux_in_flight += 1;
                    let frame = state.frame().or(region.linux_frame(page));
                    assert_eq!(frame, region.linux_frame(page), "{page:?}");
                    let known = lock(&self.tickets).contains_key(&page);
                    assert!(known, "{page:?} has no ticket");
                }
                state => panic!("{page:?} of Linux memory is {state:?}"),
            }
        }
        assert_eq!(in_place, linux.pages_in_place(), "pages in place");
    }

    fn verify_span(&self, span: Span<'_>, found: &mut Found) {
        let block_word = span.block_word.load();
        for (page, word) in span.pages() {
            let state = word.load();
            let allowed = match block_word {
                PageBlockState::Untouched => state == PageState::Empty,
                PageBlockState::Compound { .. } => {
                    matches!(state, PageState::Empty | PageState::Collapsed)
                }
                PageBlockState::Split => state != PageState::Collapsed,
                PageBlockState::Gone => false,
            };
            assert!(
                allowed,
                "{page:?} is {state:?} in a block that is {block_word:?}"
            );
            self.verify_page(page, word, found);
        }
        if let PageBlockState::Compound { block } = block_word {
            assert!(found.blocks.insert(block.index()), "{block:?} twice");
            let owner = self.frames.block(block).owner();
            assert_eq!(owner, span.first, "{block:?} belongs to other pages");
        }
    }

    fn verify_page(&self, page: PageNo, word: &PageWord, found: &mut Found) {
        let state = word.load();
        if let Some(frame) = state.frame() {
            assert!(found.frames.insert(frame.index()), "{frame:?} twice");
            let desc = self.frames.desc(frame);
            assert_eq!(desc.owner(), page, "{frame:?} belongs to another page");
            verify_frame_state(state, desc.state());
        }
        if let Some(entry) = state.entry() {
            assert!(found.entries.insert(entry), "{entry:?} has two pages");
            let used = lock(&self.entries).is_used(entry);
            assert!(used, "{entry:?} of {page:?} is free");
        }
        found.swapped_out += i64::from(matches!(state, PageState::Swapped { .. }));
        if matches!(
            state,
            PageState::Reading { .. } | PageState::Fetching { .. }
        ) {
            found.reading += 1;
            let known = lock(&self.tickets).contains_key(&page);
            assert!(known, "{page:?} has no ticket");
        }
    }
}

fn verify_frame_state(page: PageState, frame: FrameState) {
    let agree = match page {
        PageState::Resident { .. } => {
            matches!(frame, FrameState::Used | FrameState::Isolated)
        }
        PageState::Evicting { .. } | PageState::Writeback { .. } => frame == FrameState::Isolated,
        PageState::Reading { .. } | PageState::Fetching { .. } => frame == FrameState::Cached,
        PageState::Empty
        | PageState::Zero
        | PageState::Swapped { .. }
        | PageState::Lost
        | PageState::Gone
        | PageState::Collapsed
        | PageState::InPlace
        | PageState::Discarding
        | PageState::PagedOut
        | PageState::PagingIn => false,
    };
    assert!(agree, "page {page:?} in a frame that is {frame:?}");
}
