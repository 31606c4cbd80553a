//! `std` or `loom`, chosen by `--cfg loom`.

#[cfg(loom)]
pub use loom::{
    hint::spin_loop,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{self, AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    },
    thread::{self, yield_now},
};
#[cfg(not(loom))]
pub use std::{
    hint::spin_loop,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{self, AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    },
    thread::{self, yield_now},
};
