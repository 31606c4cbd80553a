//! The stage-2 descriptor of VMSAv8-64 (Arm ARM, D8.3.2; A and D: D8.4.6 and D8.4.7).
//!
//! ```text
//!  63   59 58  57  56 55 54  53 52 51 50 48 47            12 11 10  9 8  7  6  5  2 1    0
//! |       | F | MW| L   | XN   | C|DBM|    |  frame / table |  |AF| SH | W| R|attr | type |
//! ```
//! The granule is 4 KiB. The walk starts at level 0, so an intermediate physical address has 48
//! bits and no tables are concatenated. type: 1 a block, 3 a page or a table; bit 0 clear is
//! invalid. attr 15 = normal memory, write-back; SH 3 = inner shareable; R, W are S2AP. XN has two
//! bits if the processor has FEAT_XNX, and its upper bit alone otherwise: 0 and 2 mean the same in
//! both. C, the contiguous hint, is always 0. Ours, in the bits that the architecture leaves to
//! software: L the leaf's level, 0 in a table descriptor, because pages and tables have one type;
//! MW the MMU may set W without asking; F frozen (invalid: its table is being torn down).
//!
//! The processor manages AF and the dirty state (FEAT_HAFDBS: VTCR_EL2.HA and HD are 1):
//!
//! | [`Write`], D | DBM | W | a write |
//! |---|---|---|---|
//! | `Allowed`, clean | 1 | 0 | the processor sets W: "writable-clean" becomes "writable-dirty" |
//! | `Allowed`, dirty | 1 | 1 | succeeds |
//! | `OnFault`, `Never` | 0 | 0 | permission fault |
//!
//! So the W of this crate is DBM, and its D is the W of S2AP.

use super::TableFormat;
use crate::{Entry, Leaf, Write};
use lacuna_addr::{Access, Level, PAGE_SHIFT, Pfn};
use lacuna_tables::TableId;

const VALID: u64 = 1 << 0;
const PAGE_OR_TABLE: u64 = 1 << 1;
const WRITE_BACK: u64 = 0b1111 << 2;
const READ: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;
const INNER_SHAREABLE: u64 = 0b11 << 8;
const ACCESSED: u64 = 1 << 10;
const ADDRESS: u64 = ((1 << 48) - 1) & !((1 << PAGE_SHIFT) - 1);
const WRITABLE: u64 = 1 << 51;
const CONTIGUOUS: u64 = 1 << 52;
const EXECUTE_NEVER: u64 = 0b10 << 53;

const LEVEL_SHIFT: u32 = 55;
const LEVEL: u64 = 0b11 << LEVEL_SHIFT;
const MMU_WRITABLE: u64 = 1 << 57;
const FROZEN: u64 = 1 << 58;

/// The bit budget: no two fields share a bit, and ours lie where the processor looks at none
/// (58:55, Arm ARM D8.3.2).
const _: () = {
    let fields = [
        VALID,
        PAGE_OR_TABLE,
        WRITE_BACK,
        READ,
        DIRTY,
        INNER_SHAREABLE,
        ACCESSED,
        ADDRESS,
        WRITABLE,
        CONTIGUOUS,
        0b11 << 53,
        LEVEL,
        MMU_WRITABLE,
        FROZEN,
    ];
    let mut used = 0;
    let mut i = 0;
    while i < fields.len() {
        assert!(used & fields[i] == 0, "two fields share a bit");
        used |= fields[i];
        i += 1;
    }
    let software = 0b1111 << 55;
    assert!(
        (LEVEL | MMU_WRITABLE | FROZEN) & !software == 0,
        "not ours to use"
    );
    assert!(
        (Level::L1G as u64) << LEVEL_SHIFT & !LEVEL == 0,
        "every level has its number"
    );
    assert!(
        ((u32::MAX as u64) << PAGE_SHIFT) & !ADDRESS == 0,
        "every Pfn fits"
    );
    assert!(
        ((1u64 << TableId::BITS) << PAGE_SHIFT) & !ADDRESS == 0,
        "every TableId fits"
    );
};

/// Stage-2 descriptors of arm64, with hardware management of the access flag and the dirty state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arm64;

impl TableFormat for Arm64 {
    #[inline(always)]
    fn encode(entry: Entry) -> u64 {
        match entry {
            Entry::Absent => 0,
            Entry::Frozen => FROZEN,
            Entry::Table(id) => VALID | PAGE_OR_TABLE | u64::from(id.get()) << PAGE_SHIFT,
            Entry::Leaf(leaf) => encode_leaf(leaf),
        }
    }

    #[inline(always)]
    fn decode(raw: u64) -> Entry {
        if raw & VALID == 0 {
            return if raw & FROZEN == 0 {
                Entry::Absent
            } else {
                Entry::Frozen
            };
        }
        let number = ((raw & ADDRESS) >> PAGE_SHIFT) as u32;
        let level = match (raw & LEVEL) >> LEVEL_SHIFT {
            0 => return Entry::Table(TableId::new(number).expect("corrupt stage-2 table pointer")),
            1 => Level::L4K,
            2 => Level::L2M,
            _ => Level::L1G,
        };
        let write = match (raw & WRITABLE != 0, raw & MMU_WRITABLE != 0) {
            (true, _) => Write::Allowed,
            (false, true) => Write::OnFault,
            (false, false) => Write::Never,
        };
        Entry::Leaf(Leaf {
            pfn: Pfn::new(number),
            level,
            write,
            exec: raw & EXECUTE_NEVER == 0,
            accessed: raw & ACCESSED != 0,
            dirty: raw & DIRTY != 0,
        })
    }

    #[inline(always)]
    fn table(raw: u64) -> Option<TableId> {
        if raw & (VALID | LEVEL) == VALID {
            TableId::new(((raw & ADDRESS) >> PAGE_SHIFT) as u32)
        } else {
            None
        }
    }

    #[inline(always)]
    fn is_leaf(raw: u64) -> bool {
        raw & LEVEL != 0
    }

    #[inline(always)]
    fn is_writable_leaf(raw: u64) -> bool {
        raw & WRITABLE != 0
    }

    #[inline(always)]
    fn accessed(leaf: u64, access: Access) -> u64 {
        leaf | ACCESSED | flag(access.is_write(), DIRTY)
    }

    #[inline(always)]
    fn write_protected(leaf: u64) -> u64 {
        leaf & !(WRITABLE | DIRTY)
    }

    #[inline(always)]
    fn dirty_cleared(leaf: u64) -> u64 {
        leaf & !(DIRTY | flag(leaf & PAGE_OR_TABLE == 0, WRITABLE))
    }
}

#[inline(always)]
const fn encode_leaf(leaf: Leaf) -> u64 {
    let write = match leaf.write {
        Write::Never => 0,
        Write::OnFault => MMU_WRITABLE,
        Write::Allowed => MMU_WRITABLE | WRITABLE,
    };
    let kind = match leaf.level {
        Level::L4K => VALID | PAGE_OR_TABLE,
        Level::L2M | Level::L1G => VALID,
    };
    kind | WRITE_BACK
        | READ
        | INNER_SHAREABLE
        | leaf.pfn.get() << PAGE_SHIFT
        | (leaf.level as u64) << LEVEL_SHIFT
        | write
        | flag(!leaf.exec, EXECUTE_NEVER)
        | flag(leaf.accessed, ACCESSED)
        | flag(leaf.dirty, DIRTY)
}

#[inline(always)]
const fn flag(on: bool, bit: u64) -> u64 {
    if on { bit } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{any_entry, promises};
    use super::*;
    use proptest::prelude::*;

    promises!(Arm64);

    /// An arm64 processor's reading of it (Arm ARM, D8.3.2 and D8.4.7), by the bits' numbers.
    fn processor_reads(entry: Entry, raw: u64) {
        let field = |low: u32, bits: u32| raw >> low & ((1 << bits) - 1);
        match entry {
            Entry::Absent | Entry::Frozen => assert_eq!(field(0, 1), 0, "invalid"),
            Entry::Table(_) => {
                assert_eq!(field(0, 2), 3);
                assert_eq!(field(2, 10), 0, "ignored, or AF of tables");
                assert_eq!(field(48, 16), 0, "reserved, or ignored");
            }
            Entry::Leaf(leaf) => {
                let page = leaf.level == Level::L4K;
                assert_eq!(field(0, 2), if page { 3 } else { 1 });
                assert_eq!((field(2, 4), field(8, 2)), (15, 3), "write-back, inner");
                assert_eq!((field(11, 1), field(48, 3), field(52, 1)), (0, 0, 0));
                assert_eq!(field(59, 5), 0, "not software's");
                // Readable. Writable now if bit 7 is set; the processor sets it itself under DBM.
                assert_eq!(field(6, 1), 1);
                assert_eq!(field(51, 1) == 1, leaf.write == Write::Allowed);
                assert_eq!(field(7, 1) == 1, leaf.dirty);
                assert_eq!(field(53, 2), if leaf.exec { 0 } else { 2 });
                assert_eq!(field(10, 1) == 1, leaf.accessed);
            }
        }
    }

    proptest! {
        #[test]
        fn the_processor_agrees(entry in any_entry()) {
            processor_reads(entry, Arm64::encode(entry));
        }
    }

    /// One leaf, bit by bit, so that no constant is compared with itself.
    #[test]
    fn a_writable_clean_page_and_a_dirty_block() {
        let page = Leaf {
            write: Write::Allowed,
            ..Leaf::clean(Pfn::new(0x1_2345))
        };
        let raw = Arm64::encode(Entry::Leaf(page));
        assert_eq!(raw, 0x0288_0000_1234_577f);
        assert_eq!(Arm64::accessed(raw, Access::Write), 0x0288_0000_1234_57ff);
        let block = Leaf {
            exec: false,
            ..Leaf::dirty(Pfn::new(0x200))
        };
        let raw = Arm64::encode(Entry::Leaf(block.at(Level::L2M)));
        assert_eq!(raw, 0x0348_0000_0020_07fd);
    }

    #[test]
    #[should_panic(expected = "corrupt stage-2 table pointer")]
    fn a_pointer_to_table_zero_is_corruption() {
        Arm64::decode(VALID | PAGE_OR_TABLE);
    }
}
