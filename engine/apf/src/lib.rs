//! Asynchronous page faults of one x86 vCPU: a token's life, whatever the backend.
//!
//! A page that must come from elsewhere need not stop the vCPU. The guest is told that the page is
//! not present, with a *token*, and runs another process; when the page has come it is told that
//! the token is *ready*, and the first process retries its access.
//!
//! ```text
//! vCPU's thread                                 whoever brings the page
//! not_present(gfn) ─► Wait: as if there were no asynchronous faults
//!                  ─► Halt: the guest cannot be told now; a halt that interrupts still break
//!                  ─► Injected: the guest knows the token
//!                       └─ Claim ─────────────► complete(), or dropped
//!                                                 └─► done list ─► ring
//! poll() ◄────────────────────────────────────────────────┘
//!   prefault, leave the hash, tell the guest (if it was told before), end the halt
//! ```
//!
//! Everything but the done list belongs to the vCPU's thread and is a plain state machine: no
//! clock, no thread, no guest memory of its own; [`Guest`] is all it sees.
//!
//! | file | job |
//! |---|---|
//! | `abi` | feature bits, MSR numbers, tokens |
//! | `control` | the three MSRs and every rule that makes a write raise #GP |
//! | `delivery` | the two ways to tell a guest, that of 2010 and today's |
//! | `arrivals` | the done list: the only part that other threads touch |
//! | `recent` | forward progress: pages made ready a moment ago |
//! | `queue` | faults in, ready pages out |
//! | `verify` | what must hold between two calls |
//!
//! Sources: the Linux guest ABI (`Documentation/virt/kvm/x86/msr.rst`, `cpuid.rst`) and, for the
//! delivery that Linux has since dropped, the KVM Forum talk of 2010.
#![forbid(unsafe_code)]

mod abi;
mod arrivals;
mod control;
mod delivery;
mod guest;
mod queue;
mod recent;
mod stats;
mod verify;

pub use abi::{Features, Msr};
pub use arrivals::Claim;
pub use control::GeneralProtection;
pub use guest::{CpuState, Guest, Prefault, Unwritable};
pub use queue::{NotPresent, QUEUED_MAX, Queue};
pub use stats::{Stats, SwapIn};
