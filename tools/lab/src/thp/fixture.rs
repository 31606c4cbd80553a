//! One VM's memory without its processors: slots, tables and a host, and one per-vCPU MMU context
//! for faults. So a figure has the work on tables and reverse maps, and nothing of a guest.

use crate::experiment::LabError;
use crate::fixture::{Tables, builder};
use lacuna_addr::{Access, BackingRange, Gfn, Level, PAGE_SIZE, PageCount};
use lacuna_soft::{Fault, Host, HugePages, Mmu, SlotId, VcpuMmu, VmBuilder};

/// Pages in a block.
pub const BLOCK: u64 = 512;
/// The address at which the slot under test begins: 4 GiB. The other slots are above it.
const TARGET: u64 = 1 << 32;
const OTHERS: u64 = 1 << 40;
const TABLES: u32 = 1 << 16;
const TARGET_SLOT: SlotId = SlotId(0);

/// A slot under test among others.
pub struct Fixture {
    tables: Tables,
    vcpu_mmu: VcpuMmu,
    first: Gfn,
    blocks: u64,
    others: Vec<BackingRange>,
}

impl Fixture {
    /// `slots` slots. The one in the middle is under test and has `blocks` blocks; the others have
    /// one each.
    pub fn new(slots: u64, blocks: u64, huge: HugePages) -> Result<Self, LabError> {
        // The host makes huge pages only while enough frames are free, and the per-CPU page caches
        // need some.
        let frames = PageCount::new((blocks + 32) * BLOCK);
        let builder = VmBuilder {
            huge,
            ..builder(PageCount::new(blocks * BLOCK), frames, 1)
        };
        let tables = Tables::new(&builder, TABLES)?;
        let mut fixture = Self {
            vcpu_mmu: tables.mmu.vcpu_mmu()?,
            tables,
            first: Gfn::new(TARGET / PAGE_SIZE as u64).expect("a small address"),
            blocks,
            others: Vec::new(),
        };
        for other in 1..slots.div_ceil(2) {
            fixture.add_other(other)?;
        }
        fixture.renew()?;
        for other in slots.div_ceil(2)..slots {
            fixture.add_other(other)?;
        }
        Ok(fixture)
    }

    fn add_other(&mut self, id: u64) -> Result<(), LabError> {
        let range = self.add(id, OTHERS + id * 4 * BLOCK * PAGE_SIZE as u64, BLOCK)?;
        self.others.push(range);
        Ok(())
    }

    fn add(&self, id: u64, guest: u64, pages: u64) -> Result<BackingRange, LabError> {
        let id = u16::try_from(id).expect("fewer slots than that");
        self.tables.add_slot(SlotId(id), guest, pages)
    }

    /// Replaces the backing of the slot under test by a new one without touched pages.
    pub fn renew(&mut self) -> Result<(), LabError> {
        if let Some(range) = self.target() {
            self.tables.mmu.delete_slot(TARGET_SLOT)?;
            self.tables.host.remove_region(range)?;
        }
        self.add(u64::from(TARGET_SLOT.0), TARGET, self.blocks * BLOCK)?;
        Ok(())
    }

    fn target(&self) -> Option<BackingRange> {
        let slots = self.tables.mmu.slots();
        slots.get(TARGET_SLOT).map(|slot| slot.backing)
    }

    /// The first `blocks` blocks under test.
    pub fn range(&self, blocks: u64) -> BackingRange {
        let all = self.target().expect("it was added");
        BackingRange::new(all.start(), blocks * BLOCK).expect("a part of a range")
    }

    /// The backing of the other slots.
    pub fn others(&self) -> &[BackingRange] {
        &self.others
    }

    /// Its memory-management unit.
    pub fn mmu(&self) -> &Mmu {
        &self.tables.mmu
    }

    /// Its host.
    pub fn host(&self) -> &Host {
        &self.tables.host
    }

    /// Faults in the first `blocks` blocks under test, for writing, by leaves of `level`: one fault
    /// for each leaf.
    ///
    /// # Errors
    /// A leaf has another level: the figures would be about something else.
    pub fn fault_in(&mut self, blocks: u64, level: Level) -> Result<(), LabError> {
        for page in (0..blocks * BLOCK).step_by(level.pages() as usize) {
            self.fault(page, level)?;
        }
        Ok(())
    }

    /// Faults in page number `page` of the slot under test.
    ///
    /// # Errors
    /// As [`Fixture::fault_in`].
    pub fn fault(&mut self, page: u64, level: Level) -> Result<(), LabError> {
        let gfn = self.first.checked_add(page).expect("inside the slot");
        let found = loop {
            match self
                .tables
                .mmu
                .fault(&mut self.vcpu_mmu, gfn, Access::Write)
            {
                Fault::Mapped(page) => break page.level,
                Fault::Busy => {}
                _ => return Err(LabError::Guest("a fault found no frame".into())),
            }
        };
        self.vcpu_mmu.retired();
        if found != level {
            return Err(LabError::Guest(format!(
                "the host supplied a page of level {found:?}, but {level:?} was wanted"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lacuna_soft::RmapWalk;

    #[test]
    fn every_walk_removes_what_was_faulted_in() {
        for (huge, level, leaves) in [
            (HugePages::Always, Level::L2M, 2),
            (HugePages::Never, Level::L4K, 2 * BLOCK),
        ] {
            let mut fixture = Fixture::new(5, 2, huge).unwrap();
            assert_eq!(fixture.others().len(), 4);
            for walk in RmapWalk::ALL {
                fixture.fault_in(2, level).unwrap();
                let steps = fixture.mmu().invalidate_as(walk, fixture.range(2));
                assert_eq!(steps.leaves, leaves, "{walk:?}");
            }
            fixture.renew().unwrap();
            fixture.fault_in(2, level).unwrap();
        }
    }

    #[test]
    fn pages_of_another_size_are_an_error() {
        let mut fixture = Fixture::new(1, 1, HugePages::Never).unwrap();
        let error = fixture.fault_in(1, Level::L2M).unwrap_err().to_string();
        assert!(error.contains("L4K, but L2M was wanted"), "{error}");
    }
}
