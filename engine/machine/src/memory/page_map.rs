//! A map of guest memory: which pages are resident, swapped out, missing, huge, dirty or untouched.

use crate::{MemorySlot, Vm};
use lacuna_addr::{Gfn, GfnRange, PageStates};

/// The pages of a VM's slots in the order of their guest addresses, in cells of equal size. The
/// addresses between slots are left out. The last cell may be smaller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageMap {
    /// Pages of a cell.
    pub pages_per_cell: u64,
    /// The pages of each cell by their state.
    pub cells: Vec<PageStates>,
}

impl PageMap {
    /// See [`Vm::page_map`].
    pub(crate) fn of(vm: &impl Vm, cells: usize) -> Self {
        let slots = vm.memory_slots();
        let pages: u64 = slots.iter().map(|slot| slot.gfns.pages()).sum();
        let pages_per_cell = pages.div_ceil(cells.max(1) as u64).max(1);
        let mut map = Self {
            pages_per_cell,
            cells: vec![PageStates::default(); pages.div_ceil(pages_per_cell) as usize],
        };
        let mut done = 0;
        for slot in &slots {
            let dirty = dirty(vm, slot);
            let (mut first, end) = (slot.gfns.start().get(), slot.gfns.end_raw());
            while first < end {
                let left = pages_per_cell - done % pages_per_cell;
                let pages = left.min(end - first);
                let range = Gfn::new(first).and_then(|gfn| GfnRange::new(gfn, pages));
                let states = range.map_or_else(PageStates::default, |gfns| vm.page_states(gfns));
                let from = first - slot.gfns.start().get();
                let cell = &mut map.cells[(done / pages_per_cell) as usize];
                *cell += states;
                cell.dirty += (from..from + pages)
                    .filter(|page| is_set(&dirty, *page))
                    .count() as u64;
                (first, done) = (first + pages, done + pages);
            }
        }
        map
    }
}

/// The slot's log of writes, one bit a page; empty if no log can be read without taking it.
fn dirty(vm: &impl Vm, slot: &MemorySlot) -> Vec<u64> {
    let Some(log) = vm.two_step_log().filter(|_| vm.is_logging(slot.id)) else {
        return Vec::new();
    };
    let mut words = vec![0; slot.gfns.pages().div_ceil(64) as usize];
    match log.peek_dirty(slot.id, &mut words) {
        Ok(()) => words,
        // The slot was removed, or its log was ended, meanwhile.
        Err(_) => Vec::new(),
    }
}

fn is_set(words: &[u64], page: u64) -> bool {
    let word = words.get((page / 64) as usize);
    word.is_some_and(|word| word >> (page % 64) & 1 == 1)
}
