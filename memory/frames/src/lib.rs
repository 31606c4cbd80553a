//! The frames of a host's budget, and the words that say which page is in which frame.
//!
//! [`Frames`] is the budget: one mapping of memory ([`Pool`]), a descriptor for each frame
//! ([`Desc`]) and for each 2 MiB block of frames ([`BlockDesc`]), and the map of free frames. A
//! caller takes free frames, fills one, and makes a page's word name it. A page's 64-bit word
//! ([`PageWord`]) says where the page is; a block word ([`BlockWord`]) says so for 512 pages at
//! once, which are then one compound page. A thread that has isolated a descriptor may take the
//! frame from its page, or split the block.
//!
//! The pool has addresses for Linux memory as well, after the budget's. Those pages have page words
//! and frame numbers, but no descriptors.
//!
//! `lacuna-host` decides which page to evict, and what a fault does.
//!
//! | file | job |
//! |---|---|
//! | `frames` | the budget: watermarks, batches, the queue for frames; a swap device's share |
//! | `free`, `turns` | the map of free frames; the threads that wait for one |
//! | `pool` | the mapping, and all accesses to its bytes; `pool/linux`: mappings of Linux memory |
//! | `desc`, `block` | descriptors; split and collapse of a block |
//! | `page_no`, `span` | numbers of pages; a block of pages with its words |
//! | `residency`, `block_word` | where a page is; where a block of pages is |
//!
//! An *unsafe room*: one mapping, shared by vCPUs, reclaim and I/O. `pool` says which accesses are
//! sound.

mod block;
mod block_word;
mod desc;
mod error;
mod frames;
mod free;
mod page_no;
mod pool;
mod residency;
mod span;
mod turns;

pub use block::{BlockDesc, FrameBlockState, Marked, Parts, TakenBack, Warmth, Youth};
pub use block_word::{BlockNo, BlockWord, PageBlockState};
pub use desc::{Desc, Dirt, FrameState};
pub use error::MapFailed;
pub use frames::{BATCH, BudgetFrames, Frames};
pub use page_no::{BLOCK, PageNo};
pub use pool::{Content, FramePtr, MAX_FRAMES, Pool};
pub use residency::{PageState, PageWord, empty_words};
pub use span::Span;
pub use turns::Turn;
