//! A vCPU's own view of the slots.

use crate::{Generation, Slot, SlotData, Snapshot};
use arc_swap::{ArcSwap, Cache};
use lacuna_addr::Gfn;
use std::sync::Arc;

/// Finds slots in the newest snapshot. Without a change, a look-up costs one load and a comparison,
/// and one more comparison if it finds the same slot as the last look-up.
///
/// It keeps its last snapshot alive until its next look-up.
pub struct Reader<X: SlotData> {
    cache: Cache<Arc<ArcSwap<Snapshot<X>>>, Arc<Snapshot<X>>>,
    /// The place of the last slot found, in the gfn order. Only a hint: any value is right.
    last: usize,
}

impl<X: SlotData> Reader<X> {
    pub(crate) fn new(slots: Arc<ArcSwap<Snapshot<X>>>) -> Self {
        Self {
            cache: Cache::new(slots),
            last: 0,
        }
    }

    /// The current slot of `gfn`. Take the invalidation snapshot first (see the crate's page).
    // Always inlined: a call would cost a fault as much as the look-up.
    #[inline(always)]
    pub fn find(&mut self, gfn: Gfn) -> Option<&Arc<Slot<X>>> {
        let snapshot = self.cache.load();
        let hit = snapshot
            .at(self.last)
            .is_some_and(|slot| slot.gfns.contains(gfn));
        if !hit {
            self.last = snapshot.position(gfn)?;
        }
        snapshot.at(self.last)
    }

    /// The newest snapshot.
    #[inline]
    pub fn snapshot(&mut self) -> &Arc<Snapshot<X>> {
        self.cache.load()
    }

    /// Its generation.
    #[inline]
    pub fn generation(&mut self) -> Generation {
        self.snapshot().generation()
    }
}
