//! Foreign structs and ioctls: what `rustix` and `kvm-ioctls` leave out of Linux's ABI.
//!
//! So far that is userfaultfd ([`Userfaultfd`]): a thread hears of accesses to pages that are not
//! there and supplies them. `rustix` makes the descriptor; its ioctls and events are here.
//!
//! An *unsafe room*: ioctls that change the process's own memory.

mod userfaultfd;

pub use userfaultfd::{Errno, Fault, Userfaultfd};
