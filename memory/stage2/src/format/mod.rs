//! Entry formats: the only place in this crate with shifts and masks.
//!
//! | file | what it knows |
//! |---|---|
//! | `mod` | what a format must say: [`TableFormat`] |
//! | `ept` | Intel's extended page tables |
//! | `arm64` | the stage-2 descriptors of VMSAv8-64 |
//! | `syndrome` | the registers in which an arm64 processor reports a stage-2 abort |
//! | `height` | the geometry that all formats share |
//!
//! All formats share one geometry: four levels, nine bits of the guest frame number a level, tables
//! of 512 entries of 64 bits. That is EPT with a page-walk length of four, and arm64 stage 2 with a
//! granule of 4 KiB that starts at level 0 (docs/decisions/0010-table-format.md).

mod arm64;
mod ept;
mod height;
mod syndrome;
#[cfg(test)]
mod tests;

use crate::Entry;
use lacuna_addr::Access;
use lacuna_tables::TableId;

pub use arm64::Arm64;
pub use ept::Ept;
pub use height::LookupLevel;
pub(crate) use height::{Height, block_numbers, frame_of, leaf_span};
pub use syndrome::{AbortedAccess, Stage2Abort};

/// The 64-bit form of a table entry, and how the walker changes it.
///
/// The rest of the crate is generic over the format and monomorphised. It handles raw entries as
/// opaque values: it loads and exchanges them, compares them, and passes them back to the format.
///
/// # What a format promises
/// * `decode(encode(entry)) == entry` for every entry, and `encode` of equal entries is equal. A
///   compare-and-swap of `encode(old)` therefore fails exactly when the entry is no longer `old`.
/// * Zero is [`Entry::Absent`], because a new table is zeroed memory.
/// * An entry says by itself what it is, without the height of its table. If a format's table
///   pointers and pages look alike, it keeps the leaf's level in bits that the hardware ignores.
/// * The three values of [`crate::Write`] and the bits A and D are independent, but for the rule
///   that D implies W. If the hardware encodes "writable and clean" as one state (arm64: DBM set,
///   S2AP read-only), the format decodes that state as W without D.
/// * [`Entry::Frozen`] is not present for the hardware.
///
/// # Splits in place
/// Replacing a 2 MiB leaf by a table of its parts, and the reverse, changes no translation, but for
/// a moment two TLB entries of different sizes may translate one address. Architectures restrict
/// this: arm64 asks for break-before-make, and some processors report a TLB conflict. Here it is
/// legal in every format, because no processor walks these tables. Only the software vCPUs have
/// TLBs of them. These hold pages of 4 KiB and blocks of 2 MiB side by side, and either gives the
/// same frame.
pub trait TableFormat: Send + Sync + 'static {
    /// The bits of an entry.
    fn encode(entry: Entry) -> u64;

    /// Decodes the bits.
    ///
    /// # Panics
    /// On a table pointer that [`TableFormat::encode`] cannot have written: the host's own tables
    /// are corrupt.
    fn decode(raw: u64) -> Entry;

    /// The table to which the bits point, if they are a table pointer: [`TableFormat::decode`] for
    /// the upper levels of a walk, where the entry is nearly always a table pointer.
    fn table(raw: u64) -> Option<TableId>;

    /// Whether the bits are a leaf. Cheaper than [`TableFormat::decode`] for a loop over a table.
    fn is_leaf(raw: u64) -> bool;

    /// Whether the bits are a leaf with W.
    fn is_writable_leaf(raw: u64) -> bool;

    /// The bits of `leaf` after `access`: with A, and with D for a write. The leaf grants the
    /// access.
    fn accessed(leaf: u64, access: Access) -> u64;

    /// The bits of the writable `leaf`, write-protected: without W and D. The next write faults.
    fn write_protected(leaf: u64) -> u64;

    /// The bits of the writable `leaf` without D. The next walk for a write sets D again. A leaf
    /// above 4 KiB loses W too, because one D stands for all its pages.
    fn dirty_cleared(leaf: u64) -> u64;
}
