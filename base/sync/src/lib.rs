//! How Lacuna waits, counts and tells the time.
//!
//! * [`shim`]: atomics, locks and threads from one place: `std`, or `loom` under `--cfg loom`, so
//!   that every lock-free protocol can be model-checked as it is written.
//! * [`Clock`]: time is injected. Production uses [`HostClock`]; a seeded run uses
//!   [`VirtualClock`].
//! * [`LatencySetting`]: a latency that can be changed while a device works.
//! * [`Qsbr`]: which vCPUs may still hold a translation of which [`Blocks`] (the shoot-down
//!   protocol).
//! * [`CachePadded`]: cache lines of one's own.
//! * [`RangeLocks`]: the range lock of the stage-2 cursor with its invalidation sequence.
//!
//! Imports nothing of ours. No `unsafe`.
#![forbid(unsafe_code)]

mod clock;
mod latency_setting;
mod padded;
mod qsbr;
mod range_locks;
pub mod shim;
mod tlb_filter;

pub use clock::{Clock, HostClock, Nanos, VirtualClock};
pub use latency_setting::LatencySetting;
pub use padded::CachePadded;
pub use qsbr::{GracePeriod, KickAll, Qsbr, VcpuSlot};
pub use range_locks::{InvalidateSeq, RangeGuard, RangeLocks};
pub use tlb_filter::Blocks;
