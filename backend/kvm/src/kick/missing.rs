//! Accesses to pages that were never provided: which vCPU makes one, and how it leaves the guest
//! for its VMM.
//!
//! ```text
//! vCPU's thread, in KVM_RUN        page source's thread               vCPU's thread, outside
//! waits in userfaultfd ──────────► report: note the page, kick
//! leaves with EINTR ────────────────────────────────────────────────► take_missing: the exit
//! waits again, same entry ───────► report: it cannot leave (`Stays`)
//! ```
//! A signal ends the wait of a guest's access: KVM gets the page with `FOLL_INTERRUPTIBLE`. It does
//! not end an access that KVM itself makes by `copy_from_user`, such as one of its instruction
//! emulator. There Linux repeats the fault at once, so a second fault of one entry on one page says
//! that the access is KVM's own.

use super::{VcpuKick, VcpuKicks};
use crate::pages::Page;
use lacuna_addr::Access;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// A vCPU's access to a page that was never provided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MissingPage {
    pub page: Page,
    pub access: Access,
}

/// What a vCPU does that waits for a missing page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Reported {
    /// It leaves the guest, and takes the page.
    Leaves,
    /// It waits: it has exited for this page, and its VMM has entered it again in order to wait.
    Waits,
    /// It cannot leave without the page, because KVM itself makes the access.
    Stays,
    /// It left meanwhile. If it still needs the page, it faults again when it is entered.
    Left,
}

/// What one vCPU knows of missing pages.
#[derive(Default)]
pub(super) struct Missing {
    /// The pages for which the vCPU will exit.
    found: VecDeque<MissingPage>,
    /// The page that the vCPU was last kicked for, and the number of that entry.
    kicked: Option<(u64, Page)>,
    /// The page for which the vCPU waits without another exit.
    waits: Option<Page>,
}

impl Missing {
    /// Whether the vCPU shall leave at its next entry.
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

    /// vCPU `index` waits for a missing page, in a slot that exits.
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

    /// A worker of KVM waits for a missing page. It acts for a vCPU, and does not say for which, so
    /// one that is in the guest exits.
    pub fn report_for_any(&self, missing: MissingPage) {
        let (count, first) = (
            self.vcpus.len(),
            self.any.fetch_add(1, Ordering::Relaxed) as usize,
        );
        for index in (first..first + count).map(|index| index % count) {
            let mut state = self.vcpus[index].state();
            if let (Some(entered), false) = (&state.entered, state.missing.is_found()) {
                entered.kick();
                state.missing.found.push_back(missing);
                return;
            }
        }
        let mut state = self.vcpus[first % count].state();
        state.entered.as_ref().inspect(|entered| entered.kick());
        state.missing.found.push_back(missing);
    }

    /// The next page for which vCPU `index` exits.
    pub fn take_missing(&self, index: usize) -> Option<MissingPage> {
        self.vcpus[index].state().missing.found.pop_front()
    }

    /// From now on vCPU `index` waits for `page` without an exit, and exits for any other.
    pub fn set_waits(&self, index: usize, page: Option<Page>) {
        self.vcpus[index].state().missing.waits = page;
    }

    /// Waits until no vCPU is in the guest, at most for `max`.
    pub fn wait_until_left(&self, max: Duration) {
        let end = Instant::now() + max;
        for vcpu in &self.vcpus {
            while vcpu.state().entered.is_some() && Instant::now() < end {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
