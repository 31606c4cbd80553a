//! The failure of a vCPU after the kernel has taken away guest memory.
//!
//! ```text
//! guest code: an access gets SIGBUS, and finds zeros     this vCPU, or another thread
//! the vCPU leaves guest code: has the count of losses moved?
//!   no:  none of its accesses has found such zeros, its exit is valid
//!   yes: was a page of this VM lost? then the exit is dropped, and each step fails
//! ```
//! The vCPU makes this test before it handles the exit. So no port, device or VMM gets a value
//! derived from the zeros. All vCPUs of the VM fail at their next exit from guest code, because
//! each may have read the zeros, or later writes of the others. A reset or a restore of the vCPU
//! ends the failure; the page stays lost.
//!
//! The guest's memory may keep the vCPUs' writes between the loss and their exits: each vCPU runs
//! at most for the instructions of one step.

use super::Entry;
use crate::platform::Platform;
use lacuna_addr::PAGE_SIZE;
use lacuna_host::LostPage;
use lacuna_machine::VcpuError;

impl<P: Platform> Entry<P> {
    /// The error of each step since the vCPU may have read a lost page. The offline vCPU calls this
    /// after each stay in guest code.
    #[inline]
    pub(crate) fn lost(&mut self) -> Option<VcpuError> {
        if !self.seen.is_all(self.vm.host.losses()) {
            self.note_losses();
        }
        self.lost.clone()
    }

    #[cold]
    fn note_losses(&mut self) {
        let vm = &self.vm;
        if let Some(page) = vm.host.lost_since(&mut self.seen, &*vm.mmu.notifier()) {
            let error = self.error_of(&page);
            self.lost.get_or_insert(error);
        }
    }

    fn error_of(&self, lost: &LostPage) -> VcpuError {
        let vcpu = self.index;
        let cause = lost.to_string();
        let slots = self.vm.mmu.slots();
        let gpa = slots.iter().find_map(|slot| {
            let offset = lost
                .page
                .get()
                .checked_sub(slot.backing_of(slot.gfns.start()).get())?;
            let gfn = slot.gfns.start().checked_add(offset / PAGE_SIZE as u64)?;
            slot.gfns.contains(gfn).then(|| gfn.gpa())
        });
        match gpa {
            Some(gpa) => VcpuError::no_page(vcpu, gpa, lost.kind, cause),
            // The page's slot is deleted.
            None => VcpuError::Host { vcpu, cause },
        }
    }

    /// Forgets the losses, because the vCPU gets a new state without anything of the old one.
    pub(crate) fn forget_losses(&mut self) {
        self.seen = self.vm.host.seen_losses();
        self.lost = None;
    }
}
