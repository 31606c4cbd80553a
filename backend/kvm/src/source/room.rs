//! How the page source's thread evicts pages, and puts pages in place.
//!
//! UNSAFETY: as in `source`.

use super::swap::{CLUSTER, Content, NotWritten};
use super::{Page, RETRY, Worker, count};
use lacuna_addr::PAGE_SIZE;
use lacuna_swap::SwapError;
use lacuna_sys::Errno;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// The number of refused pages that end one attempt to make room.
const REFUSALS_MAX: usize = 8;
/// How long the swap device may refuse every write.
const REFUSED_MAX: Duration = Duration::from_secs(2);

static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// Why a page cannot be put in place.
#[derive(Debug)]
pub enum NotPlaced {
    /// Linux refuses.
    Kernel(Errno),
    /// The swap device does not have its bytes.
    Device(SwapError),
}

impl Worker {
    pub fn place(&mut self, page: Page) -> Result<(), NotPlaced> {
        let (guest, store) = (self.memory.guest.page(page), self.memory.store.page(page));
        // SAFETY: 1. the store is registered with this descriptor.
        match unsafe { self.uffd.shift(store, guest) } {
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(NotPlaced::Kernel(errno)),
            Ok(()) => {
                // It has an entry if Linux did not take its memory after the write.
                self.swap.arrived(page);
                self.pages.charge(self.swap.charged());
                return Ok(());
            }
        }
        let content = self.swap.read(page).map_err(NotPlaced::Device)?;
        let bytes = match &content {
            Content::Bytes(bytes) => &bytes.0,
            // The page source has provided it, so its bytes must be somewhere.
            Content::Untouched if self.provider.is_some() => {
                return Err(NotPlaced::Kernel(Errno::NOENT));
            }
            Content::Zeros | Content::Untouched => &ZEROS,
        };
        self.uffd.copy(bytes, guest).map_err(NotPlaced::Kernel)?;
        if let (Content::Untouched, None) = (&content, &self.provider) {
            count(&self.shared.counters.first_touches, 1);
        }
        self.swap.arrived(page);
        self.pages.charge(self.swap.charged());
        Ok(())
    }

    /// Evicts pages until the guest is within its budget. Pages in flight count as resident.
    pub fn make_room(&mut self) {
        let mut refusals = 0;
        while let Some(page) = self.pages.victim() {
            let (guest, store) = (self.memory.guest.page(page), self.memory.store.page(page));
            // SAFETY: 1. the guest's memory is registered with this descriptor.
            match unsafe { self.uffd.shift(guest, store) } {
                Ok(()) => {
                    self.pages.evicted(page);
                    count(&self.shared.counters.evicted, 1);
                }
                // The page is pinned, or another thread changes its mapping.
                Err(Errno::BUSY | Errno::AGAIN | Errno::NOMEM) => {
                    self.pages.refused(page);
                    count(&self.shared.counters.refused, 1);
                    refusals += 1;
                    if refusals == REFUSALS_MAX {
                        break;
                    }
                }
                Err(errno) => {
                    self.pages.refused(page);
                    return self.fail(format!("cannot evict guest page {page}: {errno}"));
                }
            }
        }
        self.swap_out();
    }

    /// Writes the oldest pages on probation to the swap device until the guest is within its
    /// budget. While the device refuses, only the pages arrive that are on their way, which the
    /// budget has counted already; their entries become free.
    fn swap_out(&mut self) {
        let mut refused_since = None;
        loop {
            let pages = self.pages.excess(CLUSTER);
            if pages.is_empty() {
                return;
            }
            let written = self.swap.write(&pages, &self.memory.store);
            let done = written
                .as_ref()
                .map_or_else(|failed| failed.done, |()| pages.len());
            self.pages.swapped_out(done);
            self.pages.charge(self.swap.charged());
            if done > 0 {
                refused_since = None;
            } else if let Err(NotWritten { error, .. }) = written {
                let since = *refused_since.get_or_insert_with(Instant::now);
                if self.shared.kicks.is_stopping() || self.shared.quit.load(Ordering::Acquire) {
                    return;
                }
                if since.elapsed() < REFUSED_MAX {
                    self.supply_due();
                    thread::sleep(RETRY);
                    continue;
                }
                return self.fail(format!(
                    "cannot write to swap: {}: {error}; give it more space, or the guest a larger \
                     budget",
                    self.swap.describe()
                ));
            }
        }
    }
}
