//! The list of pages that the kernel has taken away.

use crate::region::{MmuNotifier, Region};
use lacuna_addr::BackingRange;
use lacuna_sync::{Mutex, lock, lock_order};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

/// The pages that the kernel has taken away, as far as the host knows.
#[derive(Default)]
pub(crate) struct Losses {
    pub list: Mutex<List, lock_order::LostLinuxPages>,
    /// The count of taken pages whose words say Lost.
    pub settled: AtomicU64,
}

#[derive(Default)]
pub(crate) struct List {
    /// All regions of Linux memory.
    pub regions: Vec<Arc<Region>>,
    /// The losses of existing VMs, in the order in which they were settled.
    pub lost: Vec<Loss>,
    /// The number of losses so far.
    pub count: usize,
}

/// Consecutive pages that were settled together.
pub(crate) struct Loss {
    /// The number of earlier losses.
    pub number: usize,
    pub pages: BackingRange,
    /// Whether a vCPU may have read them: no fetch was in flight.
    pub read: bool,
    pub owner: Weak<dyn MmuNotifier>,
}

impl Loss {
    /// Adds the pages of `next`, if one entry can describe both. Returns whether it can.
    pub fn join(&mut self, next: &Self) -> bool {
        let alike = self.read == next.read && self.owner.ptr_eq(&next.owner);
        let joined = self.pages.join(next.pages).filter(|_| alike);
        self.pages = joined.unwrap_or(self.pages);
        joined.is_some()
    }
}

/// The losses that a reader has looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SeenLosses {
    pub(super) count: u64,
    pub(super) listed: usize,
}

impl SeenLosses {
    /// Whether the reader has looked at all of `count` losses
    /// ([`Host::losses`](crate::Host::losses)).
    #[inline]
    pub const fn is_all(self, count: u64) -> bool {
        self.count == count
    }
}

impl Losses {
    pub fn add(&self, region: Arc<Region>) {
        lock(&self.list).regions.push(region);
    }

    pub fn remove(&self, region: &Region) {
        let mut list = lock(&self.list);
        list.regions.retain(|other| !std::ptr::eq(&**other, region));
        // The vCPUs of dropped notifiers are gone, and nothing asks for their losses.
        list.lost.retain(|loss| loss.owner.strong_count() > 0);
    }
}
