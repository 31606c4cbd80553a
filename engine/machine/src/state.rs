//! Saving and restoring the state of a vCPU.

use crate::{StateError, Vcpu, VcpuState};

/// Saves and restores the state of a vCPU, between two runs.
///
/// ```text
/// save      stop all vCPUs ─► Vm::save_shared ─► SaveRestore::save of each vCPU; memory
/// restore   Vm::bare_vcpus ─► memory ─► Vm::restore_shared ─► SaveRestore::restore of each vCPU
/// ```
///
/// A state is data. It may come from a file or a peer, damaged or hostile. A backend that restores
/// it checks every field. If a field is wrong, the error names it, and the vCPU keeps its state.
/// Only the hypervisor below can refuse half-way ([`StateError::Host`]); the vCPU must then be
/// restored again or dropped.
///
/// The vCPU's owning thread calls this: see [`Running::pause`](crate::Running::pause) for running
/// vCPUs.
///
/// Pages on their way to the guest are not part of a state. If the guest has enabled asynchronous
/// page faults, it gets a *wake-all* after a restore: every thread waiting for a page retries its
/// access.
pub trait SaveRestore: Vcpu {
    /// The vCPU's present state. The vCPU does not change, and may be entered again.
    ///
    /// # Errors
    /// [`StateError::MidInstruction`], or the hypervisor below refuses.
    fn save(&mut self) -> Result<VcpuState, StateError>;

    /// Puts the vCPU into `state`. Restore the guest's memory and the VM's own state first.
    ///
    /// # Errors
    /// [`StateError`], with the name of the field; the vCPU keeps its state. A hypervisor below
    /// that cannot forget a half-done instruction refuses with [`StateError::MidInstruction`].
    fn restore(&mut self, state: &VcpuState) -> Result<(), StateError>;
}
