//! Untouched pages that the VMM reads or writes whole. An access would fault, and each fault costs
//! two switches of threads.

use super::Source;
use super::shared::count;
use lacuna_addr::{Hva, HvaRange, PAGE_SIZE};
use lacuna_sys::Waiters;

impl Source {
    /// Whether each page of `range` was ever touched: an untouched page has zeros. `None`: only an
    /// access can tell.
    pub fn touched(&self, range: HvaRange) -> Option<Vec<bool>> {
        let pagemap = self.pagemap.as_ref()?;
        let is_guest = self.guest.start() <= range.start() && range.end() <= self.guest.end();
        is_guest.then(|| pagemap.touched(range).ok()).flatten()
    }

    /// Puts pages in place from `to` on, up to the first touched one. Returns their number.
    pub fn place(&self, to: Hva, pages: &[[u8; PAGE_SIZE]]) -> usize {
        if self.pagemap.is_none() || pages.is_empty() {
            return 0;
        }
        let Some(uffd) = self.uffd.upgrade() else {
            return 0;
        };
        let placed = uffd.place(pages, to, Waiters::Wake);
        let done = placed.map_or_else(|partial| partial.done, |()| pages.len());
        count(&self.shared.counters.first_touches, done as u64);
        done
    }
}
