//! A value for each of several groups of threads, so that two threads rarely share a cache line.

use crate::padded::CachePadded;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of groups. Threads join them in turn, so up to this number of threads share none.
const GROUPS: usize = 16;

/// One `T` for each group of threads.
#[derive(Default)]
pub struct Striped<T>([CachePadded<T>; GROUPS]);

impl<T> Striped<T> {
    /// The value of the calling thread's group. A thread keeps its group.
    pub fn own(&self) -> &T {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static GROUP: usize = THREADS.fetch_add(1, Ordering::Relaxed) % GROUPS;
        }
        &self.0[GROUP.with(|group| *group)]
    }

    /// The values of all groups.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|value| &**value)
    }
}
