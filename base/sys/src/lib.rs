//! Foreign structs and ioctls: the parts of Linux's ABI that `rustix` and `kvm-ioctls` lack.
//!
//! * [`Userfaultfd`]: a thread receives the faults of missing pages and supplies the pages, and the
//!   kernel records writes. `rustix` makes the descriptor; its ioctls and events are here.
//! * [`MissingArea`], [`FileArea`]: memory with missing pages, and mapped files, for programs
//!   without `unsafe`.
//! * [`SharedFile`]: a memory file that this process fills, and that others map.
//! * [`page_out`]: pages of another process go to swap.
//! * [`Toucher`]: a thread waits for a missing page, and another thread can end the wait.
//! * [`TakenPages`]: pages that the kernel takes away, and the `SIGBUS` of the next access.
//! * [`Pagemap`]: which pages were written, by `PAGEMAP_SCAN`.
//! * [`PageReads`]: reads of pages of a file by io_uring.
//! * [`clear_dirty_log`], [`reset_dirty_rings`]: two calls of KVM's dirty logging.
//! * [`irqfd`]: an eventfd becomes an interrupt of a KVM guest. [`ioeventfd`]: a guest's write
//!   signals an eventfd.
//! * [`VcpuStatistic`]: one of KVM's statistics of a vCPU.
//! * [`major_faults`]: how often Linux has read a page for the calling thread.
//! * [`PeerCredentials`]: the process at the other end of a UNIX socket.
//! * [`SharedBytes`]: bytes of a file that outlive this process.
//! * [`inherited_descriptors`], [`pass_descriptors`]: descriptors that a service manager keeps.
//! * [`tap`], [`new_network_namespace`]: a network interface of this process, apart from others.
//!
//! An *unsafe room*: these calls change the process's own memory, or take its addresses.

mod area;
mod counted;
mod dirty_log;
mod inherited;
mod ioeventfd;
mod irqfd;
mod page_out;
mod page_reads;
mod pagemap;
mod peer;
mod shared_bytes;
mod shared_file;
mod sigbus;
mod signals;
mod statistic;
mod tap;
mod touch;
mod usage;
mod userfaultfd;

pub use area::{FileArea, MissingArea};
pub use dirty_log::{clear_dirty_log, reset_dirty_rings};
pub use inherited::{inherited_descriptors, pass_descriptors};
pub use ioeventfd::{IoWrites, ioeventfd};
pub use irqfd::irqfd;
pub use page_out::page_out;
pub use page_reads::{PageReads, Waker};
pub use pagemap::{Pagemap, Written};
pub use peer::PeerCredentials;
pub use shared_bytes::SharedBytes;
pub use shared_file::SharedFile;
pub use sigbus::TakenPages;
pub use statistic::VcpuStatistic;
pub use tap::{new_network_namespace, tap};
pub use touch::{Touched, Toucher};
pub use usage::major_faults;
pub use userfaultfd::{
    Accesses, EVENT_BYTES, Errno, Event, Fault, Minor, Partial, Userfaultfd, VmmMemory, Waiters,
};
