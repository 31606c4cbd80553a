//! Placements that the kernel refuses at present.

use crate::placing::Put;
use crate::regions::Unit;
use lacuna_addr::PAGE_SIZE;
use lacuna_sync::{Mutex, lock, lock_order};
use std::time::{Duration, Instant};

/// Whether a placement is to be repeated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Again {
    /// It is not.
    No,
    /// From this page of the unit on.
    Later(usize),
    /// The unit may be in place: see `Placed::Unsure`.
    Unsure,
}

impl Again {
    /// Whether it is to be repeated.
    pub fn is_needed(self) -> bool {
        self != Self::No
    }
}

/// What waits to be placed.
pub enum WaitingPut {
    Content(Vec<[u8; PAGE_SIZE]>),
    Zeros,
    Shared,
    Poison,
}

/// A placement that is to be repeated.
pub struct Waiting {
    pub unit: Unit,
    pub put: WaitingPut,
    /// The first page of the unit that is not in place.
    pub from: usize,
    /// Not before this time.
    due: Option<Instant>,
    /// A thread has had a fault on the unit meanwhile.
    is_needed: bool,
}

/// The pause before an unsure placement is repeated. A woken thread that misses the page has
/// another fault meanwhile.
const UNSURE: Duration = Duration::from_millis(10);

/// The placements of one VM that are to be repeated.
#[derive(Default)]
pub struct WaitingList(Mutex<Vec<Waiting>, lock_order::PagerWaiting>);

impl Waiting {
    /// The placement was unsure and has woken the threads, and none has missed the page since.
    pub fn is_there(&self) -> bool {
        self.due.is_some() && !self.is_needed
    }
}

impl WaitingPut {
    /// What is to be kept of `put`.
    pub fn of(put: Put<'_>) -> Self {
        match put {
            Put::Pages(pages) => Self::Content(pages.to_vec()),
            Put::Zeros => Self::Zeros,
            Put::Shared => Self::Shared,
            Put::Poison => Self::Poison,
        }
    }

    pub fn as_put(&self) -> Put<'_> {
        match self {
            Self::Content(content) => Put::Pages(content),
            Self::Zeros => Put::Zeros,
            Self::Shared => Put::Shared,
            Self::Poison => Put::Poison,
        }
    }
}

impl WaitingList {
    /// Keeps a placement, if it is to be repeated. One entry serves all threads that wait for the
    /// unit. Returns whether the unit waits.
    pub fn keep(&self, unit: Unit, put: WaitingPut, again: Again) -> bool {
        let (from, due) = match again {
            Again::No => return false,
            Again::Later(from) => (from, None),
            Again::Unsure => (0, Some(Instant::now() + UNSURE)),
        };
        let mut waiting = lock(&self.0);
        if waiting.iter().all(|other| other.unit != unit) {
            let is_needed = false;
            waiting.push(Waiting {
                unit,
                put,
                from,
                due,
                is_needed,
            });
        }
        true
    }

    /// Whether the unit waits. A thread needs it.
    pub fn need(&self, unit: &Unit) -> bool {
        let mut waiting = lock(&self.0);
        let mut others = waiting.iter_mut();
        let found = others.find(|other| other.unit == *unit);
        found.map(|found| found.is_needed = true).is_some()
    }

    /// Takes those that may be repeated now.
    pub fn take(&self) -> Vec<Waiting> {
        let now = Instant::now();
        let is_due = |waiting: &mut Waiting| waiting.due.is_none_or(|due| due <= now);
        lock(&self.0).extract_if(.., is_due).collect()
    }

    /// Takes all.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *lock(&self.0));
        drop(all);
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }
}
