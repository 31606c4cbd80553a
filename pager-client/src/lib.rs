//! Guest memory that a pager fills: the VMM's side of `lacuna pager`.
//!
//! A VMM connects to the pager's socket, and gets memory with the content of the pager's image. Its
//! pages arrive when they are first touched, by vCPUs of KVM too:
//!
//! ```no_run
//! use lacuna_pager_client::{Accesses, Client};
//!
//! let client = Client::connect("/run/pager.socket".as_ref())?;
//! let memory = client.memory(Accesses::All, |reason| eprintln!("no page arrives: {reason}"))?;
//! println!("{} pages at {}", memory.range().pages(), memory.range().start());
//! # Ok::<(), lacuna_pager_client::ClientError>(())
//! ```
//! Clones with [`Client::memory`] share each page until they write to it. [`Client::anonymous`] is
//! for memory that is not shared, as Firecracker has it.
//!
//! A VMM with `vm-memory` makes its regions from parts of [`PagedMemory::range`], by
//! `MmapRegionBuilder::with_raw_mmap_pointer`. The VMM must not enable huge pages for the memory,
//! fork, or move it by `mremap(2)`: `docs/pager.md` says why, and has the protocol.
#![forbid(unsafe_code)]

mod client;

pub use client::{Client, ClientError, PagedMemory};
pub use lacuna_sys::Accesses;
