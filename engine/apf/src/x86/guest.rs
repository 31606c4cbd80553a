//! What x86's ABI needs of a vCPU and its memory.

use lacuna_addr::Gpa;

/// What decides whether an x86 vCPU may be told, besides [`crate::Guest::is_interruptible`]: the
/// processor between two instructions, or at a fault. There, a vCPU is interruptible if RFLAGS.IF
/// is set, there is no STI or MOV SS shadow, no exception or interrupt is pending or being
/// delivered, and no instruction is half done except the one that faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuState {
    /// CPL is not 0.
    pub user: bool,
    /// CR0.PG.
    pub paging: bool,
    /// The local APIC is enabled by software (SVR bit 8).
    pub lapic: bool,
}

/// The word cannot be written: no memory, read-only memory, or a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unwritable;

/// An x86 guest on one vCPU. All calls come from the vCPU's thread, with no lock held.
pub trait Guest: crate::Guest {
    /// The processor now.
    fn state(&self) -> CpuState;

    /// Guest memory at `at`, which is a multiple of 4. `None`: there is no memory there.
    fn read_u32(&mut self, at: Gpa) -> Option<u32>;

    /// Writes guest memory at `at`, which is a multiple of 4.
    ///
    /// # Errors
    /// There is no memory that could be written; nothing was.
    fn write_u32(&mut self, at: Gpa, value: u32) -> Result<(), Unwritable>;

    /// Makes a #PF pending, with error code 0 and `address` for CR2. Called only while the vCPU is
    /// interruptible; afterwards it is not.
    fn inject_page_fault(&mut self, address: u64);

    /// Raises a fixed-mode interrupt in the vCPU's own local APIC.
    fn interrupt(&mut self, vector: u8);
}
