//! Getting vCPUs out of the guest.

/// Makes vCPUs return to their VMM.
///
/// A kick is a request that stays until a run takes it. So it is right in every order: before the
/// run, the next run returns at once; twice, the second adds nothing; after the last run, nothing
/// happens.
pub trait Kick: Sync {
    /// [`Vcpu::run`](crate::Vcpu::run) of vCPU `index` returns
    /// [`Exit::Interrupted`](crate::Exit::Interrupted) soon, also when the vCPU is halted or waits
    /// for a page. A vCPU that is about to return for another reason returns `Interrupted` from its
    /// next run. An index without a vCPU does nothing.
    fn kick(&self, index: usize);

    /// [`Kick::kick`] for every vCPU.
    fn kick_all(&self);
}
