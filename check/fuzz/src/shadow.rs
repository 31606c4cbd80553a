//! The oracle of dirty tracking, from outside the VM. It keeps a copy of memory and copies only
//! harvested pages. The copy must equal memory.
//!
//! The copy is a hash of each page. The functions that read pages here also look for words of other
//! VMs.

use crate::subject::assert_own;
use fastrand::Rng;
use lacuna_addr::PAGE_SIZE;
use lacuna_machine::{
    DirtyRings as _, DirtyTracking as _, GuestMemory as _, MemorySlot, MemorySlots as _,
};
use lacuna_soft::{Backup, Delivery, DirtyError, HugeLeaves, Initially, Logging, SlotId, Vm};
use std::collections::BTreeMap;

/// A page by its slot.
pub type Name = (SlotId, usize);

/// Whether there are bitmaps: for all writes, or for writes that no vCPU makes.
pub fn has_bitmaps(vm: &Vm) -> bool {
    match vm.mmu().delivery() {
        Delivery::Bitmap => true,
        Delivery::Ring { backup, .. } => backup == Backup::Bitmap,
    }
}

/// The number of pages of a slot; 0 if there is no such slot.
pub fn pages_of(vm: &Vm, id: SlotId) -> usize {
    let slots = vm.mmu().slots();
    slots.get(id).map_or(0, |slot| slot.gfns.pages() as usize)
}

/// The hash of a page; `None` if there is no memory.
fn look(vm: &Vm, owner: usize, (id, page): Name) -> Option<u64> {
    let slots = vm.mmu().slots();
    let slot = slots.get(id)?;
    let gfn = slot.gfns.start().checked_add(page as u64)?;
    if !slot.gfns.contains(gfn) {
        return None;
    }
    let mut bytes = [0; PAGE_SIZE];
    vm.read(gfn.gpa(), &mut bytes).expect("its slot is there");
    Some(hash(&bytes, owner, gfn.gpa().get()))
}

fn hash(bytes: &[u8; PAGE_SIZE], owner: usize, gpa: u64) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for word in bytes.chunks_exact(8) {
        let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
        assert_own(owner, word, &format_args!("the page at {gpa:#x}"));
        hash = (hash ^ word)
            .wrapping_mul(0x0000_0100_0000_01b3)
            .rotate_left(23);
    }
    hash
}

/// Reads all memory of a VM, and panics if a word belongs to another VM.
pub fn read_all(vm: &Vm, owner: usize) {
    for MemorySlot { id, .. } in vm.memory_slots() {
        for page in 0..pages_of(vm, id) {
            look(vm, owner, (id, page));
        }
    }
}

/// The pages that `words` names, the first word from page `first` on.
pub fn named(id: SlotId, first: usize, words: &[u64]) -> impl Iterator<Item = Name> {
    let is_set = move |at: &usize| words[at / 64] >> (at % 64) & 1 == 1;
    (0..words.len() * 64)
        .filter(is_set)
        .map(move |at| (id, first + at))
}

/// The copy.
pub struct Shadow {
    owner: usize,
    pages: BTreeMap<SlotId, Vec<Option<u64>>>,
}

impl Shadow {
    /// Turns on the logs of all slots in a drawn way. Then copies memory, unless all pages count as
    /// written.
    pub fn begin(vm: &Vm, owner: usize, rng: &mut Rng) -> Self {
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
        let mut pages = BTreeMap::new();
        for MemorySlot { id, .. } in vm.memory_slots() {
            vm.set_logging(id, logging).expect("the slot is there");
            let copy = |page| match all_set {
                true => None,
                false => look(vm, owner, (id, page)),
            };
            pages.insert(id, (0..pages_of(vm, id)).map(copy).collect());
        }
        Self { owner, pages }
    }

    /// Forgets the pages of a removed slot.
    pub fn forget(&mut self, id: SlotId) {
        self.pages.remove(&id);
    }

    /// Copies these pages. Dirty tracking detects their next write again.
    pub fn replay(&mut self, vm: &Vm, dirty: &[Name]) {
        for &(id, page) in dirty {
            let known = self
                .pages
                .get_mut(&id)
                .and_then(|pages| pages.get_mut(page));
            if let Some(copy) = known {
                *copy = look(vm, self.owner, (id, page));
            }
        }
    }

    /// Copies the pages written since the last time. Returns their number.
    pub fn harvest(&mut self, vm: &Vm) -> usize {
        let mut dirty = Vec::new();
        if vm.mmu().delivery() != Delivery::Bitmap {
            vm.reap_rings(&mut |id, page| dirty.push((id, page)))
                .expect("its rings lose no page");
            vm.reset_rings().expect("its rings lose no page");
        }
        if has_bitmaps(vm) {
            for MemorySlot { id, .. } in vm.memory_slots() {
                let mut words = vec![0; pages_of(vm, id).div_ceil(64)];
                match vm.get_dirty(id, &mut words) {
                    Ok(()) => dirty.extend(named(id, 0, &words)),
                    // The slot was added later.
                    Err(_) if !self.pages.contains_key(&id) => {}
                    Err(error) => panic!("{id}: {error}"),
                }
            }
        }
        self.replay(vm, &dirty);
        dirty.len()
    }

    /// Compares the copy with memory, after the guest has stopped and every written page was
    /// harvested.
    pub fn compare(&self, vm: &Vm) {
        for (id, pages) in &self.pages {
            for (page, copy) in pages.iter().enumerate() {
                assert!(
                    *copy == look(vm, self.owner, (*id, page)),
                    "{id}: page {page} was written unseen"
                );
            }
        }
    }
}

/// Whether the error is the refusal of a slot without a log, or without a bitmap.
pub fn is_refusal(error: &DirtyError) -> bool {
    matches!(error, DirtyError::NotLogging(_) | DirtyError::NoBitmap)
}
