//! Locks, grace periods and time for all crates.
//!
//! * [`shim`]: atomics, locks and threads from one place: `std`, or `loom` under `--cfg loom`, so
//!   that every lock-free protocol can be model-checked in its real code.
//! * [`Clock`]: the time is injected. Production uses [`HostClock`]; a seeded run uses
//!   [`VirtualClock`].
//! * [`LatencySetting`]: a latency that can be changed while a device works.
//! * [`Qsbr`]: which vCPUs may still hold a translation of which [`Blocks`] (the shoot-down
//!   protocol).
//! * [`Mutex`], [`RwLock`], [`Condvar`]: locks with a place in the [order of all
//!   locks](lock_order), which debug builds assert.
//! * [`CachePadded`], [`Striped`]: values on cache lines of their own, or one for each of several
//!   groups of threads.
//! * [`RangeLocks`]: the range locks of the stage-2 cursor, with their invalidation sequences.
//!
//! It imports no other crate of the workspace and has no `unsafe`.
#![forbid(unsafe_code)]

mod clock;
mod held;
mod latency_setting;
pub mod lock_order;
mod locks;
mod padded;
mod qsbr;
mod range_locks;
pub mod shim;
mod striped;
mod threads;
mod tlb_filter;

pub use clock::{Clock, HostClock, Nanos, VirtualClock};
pub use latency_setting::LatencySetting;
pub use locks::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, assert_may_wait, lock,
};
pub use padded::CachePadded;
pub use qsbr::{GracePeriod, KickAll, Qsbr, VcpuSlot};
pub use range_locks::{InvalidateSeq, RangeGuard, RangeLocks};
pub use striped::Striped;
pub use threads::join;
pub use tlb_filter::Blocks;
