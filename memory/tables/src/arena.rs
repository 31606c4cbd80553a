//! The arena: an allocation cursor, a free list and the limbo list over the pages of `backing`.

use crate::backing::Backing;
use crate::{Index, TableId};
use lacuna_sync::shim::{AtomicU64, Ordering};
use lacuna_sync::{GracePeriod, Mutex, MutexGuard, lock_order};
use std::collections::VecDeque;

/// No table is left: the arena is at its cap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "all {cap} translation-table pages are in use ({limbo} of them wait for a TLB shoot-down): \
     give the VM a larger table cap"
)]
pub struct Exhausted {
    /// The number of tables that the arena may have at once.
    pub cap: u32,
    /// Tables that the next shoot-down may free.
    pub limbo: u32,
}

/// The arena could not be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ArenaError {
    /// The cap is zero, or larger than the largest id.
    #[error(
        "a VM cannot have a cap of {0} table pages: choose one between 1 and {max}",
        max = Arena::MAX_CAP
    )]
    Cap(u32),
    /// The kernel refused the reservation.
    #[error(
        "cannot reserve {bytes} bytes of address space for translation tables: {errno}; raise the \
         limit on this process's address space (ulimit -v)"
    )]
    Reserve {
        /// Size of the reservation.
        bytes: usize,
        /// The kernel's error.
        errno: rustix::io::Errno,
    },
}

/// The number of tables in each state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Allocated and, as far as the arena knows, linked.
    pub in_use: u32,
    /// Unlinked, not yet waiting for a shoot-down.
    pub detached: u32,
    /// Waiting for a shoot-down to pass.
    pub limbo: u32,
}

/// An unlinked table: no new walk can enter it, but a walk may still be inside. It must be given to
/// [`Arena::retire`]; dropping it leaks the page.
#[must_use = "a detached table must be retired, or its page is lost"]
#[derive(Debug)]
pub struct Detached(TableId);

/// An arena of table pages. It grows by touching its reservation, up to its cap.
pub struct Arena {
    pages: Backing,
    cap: u32,
    lists: Mutex<Lists, lock_order::TableLists>,
}

struct Lists {
    /// Ids from `fresh` up were never given out, so their tables are zero.
    fresh: u32,
    free: Vec<TableId>,
    /// In the order of retirement. Two flushes may retire their tables in the reverse order of
    /// their grace periods. `reap` stops at the first period that has not passed, so a table behind
    /// it may be freed later than necessary.
    limbo: VecDeque<(GracePeriod, TableId)>,
    detached: u32,
}

impl Arena {
    /// The most tables that one arena can name; id 0 is never used.
    pub const MAX_CAP: u32 = (1 << TableId::BITS) - 1;

    /// An arena that gives out at most `cap` tables of 4 KiB.
    pub fn new(cap: u32) -> Result<Self, ArenaError> {
        if cap == 0 || cap > Self::MAX_CAP {
            return Err(ArenaError::Cap(cap));
        }
        let pages =
            Backing::new(cap).map_err(|(bytes, errno)| ArenaError::Reserve { bytes, errno })?;
        let lists = Lists {
            fresh: 1,
            free: Vec::new(),
            limbo: VecDeque::new(),
            detached: 0,
        };
        Ok(Self {
            pages,
            cap,
            lists: Mutex::new(lists),
        })
    }

    /// The most tables that may exist at once.
    pub fn cap(&self) -> u32 {
        self.cap
    }

    /// A zeroed table.
    pub fn alloc(&self) -> Result<TableId, Exhausted> {
        let id = {
            let mut lists = self.lists();
            match lists.free.pop() {
                Some(id) => id,
                None if lists.fresh <= self.cap => {
                    let id = TableId::new(lists.fresh).expect("the cap fits the id");
                    lists.fresh += 1;
                    return Ok(id);
                }
                None => {
                    return Err(Exhausted {
                        cap: self.cap,
                        limbo: lists.limbo.len() as u32,
                    });
                }
            }
        };
        for index in Index::all() {
            self.entry(id, index).store(0, Ordering::Relaxed);
        }
        Ok(id)
    }

    /// An entry of a table.
    ///
    /// # Panics
    /// If `id` is past the cap: this arena has not given it out.
    #[inline]
    pub fn entry(&self, id: TableId, index: Index) -> &AtomicU64 {
        self.pages.entry(id, index)
    }

    /// Prefetches an entry's cache line before a change. Changes nothing. A caller that will change
    /// many entries by locked instructions first calls this for all of them. Then their lines,
    /// which other cores wrote last, arrive in parallel; locked instructions would wait for one
    /// line after the other.
    ///
    /// # Panics
    /// As [`Arena::entry`].
    #[inline]
    pub fn prefetch(&self, id: TableId, index: Index) {
        self.pages.prefetch(id, index);
    }

    /// Frees a table that was never linked, so that no walk can be inside.
    pub fn free_unlinked(&self, id: TableId) {
        self.lists().free.push(id);
    }

    /// Records that `id` was unlinked.
    pub fn detach(&self, id: TableId) -> Detached {
        self.lists().detached += 1;
        Detached(id)
    }

    /// Puts unlinked tables in limbo until `grace` has passed.
    pub fn retire(&self, tables: impl IntoIterator<Item = Detached>, grace: GracePeriod) {
        let mut lists = self.lists();
        for Detached(id) in tables {
            lists.detached -= 1;
            lists.limbo.push_back((grace, id));
        }
    }

    /// Frees the tables whose grace period has passed; returns how many.
    pub fn reap(&self, passed: impl Fn(GracePeriod) -> bool) -> u32 {
        let mut lists = self.lists();
        let mut reaped = 0;
        while let Some((_, id)) = lists.limbo.pop_front_if(|(grace, _)| passed(*grace)) {
            lists.free.push(id);
            reaped += 1;
        }
        reaped
    }

    /// The tables in each state, as one consistent view.
    pub fn usage(&self) -> Usage {
        let lists = self.lists();
        let limbo = lists.limbo.len() as u32;
        let handed_out = lists.fresh - 1 - lists.free.len() as u32;
        Usage {
            in_use: handed_out - limbo - lists.detached,
            detached: lists.detached,
            limbo,
        }
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists
            .lock()
            .expect("no panic while holding the arena's lists")
    }
}
