//! Copies bytes into and out of pages, for code that is not a vCPU: image loading, the status page,
//! tests.
//!
//! The frame must not leave its page during a copy. Pins are not enough, because reclaim reads them
//! only at the beginning of a batch. So a copy isolates the frame while it runs, as a reclaimer
//! does.

use crate::core::Core;
use crate::error::HostError;
use crate::host::Host;
use crate::per_cpu_pages::PerCpuPages;
use crate::region::PageLocation;
use crate::resolve::{Frame, Resolution, small};
use crate::settled::TICK;
use lacuna_addr::{Access, BackingAddr, Level, PAGE_SIZE};
use lacuna_frames::{BlockNo, FramePtr, PageNo, PageState};
use lacuna_linux::LinuxMemory;

/// How often [`Host::peek`] tries a page that reclaim has isolated.
const PEEKS: usize = 64;

impl Host {
    /// Copies `bytes` to the pages from `addr` on, and waits for swapped-out pages. A vCPU's thread
    /// must not call it.
    pub fn copy_in(&self, addr: BackingAddr, bytes: &[u8]) -> Result<(), HostError> {
        let mut cache = self.borrow_cache();
        let copied = self.copy_in_with(addr, bytes, &mut cache);
        // After an error, a page may be pinned.
        cache.unpin_all();
        self.spare_caches.put(cache);
        copied
    }

    fn copy_in_with(
        &self,
        mut addr: BackingAddr,
        mut bytes: &[u8],
        cache: &mut PerCpuPages,
    ) -> Result<(), HostError> {
        while !bytes.is_empty() {
            let (offset, len) = within_page(addr, bytes.len());
            let (now, rest) = bytes.split_at(len);
            let is_filled = now
                .try_into()
                .is_ok_and(|content| self.core.fill_untouched(PageNo::of(addr), content, cache));
            if !is_filled {
                let copy = |frame: FramePtr<'_>| frame.write(offset, now);
                self.with_page(addr, Access::Write, cache, copy)?;
            }
            (addr, bytes) = (BackingAddr::new(addr.get().wrapping_add(len as u64)), rest);
        }
        Ok(())
    }

    /// Copies from the pages at `addr` on, and waits for swapped-out pages. Empty pages stay empty
    /// and read as zeros.
    pub fn copy_out(&self, addr: BackingAddr, out: &mut [u8]) -> Result<(), HostError> {
        let mut cache = self.borrow_cache();
        let copied = self.copy_out_with(addr, out, &mut cache);
        cache.unpin_all();
        self.spare_caches.put(cache);
        copied
    }

    fn copy_out_with(
        &self,
        mut addr: BackingAddr,
        mut out: &mut [u8],
        cache: &mut PerCpuPages,
    ) -> Result<(), HostError> {
        while !out.is_empty() {
            let (offset, len) = within_page(addr, out.len());
            let (now, rest) = out.split_at_mut(len);
            if self.core.reads_as_zeros(addr) {
                now.fill(0);
            } else {
                let copy = |frame: FramePtr<'_>| frame.read(offset, now);
                self.with_page(addr, Access::Read, cache, copy)?;
            }
            (addr, out) = (BackingAddr::new(addr.get().wrapping_add(len as u64)), rest);
        }
        Ok(())
    }

    /// Copies from the page at `addr`, up to the page's end, if the page is resident. Otherwise
    /// returns `None`, and does not bring the page in.
    pub fn peek(&self, addr: BackingAddr, out: &mut [u8]) -> Option<()> {
        let (offset, len) = within_page(addr, out.len());
        if len < out.len() {
            return None;
        }
        for _ in 0..PEEKS {
            let frame = match self.core.place_of(addr)? {
                PageLocation::Block(block) => Some(Frame {
                    pfn: block.frame_of(PageNo::of(addr)),
                    level: Level::L2M,
                }),
                PageLocation::Page(PageState::Resident { frame, .. }) => Some(small(frame)),
                PageLocation::Page(PageState::InPlace) => {
                    let read = |bytes: FramePtr<'_>| bytes.read(offset, out);
                    return self.core.while_in_place(PageNo::of(addr), read);
                }
                // A collapse of the page's block is in progress.
                PageLocation::Page(PageState::Collapsed) => None,
                PageLocation::Page(_) => return None,
            };
            let page = PageNo::of(addr);
            let read = |frame| {
                self.core
                    .while_isolated(frame, page, |bytes| bytes.read(offset, out))
            };
            if frame.and_then(read).is_some() {
                return Some(());
            }
            std::thread::yield_now();
        }
        None
    }

    fn with_page(
        &self,
        addr: BackingAddr,
        access: Access,
        cache: &mut PerCpuPages,
        mut copy: impl FnMut(FramePtr<'_>),
    ) -> Result<(), HostError> {
        loop {
            let seen = self.core.settled.generation();
            match self.resolve(addr, access, Level::L4K, cache) {
                Resolution::Ready(frame) => {
                    let copied = self.core.while_isolated(frame, PageNo::of(addr), |page| {
                        copy(page);
                        if access.is_write() {
                            self.mark_dirty(frame.pfn, Level::L4K);
                        }
                    });
                    if copied.is_some() {
                        cache.unpin_all();
                        return Ok(());
                    }
                    if !self.core.losses_are_settled() {
                        self.core.settle_losses();
                        continue;
                    }
                    // Isolated: the page was taken back during its write, or is about to be taken.
                    self.io.help(&self.core, seen, TICK);
                }
                Resolution::Pending(ticket) | Resolution::Missing(ticket) => self.wait(&ticket)?,
                Resolution::NoMemory => {
                    if self.reclaim_direct(cache)?.freed == 0 {
                        self.io.help(&self.core, seen, TICK);
                    }
                }
                Resolution::Busy => self.io.help(&self.core, seen, TICK),
                Resolution::Lost(lost) => return Err(lost.into()),
            }
        }
    }
}

impl Core {
    /// Whether the page has no frame and contains zeros.
    fn reads_as_zeros(&self, addr: BackingAddr) -> bool {
        let page = PageNo::of(addr);
        let Some(region) = self.regions.find(page) else {
            return false;
        };
        match region.place(page) {
            Some(PageLocation::Page(PageState::Empty)) => {
                let has_content = region.linux.as_ref().is_some_and(LinuxMemory::has_content);
                region.origin.is_none() && !has_content
            }
            place => place == Some(PageLocation::Page(PageState::Zero)),
        }
    }

    fn place_of(&self, addr: BackingAddr) -> Option<PageLocation> {
        let page = PageNo::of(addr);
        self.regions.find(page)?.place(page)
    }

    /// Runs `copy` while no other thread can take the frame from `page`. `None` if another thread
    /// has isolated the frame, or the page has left it.
    fn while_isolated(
        &self,
        frame: Frame,
        page: PageNo,
        copy: impl FnOnce(FramePtr<'_>),
    ) -> Option<()> {
        if self.frames.is_linux(frame.pfn) {
            return self.while_in_place(page, copy);
        }
        if frame.level != Level::L4K {
            let desc = self.frames.block(BlockNo::of(frame.pfn));
            let owner = desc.isolate()?;
            let own = owner == page.block_start();
            if own {
                copy(self.frames.pool.frame(frame.pfn));
            }
            desc.publish();
            return own.then_some(());
        }
        let frame = frame.pfn;
        let desc = self.frames.desc(frame);
        let owner = desc.isolate()?;
        if owner == page {
            copy(self.frames.pool.frame(frame));
        }
        desc.publish();
        (owner == page).then_some(())
    }
}

fn within_page(addr: BackingAddr, len: usize) -> (usize, usize) {
    let offset = addr.get() as usize & (PAGE_SIZE - 1);
    (offset, len.min(PAGE_SIZE - offset))
}
