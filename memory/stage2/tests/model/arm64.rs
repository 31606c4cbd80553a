//! A second table format: stage-2 descriptors of arm64 (Arm ARM, D8.3), granule 4 KiB.
//!
//! ```text
//!  63 60 59  58 57 56  55 54 53 52 51    50 44 43          12 11 10 9 8 7  6 5    2 1  0
//! |     | F |  | ML| L   | XN|    | DBM |     | table/frame |  |AF| SH |S2AP| attr | type|
//! ```
//! It proves that walk, cursor and change know decoded entries only: no bit is where EPT has it,
//! "executable" is a bit that is *clear*, D is a right, and pages look like table pointers.
//!
//! * type: 1 a block of 2 MiB or more, 3 a page or a table. L tells pages from tables.
//! * S2AP is bit 6 (read) and bit 7 (write). With DBM set, the hardware turns "read-only" into
//!   "writable" at the first write. So DBM is W, and S2AP write is D.
//! * L and ML are in bits that the hardware ignores: the leaf's level; the MMU may set W.
//! * F, in bit 59: frozen. The type is 0 then, so the descriptor is invalid.
//!
//! Frame numbers are stored inverted. A number that is read with the bits of another format is
//! then far outside the pool: such a mistake breaks at once.

use lacuna_addr::{Access, Level, Pfn};
use lacuna_stage2::{Entry, Leaf, TableFormat, TableId, Write};

const BLOCK: u64 = 1;
const PAGE_OR_TABLE: u64 = 3;
const TYPE: u64 = 3;
const NORMAL_WRITE_BACK: u64 = 0b1111 << 2;
const READ: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;
const INNER_SHAREABLE: u64 = 3 << 8;
const ACCESSED: u64 = 1 << 10;
const ADDRESS: u64 = 0xffff_ffff << 12;
const DBM: u64 = 1 << 51;
const EXECUTE_NEVER: u64 = 1 << 54;
const LEVEL_SHIFT: u32 = 55;
const LEVEL: u64 = 3 << LEVEL_SHIFT;
const MMU_WRITABLE: u64 = 1 << 57;
const FROZEN: u64 = 1 << 59;

/// Descriptors of arm64, with hardware management of the access flag and of the dirty state.
pub struct Arm64;

fn address(number: u32) -> u64 {
    u64::from(!number) << 12
}

fn number(raw: u64) -> u32 {
    !((raw & ADDRESS) >> 12) as u32
}

fn flag(on: bool, bit: u64) -> u64 {
    if on { bit } else { 0 }
}

impl TableFormat for Arm64 {
    fn encode(entry: Entry) -> u64 {
        let leaf = match entry {
            Entry::Absent => return 0,
            Entry::Frozen => return FROZEN,
            Entry::Table(id) => return PAGE_OR_TABLE | address(id.get()),
            Entry::Leaf(leaf) => leaf,
        };
        let kind = match leaf.level {
            Level::L4K => PAGE_OR_TABLE,
            Level::L2M | Level::L1G => BLOCK,
        };
        let write = match leaf.write {
            Write::Never => 0,
            Write::OnFault => MMU_WRITABLE,
            Write::Allowed => MMU_WRITABLE | DBM,
        };
        let frame = u32::try_from(leaf.pfn.get()).expect("frame numbers have 32 bits");
        kind | NORMAL_WRITE_BACK
            | READ
            | INNER_SHAREABLE
            | address(frame)
            | write
            | (leaf.level as u64) << LEVEL_SHIFT
            | flag(leaf.accessed, ACCESSED)
            | flag(leaf.dirty, DIRTY)
            | flag(!leaf.exec, EXECUTE_NEVER)
    }

    fn decode(raw: u64) -> Entry {
        let level = match (raw & TYPE, (raw & LEVEL) >> LEVEL_SHIFT) {
            (0, _) if raw & FROZEN != 0 => return Entry::Frozen,
            (0, _) => return Entry::Absent,
            (PAGE_OR_TABLE, 0) => {
                return Entry::Table(TableId::new(number(raw)).expect("a table"));
            }
            (PAGE_OR_TABLE, 1) => Level::L4K,
            (BLOCK, 2) => Level::L2M,
            (BLOCK, 3) => Level::L1G,
            other => panic!("type and level {other:?} in {raw:#x}"),
        };
        let write = match (raw & DBM != 0, raw & MMU_WRITABLE != 0) {
            (true, _) => Write::Allowed,
            (false, true) => Write::OnFault,
            (false, false) => Write::Never,
        };
        Entry::Leaf(Leaf {
            pfn: Pfn::new(number(raw)),
            level,
            write,
            exec: raw & EXECUTE_NEVER == 0,
            accessed: raw & ACCESSED != 0,
            dirty: raw & DIRTY != 0,
        })
    }

    fn table(raw: u64) -> Option<TableId> {
        match Self::decode(raw) {
            Entry::Table(id) => Some(id),
            _ => None,
        }
    }

    fn is_leaf(raw: u64) -> bool {
        raw & LEVEL != 0
    }

    fn is_writable_leaf(raw: u64) -> bool {
        Self::is_leaf(raw) && raw & DBM != 0
    }

    fn accessed(leaf: u64, access: Access) -> u64 {
        leaf | ACCESSED | flag(access.is_write(), DIRTY)
    }

    fn write_protected(leaf: u64) -> u64 {
        leaf & !(DBM | DIRTY)
    }

    fn dirty_cleared(leaf: u64) -> u64 {
        leaf & !(DIRTY | flag(leaf & TYPE == BLOCK, DBM))
    }
}
