//! The log of a guest's writes, as a copy of its memory uses it.

use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_machine::{Logging, SlotId, Vm, harvest, set_logging_everywhere};

/// The log of a guest's writes, and the pages that differ from the last whole copy. Dropped, it
/// gives back what it has taken from a log of the VMM, and turns the other logs off.
pub(crate) struct Changes<'a, V: Vm> {
    vm: &'a V,
    layout: MemoryLayout,
    /// Pages that were written since the last whole copy, as far as the log was harvested.
    changed: PageSet,
    /// Pages that were taken from the log.
    taken: PageSet,
    /// The slots that logged before: their logs are the VMM's.
    lent: Vec<SlotId>,
}

impl<'a, V: Vm> Changes<'a, V> {
    /// Turns the log on. All pages have changed since no copy.
    pub fn log(vm: &'a V) -> Result<Self, MigrateError> {
        let layout = MemoryLayout::of(vm);
        let ids = vm.memory_slots().into_iter().map(|slot| slot.id);
        let changes = Self {
            vm,
            changed: PageSet::full(layout.pages()),
            taken: PageSet::empty(layout.pages()),
            layout,
            lent: ids.filter(|id| vm.is_logging(*id)).collect(),
        };
        set_logging_everywhere(vm, Logging::LAZY)?;
        Ok(changes)
    }

    /// The memory slots.
    pub fn layout(&self) -> &MemoryLayout {
        &self.layout
    }

    /// Pages that differ from the last whole copy, as far as the log was harvested.
    pub fn changed(&self) -> &PageSet {
        &self.changed
    }

    /// The copy since [`Changes::log`], or since the last call, is whole.
    pub fn copied(&mut self) {
        self.changed = PageSet::empty(self.layout.pages());
    }

    /// Pages that were written since the last harvest. They count as changed until a copy is whole,
    /// so a copy that fails loses none.
    pub fn harvest(&mut self) -> Result<PageSet, MigrateError> {
        let mut set = PageSet::empty(self.layout.pages());
        let harvested = harvest(self.vm, |slot, index| {
            // A page of a slot that was added meanwhile has no number: the check at the end finds
            // it.
            if let Some(page) = self.layout.number(slot, index) {
                set.insert(page);
            }
        });
        self.changed.add(&set);
        self.taken.add(&set);
        harvested?;
        Ok(set)
    }

    /// Gives a slot of the VMM's log its pages back.
    fn give_back(&self, id: SlotId, pages: u64) {
        let mut words = vec![0; pages.div_ceil(64) as usize];
        for index in 0..pages as usize {
            let page = self.layout.number(id, index);
            if page.is_some_and(|page| self.taken.contains(page)) {
                words[index / 64] |= 1 << (index % 64);
            }
        }
        // Without a bitmap, or without the slot, there is no place for them.
        let _ = self.vm.put_back_dirty(id, &words);
    }

    /// Whether the log has missed no write.
    ///
    /// # Errors
    /// [`MigrateError::SlotsChanged`], [`MigrateError::LogEnded`].
    pub fn check_slots(&self) -> Result<(), MigrateError> {
        if MemoryLayout::of(self.vm) != self.layout {
            return Err(MigrateError::SlotsChanged);
        }
        let mut slots = self.vm.memory_slots().into_iter();
        match slots.all(|slot| self.vm.is_logging(slot.id)) {
            true => Ok(()),
            false => Err(MigrateError::LogEnded),
        }
    }
}

impl<V: Vm> Drop for Changes<'_, V> {
    fn drop(&mut self) {
        for slot in self.vm.memory_slots() {
            match self.lent.contains(&slot.id) {
                true => self.give_back(slot.id, slot.gfns.pages()),
                // A slot that does not log any more needs nothing.
                false => _ = self.vm.set_logging(slot.id, Logging::Off),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_addr::PageCount;
    use lacuna_machine::{Builder, DirtyTracking as _, MemorySlots as _};

    const MEMORY: PageCount = PageCount::from_bytes(4 << 20);

    fn written(vm: &impl Vm) -> Vec<usize> {
        let mut pages = Vec::new();
        harvest(vm, |_, page| pages.push(page)).expect("a log");
        pages.sort_unstable();
        pages
    }

    fn write(vm: &impl Vm, page: u64) {
        let gpa = MemoryLayout::of(vm).slots()[0].gfn + page;
        let gpa = lacuna_addr::Gpa::new(gpa << 12).expect("an address");
        vm.write(gpa, &[1]).expect("memory");
    }

    fn gives_back(builder: &impl Builder) {
        let vm = &*builder.build().expect("a VM");
        set_logging_everywhere(vm, Logging::LAZY).expect("a log");
        written(vm);
        write(vm, 5);
        let mut changes = Changes::log(vm).expect("a log");
        let taken = changes.harvest().expect("a log");
        assert_eq!(taken.runs().next(), Some(5..6));
        write(vm, 7);
        drop(changes);
        assert_eq!(written(vm), [5, 7]);
        // The VMM does not log any more: nor does the VM, afterwards.
        set_logging_everywhere(vm, Logging::Off).expect("a log");
        let changes = Changes::log(vm).expect("a log");
        changes.check_slots().expect("it logs");
        let id = vm.memory_slots()[0].id;
        vm.set_logging(id, Logging::Off).expect("a log");
        let missed = changes.check_slots();
        assert!(matches!(missed, Err(MigrateError::LogEnded)), "{missed:?}");
        vm.set_logging(id, Logging::LAZY).expect("a log");
        drop(changes);
        assert!(!vm.is_logging(id));
    }

    #[test]
    fn the_vmm_gets_its_pages_back_from_soft() {
        gives_back(&lacuna_soft::VmBuilder::new(MEMORY, MEMORY));
    }

    #[lacuna_skip::test]
    fn the_vmm_gets_its_pages_back_from_kvm() {
        if let Err(error) = lacuna_kvm::available() {
            lacuna_skip::skip_test(error);
        }
        let mut builder = lacuna_kvm::VmBuilder::new(MEMORY, MEMORY);
        builder.apf = lacuna_machine::Apf::Off;
        gives_back(&builder);
    }
}
