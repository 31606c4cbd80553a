//! The behaviours, each a function over a backend. `Err` says what the backend lacks. A failure is
//! a panic, as in every test.

pub mod async_faults;
pub mod between;
pub mod devices;
pub mod dirty;
pub mod exits;
pub mod files;
pub mod guests;
pub mod interrupts;
pub mod ioeventfd;
pub mod many_vcpus;
pub mod memory;
pub mod missing;
pub mod missing_races;
pub mod misuse;
pub mod nmi;
pub mod nonresident;
pub mod odd_slots;
pub mod paged_out;
pub mod powers;
pub mod processors;
pub mod reentry;
pub mod slots;
pub mod sources;
pub mod state;
pub mod tokens;
pub mod virtio;

/// A body's result.
pub type Outcome = Result<(), crate::backend::Lacks>;
