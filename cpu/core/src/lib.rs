//! The common parts of all software processors: the bus, guest bytes, the TLB, and the cache of
//! decoded code.
//!
//! A processor knows a [`Bus`], not a hypervisor: it requests the page behind a guest-physical
//! frame and gets a [`HostPage`] or a [`Stop`]. A hypervisor knows a [`Processor`], not an
//! instruction set. `lacuna-x86` is one processor.
//!
//! | file | job |
//! |---|---|
//! | `processor` | what a hypervisor needs of a processor |
//! | `bus` | what a processor needs of the machine around it |
//! | `page`, `word`, `pair` | one page of guest memory, and the accesses to it |
//! | `memory` | the loads and stores of an instruction |
//! | `replay` | accesses of devices, and the answers of an instruction |
//! | `tlb` | translations for one privilege |
//! | `walk_cache` | last tables of stage 1, for one address space |
//! | `translations` | TLBs by privilege and address space |
//! | `op` | the layout of a decoded op |
//! | `code` | basic blocks, their links, and the epochs that invalidate them |
//!
//! # Unsafe
//! This crate may hold `unsafe` because it is the vCPU's fast path to guest memory. A [`HostPage`]
//! is a raw pointer to a page that other threads write as well. Every access through it is an
//! atomic (aligned, up to 8 bytes) or a series of byte atomics. No reference to guest memory is
//! ever formed. The pointer stays valid until the vCPU's next quiescent point
//! (`lacuna_sync::Qsbr`); the `unsafe trait Bus` promises this.

mod bus;
pub mod code;
mod memory;
pub mod op;
mod page;
mod pair;
mod processor;
mod replay;
#[cfg(feature = "testing")]
pub mod testing;
mod tlb;
mod translations;
mod walk_cache;
mod word;

pub use bus::{Bus, Stop, Wake};
pub use memory::{Blocked, Memory, Target, Touch, offset};
pub use page::{HostPage, Span, Stores};
pub use processor::{Event, Exit, Privilege, Processor, Refused};
pub use replay::{Replay, after, device_pieces, low_bytes};
pub use tlb::{Rights, Tlb};
pub use translations::{Learned, Mapping, PARKED, Retain, Space, Switched, Translations};
pub use walk_cache::WalkCache;
pub use word::Word;
