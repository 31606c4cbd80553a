//! A stage 2 as a map behind a lock: an access and an invalidation exclude each other. These tests
//! check the manager, not a shoot-down protocol.

use lacuna_addr::{BackingAddr, BackingRange, Level, PAGE_SIZE, Pfn};
use lacuna_host::{Host, MmuNotifier};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, Weak};

#[derive(Clone, Copy)]
pub struct Leaf {
    /// The frame of the leaf's first page.
    pub pfn: Pfn,
    pub accessed: bool,
    pub dirty: bool,
}

/// The mappings of one block of 512 pages: all of it at once, or page by page.
#[derive(Default)]
pub struct Block {
    pub whole: Option<Leaf>,
    pub pages: HashMap<u64, Leaf>,
}

pub const BLOCK: u64 = 2 << 20;

impl Block {
    /// Gives each page its own leaf.
    pub fn split_huge(&mut self, start: u64) {
        let Some(whole) = self.whole.take() else {
            return;
        };
        for i in 0..512 {
            let leaf = Leaf {
                pfn: Pfn::new((whole.pfn.get() + i) as u32),
                ..whole
            };
            self.pages.insert(start + i * PAGE_SIZE as u64, leaf);
        }
    }

    pub fn leaf(&mut self, addr: BackingAddr) -> Option<&mut Leaf> {
        match &mut self.whole {
            Some(whole) => Some(whole),
            None => self.pages.get_mut(&addr.get()),
        }
    }
}

/// A stage 2 by block, in shards, with a sequence number that every invalidation increments.
pub struct Stage2 {
    pub host: OnceLock<Weak<Host>>,
    pub seq: AtomicU64,
    pub blocks: Vec<Mutex<HashMap<u64, Block>>>,
}

impl Stage2 {
    pub fn new() -> Self {
        let blocks = (0..16).map(|_| Mutex::default()).collect();
        Self {
            host: OnceLock::new(),
            seq: AtomicU64::new(0),
            blocks,
        }
    }

    /// Runs `visit` on the part of each block that `range` covers.
    pub fn visit(&self, range: BackingRange, mut visit: impl FnMut(&mut Block, u64, BackingRange)) {
        let mut start = range.start().get() & !(BLOCK - 1);
        while start < range.end().get() {
            let block = BackingRange::new(BackingAddr::new(start), 512).unwrap();
            let part = block.intersect(range).unwrap();
            self.with(BackingAddr::new(start), |block| visit(block, start, part));
            start += BLOCK;
        }
    }

    /// Whether any page is mapped.
    pub fn maps_something(&self) -> bool {
        self.blocks.iter().any(|blocks| {
            let blocks = blocks.lock().unwrap();
            let mapped = |block: &Block| block.whole.is_some() || !block.pages.is_empty();
            blocks.values().any(mapped)
        })
    }

    pub fn with<T>(&self, addr: BackingAddr, run: impl FnOnce(&mut Block) -> T) -> T {
        let start = addr.get() & !(BLOCK - 1);
        let shard = &self.blocks[(start / BLOCK) as usize % self.blocks.len()];
        run(shard.lock().unwrap().entry(start).or_default())
    }
}

impl MmuNotifier for Stage2 {
    fn invalidate(&self, ranges: &[BackingRange]) {
        let host = self
            .host
            .get()
            .and_then(Weak::upgrade)
            .expect("the host calls");
        // `seq` moves before and after: a fault that resolved earlier, or during the invalidation,
        // does not install its leaf.
        self.seq.fetch_add(1, Ordering::SeqCst);
        for range in ranges {
            self.visit(*range, |block, start, part| {
                if part.pages() == 512
                    && let Some(leaf) = block.whole.take_if(|leaf| leaf.dirty)
                {
                    host.mark_dirty(leaf.pfn, Level::L2M);
                } else if part.pages() == 512 {
                    block.whole = None;
                } else {
                    block.split_huge(start);
                }
                block.pages.retain(|page, leaf| {
                    let inside = part.contains(BackingAddr::new(*page));
                    if inside && leaf.dirty {
                        host.mark_dirty(leaf.pfn, Level::L4K);
                    }
                    !inside
                });
            });
        }
        self.seq.fetch_add(1, Ordering::SeqCst);
    }

    fn age(&self, ranges: &[BackingRange], young: &mut [bool]) {
        for (range, young) in ranges.iter().zip(young) {
            self.visit(*range, |block, _, part| {
                let whole = block.whole.as_mut();
                let pages = block.pages.iter_mut();
                let pages = pages.filter(|(page, _)| part.contains(BackingAddr::new(**page)));
                for leaf in pages.map(|(_, leaf)| leaf).chain(whole) {
                    *young |= std::mem::take(&mut leaf.accessed);
                }
            });
        }
    }

    fn split_huge(&self, range: BackingRange) {
        self.visit(range, |block, start, _| block.split_huge(start));
    }

    fn end_of_aging(&self) {}
}
