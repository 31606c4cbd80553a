//! Asynchronous page faults of one vCPU: a token's life, whatever the backend and the architecture.
//!
//! A page that must come from elsewhere need not stop the vCPU. The guest is told that the page is
//! not present, with a *token*, and runs another process. When the page has come, the guest is told
//! that the token is *ready*, and the first process retries its access.
//!
//! ```text
//! vCPU's thread                                 the thread that brings the page
//! not_present(gfn) ─► Wait: as if there were no asynchronous faults
//!                  ─► Halt: the guest cannot be told now; a halt that interrupts still break
//!                  ─► Injected: the guest knows the token
//!                       └─ Completion ────────► complete(), or dropped
//!                                                 └─► completion queue ─► kick the vCPU
//! poll() ◄────────────────────────────────────────────────┘
//!   prefault, leave the hash, tell the guest (if it was told before), end the halt
//! ```
//!
//! A backend has one [`Queue`] a vCPU, and implements the guest traits for that vCPU: [`Guest`],
//! and the one of its architecture, for example [`x86::Guest`]. Except for the completion queue,
//! everything belongs to the vCPU's thread and is a plain state machine: it has no clock, no thread
//! and no guest memory of its own.
//!
//! The crate has two halves. The neutral half knows tokens, the order of arrivals, forward
//! progress, cancellation and statistics. An [`Abi`] knows one architecture's contract with its
//! guests: the control registers, the words in guest memory, the events, and when a vCPU may take
//! them. The neutral half asks two things of it, "may the guest be told now" and "tell it".
//!
//! | file | job |
//! |---|---|
//! | `abi` | the trait between the halves |
//! | `token` | tokens: their format, and where a vCPU's next one comes from |
//! | `arrivals` | the completion queue: the only part that other threads touch |
//! | `recent` | forward progress: pages made ready a moment ago |
//! | `queue` | faults in, ready pages out |
//! | `stats` | counters |
//! | `verify` | what must hold between two calls |
//! | `x86` | the Linux guest ABI for x86: the delivery of 2010 and today's |
#![forbid(unsafe_code)]

mod abi;
mod arrivals;
mod queue;
mod recent;
mod stats;
mod token;
mod verify;
pub mod x86;

pub use abi::{Abi, Guest, Prefault, Tell, Untold};
pub use arrivals::Completion;
pub use queue::{NotPresent, QUEUED_MAX, Queue};
pub use stats::{Stats, SwapIn};
pub use token::{Token, TokenFormat};
