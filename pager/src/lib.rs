//! A guest-memory manager for other VMMs: it fills the memory of their VMs, page by page.
//!
//! A VMM such as Firecracker registers its guest's memory with a userfaultfd, connects to the
//! pager's socket, and sends the descriptor with the addresses. From then on the pager answers the
//! guest's faults from any [`PageSource`]. One pager serves many VMs:
//!
//! ```no_run
//! use lacuna_addr::PageCount;
//! use lacuna_pager::{Config, Image, Pager};
//! use lacuna_source::{MemoryFile, Policy};
//! use std::os::unix::net::UnixListener;
//! use std::sync::Arc;
//!
//! let pages = PageCount::from_bytes(512 << 20);
//! let source = MemoryFile::open("/snapshots/memory".as_ref(), pages, Policy::default())?;
//! let source = Arc::new(source.answering_at_once());
//! let listener = UnixListener::bind("/run/pager.socket")?;
//! let pager = Pager::new(Config::default())?;
//! pager.serve(listener, Image::new(source, pages))?;
//! println!("{} VMs", pager.stats().vms);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! A page that the VM has taken away, as by a balloon, gets zeros at its next fault, and never its
//! old content. A page that the source has lost never gets zeros: [`WhenLost`] decides. The pager
//! never closes the userfaultfd of a VM before the VM ends, because its missing pages would become
//! zeros. If it is killed, the VMs wait for the next pager with the same [`StateFolder`].
//! `docs/pager.md` has the limits.
//!
//! | file | job |
//! |---|---|
//! | `pager`, `config`, `image` | accepts VMs; the settings; what a socket's VMs get |
//! | `served`, `quota`, `window` | what a socket's VMs share; a VM's requests in flight |
//! | `handshake`, `regions`, `peer_process` | the VMM's message, checked; its process |
//! | `service`, `vm`, `units` | the event thread of one VM; what it does; the states of pages |
//! | `placing`, `waiting` | a placement, and the kernel's answers; placements to repeat |
//! | `filler`, `rate`, `record` | a fill beside the faults; its limit; a VM's working set |
//! | `cold`, `shared_pages` | idle VMs' pages go to swap; the file that an image's clones share |
//! | `state`, `supervisor` | what the next pager needs; the manager that keeps descriptors |
//! | `stats`, `stalls`, `messages` | counters; the waits of threads; messages to the user |
//!
//! [`PageSource`]: lacuna_source::PageSource
#![forbid(unsafe_code)]

mod cold;
mod config;
mod filler;
mod handshake;
mod image;
mod messages;
mod pager;
mod peer_process;
mod placing;
mod quota;
mod rate;
mod record;
mod regions;
mod served;
mod service;
mod shared_pages;
mod stalls;
mod state;
mod stats;
mod supervisor;
mod units;
mod vm;
mod waiting;
mod window;

pub use config::{Config, Report, WhenLost};
pub use handshake::HandshakeError;
pub use image::{Fill, Image};
pub use lacuna_sys::pass_descriptors;
pub use pager::Pager;
pub use rate::FillRate;
pub use record::Record;
pub use regions::regions;
pub use stalls::ThreadStalls;
pub use state::{StateError, StateFolder};
pub use stats::{PagerCounts, PagerStats, UnitCounts, VmStats};
pub use supervisor::Supervisor;
