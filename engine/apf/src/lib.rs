//! Asynchronous page faults of one vCPU, independent of backend and architecture.
//!
//! A vCPU need not wait for an absent page. The guest gets the event *page-not-present* with a
//! *token*, and runs another process. When the page has arrived, the guest gets *page-ready* for
//! the token, and the first process retries its access.
//!
//! ```text
//! vCPU's thread                                 the thread that brings the page
//! not_present(gfn) ─► Wait: the vCPU waits, as if there were no asynchronous faults
//!                  ─► Halt: the guest got no event for this fault; the vCPU halts until
//!                  │        the page has arrived or an interrupt can be taken
//!                  ─► Injected: the guest knows the token
//!                       └─ Completion ────────► complete(), or dropped
//!                                                 └─► completion queue ─► kick the vCPU
//! poll() ◄────────────────────────────────────────────────┘
//!   for each page: remove it from the hash, prefault it, deliver page-ready
//!   (only if the guest has the token), end the halt
//! ```
//!
//! A backend has one [`Queue`] for each vCPU, and implements the guest traits for that vCPU:
//! [`Guest`], [`SharedWords`], and its architecture's trait, for example [`x86::Guest`]. Other
//! threads touch only the completion queue. The rest of a [`Queue`] is a state machine on the
//! vCPU's thread. It has no clock, no thread and no guest memory of its own: its caller passes the
//! time and the guest.
//!
//! The crate has two halves. The neutral half handles tokens, the order of arrivals, forward
//! progress, cancellation and statistics. An [`Abi`] implements one architecture's contract with
//! its guests: the control registers, the words in guest memory, the events, and when a vCPU may
//! take them. The neutral half asks the [`Abi`] whether an event may be delivered now, and delivers
//! it by the [`Abi`].
//!
//! | file | job |
//! |---|---|
//! | `abi` | the traits between the halves |
//! | `token` | the format of tokens, and the next token of a vCPU |
//! | `arrivals` | the completion queue: the only part that other threads touch |
//! | `recent` | forward progress: if a page faults again just after it was made ready, wait |
//! | `poll_first` | whether to poll for a page before the guest is notified |
//! | `queue` | [`Queue`]: takes faults, delivers ready pages |
//! | `stats` | counters |
//! | `verify` | checks the invariants that hold between two calls |
//! | `x86` | Linux's guest ABI for x86: delivery by exceptions (2010) and by interrupt (today) |
//! | `arm64` | the two published forms for arm64: data aborts (RFCv2); SDEI and interrupt (v4) |
#![forbid(unsafe_code)]

mod abi;
pub mod arm64;
mod arrivals;
mod poll_first;
mod queue;
mod recent;
mod stats;
mod token;
mod verify;
pub mod x86;

pub use abi::{Abi, Deliver, Guest, NotDelivered, Prefault, SharedWords, Unwritable};
pub use arrivals::Completion;
pub use poll_first::POLL_NS;
pub use queue::{NotPresent, QUEUED_MAX, Queue};
pub use stats::{Stats, SwapIn};
pub use token::{Token, TokenFormat};
