//! The extended-page-table entry (Intel SDM vol. 3C, 29.3; A and D bits: 29.3.5).
//!
//! ```text
//!  63   60 59  58  57  56  54 53 52 51            12 11 10  9  8  7  6  5  3  2  1  0
//! |      | F | MW| HW |      | L   |  frame / table |     | D| A|PS|IP| MT | X| W| R|
//! ```
//! R W X rights; MT 6 = write-back; IP ignore the guest's PAT; PS a leaf above 4 KiB; A, D set by
//! the walker. Ours, in bits that the processor ignores: L the leaf's level, 0 in a table pointer,
//! so that an entry says what it is wherever it is found; HW the backing is writable; MW the MMU
//! may set W without asking; F frozen (not present: its table is being torn down).
//!
//! Legal (HW, MW, W) are 000, 110 and 111, which is [`Write`]. A table pointer is born with A set:
//! only leaves are aged, so the walker need not write above them.

use super::TableFormat;
use crate::{Cause, Entry, Leaf, Violation, Write};
use lacuna_addr::{Access, Level, PAGE_SHIFT, Pfn};
use lacuna_tables::TableId;

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const EXEC: u64 = 1 << 2;
const WRITE_BACK: u64 = 6 << 3;
const IGNORE_PAT: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;
const ADDRESS: u64 = ((1 << 52) - 1) & !((1 << PAGE_SHIFT) - 1);

const LEVEL_SHIFT: u32 = 52;
const LEVEL: u64 = 0b11 << LEVEL_SHIFT;
const HOST_WRITABLE: u64 = 1 << 57;
const MMU_WRITABLE: u64 = 1 << 58;
const FROZEN: u64 = 1 << 59;

const RIGHTS: u64 = READ | WRITE | EXEC;
const MEMORY_TYPE: u64 = 0b111 << 3;

/// The bit budget: no two fields share a bit, and ours lie where the processor looks at none
/// (62:52, without the optional features that claim some of them; SDM table 29-7).
const _: () = {
    let fields = [
        READ,
        WRITE,
        EXEC,
        MEMORY_TYPE,
        IGNORE_PAT,
        LARGE,
        ACCESSED,
        DIRTY,
        ADDRESS,
        LEVEL,
        HOST_WRITABLE,
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
    let ignored = ((1u64 << 63) - 1) & !((1 << 52) - 1);
    assert!(
        (LEVEL | HOST_WRITABLE | MMU_WRITABLE | FROZEN) & !ignored == 0,
        "not ours to use"
    );
    assert!(FROZEN & RIGHTS == 0, "a frozen entry is not present");
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

/// Intel's extended page tables, with A and D enabled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ept;

impl TableFormat for Ept {
    #[inline(always)]
    fn encode(entry: Entry) -> u64 {
        match entry {
            Entry::Absent => 0,
            Entry::Frozen => FROZEN,
            Entry::Table(id) => RIGHTS | ACCESSED | u64::from(id.get()) << PAGE_SHIFT,
            Entry::Leaf(leaf) => encode_leaf(leaf),
        }
    }

    #[inline(always)]
    fn decode(raw: u64) -> Entry {
        if raw & RIGHTS == 0 {
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
        let write = match (raw & WRITE != 0, raw & MMU_WRITABLE != 0) {
            (true, _) => Write::Allowed,
            (false, true) => Write::OnFault,
            (false, false) => Write::Never,
        };
        Entry::Leaf(Leaf {
            pfn: Pfn::new(number),
            level,
            write,
            exec: raw & EXEC != 0,
            accessed: raw & ACCESSED != 0,
            dirty: raw & DIRTY != 0,
        })
    }

    #[inline(always)]
    fn table(raw: u64) -> Option<TableId> {
        if raw & (RIGHTS | LEVEL) == RIGHTS {
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
        Self::is_leaf(raw) && raw & WRITE != 0
    }

    #[inline(always)]
    fn accessed(leaf: u64, access: Access) -> u64 {
        leaf | ACCESSED | flag(access.is_write(), DIRTY)
    }

    #[inline(always)]
    fn write_protected(leaf: u64) -> u64 {
        leaf & !(WRITE | DIRTY)
    }

    #[inline(always)]
    fn dirty_cleared(leaf: u64) -> u64 {
        leaf & !(DIRTY | flag(leaf & LARGE != 0, WRITE))
    }
}

impl Ept {
    /// The exit qualification of an EPT violation (SDM table 28-7). Bits 2:0 are the access: read,
    /// write, fetch. Bits 5:3 are the rights that the entries on the way grant together. The
    /// processor adds bit 7 (linear address valid) and bit 8 (final translation).
    pub const fn exit_qualification(violation: Violation) -> u64 {
        let access = match violation.access {
            Access::Read => READ,
            Access::Write => WRITE,
            Access::Fetch => EXEC,
        };
        let rights = match violation.cause {
            Cause::Absent => 0,
            Cause::Denied(leaf) => encode_leaf(leaf) & RIGHTS,
        };
        access | rights << 3
    }
}

#[inline(always)]
const fn encode_leaf(leaf: Leaf) -> u64 {
    let write = match leaf.write {
        Write::Never => 0,
        Write::OnFault => HOST_WRITABLE | MMU_WRITABLE,
        Write::Allowed => HOST_WRITABLE | MMU_WRITABLE | WRITE,
    };
    let large = match leaf.level {
        Level::L4K => 0,
        Level::L2M | Level::L1G => LARGE,
    };
    READ | WRITE_BACK
        | IGNORE_PAT
        | leaf.pfn.get() << PAGE_SHIFT
        | (leaf.level as u64) << LEVEL_SHIFT
        | write
        | large
        | flag(leaf.exec, EXEC)
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

    promises!(Ept);

    proptest! {
        /// Asserts that an Intel processor agrees (SDM 29.3.3.1): present entries are no
        /// misconfiguration, others are not present.
        #[test]
        fn the_processor_agrees(entry in any_entry()) {
            let raw = Ept::encode(entry);
            match entry {
                Entry::Absent | Entry::Frozen => prop_assert_eq!(raw & 0b111, 0),
                Entry::Table(_) => {
                    prop_assert_eq!(raw & 0b111, 0b111);
                    prop_assert_eq!(raw >> 3 & 0x1f, 0, "bits 7:3 of a table pointer are reserved");
                }
                Entry::Leaf(leaf) => {
                    prop_assert_eq!(raw & 1, 1, "write- or execute-only is a misconfiguration");
                    prop_assert_eq!(raw >> 3 & 0b111, 6, "write-back");
                    prop_assert_eq!(raw >> 7 & 1 == 1, leaf.level != Level::L4K);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "corrupt stage-2 table pointer")]
    fn a_pointer_to_table_zero_is_corruption() {
        Ept::decode(RIGHTS);
    }

    #[test]
    fn the_qualification_is_the_processors() {
        let absent = |access| {
            Ept::exit_qualification(Violation {
                access,
                cause: Cause::Absent,
            })
        };
        assert_eq!(
            [Access::Read, Access::Write, Access::Fetch].map(absent),
            [1, 2, 4]
        );
        let leaf = Leaf {
            exec: false,
            write: Write::OnFault,
            ..Leaf::clean(Pfn::new(1))
        };
        let denied = |access| {
            Ept::exit_qualification(Violation {
                access,
                cause: Cause::Denied(leaf),
            })
        };
        assert_eq!(
            denied(Access::Write),
            0b001_010,
            "readable, not writable, not executable"
        );
        assert_eq!(denied(Access::Fetch), 0b001_100);
    }
}
