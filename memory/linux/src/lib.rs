//! Linux memory: memory that this process maps, and whose pages Linux gives to it one by one.
//!
//! A region's memory is a [`LinuxMemory`]: a part of [`LinuxAddresses`]. Linux fills its pages with
//! zeros at their first touch, or they are missing until a caller fills them ([`Filled`]). A fill
//! copies a page or a unit into place by userfaultfd. In huge pages of hugetlbfs a unit has 512
//! pages, otherwise one. A thread that copies or fills is a user of the region
//! ([`LinuxMemory::enter`]), so that a thread that takes pages away can wait for it.
//!
//! This crate knows no states of pages. The page words of `lacuna-frames` say which page is
//! missing, in place or lost, and `lacuna-host` changes them.
//!
//! | file | job |
//! |---|---|
//! | `memory` | the memory of one region, and the threads that use it |
//! | `addresses` | which addresses each region has |
//! | `fill` | puts pages in place, and wakes the threads that sleep for them |
//! | `parts` | the userfaultfds of a region that this process fills |
//! | `handler` | a region that a handler fills from outside, and the threads that touch its pages |
//! | `shared_file` | memory files, and the kinds of memory |
//! | `private_file` | files that are copied as they are written |
//!
//! The mappings themselves belong to the pool of `lacuna-frames`, so this crate has no `unsafe`.
#![forbid(unsafe_code)]

mod addresses;
mod error;
mod fill;
mod handler;
mod memory;
mod parts;
mod private_file;
mod shared_file;

pub use addresses::LinuxAddresses;
pub use error::LinuxError;
pub use fill::Placed;
pub use handler::{FillHandler, Touch, Touching};
pub use memory::{Filled, LinuxMemory, User};
pub use parts::Touched;
pub use private_file::PrivateFile;
pub use shared_file::{LinuxBacking, MemoryKind, SharedFill, SharedMemory, linux_room, reserve_of};
