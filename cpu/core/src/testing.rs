//! Guest memory without a hypervisor, for the tests of the processor crates (feature `testing`).

use crate::{Bus, HostPage, Span, Stop, Stores, Wake};
use lacuna_addr::{Access, Gfn, Level, PAGE_SIZE};
use lacuna_sync::shim::Mutex;
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Wakes no vCPU, but records the requests to wake one.
#[derive(Default)]
pub struct Wakes(Mutex<Vec<usize>>);

impl Wake for Wakes {
    fn wake(&self, index: usize) {
        self.0.lock().expect("no panic under this lock").push(index);
    }
}

impl Wakes {
    /// The vCPUs woken since the last call, in order.
    ///
    /// # Panics
    /// If a thread has panicked in a call of this type.
    pub fn take(&self) -> Vec<usize> {
        std::mem::take(&mut self.0.lock().expect("no panic under this lock"))
    }
}

/// Frames of a block.
const BLOCK: u64 = Level::L2M.pages();

/// A guest memory of plain pages in the lowest 64 GiB. An access to a missing page is a device
/// access. A clone has the same pages, for a second processor.
#[derive(Clone, Default)]
pub struct Ram {
    /// The pages by frame number, up to the highest page added.
    pages: Vec<Option<&'static Page>>,
    tracked: BTreeSet<Gfn>,
    /// The first frames of blocks. While no page of a block is write-tracked, its pages are given
    /// out with [`Span::Block`].
    blocks: BTreeSet<u64>,
    /// Swapped-out pages: an access to one stops with [`Stop::Wait`].
    pub swapped: BTreeSet<Gfn>,
    /// Every [`Bus::code_written`], in order.
    pub code_written: Vec<Gfn>,
    /// Calls of [`Bus::page`].
    pub lookups: u64,
    /// Frames given out since [`Ram::take_back`], and first frames of blocks.
    handed_out: BTreeSet<Gfn>,
}

#[repr(align(4096))]
struct Page([AtomicU64; PAGE_SIZE / 8]);

impl Ram {
    /// The page at `gfn`. If there is none, makes a page of zeros.
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
        let page = *page;
        self.host_page(gfn, page)
    }

    /// The 2 MiB from `gfn` on, made of zeros, as one block.
    ///
    /// # Panics
    /// If `gfn` is not the first of a block, or there is a page already.
    pub fn add_block(&mut self, gfn: Gfn) {
        assert!(gfn.get().is_multiple_of(BLOCK), "{gfn:?} is inside a block");
        let zeros = |_| Page(std::array::from_fn(|_| AtomicU64::new(0)));
        let memory: &'static [Page] = Box::leak((0..BLOCK).map(zeros).collect());
        let (first, end) = (gfn.get() as usize, (gfn.get() + BLOCK) as usize);
        self.pages.resize(self.pages.len().max(end), None);
        for (slot, page) in self.pages[first..end].iter_mut().zip(memory) {
            assert!(slot.replace(page).is_none(), "a page is there already");
        }
        self.blocks.insert(gfn.get());
    }

    /// Acts as if the host took every page back. The processor's owner must then flush its TLBs.
    pub fn take_back(&mut self) {
        self.handed_out.clear();
    }

    /// Whether a processor may hold the page in a TLB: it was given out since [`Ram::take_back`],
    /// alone or with its block.
    pub fn is_handed_out(&self, gfn: Gfn) -> bool {
        let first = Gfn::new(gfn.get() & !(BLOCK - 1)).expect("below a frame");
        self.handed_out.contains(&gfn)
            || self.blocks.contains(&first.get()) && self.handed_out.contains(&first)
    }

    fn host_page(&self, gfn: Gfn, page: &'static Page) -> HostPage {
        let first = gfn.get() & !(BLOCK - 1);
        // SAFETY: a leaked page-aligned page of atomics: valid for ever, written only as atomics.
        // A block's pages were leaked as one piece.
        unsafe {
            let tracked = self.tracked.contains(&gfn);
            let stores = Stores {
                allowed: true,
                tracked,
            };
            let page = HostPage::new(NonNull::from(&page.0).cast(), stores);
            let block = first..first + BLOCK;
            if self.blocks.contains(&first)
                && !self.tracked.iter().any(|gfn| block.contains(&gfn.get()))
            {
                page.of_block()
            } else {
                page
            }
        }
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
            Some(Some(page)) => {
                let page = self.host_page(gfn, page);
                let first = Gfn::new(gfn.get() & !(BLOCK - 1)).expect("below a frame");
                self.handed_out.insert(match page.span() {
                    Span::Page => gfn,
                    Span::Block => first,
                });
                Ok(page)
            }
            _ => Err(Stop::Mmio(gfn.gpa())),
        }
    }

    fn track_code(&mut self, gfn: Gfn) -> Result<(), Stop> {
        self.tracked.insert(gfn);
        Ok(())
    }

    fn code_written(&mut self, gfn: Gfn) {
        self.tracked.remove(&gfn);
        self.code_written.push(gfn);
    }
}
