//! Placements that the kernel refuses at present.

use crate::placing::Put;
use crate::regions::Unit;
use lacuna_addr::PAGE_SIZE;
use lacuna_sync::{Mutex, lock, lock_order};

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

/// What waits to be placed.
pub enum WaitingPut {
    Content(Vec<[u8; PAGE_SIZE]>),
    Zeros,
    Poison,
}

/// A placement that is to be repeated.
pub struct Waiting {
    pub unit: Unit,
    pub put: WaitingPut,
    /// The first page of the unit that is not in place.
    pub from: usize,
}

/// The placements of one VM that are to be repeated.
#[derive(Default)]
pub struct WaitingList(Mutex<Vec<Waiting>, lock_order::PagerWaiting>);

impl WaitingPut {
    pub fn as_put(&self) -> Put<'_> {
        match self {
            Self::Content(content) => Put::Pages(content),
            Self::Zeros => Put::Zeros,
            Self::Poison => Put::Poison,
        }
    }
}

impl WaitingList {
    /// Keeps a placement, if it is to be repeated. One entry serves all threads that wait for the
    /// unit.
    pub fn keep(&self, unit: Unit, put: WaitingPut, again: Again) {
        let from = match again {
            Again::No => return,
            Again::Later(from) => from,
            Again::Unsure => 0,
        };
        let mut waiting = lock(&self.0);
        if waiting.iter().all(|other| other.unit != unit) {
            waiting.push(Waiting { unit, put, from });
        }
    }

    /// Takes all.
    pub fn take(&self) -> Vec<Waiting> {
        std::mem::take(&mut *lock(&self.0))
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }
}
