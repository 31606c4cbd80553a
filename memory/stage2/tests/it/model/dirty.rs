//! D, changed independently of W.

use super::fixture::Fixture;
use super::plain::{Model, gfn};
use lacuna_addr::{GfnRange, Level};
use lacuna_stage2::{Leaf, Removed, TableFormat, Write};

impl<F: TableFormat> Fixture<F> {
    pub(crate) fn clear_dirty(&mut self, range: GfnRange) {
        let mut cleared = Vec::new();
        let mut cursor = self.stage2.cursor(range);
        let flush = cursor.clear_dirty([range], |was| cleared.push(was));
        drop(cursor);
        let (mut expected, mut stale) = (Vec::new(), false);
        for start in self.model.in_range(range) {
            let Model { leaves, rmap, .. } = &mut self.model;
            let leaf = leaves.get_mut(&start).expect("a leaf");
            if !leaf.is_writable() || (leaf.level == Level::L4K && !leaf.dirty) {
                continue;
            }
            stale = true;
            let was = *leaf;
            leaf.dirty = false;
            if was.level != Level::L4K {
                leaf.write = Write::OnFault;
            }
            if was.dirty {
                expected.push(Removed {
                    gfn: gfn(start),
                    at: rmap[&start],
                    leaf: was,
                });
            }
        }
        assert_eq!(cleared, expected);
        assert_eq!(flush.is_empty(), !stale);
        flush.finish(&self.no_vcpu);
    }

    pub(crate) fn preset_dirty(&mut self, range: GfnRange) {
        self.stage2.cursor(range).preset_dirty(range);
        for start in self.model.in_range(range) {
            let leaf = self.model.leaves.get_mut(&start).expect("a leaf");
            leaf.dirty |= leaf.is_writable();
        }
    }

    pub(crate) fn fast_page_fault(&mut self, raw: u64) {
        let outcome = self.stage2.fast_page_fault(gfn(raw));
        let start = self.model.find(raw);
        let leaf = start.and_then(|start| self.model.leaves.get_mut(&start));
        let easy = |leaf: &&mut Leaf| leaf.level == Level::L4K && leaf.write != Write::Never;
        let Some(leaf) = leaf.filter(easy) else {
            assert_eq!(outcome, None);
            return;
        };
        leaf.write = Write::Allowed;
        (leaf.accessed, leaf.dirty) = (true, true);
        let hit = outcome.expect("no other thread is at work");
        assert_eq!(
            (hit.pfn, hit.level, hit.writable),
            (leaf.pfn, Level::L4K, true)
        );
    }
}
