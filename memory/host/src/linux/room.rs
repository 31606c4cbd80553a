//! Which part of the addresses for Linux memory each region has.

use crate::block_word::BLOCK;
use crate::error::HostError;
use crate::host::lock;
use crate::pool::Pool;
use lacuna_addr::{PageCount, Pfn};
use lacuna_sync::{Mutex, lock_order};
use std::collections::BTreeMap;
use std::ops::Range;

/// The parts in use: the first frame number of each, and the one past its last.
#[derive(Default)]
pub(crate) struct Room(Mutex<BTreeMap<usize, usize>, lock_order::LinuxRoom>);

impl Room {
    /// Takes the first gap that is large enough. Each region begins with a block.
    pub fn take(&self, pool: &Pool, pages: PageCount) -> Result<Pfn, HostError> {
        let all = pool.linux();
        let mut used = lock(&self.0);
        let wanted = usize::try_from(pages.get()).unwrap_or(usize::MAX);
        match first_gap(&used, all.clone(), wanted) {
            Some(first) => {
                used.insert(first, (first + wanted).next_multiple_of(BLOCK));
                Ok(Pfn::new(first as u32))
            }
            None => Err(HostError::LinuxRoom {
                pages,
                room: PageCount::new(all.len() as u64),
            }),
        }
    }

    /// Gives back what begins at `first`.
    pub fn give(&self, first: Pfn) {
        let given = lock(&self.0).remove(&first.index());
        debug_assert!(given.is_some(), "{first:?} was taken");
    }
}

fn first_gap(used: &BTreeMap<usize, usize>, all: Range<usize>, pages: usize) -> Option<usize> {
    let mut start = all.start;
    let ends = used.iter().map(|(&first, &end)| (first, end));
    for (first, end) in ends.chain([(all.end, all.end)]) {
        if first.checked_sub(start)? >= pages {
            return Some(start);
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
        let room = Room::default();
        let take = |pages: usize| room.take(&pool, PageCount::new(pages as u64));
        let at = |block: usize| Pfn::new((BLOCK * block) as u32);
        assert_eq!(take(BLOCK + 1), Ok(at(1)));
        assert_eq!(take(1), Ok(at(3)));
        let refused = take(BLOCK + 1).unwrap_err().to_string();
        assert!(refused.contains("513 pages"), "{refused}");
        assert!(refused.contains("2048"), "{refused}");
        assert_eq!(take(BLOCK), Ok(at(4)));
        assert!(take(1).is_err());
        room.give(at(3));
        assert!(take(BLOCK + 1).is_err());
        room.give(at(1));
        assert_eq!(take(3 * BLOCK), Ok(at(1)));
        assert!(take(usize::MAX).is_err());
    }
}
