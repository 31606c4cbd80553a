//! Accesses to missing pages: finds the accessing vCPU, and makes it leave the guest.
//!
//! ```text
//! vCPU's thread, in KVM_RUN        reader of faults                   vCPU's thread, outside
//! waits in userfaultfd ──────────► report: note the page, kick
//! leaves with EINTR ────────────────────────────────────────────────► take_missing: the exit
//! waits again, same entry ───────► report: it cannot leave (`Stays`)
//! ```
//! A signal ends the wait of a guest's access: KVM gets the page with `FOLL_INTERRUPTIBLE`. It does
//! not end KVM's own access by `copy_from_user`, such as in its instruction emulator. There Linux
//! repeats the fault at once. So a second fault in one entry on the same page means that KVM itself
//! makes the access.

use super::{VcpuKick, VcpuKicks};
use crate::memory::Page;
use lacuna_addr::Access;
use lacuna_machine::VCPUS_MAX;
use lacuna_sys::VcpuStatistic;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// A vCPU's access to a missing page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MissingPage {
    pub page: Page,
    pub access: Access,
    pub comes: Comes,
    /// The search for the vCPU, if a worker of KVM waits for the page.
    pub search: Option<Search>,
}

/// A search for the vCPU for which a worker of KVM acts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Search {
    /// A bit for each vCPU that has left the guest and does not need the page.
    ruled_out: [u64; VCPUS_MAX / 64],
}

impl Search {
    fn without(mut self, index: usize) -> Self {
        self.ruled_out[index / 64] |= 1 << (index % 64);
        self
    }

    fn has(self, index: usize) -> bool {
        self.ruled_out[index / 64] >> (index % 64) & 1 == 0
    }
}

/// Whether a page arrives without the VMM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Comes {
    /// The VMM has to provide the page: the vCPU exits.
    FromVmm,
    /// The source was asked, or the page was swapped out. The vCPU notifies its guest, if it can.
    ByItself,
}

/// The reaction of a vCPU that waits for a missing page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Reported {
    /// It leaves the guest, and takes the page.
    Leaves,
    /// It waits: it has exited for this page before, and its VMM has entered it again.
    Waits,
    /// It cannot leave without the page, because KVM itself makes the access.
    Stays,
    /// It has already left. If it still needs the page, it faults again after its next entry.
    Left,
}

/// The missing pages of one vCPU.
#[derive(Default)]
pub(super) struct Missing {
    /// The pages for which the vCPU leaves.
    found: VecDeque<MissingPage>,
    /// The page of the vCPU's last kick, and the number of the kicked entry.
    kicked: Option<(u64, Page)>,
    /// The page for which the vCPU waits without another exit.
    waits: Option<Page>,
    /// The number of an entry that began while the guest had halted the vCPU.
    idle: Option<u64>,
}

impl Missing {
    /// Whether the vCPU must leave at its next entry.
    pub(super) fn is_found(&self) -> bool {
        !self.found.is_empty()
    }
}

impl VcpuKicks {
    /// The vCPU that `thread` runs at present.
    pub fn vcpu_of(&self, thread: u32) -> Option<usize> {
        let runs = |vcpu: &VcpuKick| vcpu.thread.load(Ordering::SeqCst) == thread;
        self.vcpus.iter().position(runs)
    }

    /// vCPU `index` waits for a missing page in a slot that exits.
    pub fn report(&self, index: usize, missing: MissingPage) -> Reported {
        let mut state = self.vcpus[index].state();
        let Some(entered) = &state.entered else {
            return Reported::Left;
        };
        let page = missing.page;
        if state.missing.waits == Some(page) {
            return Reported::Waits;
        }
        let this = Some((state.entries, page));
        if state.missing.kicked == this {
            state.missing.found.retain(|other| other.page != page);
            return Reported::Stays;
        }
        entered.kick();
        state.missing.kicked = this;
        state.missing.found.push_back(missing);
        Reported::Leaves
    }

    /// From now on `blocked` shows whether KVM has halted vCPU `index`. Call this once for each
    /// vCPU.
    pub fn watch(&self, index: usize, blocked: VcpuStatistic) {
        let set = self.vcpus[index].blocked.set(blocked);
        debug_assert!(set.is_ok(), "a vCPU is made once");
    }

    /// A worker of KVM waits for a missing page. The worker acts for an unknown vCPU, so a vCPU in
    /// the guest leaves.
    pub fn report_for_any(&self, missing: MissingPage) {
        let search = Some(Search::default());
        let missing = MissingPage { search, ..missing };
        let first = self.any.fetch_add(1, Ordering::Relaxed) as usize;
        if !self.report_for_one(first, missing) {
            self.report_again(first % self.vcpus.len(), missing);
        }
    }

    /// vCPU `index` has left for a page but does not need it, because its guest has halted it.
    /// Returns whether another vCPU leaves for the page instead.
    pub fn pass_on(&self, index: usize, missing: MissingPage) -> bool {
        let mut state = self.vcpus[index].state();
        state.missing.idle = Some(state.entries + 1);
        drop(state);
        missing.search.is_some_and(|search| {
            let search = Some(search.without(index));
            self.report_for_one(index + 1, MissingPage { search, ..missing })
        })
    }

    /// Makes one vCPU leave that may need the page. The search begins with vCPU `first`. It prefers
    /// vCPUs halted by KVM, because KVM has halted the vCPU that needs the page. vCPUs halted by
    /// the guest come later: an interrupt may have ended that halt, but rarely has.
    fn report_for_one(&self, first: usize, missing: MissingPage) -> bool {
        let count = self.vcpus.len();
        let search = missing.search.unwrap_or_default();
        let all = || {
            let all = (first..first + count).map(|index| index % count);
            all.filter(|index| search.has(*index))
        };
        let is_blocked = |index: &usize| {
            let blocked = self.vcpus[*index].blocked.get();
            blocked.is_some_and(|blocked| blocked.read() == Ok(1))
        };
        let is_busy = |index: &usize| {
            let state = self.vcpus[*index].state();
            state.missing.idle != Some(state.entries)
        };
        let likely = all().filter(is_busy).filter(is_blocked);
        for index in likely.chain(all().filter(is_blocked)).chain(all()) {
            let mut state = self.vcpus[index].state();
            if let (Some(entered), false) = (&state.entered, state.missing.is_found()) {
                entered.kick();
                state.missing.found.push_back(missing);
                return true;
            }
        }
        false
    }

    /// vCPU `index` leaves for a page, now or at its next entry.
    pub fn report_again(&self, index: usize, missing: MissingPage) {
        let mut state = self.vcpus[index].state();
        state.entered.as_ref().inspect(|entered| entered.kick());
        state.missing.found.push_back(missing);
    }

    /// The next page for which vCPU `index` leaves the guest.
    pub fn take_missing(&self, index: usize) -> Option<MissingPage> {
        self.vcpus[index].state().missing.found.pop_front()
    }

    /// From now on vCPU `index` waits for `page` without an exit, and exits for other pages.
    pub fn set_waits(&self, index: usize, page: Option<Page>) {
        self.vcpus[index].state().missing.waits = page;
    }

    /// Waits at most `max` until no vCPU is in the guest.
    pub fn wait_until_left(&self, max: Duration) {
        let end = Instant::now() + max;
        for vcpu in &self.vcpus {
            while vcpu.state().entered.is_some() && Instant::now() < end {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_rules_out_any_vcpu() {
        let out = [0, 63, 64, VCPUS_MAX - 1];
        let search = out.into_iter().fold(Search::default(), Search::without);
        let left: Vec<usize> = (0..VCPUS_MAX).filter(|index| !search.has(*index)).collect();
        assert_eq!(left, out);
    }
}
