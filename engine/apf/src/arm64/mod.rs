//! The two guest ABIs published for arm64: a few calls, a block of guest memory, and two events.
//! Neither was merged into Linux.
//!
//! | file | job |
//! |---|---|
//! | `numbers` | identifiers of calls, feature bits, results |
//! | `control` | the calls, and every rule by which one is refused |
//! | `delivery` | the events, in the form of RFCv2 and in the form of v1 to v4 |
//! | `sdei` | the software-delegated exception interface that the second form needs |
//! | `guest` | the interface to a vCPU |
//!
//! ```text
//! the guest's HVC ─► Queue::call ─► Answer, and Effects on the vCPU
//! a fault ─► crate::Queue::not_present          a page has arrived ─► crate::Queue::poll
//! before the vCPU's next instruction ─► Queue::enter: it takes the SDEI event, if one is signalled
//! ```
//! A guest probes: the UID of the vendor services is KVM's; bit 1 of their bitmap is RFCv2, and bit
//! 2 is v1 to v4. It chooses a form by the call that enables the events.
//!
//! Sources: the series "Support Async Page Fault" for KVM/arm64 of May 2020 (RFCv2), and of August
//! 2020 to August 2021 (v1 to v4); the SMC calling convention (Arm DEN 0028); the
//! software-delegated exception interface (Arm DEN 0054).
//! docs/decisions/0024-arm64-async-page-faults.md answers the reviewers' objections.

mod control;
mod delivery;
mod guest;
mod numbers;
mod sdei;

use lacuna_addr::{Access, Gfn};
use lacuna_state::StateError;
use lacuna_state::arm64::AsyncFaults;
use lacuna_sync::Nanos;

pub use control::{Answer, Control};
pub use guest::{CpuState, Effect, ExceptionLevel, Guest, Line};
pub use numbers::{Features, Numbers};

/// The asynchronous page faults of one arm64 vCPU.
pub type Queue = crate::Queue<Control>;

impl Queue {
    /// The page that [`Queue::call`] accesses, and how. A backend that must not wait inside the
    /// call brings the page in before.
    pub fn page_accessed_by(&self, function: u32, args: &[u64; 5]) -> Option<(Gfn, Access)> {
        self.abi().page_accessed_by(function, args)
    }

    /// HVC, with the function identifier in W0 and X1 to X5. `None`: the call belongs to neither
    /// the vendor services nor the SDEI, so another part of the hypervisor answers it.
    pub fn call<G: Guest>(
        &mut self,
        function: u32,
        args: &[u64; 5],
        now: Nanos,
        guest: &mut G,
    ) -> Option<Answer> {
        let (answer, request) = self.abi_mut().call(function, args, guest)?;
        self.apply(request, now, guest);
        Some(answer)
    }

    /// The vCPU is about to execute its next instruction: it takes a signalled SDEI event. Call it
    /// before each entry into the guest, after [`crate::Queue::poll`].
    #[inline]
    pub fn enter<G: Guest>(&mut self, guest: &mut G) {
        self.abi_mut().enter(guest);
    }

    /// The guest's configuration. Faults in flight are not part of it: a restored guest gets a
    /// wake-all, and every task retries its access.
    pub fn save(&self) -> AsyncFaults {
        self.abi().save()
    }

    /// Whether [`Queue::restore`] would take `saved`.
    ///
    /// # Errors
    /// It would not. The error names the first such field.
    pub fn check<G: Guest>(&self, saved: &AsyncFaults, guest: &mut G) -> Result<(), StateError> {
        self.abi().check(saved, guest).map(|_| ())
    }

    /// Replaces the configuration, and queues a wake-all if events are enabled.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn restore<G: Guest>(
        &mut self,
        saved: &AsyncFaults,
        now: Nanos,
        guest: &mut G,
    ) -> Result<(), StateError> {
        let request = self.abi_mut().restore(saved, guest)?;
        self.cancel();
        self.apply(request, now, guest);
        Ok(())
    }
}
