//! The source's answers. The threads of the source serve all VMs, so no answer waits for the event
//! thread of one: its content is kept for that thread if the thread holds the lock alone.

use super::Vm;
use crate::placing::Put;
use crate::regions::Unit;
use crate::stats::Count;
use crate::units::UnitState;
use crate::waiting::{Again, WaitingPut};
use lacuna_addr::PAGE_SIZE;
use lacuna_source::{Answer, Failure, Gathered, PageRequester};
use lacuna_sync::lock;
use std::sync::TryLockError;

/// Bits of a page's number in its unit, in the key of a request: a unit has up to 1 GiB.
const WITHIN: u32 = 18;

impl Vm {
    /// The key of the request for page `page` of the unit.
    pub fn key(unit: &Unit, page: u64) -> u64 {
        unit.number << WITHIN | page
    }
}

impl PageRequester for Vm {
    fn answer(&self, key: u64, content: Result<&[u8; PAGE_SIZE], Failure<'_>>) -> Answer {
        let unit = self.regions.unit(key >> WITHIN);
        let page = key & ((1 << WITHIN) - 1);
        let live = match self.live.try_read() {
            Ok(live) => Some(live),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let uffd = match &live {
            Some(live) => match &**live {
                None => return Answer::Late,
                uffd => uffd.as_deref(),
            },
            None => None,
        };
        if self.units.get(unit.number) != UnitState::Asked {
            if content.is_ok() {
                self.counts.add(Count::Late);
            }
            return Answer::Late;
        }
        let gathered;
        let pages = match content {
            // The end of a request calls this with a failure, also after an answer.
            Err(_) if self.has_gathered(&unit, page) => return Answer::Late,
            // A fill may have brought it since the check above.
            Err(_) if !self.units.fail(unit.number) => return Answer::Late,
            Err(failure) => {
                self.report_loss(uffd, &unit, failure.reason);
                return Answer::Taken;
            }
            Ok(content) if unit.memory.pages() == 1 => std::slice::from_ref(content),
            Ok(content) => match self.gather(&unit, page, content) {
                Gathered::Late => return Answer::Late,
                Gathered::Partly => return Answer::Taken,
                Gathered::Wholly(pages) => {
                    gathered = pages;
                    gathered.all()
                }
            },
        };
        // A fill may have brought it.
        if !self.units.arrive(unit.number) {
            return Answer::Late;
        }
        let put = self.content(&unit, pages);
        let again = match uffd {
            Some(uffd) => self.place(uffd, &unit, put, 0),
            None => Again::Later(0),
        };
        if again.is_needed() {
            self.keep(unit, WaitingPut::of(put), again);
        }
        // Only now: until the state has changed, an ended request must find its page here.
        lock(&self.gathering).remove(&unit.number);
        Answer::Taken
    }
}

impl Vm {
    /// What puts the content of `unit` in place: the page of the image's file, or a copy.
    pub(super) fn content<'a>(&self, unit: &Unit, pages: &'a [[u8; PAGE_SIZE]]) -> Put<'a> {
        let shared = self.shared.as_ref();
        match shared.is_some_and(|shared| shared.has(unit.first)) {
            true => Put::Shared,
            false => Put::Pages(pages),
        }
    }

    /// Whether the page needs no answer any more.
    fn has_gathered(&self, unit: &Unit, page: u64) -> bool {
        let all = lock(&self.gathering);
        self.units.get(unit.number) != UnitState::Asked
            || all
                .get(&unit.number)
                .is_some_and(|unit| unit.has(page as usize))
    }

    /// Adds the page to the unit. The last page leaves the unit in the map.
    fn gather(&self, unit: &Unit, page: u64, content: &[u8; PAGE_SIZE]) -> Gathered {
        let mut all = lock(&self.gathering);
        // A thread that changes the state removes the unit afterwards.
        if self.units.get(unit.number) != UnitState::Asked {
            return Gathered::Late;
        }
        let pages = unit.memory.pages() as usize;
        let gathering = all.entry(unit.number).or_default();
        gathering.add((page as usize, pages), content)
    }
}
