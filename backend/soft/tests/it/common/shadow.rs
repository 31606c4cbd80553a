//! A copy of guest memory, updated with harvested pages.

use fastrand::Rng;
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{
    DirtyRings as _, DirtyTracking as _, GuestMemory as _, MemorySlot, MemorySlots as _,
};
use lacuna_soft::{
    Backup, Delivery, Detection, HugeLeaves, Initially, Logging, RingSize, SlotId, Vm,
};
use std::collections::BTreeMap;

pub const DETECTIONS: [Detection; 2] = [Detection::WriteProtect, Detection::Pml];

/// The smallest rings, so that they become full now and then.
pub fn ring(backup: Backup) -> Delivery {
    let size = RingSize::from_bytes(RingSize::BYTES_MIN).unwrap();
    Delivery::Ring { size, backup }
}

/// Whether logging slots have bitmaps, for all writes or as a backup beside rings.
pub fn has_bitmaps(vm: &Vm) -> bool {
    match vm.mmu().delivery() {
        Delivery::Bitmap => true,
        Delivery::Ring { backup, .. } => backup == Backup::Bitmap,
    }
}

pub type Page = [u8; PAGE_SIZE];

/// A page, named by its slot and its number in it.
pub type Name = (SlotId, usize);

pub fn read((id, page): Name, vm: &Vm) -> Page {
    let slots = vm.mmu().slots();
    let slot = slots.get(id).unwrap();
    let gfn = slot.gfns.start().checked_add(page as u64).unwrap();
    let mut bytes = [0; PAGE_SIZE];
    vm.read(gfn.gpa(), &mut bytes).unwrap();
    bytes
}

/// The number of pages of a slot.
pub fn pages_of(vm: &Vm, id: SlotId) -> usize {
    vm.mmu().slots().get(id).unwrap().gfns.pages() as usize
}

/// The pages with a bit in `words`, which begins with page `first` of the slot.
pub fn named(id: SlotId, first: usize, words: &[u64]) -> impl Iterator<Item = Name> {
    let is_set = move |at: &usize| words[at / 64] >> (at % 64) & 1 == 1;
    (0..words.len() * 64)
        .filter(is_set)
        .map(move |at| (id, first + at))
}

/// A copy of all slots, page by page.
pub struct Shadow(BTreeMap<SlotId, Vec<Page>>);

impl Shadow {
    /// Turns on all logs, with settings drawn from `rng`, and begins a copy.
    pub fn drawn(vm: &Vm, rng: &mut Rng) -> Self {
        let all_set = has_bitmaps(vm) && rng.bool();
        let logging = Logging::On {
            initially: match all_set {
                true => Initially::AllSet,
                false => Initially::Clean,
            },
            huge: match rng.bool() {
                true => HugeLeaves::Lazy,
                false => HugeLeaves::Eager,
            },
        };
        for MemorySlot { id, .. } in vm.memory_slots() {
            vm.set_logging(id, logging).unwrap();
        }
        match all_set {
            true => Self::empty(vm),
            false => Self::of(vm),
        }
    }

    /// A copy without content, for logs in which all pages count as written at first.
    pub fn empty(vm: &Vm) -> Self {
        let all = |id| (id, vec![[0; PAGE_SIZE]; pages_of(vm, id)]);
        Self(vm.memory_slots().iter().map(|slot| all(slot.id)).collect())
    }

    /// A copy of the present memory.
    pub fn of(vm: &Vm) -> Self {
        let all = |id| {
            let pages = (0..pages_of(vm, id)).map(|at| read((id, at), vm));
            (id, pages.collect())
        };
        Self(vm.memory_slots().iter().map(|slot| all(slot.id)).collect())
    }

    /// Turns all logs on, then copies.
    pub fn begin(vm: &Vm) -> Self {
        for MemorySlot { id, .. } in vm.memory_slots() {
            vm.set_logging(id, Logging::LAZY).unwrap();
        }
        Self::of(vm)
    }

    /// Copies these pages. Dirty tracking has re-armed them.
    pub fn replay(&mut self, vm: &Vm, dirty: &[Name]) {
        for name in dirty {
            self.0.get_mut(&name.0).unwrap()[name.1] = read(*name, vm);
        }
    }

    /// Copies everything written since the last harvest. Returns the number of pages.
    pub fn harvest(&mut self, vm: &Vm) -> usize {
        let mut dirty = Vec::new();
        if vm.mmu().delivery() != Delivery::Bitmap {
            vm.reap_rings(&mut |id, at| dirty.push((id, at))).unwrap();
            vm.reset_rings().unwrap();
        }
        if has_bitmaps(vm) {
            for MemorySlot { id, .. } in vm.memory_slots() {
                let mut words = vec![0; pages_of(vm, id).div_ceil(64)];
                vm.get_dirty(id, &mut words).unwrap();
                dirty.extend(named(id, 0, &words));
            }
        }
        self.replay(vm, &dirty);
        dirty.len()
    }

    /// Compares the copy with memory. The guest does not run, and every written page was harvested.
    pub fn compare(&self, vm: &Vm) {
        for (id, pages) in &self.0 {
            for (at, bytes) in pages.iter().enumerate() {
                assert!(
                    *bytes == read((*id, at), vm),
                    "{id}: page {at} was written unseen"
                );
            }
        }
    }
}

/// Ends the logging of all slots. If the build has both ways to end it, `rng` decides. The number
/// is drawn in every build, so that later draws are the same in all builds.
pub fn end_logging(vm: &Vm, rng: &mut Rng) {
    let in_place = rng.bool();
    for MemorySlot { id, .. } in vm.memory_slots() {
        #[cfg(feature = "comparisons")]
        if !in_place {
            let how = lacuna_soft::Recovery::Refault;
            vm.mmu().end_logging_as(id, how).unwrap();
            continue;
        }
        let _ = in_place;
        vm.set_logging(id, Logging::Off).unwrap();
    }
}
