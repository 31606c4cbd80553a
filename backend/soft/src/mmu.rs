//! The MMU of a VM of any architecture, for code outside vCPUs.
//!
//! A vCPU's bus has the table format in the type of its MMU, so no guest access and no fault pass
//! through this file. Each call here has one `match`.

use lacuna_addr::{BackingRange, Gfn, GfnRange, Gpa};
use lacuna_host::{Host, MmuNotifier};
use lacuna_machine::Arch;
use lacuna_mmu::{
    Delivery, Detection, DirtyError, DirtyStats, Logging, Mmu, MmuError, MmuFormat, Rmap, SlotSpec,
    Writing,
};
#[cfg(feature = "comparisons")]
use lacuna_mmu::{Recovery, RmapWalk, Steps};
use lacuna_slots::{CurrentSlots, Slot, SlotError, SlotFlags, SlotId, Snapshot};
use lacuna_stage2::{Arm64, Counts, Ept, Exhausted};
use lacuna_sync::Qsbr;
use std::sync::Arc;

/// A VM's MMU. The VM's architecture decides the format of its tables.
#[derive(Clone)]
pub enum VmMmu {
    /// Extended page tables, for x86-64 processors.
    Ept(Arc<Mmu<Ept>>),
    /// Stage-2 tables of VMSAv8-64, for AArch64 processors.
    Arm64(Arc<Mmu<Arm64>>),
}

/// A table format of this backend's VMs.
pub trait Format: MmuFormat {
    /// `mmu`, if its tables are in this format.
    fn of(mmu: &VmMmu) -> Option<&Arc<Mmu<Self>>>;
}

macro_rules! formats {
    ($($format:ident),*) => {
        $(impl Format for $format {
            fn of(mmu: &VmMmu) -> Option<&Arc<Mmu<Self>>> {
                match mmu {
                    VmMmu::$format(mmu) => Some(mmu),
                    _ => None,
                }
            }
        })*
    };
}

formats!(Ept, Arm64);

macro_rules! each {
    ($self:expr, $mmu:ident => $body:expr) => {
        match $self {
            VmMmu::Ept($mmu) => $body,
            VmMmu::Arm64($mmu) => $body,
        }
    };
}

impl VmMmu {
    /// As [`Mmu::new`], in the format of `arch`.
    pub(crate) fn new(
        arch: Arch,
        host: Arc<Host>,
        qsbr: Arc<Qsbr>,
        tables: u32,
    ) -> Result<Self, MmuError> {
        Ok(match arch {
            Arch::Arm64 => Self::Arm64(Mmu::new(host, qsbr, tables)?),
            _ => Self::Ept(Mmu::new(host, qsbr, tables)?),
        })
    }

    /// Takes the invalidations of the host's memory manager for regions in this VM's slots.
    pub fn notifier(&self) -> Arc<dyn MmuNotifier> {
        each!(self, mmu => Arc::clone(mmu) as Arc<dyn MmuNotifier>)
    }
}

macro_rules! forward {
    ($($(#[$attr:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)?;)*) => {
        impl VmMmu {$(
            #[doc = concat!("As [`Mmu::", stringify!($name), "`].")]
            $(#[$attr])*
            $vis fn $name(&self $(, $arg: $type)*) $(-> $out)? {
                each!(self, mmu => mmu.$name($($arg),*))
            }
        )*}
    };
}

// Slots and levels.
forward! {
    pub fn slots() -> Arc<Snapshot<Rmap>>;
    pub(crate) fn read_slots() -> CurrentSlots<Rmap>;
    pub(crate) fn add_slot(spec: SlotSpec) -> Result<(), SlotError>;
    pub(crate) fn delete_slot(id: SlotId) -> Result<BackingRange, SlotError>;
    pub(crate) fn move_slot(id: SlotId, guest: Gpa) -> Result<(), SlotError>;
    pub(crate) fn set_slot_flags(id: SlotId, flags: SlotFlags) -> Result<(), SlotError>;
    pub fn disallow_huge(gfns: GfnRange) -> Result<(), Exhausted>;
    pub fn allow_huge(gfns: GfnRange);
}

// Dirty tracking.
forward! {
    pub(crate) fn set_delivery(delivery: Delivery) -> Result<(), DirtyError>;
    pub fn delivery() -> Delivery;
    pub(crate) fn set_detection(detection: Detection);
    pub(crate) fn detection() -> Detection;
    pub(crate) fn dirty_stats() -> Vec<DirtyStats>;
    pub(crate) fn set_logging(id: SlotId, logging: Logging) -> Result<(), DirtyError>;
    pub(crate) fn get_dirty(id: SlotId, out: &mut [u64]) -> Result<(), DirtyError>;
    pub(crate) fn peek_dirty(id: SlotId, out: &mut [u64]) -> Result<(), DirtyError>;
    pub(crate) fn clear_dirty(
        id: SlotId,
        first_page: usize,
        pages: usize,
        mask: &mut [u64]
    ) -> Result<(), DirtyError>;
    pub fn put_back_dirty(id: SlotId, words: &[u64]) -> Result<(), DirtyError>;
    pub(crate) fn is_logging(id: SlotId) -> bool;
    pub(crate) fn reap_rings(each: impl FnMut(SlotId, usize)) -> usize;
    pub fn put_back_rings();
    pub(crate) fn reset_rings() -> usize;
    pub(crate) fn host_write(slot: &Arc<Slot<Rmap>>, gfn: Gfn) -> Result<Writing, DirtyError>;
    pub(crate) fn vcpu_write(slot: &Arc<Slot<Rmap>>, gfn: Gfn) -> Writing;
}

// For tests, the lab and the fuzzer.
forward! {
    pub fn verify();
    pub fn counts() -> Counts;
    pub fn is_mapped(gfn: Gfn) -> bool;
    pub fn test_young(range: BackingRange) -> bool;
    pub fn write_protect(range: BackingRange);
    #[cfg(feature = "comparisons")]
    pub fn invalidate_as(walk: RmapWalk, range: BackingRange) -> Steps;
    #[cfg(feature = "comparisons")]
    pub fn end_logging_as(id: SlotId, recovery: Recovery) -> Result<(), DirtyError>;
}
