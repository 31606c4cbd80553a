//! Swap devices: where pages of guests go that leave memory.
//!
//! A device is synchronous and knows entries and bytes only. Its caller decides which thread calls
//! it, and when a completion is delivered.
//!
//! | file | job |
//! |---|---|
//! | `store` | [`SwapStore`]: what a device does; [`StoreFrames`]: what one in memory needs |
//! | `entry`, `map` | places on a device; which of them are in use, and their checksums |
//! | `kind` | [`Swap`]: which device a VM gets |
//! | `file` | pages in an unnamed file |
//! | `memory` | compressed pages in frames of the budget |
//! | `latency`, `log_normal`, `faulty` | devices that are slow, or fail, as a test says |
//!
//! No page is silently wrong: a caller compares [`Page::checksum`] with what [`SwapMap`] has.
#![forbid(unsafe_code)]

mod entry;
mod error;
mod faulty;
mod file;
mod kind;
mod latency;
mod log_normal;
mod map;
mod memory;
mod page;
mod store;

pub use entry::SwapEntry;
pub use error::{SetupFailed, SwapError, WriteFailed};
pub use faulty::{Fault, FaultyStore};
pub use file::{FileStore, SwapFile};
pub use kind::Swap;
pub use latency::Latency;
pub use log_normal::LogNormal;
pub use map::{Run, SwapMap, SwapSpace};
pub use memory::MemoryStore;
pub use page::Page;
pub use store::{Reads, StoreFrames, SwapStore};
