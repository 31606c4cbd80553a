//! The older way to restore huge leaves when logging ends, for comparison.

use crate::{DirtyError, Logging, Mmu, MmuFormat, Rmap};
use lacuna_addr::{BackingRange, Level};
use lacuna_slots::{Slot, SlotId};

/// How huge leaves are restored when logging ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recovery {
    /// Tables of small leaves are collapsed in place to one huge leaf.
    InPlace,
    /// All leaves are unmapped, and faults map huge leaves again, as in KVM before 2022.
    Refault,
}

impl<F: MmuFormat> Mmu<F> {
    /// Ends the logging of slot `id`, and restores huge leaves by `recovery`. [`Recovery::InPlace`]
    /// is [`Mmu::set_logging`].
    ///
    /// # Errors
    /// There is no such slot.
    pub fn end_logging_as(&self, id: SlotId, recovery: Recovery) -> Result<(), DirtyError> {
        if recovery == Recovery::InPlace {
            return self.set_logging(id, Logging::Off);
        }
        let _change = self.lock_layout();
        let slot = self.slot(id)?;
        if slot.attach.log().is_on() {
            slot.attach.log().turn_off();
            self.drop_leaves(&slot);
        }
        Ok(())
    }

    /// Unmaps some blocks at a time, so that a fault waits only for the shoot-down of blocks near
    /// it.
    fn drop_leaves(&self, slot: &Slot<Rmap>) {
        const AT_ONCE: u64 = 32 * Level::L2M.pages();
        let all = slot.backing;
        for first in (0..all.pages()).step_by(AT_ONCE as usize) {
            let pages = (all.pages() - first).min(AT_ONCE);
            let start = all.start().checked_add_pages(first);
            let some = start.and_then(|start| BackingRange::new(start, pages));
            let some = some.expect("a part of a range");
            self.begin_invalidation(&[some]).finish();
        }
    }
}
