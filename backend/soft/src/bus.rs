//! A vCPU's access to memory: the stage-2 walk, and the fault path if the walk fails.

use crate::error::SoftError;
use crate::mmu::Format;
use crate::stall::{FaultKind, SAMPLED};
use crate::vm::Vm;
use lacuna_addr::{Access, Gfn, Level, PAGE_SHIFT};
use lacuna_cpu::{Bus, HostPage, Stop, Stores};
use lacuna_host::{LostPage, Ticket};
use lacuna_mmu::{Mmu, MmuFormat, Outcome, Page, RingSpace, VcpuMmu};
use lacuna_stage2::{Shootdown, Walk};
use std::sync::Arc;
use tracing::trace;

/// An access that stopped because its page is not resident.
pub(crate) struct PageFault {
    pub(crate) gfn: Gfn,
    pub(crate) access: Access,
    pub(crate) ticket: Ticket,
    pub(crate) origin: Origin,
}

/// The origin of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Swap.
    Swap,
    /// The page source: the page was never provided.
    Source,
}

/// Why an instruction has stopped, with the object of its wait.
pub(crate) enum Blocked {
    /// The page is not resident. The instruction waits for its ticket.
    Page(PageFault),
    /// The page is not at hand, and its slot exits: the VMM provides the page, or brings it back.
    NotAtHand(Gfn, Access),
    /// No frame is free. The instruction waits for reclaim.
    Memory,
    /// An invalidation is in progress near the page. The instruction waits for its end.
    Busy,
    /// The vCPU's dirty ring has reached its soft limit. The vCPU waits until entries are reset.
    RingFull,
    /// The content of this page is lost. Waiting does not help.
    Lost(Gfn, Access, LostPage),
    /// No table page is free for this page, for this reason. Waiting does not help.
    NoTables(Gfn, Access, String),
}

/// One vCPU's bus, to memory that tables in the format `F` map.
pub(crate) struct SoftBus<F> {
    vm: Arc<Vm>,
    mmu: Arc<Mmu<F>>,
    index: usize,
    vcpu_mmu: VcpuMmu,
    pub(crate) blocked: Option<Blocked>,
    /// Faults so far.
    faults: u64,
}

impl<F: Format> SoftBus<F> {
    pub(crate) fn new(vm: Arc<Vm>, index: usize) -> Result<Self, SoftError> {
        let mmu = F::of(&vm.mmu).ok_or(SoftError::Processor(vm.config.arch))?;
        let mmu = Arc::clone(mmu);
        let vcpu_mmu = mmu.vcpu_mmu()?;
        Ok(Self {
            vm,
            mmu,
            index,
            vcpu_mmu,
            blocked: None,
            faults: 0,
        })
    }
}

impl<F: MmuFormat> SoftBus<F> {
    pub(crate) fn vcpu_mmu(&mut self) -> &mut VcpuMmu {
        &mut self.vcpu_mmu
    }

    /// Its tables.
    #[cfg(feature = "arm64")]
    pub(crate) fn mmu(&self) -> &Mmu<F> {
        &self.mmu
    }

    /// As [`Mmu::wait_for_page`].
    pub(crate) fn wait_for_page(&mut self, gfn: Gfn, access: Access) -> Option<Outcome> {
        self.mmu.wait_for_page(&mut self.vcpu_mmu, gfn, access)
    }

    /// Marks the pages logged by the vCPU. The vCPU calls this when it leaves guest code, before it
    /// goes offline: a harvesting thread waits only until the vCPU is offline.
    #[inline]
    pub(crate) fn leave(&mut self) {
        self.mmu.flush_log(&mut self.vcpu_mmu);
    }

    /// As [`Bus::page`], but ignores the soft limit of the dirty ring. For the few pages that the
    /// vCPU accesses outside guest code: the ring's reserve has entries for them.
    #[inline]
    pub(crate) fn page_now(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop> {
        let vm = &self.vm;
        // The note precedes the walk. So if a thread unmaps the leaf after the walk, it sees that
        // this vCPU's TLB may hold the leaf, and requests a flush.
        vm.qsbr().vcpu(self.index).note(gfn.block().get());
        if let Walk::Hit(hit) = self.mmu.walk(&mut self.vcpu_mmu, gfn, access) {
            let page = Page {
                pfn: hit.pfn,
                level: hit.level,
                writable: hit.writable,
            };
            return Ok(self.host_page(gfn, page));
        }
        self.fault(gfn, access)
    }

    /// Resolves a fault. Not inlined: otherwise `page_now` would set up this function's stack frame
    /// for every walk, even if the walk finds the page.
    #[inline(never)]
    fn fault(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop> {
        self.faults = self.faults.wrapping_add(1);
        if self.faults.is_multiple_of(SAMPLED) {
            return self.measured_fault(gfn, access);
        }
        self.unmeasured_fault(gfn, access)
    }

    /// As [`SoftBus::fault`], with its time.
    #[cold]
    fn measured_fault(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop> {
        let filled = self.vcpu_mmu.frames().zero_fills();
        let begun = self.vm.clock.now();
        let result = self.unmeasured_fault(gfn, access);
        let ended = self.vm.clock.now();
        if result.is_ok() {
            let kind = match self.vcpu_mmu.frames().zero_fills() == filled {
                true => FaultKind::Resident,
                false => FaultKind::ZeroFill,
            };
            let meter = &self.vm.meters[self.index];
            meter.times.faulted(ended.since(begun));
            let mut faults = meter.faults.lock().expect("no panic under this lock");
            faults.record(kind, begun, ended);
        }
        result
    }

    fn unmeasured_fault(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop> {
        match self.mmu.fault(&mut self.vcpu_mmu, gfn, access) {
            Outcome::Mapped(page) => Ok(self.host_page(gfn, page)),
            other => Err(self.stop(gfn, access, other)),
        }
    }

    #[cold]
    fn ring_full(&mut self) -> Stop {
        self.blocked = Some(Blocked::RingFull);
        Stop::Wait
    }

    // Always inlined. A call would return the page through memory, written by several stores. The
    // caller reads it by one wider load, which would wait about 12 ns for these stores.
    #[inline(always)]
    #[allow(
        unsafe_code,
        reason = "the one place where a frame becomes a page of a processor"
    )]
    fn host_page(&self, gfn: Gfn, page: Page) -> HostPage {
        let Page {
            pfn,
            level,
            writable,
        } = page;
        let base = self.vm.host.frame(pfn).as_non_null();
        let stores = Stores {
            allowed: writable,
            tracked: self.vm.code.is_write_tracked(gfn),
        };
        // SAFETY: `base` is the start of a pool frame. It is page-aligned, and it is readable and
        // writable as long as the host lives, which the VM holds. The frame belongs to this page at
        // least until this vCPU's next quiescent point, for two reasons. The vCPU was online when
        // it read or installed the leaf. Code that unmaps a leaf then requests a grace period, and
        // waits for this vCPU before the frame is reused (`Invalidation::finish`,
        // `Mmu::delete_slot`). All code that accesses frames of mapped pages uses atomics: that is
        // the contract of `Host::frame`.
        let page = unsafe { HostPage::new(base, stores) };
        if level == Level::L4K || self.vm.code.is_block_write_tracked(gfn) {
            return page;
        }
        // SAFETY: a leaf of 2 MiB or more maps the whole block around `gfn` to consecutive frames,
        // with the same rights for each page. It is unmapped by the rules above. The test above has
        // shown that no page of the block is write-tracked. If a page of it becomes write-tracked
        // later, `track_code` shoots down all TLBs before the page is decoded.
        unsafe { page.of_block() }
    }

    #[cold]
    pub(crate) fn stop(&mut self, gfn: Gfn, access: Access, outcome: Outcome) -> Stop {
        let vcpu = self.index;
        let page = |ticket: Ticket, origin| {
            let page = ticket.page().get() >> PAGE_SHIFT;
            trace!(target: "lacuna::fault", vcpu, gfn = gfn.get(), page, ?access, "fault");
            Blocked::Page(PageFault {
                gfn,
                access,
                ticket,
                origin,
            })
        };
        let (blocked, stop) = match outcome {
            Outcome::Busy => (Blocked::Busy, Stop::Wait),
            Outcome::Pending(ticket) => (page(ticket, Origin::Swap), Stop::Wait),
            Outcome::Missing(ticket) => (page(ticket, Origin::Source), Stop::Wait),
            Outcome::NotAtHand => (Blocked::NotAtHand(gfn, access), Stop::Wait),
            Outcome::NoMemory => (Blocked::Memory, Stop::Wait),
            Outcome::Mmio => return Stop::Mmio(gfn.gpa()),
            Outcome::Lost(page) => (Blocked::Lost(gfn, access, page), Stop::Lost),
            Outcome::NoTables(e) => (Blocked::NoTables(gfn, access, e.to_string()), Stop::Lost),
            Outcome::Mapped(_) => unreachable!("a mapped page stops nothing"),
        };
        self.blocked = Some(blocked);
        stop
    }
}

// SAFETY: `host_page` says why a page stays valid until the next quiescent point. Pages are
// returned only while the vCPU is online: `Entry` brings it online each time it enters the
// processor. If a grace period for this vCPU has begun since the last flush, `Entry` flushes the
// processor's TLB before it enters the processor again.
#[allow(unsafe_code, reason = "the vCPU's guest-memory fast path")]
unsafe impl<F: MmuFormat> Bus for SoftBus<F> {
    #[inline]
    fn page(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop> {
        match self.vcpu_mmu.space() {
            RingSpace::Free => self.page_now(gfn, access),
            RingSpace::SoftFull => Err(self.ring_full()),
        }
    }

    fn track_code(&mut self, gfn: Gfn) -> Result<(), Stop> {
        let vm = &self.vm;
        if vm.code.is_settled(gfn) {
            return Ok(());
        }
        vm.code.track(gfn);
        self.mmu.flush_log(&mut self.vcpu_mmu);
        // Any vCPU, this one included, may hold a writable TLB entry for the page: shoot down all
        // TLBs. This vCPU waits offline. If it waited online, two vCPUs that track pages at the
        // same time would wait for each other for ever.
        let qsbr = vm.qsbr();
        let grace = qsbr.request();
        qsbr.offline(self.index);
        Shootdown::wait(qsbr, grace);
        vm.code.settle(gfn);
        Err(Stop::Again)
    }

    fn code_written(&mut self, gfn: Gfn) {
        self.vm.code.written(gfn, self.index, self.vm.qsbr());
    }
}
