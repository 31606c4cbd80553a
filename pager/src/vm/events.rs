//! The events of a VM's descriptor.

use super::Vm;
use crate::config::WhenLost;
use crate::messages::Matter;
use crate::placing::wake;
use crate::stats::Count;
use crate::units::UnitState;
use lacuna_addr::{Hva, HvaRange};
use lacuna_sync::lock;
use lacuna_sys::{Errno, Event, Userfaultfd};
use std::sync::PoisonError;

/// The most events of one read.
const EVENTS: usize = 64;
/// The most reads of the descriptor under one lock.
const READS: usize = 64;

impl Vm {
    /// Reads the events of the descriptor. Settles the removed units, and appends the faults to
    /// `faults`. Returns whether there was an event.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn read_events(&self, faults: &mut Vec<Hva>) -> Result<bool, Errno> {
        let live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        let Some(uffd) = &*live else {
            return Ok(false);
        };
        let (mut events, mut has_read) = (Vec::new(), false);
        for _ in 0..READS {
            let read = uffd.events(self.units.state().events(), &mut events);
            if events.is_empty() {
                return read.map(|()| has_read);
            }
            has_read = true;
            // A later event makes the descriptor readable again.
            let is_last = events.len() < EVENTS;
            // Before the next read: it overwrites the events that a later pager would find. The
            // kernel returns faults before removals that are older.
            let changes = events.drain(..);
            faults.extend(changes.filter_map(|event| self.settle_event(uffd, event)));
            if is_last {
                break;
            }
        }
        Ok(has_read)
    }

    /// Continues the service of a dead pager. Settles what it has read, also if it has settled
    /// that: a second time has no effect. Then the threads whose faults it has read fault again.
    pub fn take_over(&self) {
        let live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        let Some(uffd) = &*live else { return };
        self.units.forget_requests();
        for change in Event::changes(self.units.state().events()) {
            self.settle_event(uffd, change);
        }
        // It fails if the process has ended, so no thread waits.
        let wake = |memory| _ = uffd.wake_all(memory);
        self.regions.memory().for_each(wake);
    }

    /// Settles what an event says about the units. Returns the address of a fault.
    fn settle_event(&self, uffd: &Userfaultfd, event: Event) -> Option<Hva> {
        match event {
            Event::Fault(fault) => {
                if let Some(unit) = self.regions.at(fault.page) {
                    self.stalls.begin(fault.thread, unit.number);
                }
                return Some(fault.page);
            }
            Event::Removed(range) | Event::Unmapped(range) => self.remove(uffd, range),
            Event::Moved { from, to } => self.moved(uffd, from, to),
            // The child's pages are not served. Dropping its descriptor lets the child continue,
            // with zeros in missing pages.
            Event::Forked(child) => {
                drop(child);
                let text = "has forked: the child's missing pages are zeros; do not fork a VMM";
                self.messages.say(Matter::Oddity, text);
            }
            Event::Other(number) => {
                let text = format!("has sent the unknown event {number:#x}, which is ignored");
                self.messages.say(Matter::Oddity, &text);
            }
        }
        None
    }

    fn remove(&self, uffd: &Userfaultfd, range: HvaRange) {
        self.counts.add(Count::Removals);
        for (number, is_whole) in self.regions.touched(range) {
            if !is_whole {
                // No content may cover the removed pages, and the others must not become zeros. A
                // settled unit stays: its missing pages get zeros.
                let unit = self.regions.unit(number);
                let reason = "the VM has taken a part of the page away: announce its page size";
                self.lose(Some(uffd), &unit, reason);
                continue;
            }
            match self.units.settle(number) {
                UnitState::Missing | UnitState::Settled | UnitState::Shared => {}
                // The waiting threads fault again, and get zeros.
                UnitState::Asked | UnitState::Arrived | UnitState::Lost => {
                    lock(&self.gathering).remove(&number);
                    wake(uffd, &self.regions.unit(number));
                }
            }
        }
    }

    /// The VMM has moved a part of its memory. It has not announced the new addresses, so a fault
    /// there is a fault outside of the regions.
    fn moved(&self, uffd: &Userfaultfd, from: HvaRange, to: Hva) {
        for (number, _) in self.regions.touched(from) {
            if let Some(UnitState::Asked | UnitState::Arrived) = self.units.lose(number) {
                lock(&self.gathering).remove(&number);
                // Its threads find that the memory is not there any more.
                wake(uffd, &self.regions.unit(number));
            }
        }
        let text = format!(
            "has moved memory from {} to {to} by mremap, which this pager does not follow: its \
             missing pages are lost",
            from.start()
        );
        self.messages.say(Matter::Loss, &text);
        if self.when_lost == WhenLost::Kill {
            self.kill();
        }
    }
}
