//! Guest memory without a hypervisor, for the tests of the processor crates (feature `testing`).

use crate::{Bus, HostPage, Stop};
use lacuna_addr::{Access, Gfn, PAGE_SIZE};
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// A guest memory of plain pages in the lowest 64 GiB. What is not there is a device access.
#[derive(Default)]
pub struct Ram {
    /// By frame number, as far as the highest page added.
    pages: Vec<Option<&'static Page>>,
    watched: BTreeSet<Gfn>,
    /// Pages that are not resident: touching one stops with [`Stop::Wait`].
    pub swapped: BTreeSet<Gfn>,
    /// Every [`Bus::code_written`], in order.
    pub code_written: Vec<Gfn>,
    /// Calls of [`Bus::page`].
    pub lookups: u64,
}

#[repr(align(4096))]
struct Page([AtomicU64; PAGE_SIZE / 8]);

impl Ram {
    /// The page at `gfn`, made of zeros where there is none yet.
    ///
    /// # Panics
    /// If it lies past 64 GiB.
    pub fn add(&mut self, gfn: Gfn) -> HostPage {
        assert!(
            gfn.get() < 1 << 24,
            "{gfn:?} lies past the memory a test can have"
        );
        let index = gfn.get() as usize;
        if self.pages.len() <= index {
            self.pages.resize(index + 1, None);
        }
        let page = self.pages[index].get_or_insert_with(|| {
            // Leaked, so that no `HostPage` can outlive it: tests are small and end soon.
            Box::leak(Box::new(Page(std::array::from_fn(|_| AtomicU64::new(0)))))
        });
        Self::host_page(page, self.watched.contains(&gfn))
    }

    fn host_page(page: &'static Page, watched: bool) -> HostPage {
        // SAFETY: a leaked page-aligned page of atomics: valid for ever, written only as atomics.
        unsafe { HostPage::new(NonNull::from(&page.0).cast(), true, watched) }
    }
}

// SAFETY: pages are never freed.
unsafe impl Bus for Ram {
    fn page(&mut self, gfn: Gfn, _access: Access) -> Result<HostPage, Stop> {
        self.lookups += 1;
        if self.swapped.contains(&gfn) {
            return Err(Stop::Wait);
        }
        match self.pages.get(gfn.get() as usize) {
            Some(Some(page)) => Ok(Self::host_page(page, self.watched.contains(&gfn))),
            _ => Err(Stop::Mmio(gfn.gpa())),
        }
    }

    fn watch_code(&mut self, gfn: Gfn) -> Result<(), Stop> {
        self.watched.insert(gfn);
        Ok(())
    }

    fn code_written(&mut self, gfn: Gfn) {
        self.watched.remove(&gfn);
        self.code_written.push(gfn);
    }
}
