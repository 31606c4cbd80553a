//! Address types that cannot be confused with each other.
//!
//! A guest-memory engine has six kinds of number that all look like `u64`:
//!
//! | type | names | unit |
//! |---|---|---|
//! | [`Gpa`] / [`Gfn`] | guest-physical address / 4 KiB frame | byte / page |
//! | [`Hva`] | host virtual address, the target of a memory slot of the kvm backend | byte |
//! | [`BackingAddr`] | address in the host memory manager's numbering: the same for soft | byte |
//! | [`Pfn`] | a real 4 KiB frame of the resident budget | page |
//! | [`Level`] | size of one table leaf | – |
//! | [`BlockNumber`] | an aligned block of 512 guest frames | 2 MiB |
//!
//! [`room_for`] checks that there is room for a table with an entry for each page or block.
//! [`aligned_piece`] divides a copy of guest memory into integers that do not tear.
//!
//! There are no operators between kinds. Each conversion is a named function of the crate that
//! knows the mapping. This crate imports nothing and holds no `unsafe`.
#![forbid(unsafe_code)]

mod block;
mod frame;
mod level;
mod page_states;
mod piece;
mod range;
mod room;

pub use block::BlockNumber;
pub use frame::{BackingAddr, Gfn, Gpa, Hva, PageCount, Pfn, SlotAddress};
pub use level::Level;
pub use page_states::PageStates;
pub use piece::aligned_piece;
pub use range::{BackingRange, GfnRange, HvaRange, SlotAddressRange};
pub use room::{NoRoom, room_for, room_for_threads};

/// log2 of the base page size.
pub const PAGE_SHIFT: u32 = 12;
/// Base page size in bytes.
pub const PAGE_SIZE: usize = 1 << PAGE_SHIFT;
/// Highest guest-physical address bit plus one that four-level tables can translate.
pub const GPA_BITS: u32 = 48;

/// The kind of an access to a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Access {
    /// A data read.
    Read,
    /// A data write, an atomic, or a page walker's own update.
    Write,
    /// An instruction fetch.
    Fetch,
}

impl Access {
    /// Whether the page must be writable.
    pub const fn is_write(self) -> bool {
        matches!(self, Self::Write)
    }
}
