//! How the page source's thread handles faults of never-provided pages.
//!
//! | what waits | the slot exits | otherwise |
//! |---|---|---|
//! | a vCPU's thread, in the guest | the vCPU exits | the source is asked |
//! | the same, for an access of KVM's own | the source is asked | the source is asked |
//! | a worker of KVM, for its async page fault | a vCPU exits | the source is asked |
//! | another thread of this process | the source is asked | the source is asked |

use super::Page;
use super::Worker;
use super::provision::{PageState, Provider};
use crate::kick::{Comes, MissingPage, Reported};
use lacuna_sys::Fault;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Whether a fault was on a never-provided page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Handled {
    Yes,
    No,
}

impl Worker {
    /// Handles the fault of `page` if the page was never provided.
    pub fn never_provided(&mut self, page: Page, fault: Fault) -> Handled {
        let Some(provider) = &self.provider else {
            return Handled::No;
        };
        // Read the count before the state: if the page is missing afterwards, it has not arrived
        // since.
        let arrivals = provider.provision.arrivals(page);
        match provider.provision.state(page) {
            PageState::Provided => {
                // The notice of its arrival may be on its way.
                self.pages.provided(page);
                return Handled::No;
            }
            // The copy wakes the thread.
            PageState::Filling => {}
            // The run has ended.
            PageState::Lost => {}
            PageState::Missing | PageState::Held | PageState::Asked => {
                if provider.provision.exits(page).is_some() {
                    self.exit(provider, page, fault);
                } else {
                    provider.ask(page);
                    self.comes_by_itself(page, arrivals, fault);
                }
            }
        }
        Handled::Yes
    }

    /// A thread waits for a missing page in a slot that exits.
    fn exit(&self, provider: &Provider, page: Page, fault: Fault) {
        let missing = MissingPage {
            page,
            access: fault.access,
            comes: Comes::FromVmm,
            search: None,
        };
        let kicks = &self.shared.kicks;
        match kicks.vcpu_of(fault.thread) {
            Some(vcpu) => match kicks.report(vcpu, missing) {
                Reported::Leaves | Reported::Left => {}
                Reported::Waits => _ = provider.provision.hold(page),
                Reported::Stays => provider.ask(page),
            },
            None if is_of_this_process(fault.thread) => provider.ask(page),
            // If the page is held, the VMM already got an exit. This worker may act for another
            // vCPU, which may get the event too.
            None => {
                if provider.provision.hold(page) || provider.provision.notifies_guest() {
                    kicks.report_for_any(missing);
                }
            }
        }
    }

    /// A thread waits for a page that arrives without the VMM. If the thread is a worker of KVM, a
    /// vCPU notifies its guest. `arrivals` was read before the page could arrive.
    pub fn comes_by_itself(&self, page: Page, arrivals: u8, fault: Fault) {
        let notifies = |provider: &Arc<Provider>| provider.provision.notifies_guest();
        let kicks = &self.shared.kicks;
        if self.provider.as_ref().is_some_and(notifies)
            && kicks.vcpu_of(fault.thread).is_none()
            && !is_of_this_process(fault.thread)
        {
            kicks.report_for_any(MissingPage {
                page,
                access: fault.access,
                comes: Comes::ByItself { arrivals },
                search: None,
            });
        }
    }

    /// Takes notices: pages put in place by other threads, and changed slots.
    pub fn take_notices(&mut self) {
        let Some(provider) = &self.provider else {
            return;
        };
        for page in self.shared.take_arrived() {
            self.pages.provided(page);
        }
        // Only this thread holds pages, so none is held between this search and the next notice.
        if self.shared.slots_changed.swap(false, Ordering::AcqRel) {
            let held = provider.provision.in_state(PageState::Held);
            held.filter(|page| provider.provision.exits(*page).is_none())
                .for_each(|page| provider.ask(page));
        }
        self.make_room();
    }
}

/// Whether `thread` belongs to this process. KVM's threads for async page faults belong to the
/// kernel.
fn is_of_this_process(thread: u32) -> bool {
    // SAFETY: 1. signal 0 is not sent: the call only looks for the thread.
    let found = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) };
    found == 0
}
