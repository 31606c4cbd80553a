//! Foreign structs and ioctls: what `rustix` and `kvm-ioctls` leave out of Linux's ABI.
//!
//! * [`Userfaultfd`]: a thread hears of accesses to pages that are not there and supplies them, and
//!   the kernel notes writes. `rustix` makes the descriptor; its ioctls and events are here.
//! * [`Pagemap`]: which pages were written, by `PAGEMAP_SCAN`.
//! * [`clear_dirty_log`], [`reset_dirty_rings`]: the calls of KVM's dirty logging that `kvm-ioctls`
//!   lacks.
//!
//! An *unsafe room*: ioctls that change the process's own memory, or are given its addresses.

mod counted;
mod dirty_log;
mod pagemap;
mod userfaultfd;

pub use dirty_log::{clear_dirty_log, reset_dirty_rings};
pub use pagemap::{Pagemap, Written};
pub use userfaultfd::{Errno, Fault, Userfaultfd};
