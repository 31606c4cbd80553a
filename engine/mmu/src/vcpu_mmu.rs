//! The MMU context of one vCPU: its own state between faults, so that vCPUs share nothing, and its
//! marks of written pages.

use crate::dirty::{Count, Counts, Delivery};
use crate::{Mmu, MmuFormat, Rmap};
use lacuna_addr::{Access, Gfn, Gpa};
use lacuna_host::{HostError, PerCpuPages};
use lacuna_slots::{Reader, RingProducer, RingSpace, Slot, dirty_ring};
use lacuna_stage2::{PmlLog, Translation, Walk};
use lacuna_sync::shim::Ordering;
use std::sync::Arc;
use tracing::trace;

/// The MMU context of one vCPU: its side of the fault path.
pub struct VcpuMmu {
    /// Finds slots in the newest snapshot.
    pub(crate) reader: Reader<Rmap>,
    /// Frames of its own, and the pages pinned by its current instruction.
    pub(crate) cache: PerCpuPages,
    pub(crate) marker: Marker,
    /// The pages for which its walks have set D, while the VM's vCPUs log.
    log: PmlLog,
}

/// Records the pages written by one vCPU.
pub(crate) struct Marker {
    /// The vCPU's dirty ring; `None` if the VM records in bitmaps.
    ring: Option<RingProducer>,
    /// Whether the ring had room after the last mark.
    space: RingSpace,
    counts: Arc<Counts>,
}

impl Marker {
    /// Marks a page whose leaf has W or D now. A call before the leaf has the bit would be wrong: a
    /// harvest in between would take the mark, and miss the write.
    #[inline]
    pub(crate) fn mark(&mut self, slot: &Slot<Rmap>, gfn: Gfn, why: Count) {
        self.counts.add(why, 1);
        let page = slot.page(gfn);
        match &mut self.ring {
            Some(ring) => {
                let space = ring.push(slot.id, page);
                self.note(space);
            }
            None => slot.attach.log().mark(page),
        }
    }

    /// Notes whether the ring has room.
    #[inline]
    fn note(&mut self, space: RingSpace) {
        if space == RingSpace::SoftFull && self.space == RingSpace::Free {
            trace!(target: "lacuna::mmu", "dirty ring is full");
        }
        self.space = space;
    }

    /// Marks pages for which the vCPU's walks have set D. `logged` has the newest first, and its
    /// last page is in `slot`. Begins at the end of `logged`, stops at the first page outside
    /// `slot`, and returns the rest of `logged`.
    #[inline]
    fn mark_logged<'l>(&mut self, slot: &Slot<Rmap>, logged: &'l [Gpa]) -> &'l [Gpa] {
        let (start, end) = (slot.gfns.start().get(), slot.gfns.pages());
        let pages = logged.iter().rev().map_while(|gpa| {
            let page = gpa.gfn().get().wrapping_sub(start);
            (page < end).then_some(page as usize)
        });
        let log = slot.attach.log();
        let count = match &mut self.ring {
            // The slot no longer logs, so these entries are discarded. Nothing is lost: logging is
            // enabled before the first D bit is cleared, and these pages have got their D back
            // since.
            _ if !log.is_on() => return &logged[..logged.len() - pages.count()],
            Some(ring) => {
                let count = ring.push_all(slot.id, pages);
                let space = ring.space();
                self.note(space);
                count
            }
            None => log.mark_all(pages),
        };
        self.counts.add(Count::Logged, count as u64);
        &logged[..logged.len() - count]
    }
}

impl<F: MmuFormat> Mmu<F> {
    /// The MMU context of a new vCPU.
    ///
    /// # Errors
    /// The budget cannot guarantee progress for one more vCPU.
    pub fn vcpu_mmu(&self) -> Result<VcpuMmu, HostError> {
        let cache = self.host.per_cpu_pages()?;
        let ring = match self.dirty.settled_delivery() {
            Delivery::Bitmap => None,
            Delivery::Ring { size, .. } => {
                let (producer, consumer) = dirty_ring(size);
                let mut rings = self.dirty.rings.lock().expect("no panic under this lock");
                rings.push(consumer);
                Some(producer)
            }
        };
        let counts = Arc::<Counts>::default();
        let mut all = self.dirty.counts.lock().expect("no panic under this lock");
        all.push(Arc::clone(&counts));
        Ok(VcpuMmu {
            reader: self.slots.reader(),
            cache,
            marker: Marker {
                ring,
                space: RingSpace::Free,
                counts,
            },
            log: PmlLog::new(),
        })
    }

    /// [`Stage2::walk`](lacuna_stage2::Stage2::walk), logged while the VM's vCPUs log. A full log
    /// is flushed during the walk; hardware would exit from the guest for it.
    #[inline]
    pub fn walk(&self, vcpu: &mut VcpuMmu, gfn: Gfn, access: Access) -> Walk {
        if !self.dirty.vcpus_log.load(Ordering::Relaxed) {
            return self.stage2.walk(gfn, access);
        }
        loop {
            if let Ok(walk) = self.stage2.walk_logged(gfn, access, &mut vcpu.log) {
                return walk;
            }
            vcpu.flush_full();
        }
    }

    /// Marks the pages that the vCPU has logged. Call it at every exit from guest code, *before*
    /// the vCPU goes offline in the VM's `Qsbr`: the harvesting thread waits only for that.
    #[inline]
    pub fn flush_log(&self, vcpu: &mut VcpuMmu) {
        if !vcpu.log.is_empty() {
            vcpu.flush();
        }
    }

    /// A fast page fault: handles a write fault that needs only W. Sets W without a lock, and marks
    /// the page.
    pub(crate) fn fast_page_fault(&self, vcpu: &mut VcpuMmu, gfn: Gfn) -> Option<Translation> {
        let hit = self.stage2.fast_page_fault(gfn)?;
        // Look the slot up again, because of this race: this vCPU finds the slot; another thread
        // moves the slot; this vCPU sets W in a leaf of the new slot at that place.
        if let Some(slot) = vcpu.reader.find(gfn) {
            vcpu.marker.mark(slot, gfn, Count::FastPageFault);
        }
        Some(hit)
    }
}

impl VcpuMmu {
    /// The faulting instruction has retired: reclaim may take its pages.
    pub fn retired(&mut self) {
        self.cache.unpin_all();
    }

    /// Its frames, for [`lacuna_host::Host::reclaim_direct`].
    pub fn frames(&mut self) -> &mut PerCpuPages {
        &mut self.cache
    }

    /// Whether the vCPU may continue in the guest. After [`RingSpace::SoftFull`] it must exit to
    /// its VMM, and must not enter the guest before this returns [`RingSpace::Free`].
    #[inline]
    pub fn space(&mut self) -> RingSpace {
        if self.marker.space == RingSpace::SoftFull
            && let Some(ring) = &mut self.marker.ring
        {
            self.marker.space = ring.space();
        }
        self.marker.space
    }

    /// Marks the pages of its full log.
    #[cold]
    fn flush_full(&mut self) {
        self.marker.counts.add(Count::LogFull, 1);
        trace!(target: "lacuna::mmu", "log is full");
        self.flush();
    }

    #[cold]
    fn flush(&mut self) {
        let Self {
            reader,
            marker,
            log,
            ..
        } = self;
        marker.counts.add(Count::Flush, 1);
        // One snapshot serves the whole log: a change of slots waits until all logs are flushed.
        let slots = reader.snapshot();
        let mut logged = log.take();
        while let [rest @ .., next] = logged {
            logged = match slots.find(next.gfn()) {
                Some(slot) => marker.mark_logged(slot, logged),
                // The slot was removed.
                None => rest,
            };
        }
    }
}
