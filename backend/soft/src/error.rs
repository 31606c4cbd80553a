//! Why a VM of this backend cannot be made.

use lacuna_addr::NoRoom;
use lacuna_host::HostError;
use lacuna_machine::{Arch, BootError, DirtyError, HandlerError, MachineError, VCPUS_MAX};
use lacuna_mmu::MmuError;
use lacuna_slots::SlotError;

/// Why a VM cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SoftError {
    /// The configuration is not valid.
    #[error("{0} vCPUs: give 1 to {VCPUS_MAX}")]
    Vcpus(usize),
    /// No TSC has that frequency.
    #[error("a TSC of 0 kHz: give a frequency, or none for 1 GHz")]
    TscFrequency,
    /// This build has no AArch64 processors.
    #[error("this program was built without AArch64 processors: enable the feature `arm64`")]
    NoArm64,
    /// An AArch64 processor has no TSC.
    #[error("a TSC frequency for AArch64 processors, which have none: leave it out")]
    NoTsc,
    /// The VM's stage-2 tables have another format than the processor's.
    #[error(
        "the VM was made for {0} processors, which read other stage-2 tables: make a VM of the \
         architecture of this processor"
    )]
    Processor(Arch),
    /// The host's memory manager refuses.
    #[error(transparent)]
    Host(#[from] HostError),
    /// There is no handler to fill the memory.
    #[error(transparent)]
    Handler(#[from] HandlerError),
    /// The resident budget cannot be filled from outside.
    #[error(
        "a page-fault handler cannot fill memory of the resident budget: give the VM Linux memory \
         (MemoryKind::Linux)"
    )]
    HandlerMemory,
    /// There is no memory for tables.
    #[error(transparent)]
    Mmu(#[from] MmuError),
    /// The VM's own tables do not fit.
    #[error(transparent)]
    Tables(#[from] NoRoom),
    /// The memory does not fit into slots.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The image does not fit.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The guest cannot start.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The VM does not support this delivery of dirty pages.
    #[error(transparent)]
    Dirty(#[from] DirtyError),
    /// The VM has its vCPUs already: a VM is booted once.
    #[error("this VM was booted before; make another one, or reload the image and reset its vCPUs")]
    Booted,
}
