//! Removes a region of Linux memory.
//!
//! ```text
//! page words -> Gone        a fault from here on resolves to Lost
//! invalidate                no vCPU has a page any more
//! wait for users            nor has another thread; no thread touches a page
//! settle losses             pages of it that the kernel has taken away are recorded
//! unregister, new mapping   threads that sleep on the userfaultfd wake, the bytes are gone
//! the addresses are free, at once or when no handler outside may fill them any more
//! ```

use crate::core::Core;
use crate::error::HostError;
use crate::host::Host;
use crate::region::Region;
use crate::removal::Removal;
use crate::settled::TICK;

impl Host {
    /// As [`Host::remove_region`], for a region already removed from the list.
    pub(crate) fn remove_linux(&self, region: &Region) -> Result<(), HostError> {
        loop {
            let seen = self.core.settled.generation();
            let mut busy = 0;
            for (page, word) in region.tail() {
                let removal = self.core.remove_page(page, word, &mut Vec::new());
                busy += usize::from(removal == Removal::Busy);
            }
            if busy == 0 {
                break;
            }
            self.io.hurry(region);
            self.io.help(&self.core, seen, TICK);
        }
        region.notifier.invalidate(&[region.range()]);
        self.core.release_linux(region);
        self.spare_caches.drain();
        Ok(())
    }
}

impl Core {
    fn release_linux(&self, region: &Region) {
        let Some(linux) = &region.linux else { return };
        linux.wait_for_users();
        linux.outside.iter().for_each(|outside| outside.end());
        self.forget_linux(region);
        // The new mapping ends the registration in any case.
        let unregistered = linux.unregister(0..region.range().pages());
        debug_assert!(unregistered.is_ok(), "{unregistered:?}");
        let pages = region.range().pages() as usize;
        self.give_linux(linux.first, pages, linux.outside.as_deref());
    }
}
