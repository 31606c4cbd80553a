//! The older way in which huge leaves come back when logging ends, for comparison.

use crate::{DirtyError, Logging, Mmu, Rmap};
use lacuna_addr::{HvaRange, Level};
use lacuna_slots::{Slot, SlotId};

/// How huge leaves come back when logging ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recovery {
    /// Tables of small leaves become one huge leaf where they are.
    InPlace,
    /// What is mapped goes, and comes back huge by a fault: what KVM did before 2022.
    Refault,
}

impl Mmu {
    /// Ends the logging of slot `id`, with huge leaves to come back in one of the ways to do it.
    /// [`Recovery::InPlace`] is [`Mmu::set_logging`].
    ///
    /// # Errors
    /// No such slot.
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

    /// Some blocks at a time: faults near them wait for the shoot-down, and for no more.
    fn drop_leaves(&self, slot: &Slot<Rmap>) {
        const AT_ONCE: u64 = 32 * Level::L2M.pages();
        let all = slot.hvas;
        for first in (0..all.pages()).step_by(AT_ONCE as usize) {
            let pages = (all.pages() - first).min(AT_ONCE);
            let start = all.start().checked_add_pages(first);
            let some = start.and_then(|start| HvaRange::new(start, pages));
            let some = some.expect("a part of a range");
            self.begin_invalidation(&[some]).finish();
        }
    }
}
