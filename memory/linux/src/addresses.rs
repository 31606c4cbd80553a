//! The part of the addresses for Linux memory that each region has.

use crate::error::LinuxError;
use lacuna_addr::{Level, PageCount, Pfn};
use lacuna_frames::{BLOCK, Pool};
use lacuna_source::PageSource;
use lacuna_sync::{Mutex, lock, lock_order};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The parts in use.
#[derive(Default)]
pub struct LinuxAddresses(Mutex<Parts, lock_order::LinuxAddresses>);

#[derive(Default)]
struct Parts {
    /// From the first frame number of each part to its end (exclusive).
    used: BTreeMap<usize, usize>,
    /// Parts of removed regions that a handler may still fill.
    late: Vec<Late>,
}

/// The parts that the handler of one source may still fill.
struct Late {
    source: Arc<dyn PageSource>,
    /// The first frame number of each part.
    parts: Vec<usize>,
}

impl LinuxAddresses {
    /// Takes the first large enough gap, for pages of the size `page`. Each region begins with a
    /// block, or with a page of 1 GiB.
    pub fn take(&self, pool: &Pool, pages: PageCount, page: Level) -> Result<Pfn, LinuxError> {
        let all = pool.linux();
        let mut parts = lock(&self.0);
        let over = parts.give_late();
        let wanted = usize::try_from(pages.get()).unwrap_or(usize::MAX);
        let found = match first_gap(&parts.used, all.clone(), wanted, page) {
            Some(first) => {
                let end = (first + wanted).next_multiple_of(BLOCK);
                parts.used.insert(first, end);
                Ok(Pfn::new(first as u32))
            }
            None => Err(LinuxError::Room {
                pages,
                room: PageCount::new(all.len() as u64),
                late: parts.late.iter().map(|late| late.parts.len()).sum(),
            }),
        };
        drop(parts);
        // Dropped without the lock: the end of a source waits for its threads.
        drop(over);
        found
    }

    /// Frees the part that begins at `first`.
    pub fn give(&self, first: Pfn) {
        let given = lock(&self.0).used.remove(&first.index());
        debug_assert!(given.is_some(), "{first:?} was taken");
    }

    /// As [`Self::give`], as soon as no handler of `source` can put a page there. The kernel lets a
    /// userfaultfd fill all memory of the process that is registered with *any* userfaultfd. So a
    /// late handler would fill the next region at these addresses.
    pub fn give_later(&self, first: Pfn, source: Arc<dyn PageSource>) {
        let (mut parts, first) = (lock(&self.0), first.index());
        let late = &mut parts.late;
        let same = late
            .iter_mut()
            .find(|late| Arc::ptr_eq(&late.source, &source));
        match same {
            Some(same) => same.parts.push(first),
            None => late.push(Late {
                source,
                parts: vec![first],
            }),
        }
    }
}

impl Parts {
    /// Frees the parts that no handler can fill any more, and returns their entries.
    fn give_late(&mut self) -> Vec<Late> {
        let over = self.late.extract_if(.., |late| {
            // With no other reference to the source, no thread here has its descriptors.
            let is_last = Arc::get_mut(&mut late.source).is_some();
            let external = late.source.external();
            is_last && external.is_none_or(|external| !external.is_connected())
        });
        let over: Vec<_> = over.collect();
        for first in over.iter().flat_map(|late| &late.parts) {
            self.used.remove(first);
        }
        over
    }
}

fn first_gap(
    used: &BTreeMap<usize, usize>,
    all: Range<usize>,
    pages: usize,
    page: Level,
) -> Option<usize> {
    let mut start = all.start;
    let ends = used.iter().map(|(&first, &end)| (first, end));
    for (first, end) in ends.chain([(all.end, all.end)]) {
        let aligned = start.next_multiple_of(page.pages() as usize);
        if first.checked_sub(aligned).is_some_and(|room| room >= pages) {
            return Some(aligned);
        }
        start = end;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_found_and_given_back() {
        let pool = Pool::new(100, 4 * BLOCK).unwrap();
        let addresses = LinuxAddresses::default();
        let take = |pages: usize| addresses.take(&pool, PageCount::new(pages as u64), Level::L4K);
        let at = |block: usize| Pfn::new((BLOCK * block) as u32);
        assert_eq!(take(BLOCK + 1), Ok(at(1)));
        assert_eq!(take(1), Ok(at(3)));
        let refused = take(BLOCK + 1).unwrap_err().to_string();
        assert!(refused.contains("513 pages"), "{refused}");
        assert!(refused.contains("2048"), "{refused}");
        assert_eq!(take(BLOCK), Ok(at(4)));
        assert!(take(1).is_err());
        addresses.give(at(3));
        assert!(take(BLOCK + 1).is_err());
        addresses.give(at(1));
        assert_eq!(take(3 * BLOCK), Ok(at(1)));
        assert!(take(usize::MAX).is_err());
    }
}
