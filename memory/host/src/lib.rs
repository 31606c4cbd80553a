//! Where a guest's pages come from: real frames within a resident budget, and swap behind them.
//!
//! ```text
//!         resolve (never sleeps)           Ready(frame) | Pending(ticket) | NoMemory | Lost
//! vCPU  ------------------------> page word -----------------------------------------------> vCPU
//!                                   |   ^
//!       reclaim: age, unmap, write  v   |   swap-in: whoever claims the ticket
//! listeners <--------------------- frames <-------------------------------- SwapStore
//! ```
//! A [`Host`] is shared by one or more VMs. Their memory slots point into *regions* of its own
//! numbering ([`lacuna_addr::Hva`]): never pointers. Which frame a page is in, if any, is one
//! 64-bit word a page and one state machine (`residency`); who may take a frame from its page is
//! the frame's descriptor (`desc`). 512 pages may be kept together, in one aligned block of frames:
//! a head word a block says so (`head`), a descriptor a block says who may split it (`block`); the
//! clock hand decides which are split (`trial`), the background makes others whole (`collapse`).
//! Principles:
//!
//! * **Nothing waits under a lock.** [`Host::resolve`] never sleeps and does no I/O; what waits
//!   ([`Host::wait`], [`Host::reclaim_direct`]) is called with no lock held, and so are listeners.
//! * **D is the truth about writes.** A page not marked dirty is dropped without a write and keeps
//!   its swap entry; a page is marked before a write access may go on, or when a leaf with D is
//!   removed.
//! * **Forward progress.** A page that an instruction has faulted on stays pinned until the
//!   instruction retires. A budget of [`Host::minimum_budget`] suffices. No region is reclaimed
//!   below its floor for another.
//! * **Nothing is silently zero, or wrong.** A page that cannot be read back as it was written (a
//!   checksum tells) is lost and says why; one that cannot be written out stays where it is.
//! * **No guest reads another's bytes.** A frame is zeroed or overwritten before it changes hands.
//!
//! # Unsafe
//! This crate is one of the workspace's unsafe rooms: the frame pool. Raw pointers are in `pool`
//! only; the other blocks, in `resolve`, `collapse`, `swapin` and `io::ring`, state why they own
//! the frame that they, or the kernel for them, fill. `region` allocates its words as zeros.
//!
//! Neighbours: imports `addr` and `sync`. `mmu` implements [`MmuNotifier`]; `soft` turns a
//! [`FramePtr`] into what its processors touch.

mod balance;
mod block;
mod collapse;
mod copy;
mod desc;
mod error;
mod frames;
mod free;
mod head;
mod host;
mod io;
mod patience;
mod per_cpu_pages;
mod pool;
mod reclaim;
mod region;
mod removal;
mod residency;
mod resolve;
mod settled;
mod stats;
mod swap;
mod swapin;
mod ticket;
mod trial;
mod turns;
mod verify;
mod writeback;

pub use balance::{Background, Progress};
pub use collapse::Collapse;
pub use error::{HostError, LostPage, SwapError, WriteFailed};
pub use frames::StoreFrames;
pub use host::{Host, HostConfig, HugePages, Polling};
pub use io::{Io, fine_sleeps};
pub use lacuna_sync::LatencySetting;
pub use per_cpu_pages::{MAX_PINNED, PerCpuPages};
pub use pool::{FramePtr, Page};
pub use region::MmuNotifier;
pub use resolve::{Frame, Resolution};
pub use stats::HostStats;
pub use swap::{Fault, FaultyStore, FileStore, Latency, MemoryStore, Reads, SwapEntry, SwapStore};
pub use ticket::Ticket;
