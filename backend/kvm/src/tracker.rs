//! The detector of the guest's writes.

/// The detector of writes, chosen when the VM is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Tracker {
    /// KVM, by the processor's page-modification log or by write protection.
    #[default]
    Kvm,
    /// Linux's page table: userfaultfd's asynchronous write protection, read by `PAGEMAP_SCAN`.
    /// Writes are recorded in bitmaps, and all memory has to be resident.
    Pagemap,
}
