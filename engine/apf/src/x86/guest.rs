//! The x86 ABI's interface to a vCPU, besides the words in its memory.

/// The part of an x86 vCPU's state that decides whether an event may be delivered, besides
/// [`crate::Guest::is_interruptible`]. It is the state between two instructions, or at a fault.
///
/// An x86 vCPU is interruptible if RFLAGS.IF is set, there is no STI or MOV SS shadow, no exception
/// or interrupt is pending or being delivered, and no instruction is half done except the faulting
/// one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuState {
    /// CPL is not 0.
    pub user: bool,
    /// CR0.PG.
    pub paging: bool,
    /// The local APIC is enabled by software (SVR bit 8).
    pub lapic: bool,
}

/// An x86 guest on one vCPU. The vCPU's thread makes all calls, and holds no lock.
pub trait Guest: crate::Guest + crate::SharedWords {
    /// The vCPU's present state.
    fn state(&self) -> CpuState;

    /// Makes a #PF pending, with error code 0 and `address` for CR2. The caller calls this only
    /// while the vCPU is interruptible. After the call it is not.
    fn inject_page_fault(&mut self, address: u64);

    /// Raises a fixed-mode interrupt in the vCPU's own local APIC.
    fn interrupt(&mut self, vector: u8);
}
