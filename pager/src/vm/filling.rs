//! What the filling thread does to its VM.

use super::Vm;
use crate::messages::Matter;
use crate::regions::{Regions, Unit};
use crate::stats::Count;
use crate::units::UnitState;
use crate::waiting::WaitingPut;
use lacuna_addr::PAGE_SIZE;
use lacuna_sync::lock;
use std::sync::atomic::Ordering;

impl Vm {
    /// Its memory.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Whether no thread has needed the unit so far.
    pub fn is_missing(&self, unit: &Unit) -> bool {
        self.units.get(unit.number) == UnitState::Missing
    }

    /// Whether placements wait for an unread event, or for memory of the host.
    pub fn has_waiting_placements(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Places the content of `unit`, unless its content has come already, or was taken away. The
    /// filling thread may wait for the lock: no fault needs it.
    pub fn fill(&self, unit: &Unit, content: &[[u8; PAGE_SIZE]], is_of_working_set: bool) {
        // Without the lock: the clones that wait for the page get it.
        if let (Some(shared), [page]) = (&self.shared, content) {
            shared.fill(unit.first, page);
        }
        let live = self.live();
        let Some(uffd) = live.as_deref() else { return };
        if !self.units.arrive(unit.number) {
            return self.counts.add(Count::FillLate);
        }
        self.counts.add(Count::Filled);
        if is_of_working_set {
            self.counts.add(Count::WorkingSet);
        }
        // A fault may have asked for the unit meanwhile, and have some of its pages.
        lock(&self.gathering).remove(&unit.number);
        let put = self.content(unit, content);
        let again = self.place(uffd, unit, put, 0);
        if again.is_needed() {
            self.keep(*unit, WaitingPut::of(put), again);
        }
    }

    /// The fill's source has no content for `unit`. The unit is not lost: a fault asks the VM's own
    /// source.
    pub fn say_not_filled(&self, unit: &Unit, reason: &str) {
        let text = format!(
            "is filled without {}: {reason}; a fault asks for it again",
            unit.first
        );
        self.messages.say(Matter::Fill, &text);
    }

    /// There is no thread for the fill.
    pub fn say_no_filler(&self, error: &std::io::Error) {
        let text = format!("is not filled: there is no thread for it ({error}): raise `ulimit -u`");
        self.messages.say(Matter::Fill, &text);
    }

    /// All that the fill brings is in place.
    pub fn end_fill(&self) {
        self.has_fill_ended.store(true, Ordering::Relaxed);
    }
}
