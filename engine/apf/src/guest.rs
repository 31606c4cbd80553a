//! What a backend lends to [`Queue`](crate::Queue): its guest, as the vCPU's thread sees it.

use lacuna_addr::{Access, Gfn, Gpa};

/// The processor between two instructions, or at a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuState {
    /// CPL is not 0.
    pub user: bool,
    /// CR0.PG.
    pub paging: bool,
    /// An interrupt could be taken now: IF is set, no STI or MOV SS shadow, no exception or
    /// interrupt is pending or being delivered, no instruction is half done except the one that
    /// faults.
    pub interruptible: bool,
    /// The local APIC is enabled by software (SVR bit 8).
    pub lapic: bool,
}

/// The word cannot be written: no memory, read-only memory, or a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unwritable;

/// What became of an attempt to map a page ahead of its retry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prefault {
    /// The retry will find it.
    Mapped,
    /// It is gone again, or never came; the retry faults.
    NotMapped,
}

/// The guest on one vCPU. All calls come from the vCPU's thread, with no lock held.
pub trait Guest {
    /// The processor now. Reflects at once what the calls below have changed: after
    /// [`Guest::inject_page_fault`] an exception is pending and `interruptible` is false.
    fn state(&self) -> CpuState;

    /// Guest memory at `at`, which is a multiple of 4. `None`: there is no memory there.
    fn read_u32(&mut self, at: Gpa) -> Option<u32>;

    /// Writes guest memory at `at`, which is a multiple of 4.
    fn write_u32(&mut self, at: Gpa, value: u32) -> Result<(), Unwritable>;

    /// Makes a #PF pending, with error code 0 and `address` for CR2. Called only when events are
    /// interruptible.
    fn inject_page_fault(&mut self, address: u64);

    /// Raises a fixed-mode interrupt in the vCPU's own local APIC.
    fn interrupt(&mut self, vector: u8);

    /// Maps the page for `access`, if that takes no waiting.
    fn prefault(&mut self, gfn: Gfn, access: Access) -> Prefault;

    /// Ends a HLT: the vCPU is runnable.
    fn resume(&mut self);
}
