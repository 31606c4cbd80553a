//! The host memory manager: a guest's pages in frames within a resident budget, and in swap.
//!
//! ```text
//!            resolve (never sleeps)       Ready(frame) | Pending(ticket) | Missing(ticket)
//! vCPU  --------------------------> page word ----------------------------------------------> vCPU
//!                                     |   ^
//!         reclaim: age, unmap, write  v   |   swap-in: the thread that claims the ticket
//! MMU notifiers <------------------ frames <--------------------------------- SwapStore
//! ```
//! VMs share a [`Host`]. Their memory slots point into *regions*, which the host numbers itself
//! ([`lacuna_addr::BackingAddr`]); these numbers are not pointers. A page's 64-bit word says where
//! the page is, and a frame's descriptor says which thread may take the frame from its page
//! (`lacuna_frames`). 512 pages may be one compound page in an aligned block of frames. Reclaim
//! splits compound pages (`sampled_split`), a background thread makes them (`collapse`).
//!
//! * **No thread waits under a lock.** [`Host::resolve`] never sleeps. A waiting thread has none.
//! * **Dirty marks are exact about writes.** A page is marked before a write to it proceeds, and
//!   when a leaf with D is removed. A page without the mark is dropped; it keeps its swap entry.
//! * **Forward progress.** A faulted page stays pinned until its instruction retires. A budget of
//!   [`Host::minimum_budget`] suffices. Reclaim takes no region below its floor for another.
//! * **No page is silently wrong.** A page whose checksum differs when it is read back is lost.
//! * **No guest reads another's bytes.** A frame is zeroed or overwritten before it changes hands.
//!
//! An *unsafe room*: a thread fills a frame by plain stores, and says why it owns the frame.
//! `io::ring` shares the queues of io_uring with the kernel.

mod copy;
mod core;
mod counters;
mod discard;
mod error;
mod flight;
mod host;
mod io;
mod linux;
mod origin;
mod page_states;
mod per_cpu_pages;
mod provide;
mod read_ahead;
mod read_ahead_window;
mod reclaim;
mod region;
mod removal;
mod resolve;
mod settings;
mod settled;
mod shared_cache;
mod source;
mod spare_caches;
mod stats;
mod swapin;
mod switches;
mod ticket;
mod verify;

pub use error::{HostError, LostPage};
pub use host::{Host, HostConfig, Polling};
pub use io::{Arrivals, Io, fine_sleeps};
pub use lacuna_frames::{FramePtr, MapFailed};
pub use lacuna_linux::{
    LinuxBacking, LinuxError, MemoryKind, PrivateFile, SharedFill, SharedMemory, Touched,
    linux_room,
};
pub use lacuna_source::{Answer, PageRequest, PageSource, SourcePage};
pub use lacuna_swap::{
    Fault, FaultyStore, FileStore, Latency, LogNormal, MemoryStore, Page, Reads, SetupFailed,
    StoreFrames, Swap, SwapEntry, SwapError, SwapFile, SwapStore, WriteFailed,
};
pub use lacuna_sync::LatencySetting;
pub use lacuna_sys::{Toucher, major_faults};
pub use linux::SeenLosses;
pub use per_cpu_pages::PerCpuPages;
pub use reclaim::{balance::Background, balance::Progress, collapse::Collapse};
pub use region::{HugePages, MmuNotifier};
pub use resolve::{Frame, Resolution};
pub use shared_cache::MAX_PINNED;
pub use stats::HostStats;
pub use ticket::Ticket;
