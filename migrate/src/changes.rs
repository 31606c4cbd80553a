//! The log of a guest's writes, as a copy of its memory uses it.

use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_machine::{LogReader, Vm};

/// The pages that differ from the last whole copy of a guest's memory.
pub(crate) struct Changes<'a, V: Vm> {
    vm: &'a V,
    layout: MemoryLayout,
    /// Pages written since the last whole copy, as far as the log was harvested.
    changed: PageSet,
    log: LogReader<'a, V>,
}

impl<'a, V: Vm> Changes<'a, V> {
    /// Turns the log on. All pages count as changed, because no copy exists yet.
    pub fn log(vm: &'a V) -> Result<Self, MigrateError> {
        let layout = MemoryLayout::of(vm);
        Ok(Self {
            vm,
            changed: PageSet::full(layout.pages()),
            layout,
            log: LogReader::begin(vm)?,
        })
    }

    /// The VM.
    pub fn vm(&self) -> &'a V {
        self.vm
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

    /// Pages written since the last harvest. They count as changed until a copy is whole, so a
    /// failed copy loses none.
    pub fn harvest(&mut self) -> Result<PageSet, MigrateError> {
        let mut set = PageSet::empty(self.layout.pages());
        let harvested = self.log.harvest(|slot, index| {
            // A page of a slot added meanwhile has no number: the check at the end finds the slot.
            if let Some(page) = self.layout.number(slot, index) {
                set.insert(page);
            }
        });
        self.changed.add(&set);
        harvested?;
        Ok(set)
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

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_addr::PageCount;
    use lacuna_machine::{
        Backup, Builder, Delivery, DirtyError, DirtyTracking as _, Logging, MemorySlots as _,
        RingSize, harvest, set_logging_everywhere,
    };

    const MEMORY: PageCount = PageCount::from_bytes(4 << 20);

    /// A builder of VMs of the kvm backend. Ends the test as skipped where there is none.
    fn kvm() -> lacuna_kvm::VmBuilder {
        if let Err(error) = lacuna_kvm::available() {
            lacuna_skip::skip_test(error);
        }
        let mut builder = lacuna_kvm::VmBuilder::new(MEMORY, MEMORY);
        builder.apf = lacuna_machine::Apf::Off;
        builder
    }

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
        // The VMM turns its log off: afterwards the VM does not log either.
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

    /// Two copies of one memory run at once: each gets the pages that the other has taken from the
    /// log.
    fn each_has_every_page(builder: &impl Builder) {
        let vm = &*builder.build().expect("a VM");
        let id = vm.memory_slots()[0].id;
        let mut first = Changes::log(vm).expect("a log");
        first.harvest().expect("the only reader");
        first.copied();
        write(vm, 5);
        let mut second = Changes::log(vm).expect("a log");
        second.harvest().expect("the last reader");
        write(vm, 7);
        let error = first.harvest().expect_err("the second takes the pages");
        assert!(
            matches!(error, MigrateError::Dirty(DirtyError::InUse)),
            "{error}"
        );
        second.copied();
        let taken = second.harvest().expect("a log");
        assert_eq!((taken.len(), taken.runs().next()), (1, Some(7..8)));
        drop(second);
        first.harvest().expect("the only reader");
        let changed: Vec<_> = first.changed().runs().collect();
        assert_eq!(changed, [5..6, 7..8]);
        // In the other order, the log stays on until the last one ends.
        let second = Changes::log(vm).expect("a log");
        drop(first);
        second.check_slots().expect("it logs");
        drop(second);
        assert!(!vm.is_logging(id));
    }

    #[test]
    fn copies_of_one_memory_on_soft() {
        each_has_every_page(&lacuna_soft::VmBuilder::new(MEMORY, MEMORY));
    }

    #[lacuna_skip::test]
    fn copies_of_one_memory_on_kvm() {
        each_has_every_page(&kvm());
    }

    /// A page cannot be given back to a ring.
    #[test]
    fn rings_alone_have_one_reader() {
        let vm = lacuna_soft::VmBuilder::new(MEMORY, MEMORY);
        let vm = vm.build().expect("a VM");
        let delivery = Delivery::Ring {
            size: RingSize::from_bytes(64 << 10).expect("a size"),
            backup: Backup::None,
        };
        vm.set_delivery(delivery).expect("no vCPU yet");
        let first = Changes::log(&*vm).expect("a log");
        let second = Changes::log(&*vm).map(drop);
        assert!(
            matches!(second, Err(MigrateError::Dirty(DirtyError::InUse))),
            "{second:?}"
        );
        first.check_slots().expect("it logs");
    }

    #[test]
    fn the_vmm_gets_its_pages_back_from_soft() {
        gives_back(&lacuna_soft::VmBuilder::new(MEMORY, MEMORY));
    }

    #[lacuna_skip::test]
    fn the_vmm_gets_its_pages_back_from_kvm() {
        gives_back(&kvm());
    }
}
