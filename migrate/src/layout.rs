//! The memory slots of a VM, and the numbers of their pages.

use crate::MigrateError;
use lacuna_addr::{Gfn, GfnRange, Gpa, PAGE_SIZE, PageCount};
use lacuna_machine::{Arch, Layout, MemorySlots, SlotFlags, SlotId, SourcePage};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The memory slots of a VM. Their pages have numbers from 0, slot after slot, in ascending order
/// of their addresses: a memory file has its bytes in this order.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryLayout {
    slots: Vec<SlotLayout>,
}

/// One memory slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotLayout {
    /// Its number.
    pub id: u16,
    /// Guest frame number of its first page.
    pub gfn: u64,
    /// Its size in pages of 4 KiB.
    pub pages: u64,
    /// [`SlotFlags`] as a number, without the flags of dirty logging and missing memory: these
    /// belong to the VMM, not to the guest.
    pub flags: u32,
}

/// The flags that a guest can notice.
const KEPT: SlotFlags = SlotFlags::READONLY;

impl SlotLayout {
    fn range(&self) -> Option<GfnRange> {
        GfnRange::new(Gfn::new(self.gfn)?, self.pages)
    }

    /// Guest-physical address of its first byte. [`MemoryLayout::check`] has seen the slot.
    fn gpa(&self, page: u64) -> Gpa {
        Gfn::new(self.gfn + page)
            .expect("a page of a checked slot")
            .gpa()
    }
}

impl MemoryLayout {
    /// The layout of `vm` at present.
    pub fn of(vm: &(impl MemorySlots + ?Sized)) -> Self {
        let slots = vm.memory_slots().into_iter().map(|slot| SlotLayout {
            id: slot.id.0,
            gfn: slot.gfns.start().get(),
            pages: slot.gfns.pages(),
            flags: (slot.flags & KEPT).bits(),
        });
        Self {
            slots: slots.collect(),
        }
    }

    /// The layout of a VM with `memory` bytes as it is made. `None`: there is no such VM.
    pub(crate) fn as_made(arch: Arch, memory: u64) -> Option<Self> {
        let layout = Layout::of(arch, PageCount::from_bytes(memory)).ok()?;
        let slots = (0..).zip(layout.ranges()).map(|(id, range)| SlotLayout {
            id,
            gfn: range.start().get(),
            pages: range.pages(),
            flags: 0,
        });
        Some(Self {
            slots: slots.collect(),
        })
    }

    /// The slots, in ascending order of their addresses.
    pub fn slots(&self) -> &[SlotLayout] {
        &self.slots
    }

    /// All pages of all slots.
    pub fn pages(&self) -> u64 {
        self.slots.iter().map(|slot| slot.pages).sum()
    }

    /// Checks a layout from outside. Its slots must be possible, in order, and share no number and
    /// no page.
    ///
    /// # Errors
    /// [`MigrateError::Layout`].
    pub fn check(&self) -> Result<(), MigrateError> {
        let mut end = 0;
        for (index, slot) in self.slots.iter().enumerate() {
            let wrong = || MigrateError::Layout(Gpa::truncate(slot.gfn << 12));
            let range = slot.range().ok_or_else(wrong)?;
            let flags = SlotFlags::from_bits(slot.flags).ok_or_else(wrong)?;
            let is_new = self.slots[..index].iter().all(|other| other.id != slot.id);
            if slot.gfn < end || !KEPT.contains(flags) || !is_new {
                return Err(wrong());
            }
            end = range.end_raw();
        }
        Ok(())
    }

    /// The number of the page `index` of slot `id`, as [`harvest`](lacuna_machine::harvest) names
    /// it.
    pub fn number(&self, id: SlotId, index: usize) -> Option<SourcePage> {
        let mut first = 0;
        for slot in &self.slots {
            if slot.id == id.0 {
                let index = index as u64;
                return (index < slot.pages).then_some(SourcePage(first + index));
            }
            first += slot.pages;
        }
        None
    }

    /// The address of the page `first`, and how many of the `pages` from it on are in its slot.
    /// `None` beyond the end.
    pub fn place(&self, first: SourcePage, pages: u64) -> Option<(Gpa, u64)> {
        let mut at = first.0;
        for slot in &self.slots {
            if at < slot.pages {
                return Some((slot.gpa(at), pages.min(slot.pages - at)));
            }
            at -= slot.pages;
        }
        None
    }

    /// Changes the slots of the stopped `vm` to this layout. The memory of new slots is zeros.
    ///
    /// # Errors
    /// The VM refuses a slot.
    pub fn apply(&self, vm: &(impl MemorySlots + ?Sized)) -> Result<(), MigrateError> {
        let same = |slot: &SlotLayout, id: SlotId, gfns: GfnRange| {
            slot.id == id.0 && slot.range() == Some(gfns)
        };
        for have in vm.memory_slots() {
            if !self.slots.iter().any(|slot| same(slot, have.id, have.gfns)) {
                vm.remove_slot(have.id)?;
            }
        }
        for slot in &self.slots {
            let id = SlotId(slot.id);
            let flags = SlotFlags::from_bits_truncate(slot.flags);
            let have = vm.memory_slots().into_iter().find(|have| have.id == id);
            match have {
                Some(have) if have.flags & KEPT == flags => {}
                Some(have) => vm.set_slot_flags(id, (have.flags - KEPT) | flags)?,
                None => {
                    let wrong = || MigrateError::Layout(Gpa::truncate(slot.gfn << 12));
                    vm.add_memory(id, slot.range().ok_or_else(wrong)?, flags)?;
                }
            }
        }
        Ok(())
    }
}

/// Calls `each` with the address and the pages of each part of a run, where a part lies in one
/// slot.
pub(crate) fn in_slots(
    layout: &MemoryLayout,
    first: SourcePage,
    count: u64,
    each: &mut dyn FnMut(Gpa, Range<u64>) -> Result<(), MigrateError>,
) -> Result<(), MigrateError> {
    let (mut at, end) = (first.0, first.0 + count);
    while at < end {
        let place = layout.place(SourcePage(at), end - at);
        let (gpa, now) = place.ok_or(MigrateError::SlotsChanged)?;
        each(gpa, at - first.0..at - first.0 + now)?;
        at += now;
    }
    Ok(())
}

/// The bytes of these pages of a run.
pub(crate) fn bytes_of(pages: &Range<u64>) -> Range<usize> {
    pages.start as usize * PAGE_SIZE..pages.end as usize * PAGE_SIZE
}
