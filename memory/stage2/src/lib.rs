//! Stage-2 translation: guest frame to host frame, in hardware-format tables.
//!
//! | file | job |
//! |---|---|
//! | `format/` | [`TableFormat`], [`Ept`] and [`Arm64`]: bits, shifts and masks, nowhere else |
//! | `entry` | the same entries, decoded |
//! | `walk` | what the hardware does: translates, sets A and D, without a lock |
//! | `cursor` | the lock: the only way to change a mapping |
//! | `map` `unmap` `protect` `age` `split` `collapse` | one operation each |
//! | `gib` | leaves of 1 GiB: the same operations, under a cursor over all of the 1 GiB |
//! | `pml` | the log of a walk: the pages whose D it sets |
//! | `dirty` | clears and sets D independently of W; sets W without a lock |
//! | `change` | the functions that change an entry: they count it, and assert that it is legal |
//! | `flush` | the TLB flush that a change needs, as a value that must be finished |
//! | `verify` | reads all tables and asserts their invariants |
//!
//! Three rules. *The cursor is the lock*: entries change only under the range lock of their block,
//! so faults in different 2 MiB blocks do not contend. The exceptions are A and D, set by the
//! walker, and W, set by a fast page fault. *A mapping never gets another frame in place*: it is
//! unmapped, shot down, and mapped again; split and collapse change only the size of the leaves.
//! *Prepare may fail, commit may not.*
//!
//! Imports `addr`, `sync`, `tables`. No `unsafe`.
#![forbid(unsafe_code)]

mod age;
mod change;
mod collapse;
mod cursor;
mod dirty;
mod entry;
mod flush;
mod format;
mod gib;
mod map;
mod pml;
mod protect;
mod split;
mod stage2;
mod unmap;
mod verify;
mod walk;

pub use age::Age;
pub use change::Counts;
pub use collapse::{Collapsed, NotUniform};
pub use cursor::Cursor;
pub use entry::{Entry, EntryRef, Leaf, Write};
pub use flush::{Flush, Shootdown, Waiting};
pub use format::{AbortedAccess, Arm64, Ept, LookupLevel, Stage2Abort, TableFormat};
pub use lacuna_sync::{Blocks, InvalidateSeq};
pub use lacuna_tables::{Arena, ArenaError, Exhausted, TableId, Usage};
pub use map::{LeafPlace, MapError, Mapped};
pub use pml::{LogFull, PmlLog};
pub use split::Split;
pub use stage2::Stage2;
pub use unmap::Removed;
pub use walk::{Cause, Translation, Violation, Walk};
