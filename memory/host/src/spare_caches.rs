//! Page caches of threads that are no vCPUs, between two operations.
//!
//! An operation takes a cache and puts it back. A cache for each operation would have to be
//! registered, under a lock of the host. One list for all threads would be a lock that they share:
//! vCPUs that fill their own pages take it twice a page. So there are several lists, and a thread
//! keeps to one of them.

use crate::host::lock;
use crate::per_cpu_pages::PerCpuPages;
use lacuna_sync::{CachePadded, Mutex, lock_order};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Lists. Threads get them in turns, so up to this number of threads share none.
const LISTS: usize = 16;

type List = Mutex<Vec<PerCpuPages>, lock_order::SpareCaches>;

#[derive(Default)]
pub(crate) struct SpareCaches([CachePadded<List>; LISTS]);

impl SpareCaches {
    fn own(&self) -> &List {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static LIST: usize = THREADS.fetch_add(1, Ordering::Relaxed) % LISTS;
        }
        &self.0[LIST.with(|list| *list)]
    }

    pub fn take(&self) -> Option<PerCpuPages> {
        lock(self.own()).pop()
    }

    pub fn put(&self, mut cache: PerCpuPages) {
        cache.forget_removed();
        lock(self.own()).push(cache);
    }

    /// Gives back the free frames of all caches here: a thread needs one.
    pub fn drain(&self) {
        for list in &self.0 {
            let caches = std::mem::take(&mut *lock(list));
            drop(caches);
        }
    }
}
