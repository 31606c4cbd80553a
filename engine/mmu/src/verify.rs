//! Slots, reverse maps and tables agree. For tests, the simulator and fuzzers; call when no cursor
//! is at work.

use crate::Mmu;
use lacuna_slots::assert_invariants;

impl Mmu {
    /// Walks everything.
    ///
    /// # Panics
    /// When an invariant is broken: every rmap word leads to a leaf, every leaf is in exactly one
    /// rmap, D means W, and the tables are sound in themselves.
    pub fn verify(&self) {
        let slots = self.slots.snapshot();
        assert_invariants(&slots);
        let counts = self.stage2.verify();
        let mut mapped = 0;
        for slot in slots.iter() {
            for gfn in slot.gfns.iter() {
                let Some(at) = slot.attach.get(slot.page(gfn)) else {
                    continue;
                };
                assert_eq!(self.stage2.find(gfn), Some(at), "rmap of gfn {gfn}");
                mapped += 1;
            }
        }
        assert_eq!(
            mapped,
            counts.leaves.iter().sum::<u64>(),
            "a leaf is in no rmap"
        );
    }
}
