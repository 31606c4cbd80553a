//! Page caches for other threads than vCPUs', between two operations.
//!
//! An operation takes a cache and puts it back, because a new cache has to be registered under a
//! lock of the host. vCPUs that fill their own pages do this for each page. With one list for all
//! threads, they would contend for its lock. So each group of threads has a list.

use crate::per_cpu_pages::PerCpuPages;
use lacuna_sync::{Mutex, Striped, lock, lock_order};

#[derive(Default)]
pub(crate) struct SpareCaches(Striped<Mutex<Vec<PerCpuPages>, lock_order::SpareCaches>>);

impl SpareCaches {
    pub fn take(&self) -> Option<PerCpuPages> {
        lock(self.0.own()).pop()
    }

    pub fn put(&self, mut cache: PerCpuPages) {
        cache.forget_removed();
        lock(self.0.own()).push(cache);
    }

    /// Gives back the free frames of all these caches: a thread needs one.
    pub fn drain(&self) {
        for list in self.0.iter() {
            let caches = std::mem::take(&mut *lock(list));
            drop(caches);
        }
    }
}
