//! How many pages a read from swap brings: the window of read-ahead.
//!
//! It follows the guest as Linux's does (`swapin_nr_pages`): it grows while pages that were read
//! ahead are used, or while faults are on adjacent pages. Otherwise it is halved from read to read,
//! so random accesses soon read nothing ahead. All regions of the host share it.

use lacuna_frames::PageNo;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The window of the next read.
pub(crate) struct ReadAheadWindow {
    /// The most pages of one read, a power of two; 1: no neighbours.
    max: AtomicU32,
    /// The pages of the last read.
    window: AtomicU32,
    /// Pages that were used since the last read.
    hits: AtomicU32,
    /// The page of the last read.
    last: AtomicU64,
}

impl Default for ReadAheadWindow {
    fn default() -> Self {
        Self {
            max: AtomicU32::new(1),
            window: AtomicU32::new(1),
            hits: AtomicU32::new(0),
            last: AtomicU64::new(0),
        }
    }
}

impl ReadAheadWindow {
    /// Sets the most pages of one read, a power of two; 1: no neighbours.
    pub fn set_max(&self, pages: u32) {
        self.max.store(pages, Ordering::Relaxed);
    }

    /// Whether reads may bring neighbours.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.max.load(Ordering::Relaxed) > 1
    }

    /// A page that was read ahead is used.
    pub fn hit(&self) {
        self.hits.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of pages of a read for `page`, a power of two.
    pub fn next(&self, page: PageNo) -> u32 {
        let last = self.last.swap(page.get(), Ordering::Relaxed);
        let earned = match self.hits.swap(0, Ordering::Relaxed) {
            0 if page.get().abs_diff(last) == 1 => 2,
            0 => 1,
            hits => (hits + 2).next_power_of_two(),
        };
        let least = self.window.load(Ordering::Relaxed) / 2;
        let window = earned.max(least).min(self.max.load(Ordering::Relaxed));
        self.window.store(window, Ordering::Relaxed);
        window
    }
}
