//! The VM's memory slots: this process's table, and KVM's, which this file keeps equal.
//!
//! The slots of a boot layout lie in the guest's memory (`memory`). A slot added later has a
//! mapping of its own, whose pages Linux supplies as zeros.
//!
//! UNSAFETY: a memory slot gives KVM addresses of this process. They lie in a mapping that lives as
//! long as the slot: the VM's own, or the mapping of the slot's [`SlotState`], which is dropped
//! after KVM has deleted the slot.

use crate::mapping::Mapping;
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, VmFd};
use lacuna_addr::{GfnRange, Gpa, Hva, PAGE_SHIFT, PAGE_SIZE, PageCount};
use lacuna_machine::MemorySlotError;
use lacuna_slots::{DirtyBitmap, Limits, Logging, Slot, SlotError, SlotFlags, SlotId};
use lacuna_slots::{SlotData, Slots, Snapshot};
use lacuna_sys::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// This process's state of a slot. The slot keeps it when it moves or changes its flags.
pub struct SlotState {
    /// Pages written by this process. KVM does not see these writes.
    pub host_writes: DirtyBitmap,
    logging: AtomicBool,
    /// The slot's own memory, if it was added after boot.
    own: Option<Mapping>,
}

impl SlotData for SlotState {
    type Addr = Hva;
}

impl SlotState {
    fn new(pages: u64, own: Option<Mapping>) -> Arc<Self> {
        Arc::new(Self {
            host_writes: DirtyBitmap::new(pages as usize),
            logging: AtomicBool::new(false),
            own,
        })
    }

    /// Whether the slot logs. The answer is stable only while the lock of `Dirty` is held.
    pub fn is_logging(&self) -> bool {
        self.logging.load(Ordering::Acquire)
    }

    /// Records whether the slot logs.
    pub fn set_logging(&self, logging: Logging) {
        let on = logging != Logging::Off;
        self.logging.store(on, Ordering::Release);
    }

    /// Whether the slot's memory is a part of the boot layout.
    pub fn is_of_boot(&self) -> bool {
        self.own.is_none()
    }
}

/// The description of a slot to be added or changed.
pub type SlotSpec = lacuna_slots::SlotSpec<Hva>;

/// A memory slot of the kvm backend.
pub type KvmSlot = Slot<Arc<SlotState>>;

/// Why a change of slots failed.
pub enum Refusal {
    /// The table of slots refuses.
    Slot(SlotError),
    /// KVM refuses.
    Kvm(Errno),
}

impl From<SlotError> for Refusal {
    fn from(error: SlotError) -> Self {
        Self::Slot(error)
    }
}

/// All slots of a VM.
pub struct SlotTable(Slots<Arc<SlotState>>);

impl SlotTable {
    pub fn new() -> Self {
        Self(Slots::new(Limits::default()))
    }

    pub fn snapshot(&self) -> Arc<Snapshot<Arc<SlotState>>> {
        self.0.snapshot()
    }

    pub fn get(&self, id: SlotId) -> Result<Arc<KvmSlot>, SlotError> {
        let found = self.0.snapshot().get(id).cloned();
        found.ok_or(SlotError::Unknown { id })
    }

    /// The slot whose memory has the page at `hva`, and the guest's address of that page.
    pub fn at(&self, hva: Hva) -> Option<(Arc<KvmSlot>, Gpa)> {
        let slots = self.0.snapshot();
        let (slot, offset) = slots.iter().find_map(|slot| {
            let offset = hva.get().checked_sub(slot.backing.start().get())?;
            (offset / (PAGE_SIZE as u64) < slot.backing.pages()).then_some((slot, offset))
        })?;
        let gpa = slot.gfns.start().gpa().get() + offset;
        Some((Arc::clone(slot), Gpa::truncate(gpa)))
    }

    /// Adds a slot over `own`, or over the VM's own mapping.
    pub fn add(&self, fd: &VmFd, spec: SlotSpec, own: Option<Mapping>) -> Result<(), Refusal> {
        let slot = self.insert(spec, own)?;
        set(fd, &slot, flags(&slot)).inspect_err(|_| drop(self.0.remove(spec.id)))?;
        Ok(())
    }

    /// Adds a slot to this process's table alone.
    pub fn insert(&self, spec: SlotSpec, own: Option<Mapping>) -> Result<Arc<KvmSlot>, SlotError> {
        let pages = spec.bytes / PAGE_SIZE as u64;
        self.0.add(spec, |_, _| SlotState::new(pages, own))
    }

    /// Removes a slot. Its own memory is unmapped when the last reader drops the slot.
    pub fn remove(&self, fd: &VmFd, id: SlotId) -> Result<(), Refusal> {
        let slot = self.get(id)?;
        delete(fd, &slot)?;
        self.0.remove(id)?;
        Ok(())
    }

    /// Moves a slot. KVM keeps its log.
    pub fn relocate(&self, fd: &VmFd, spec: SlotSpec) -> Result<(), Refusal> {
        let old = self.get(spec.id)?;
        let slot = self.0.replace(spec, |_, _| Arc::clone(&old.attach))?;
        set(fd, &slot, flags(&slot)).inspect_err(|_| self.put_back(&old))?;
        Ok(())
    }

    /// Replaces a slot's flags that KVM does not know.
    pub fn set_own_flags(&self, id: SlotId, new: SlotFlags) -> Result<(), SlotError> {
        let old = self.get(id)?;
        self.replace_flags(&old, new).map(drop)
    }

    fn replace_flags(&self, old: &KvmSlot, flags: SlotFlags) -> Result<Arc<KvmSlot>, SlotError> {
        let spec = SlotSpec {
            flags,
            ..spec_of(old)
        };
        self.0.replace(spec, |_, _| Arc::clone(&old.attach))
    }

    /// Replaces a slot's flags. KVM cannot change READONLY of a slot, so the slot is deleted and
    /// added again. The caller keeps all vCPUs out of the guest meanwhile, and has preserved the
    /// slot's log, which KVM deletes.
    ///
    /// If KVM refuses the slot with its new flags, it gets the old slot back. If KVM refuses that
    /// too, the slot is removed, so that this table equals KVM's.
    pub fn set_flags(&self, fd: &VmFd, id: SlotId, new: SlotFlags) -> Result<(), Refusal> {
        let old = self.get(id)?;
        let slot = self.replace_flags(&old, new)?;
        delete(fd, &old).inspect_err(|_| self.put_back(&old))?;
        set(fd, &slot, flags(&slot)).inspect_err(|_| match set(fd, &old, flags(&old)) {
            Ok(()) => self.put_back(&old),
            Err(_) => drop(self.0.remove(id)),
        })
    }

    fn put_back(&self, old: &KvmSlot) {
        let back = self.0.replace(spec_of(old), |_, _| Arc::clone(&old.attach));
        debug_assert!(back.is_ok(), "the table had it before");
    }
}

/// The largest number of pages of a slot, `KVM_MEM_MAX_NR_PAGES`.
const PAGES_MAX: PageCount = PageCount::new((1 << 31) - 1);

/// Refuses a number or a size that KVM does not support, before tables for the slot are made.
pub fn check_slot(
    fd: &VmFd,
    id: SlotId,
    gfns: GfnRange,
    address_bits: u32,
) -> Result<(), MemorySlotError> {
    let slots = fd.check_extension_int(Cap::NrMemslots);
    let last = u16::try_from(slots - 1).unwrap_or(u16::MAX);
    if id.0 > last {
        return Err(MemorySlotError::Number { id, last });
    }
    let pages = PageCount::new(gfns.pages());
    if pages > PAGES_MAX {
        let max = PAGES_MAX;
        return Err(MemorySlotError::Size { id, pages, max });
    }
    check_address(id, gfns, address_bits)
}

/// Whether addresses of `bits` bits reach the slot's end.
pub fn check_address(id: SlotId, gfns: GfnRange, bits: u32) -> Result<(), MemorySlotError> {
    let frames = 1_u64.checked_shl(bits.saturating_sub(PAGE_SHIFT));
    match frames.is_none_or(|frames| gfns.end_raw() <= frames) {
        true => Ok(()),
        false => Err(MemorySlotError::Address { id, bits }),
    }
}

/// The description of an existing slot.
pub fn spec_of(slot: &KvmSlot) -> SlotSpec {
    SlotSpec {
        id: slot.id,
        guest: slot.gfns.start().gpa().get(),
        backing: slot.backing.start(),
        bytes: slot.backing.pages() * PAGE_SIZE as u64,
        flags: slot.flags,
    }
}

/// KVM's flags of a slot.
fn flags(slot: &KvmSlot) -> u32 {
    let read_only = match slot.flags.contains(SlotFlags::READONLY) {
        true => KVM_MEM_READONLY,
        false => 0,
    };
    let log = match slot.attach.is_logging() {
        true => KVM_MEM_LOG_DIRTY_PAGES,
        false => 0,
    };
    read_only | log
}

/// Makes KVM begin or stop logging a slot's writes.
pub fn set_logging_flag(fd: &VmFd, slot: &KvmSlot, logging: Logging) -> Result<(), Errno> {
    let flags = match logging {
        Logging::Off => flags(slot) & !KVM_MEM_LOG_DIRTY_PAGES,
        Logging::On { .. } => flags(slot) | KVM_MEM_LOG_DIRTY_PAGES,
    };
    set_region(fd, slot, flags)
}

fn set(fd: &VmFd, slot: &KvmSlot, flags: u32) -> Result<(), Refusal> {
    set_region(fd, slot, flags).map_err(Refusal::Kvm)
}

fn delete(fd: &VmFd, slot: &KvmSlot) -> Result<(), Refusal> {
    let mut region = region(slot, 0);
    region.memory_size = 0;
    // SAFETY: 1. a size of zero deletes the slot: KVM uses no address of this process for it.
    let set = unsafe { fd.set_user_memory_region(region) };
    set.map_err(|e| Refusal::Kvm(Errno::from_raw_os_error(e.errno())))
}

fn set_region(fd: &VmFd, slot: &KvmSlot, flags: u32) -> Result<(), Errno> {
    // SAFETY: 1. the range lies in a mapping of guest memory, touched by atomics only. 2. It stays
    // mapped until KVM has deleted the slot: see the file's header.
    let set = unsafe { fd.set_user_memory_region(region(slot, flags)) };
    set.map_err(|e| Errno::from_raw_os_error(e.errno()))
}

fn region(slot: &KvmSlot, flags: u32) -> kvm_userspace_memory_region {
    kvm_userspace_memory_region {
        slot: u32::from(slot.id.0),
        flags,
        guest_phys_addr: slot.gfns.start().gpa().get(),
        memory_size: slot.backing.pages() * PAGE_SIZE as u64,
        userspace_addr: slot.backing.start().get(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In KVM another slot overlaps this one, so KVM refuses the slot with its new flags and with
    /// the old ones. Then this process's table has no such slot either.
    #[lacuna_skip::test]
    fn a_slot_that_kvm_refuses_is_gone_from_both_tables() {
        let made = crate::available::open().map(|kvm| kvm.create_vm());
        let fd = match made {
            Ok(Ok(fd)) => fd,
            other => lacuna_skip::skip_test(format!("no VM: {:?}", other.map(drop))),
        };
        let (id, other) = (SlotId(3), SlotId(4));
        let own = Mapping::new(PageCount::new(16)).unwrap();
        let spec = SlotSpec {
            id,
            guest: 0,
            backing: own.range().start(),
            bytes: 16 * PAGE_SIZE as u64,
            flags: SlotFlags::empty(),
        };
        let slots = SlotTable::new();
        assert!(slots.add(&fd, spec, Some(own)).is_ok());
        let slot = slots.get(id).unwrap();
        for (id, gpa) in [(id, 1 << 20), (other, 0)] {
            let mut region = region(&slot, 0);
            (region.slot, region.guest_phys_addr) = (id.0.into(), gpa);
            // SAFETY: 1. no vCPU runs, so KVM accesses no memory.
            unsafe { fd.set_user_memory_region(region) }.unwrap();
        }
        let refused = slots.set_flags(&fd, id, SlotFlags::READONLY);
        assert!(matches!(refused, Err(Refusal::Kvm(Errno::EXIST))));
        assert!(slots.get(id).is_err());
        assert!(
            slots
                .add(
                    &fd,
                    SlotSpec {
                        guest: 2 << 20,
                        ..spec
                    },
                    None
                )
                .is_ok()
        );
    }
}
