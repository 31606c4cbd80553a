//! Checks that slots, reverse maps and tables agree. For tests, the simulator and fuzzers.

use crate::rmap::parts;
use crate::{InBlock, Mmu, MmuFormat, Rmap};
use lacuna_addr::{GfnRange, Level};
use lacuna_slots::{Slot, assert_invariants};
use lacuna_sync::shim::Ordering;

impl<F: MmuFormat> Mmu<F> {
    /// Walks everything. Other threads may fault, age and invalidate meanwhile: the host's
    /// background thread may still reclaim when all vCPUs have stopped. No other thread may change
    /// slots or dirty tracking.
    ///
    /// # Panics
    /// If an invariant is broken. Every rmap word leads to leaves of its level, in the table that a
    /// walk reaches. Every leaf is in exactly one rmap. Small leaves are counted exactly. A huge
    /// leaf is only where the slot allows it. Disallow counts are at least as large as the slot's
    /// place requires. D implies W. W implies D wherever no vCPU logs for a slot that logs. The
    /// tables are consistent in themselves.
    pub fn verify(&self) {
        let slots = self.slots.snapshot();
        assert_invariants(&slots);
        let vcpus_log = self.dirty.vcpus_log.load(Ordering::Relaxed);
        // Hold the cursor to the end, because of this race: this thread counts a leaf in the
        // tables; reclaim unmaps the leaf; this thread does not find it in the reverse maps.
        let all = self.stage2.cursor_of_all();
        let leaves = all.verify(|gfn, leaf| {
            let unseen = leaf.is_writable() && !leaf.dirty;
            let logs = |slot: &Slot<Rmap>| vcpus_log && slot.attach.log().is_on();
            let may_be = slots.find(gfn).is_some_and(|slot| logs(slot));
            assert!(
                !unseen || may_be,
                "gfn {gfn}: W without D where no vCPU logs"
            );
        });
        let (mut small, mut huge, mut gibs) = (0, 0, 0);
        for slot in slots.iter() {
            gibs += self.verify_gibs(slot);
            let fresh = Rmap::new(slot.gfns, slot.backing);
            for part in parts(slot.gfns) {
                slot.attach.assert_disallowed_like(&fresh, part.start());
                match self.verify_block(slot, part) {
                    InBlock::Nothing => {}
                    InBlock::Small(count) => small += u64::from(count),
                    InBlock::Huge(_) => {
                        assert_eq!(fresh.max_level(part.start()), Level::L2M, "{part:?}: huge");
                        huge += 1;
                    }
                }
            }
        }
        assert_eq!(small, leaves.of(Level::L4K), "small leaves in rmaps");
        assert_eq!(huge, leaves.of(Level::L2M), "huge leaves in rmaps");
        assert_eq!(gibs, leaves.of(Level::L1G), "1 GiB leaves in rmaps");
    }

    /// Asserts that the slot's 1 GiB leaves agree with its reverse map. Returns their number.
    fn verify_gibs(&self, slot: &Slot<Rmap>) -> u64 {
        let rmap = &slot.attach;
        let mut count = 0;
        for gib in rmap.gibs(slot.gfns) {
            rmap.assert_gib_counts(gib);
            let Some(at) = rmap.gib(gib.start()) else {
                continue;
            };
            assert_eq!(self.stage2.find(gib.start()), Some(at), "rmap of {gib:?}");
            assert!(rmap.allows_gib(gib.start()), "{gib:?}");
            let mut blocks = gib.steps(Level::L2M);
            assert!(
                blocks.all(|gfn| rmap.block(gfn) == InBlock::Nothing),
                "{gib:?}: leaves in a 1 GiB leaf"
            );
            count += 1;
        }
        count
    }

    /// Asserts that the slot's leaves in `part`, in one block, agree with its reverse map. Does not
    /// search a block that is empty in the reverse map: leaves there make the sums in `verify`
    /// differ.
    fn verify_block(&self, slot: &Slot<Rmap>, part: GfnRange) -> InBlock {
        let rmap = &slot.attach;
        let block = rmap.block(part.start());
        match block {
            InBlock::Nothing => {}
            InBlock::Small(count) => {
                let place = |gfn| rmap.place(gfn).expect("a block of small leaves");
                let mut mapped = 0;
                for gfn in part.iter() {
                    // The leaf is at its place in this table, and in the table that a walk reaches.
                    let found = self.stage2.find(gfn);
                    let here = Some(place(gfn)).filter(|at| self.stage2.has_leaf(*at));
                    assert_eq!(found, here, "rmap of gfn {gfn}");
                    mapped += u32::from(here.is_some());
                }
                assert_eq!(mapped, count, "{part:?}: small leaves");
            }
            // One entry translates the whole block.
            InBlock::Huge(at) => {
                assert_eq!(self.stage2.find(part.start()), Some(at), "rmap of {part:?}");
            }
        }
        block
    }
}
