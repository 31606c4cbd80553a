//! Getting vCPUs out of the guest.

/// Makes vCPUs return to their VMM.
///
/// A kick is a request that stays until a run takes it, so a kick at any moment works. After a kick
/// between two runs, the next run returns at once. A second kick before that run adds nothing. A
/// kick after the last run has no effect.
pub trait Kick: Sync {
    /// [`Vcpu::run`](crate::Vcpu::run) of vCPU `index` returns
    /// [`Exit::Interrupted`](crate::Exit::Interrupted) soon, also when the vCPU is halted, waits
    /// for a page or has a full dirty ring. If the vCPU is about to return for another reason, its
    /// next run returns `Interrupted`. An index without a vCPU does nothing.
    fn kick(&self, index: usize);

    /// [`Kick::kick`] for every vCPU.
    fn kick_all(&self);
}
