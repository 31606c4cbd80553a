//! A vCPU's access to memory: the stage-2 walk, and the fault path if the walk fails.

use crate::Vm;
use lacuna_addr::{Access, Gfn, Gpa, Level};
use lacuna_cpu::{Bus, HostPage, Stop};
use lacuna_host::{HostError, Ticket};
use lacuna_mmu::{Outcome, Page, Room, VcpuMmu};
use lacuna_stage2::{Shootdown, Walk};
use std::sync::Arc;

/// An access to a page that is on its way.
pub(crate) struct PageFault {
    pub(crate) gfn: Gfn,
    pub(crate) access: Access,
    pub(crate) ticket: Ticket,
}

/// What a stopped instruction waits for.
pub(crate) enum Blocked {
    /// A page that is on its way.
    Page(PageFault),
    /// A free frame.
    Memory,
    /// An invalidation near its page to end.
    Busy,
    /// Its ring of dirty pages to be emptied.
    RingFull,
    /// Nothing: the content of this page is lost.
    Lost(Gpa, String),
    /// Nothing: no table page is free.
    NoTables(String),
}

/// One vCPU's bus.
pub(crate) struct SoftBus {
    vm: Arc<Vm>,
    index: usize,
    vcpu_mmu: VcpuMmu,
    pub(crate) blocked: Option<Blocked>,
}

impl SoftBus {
    pub(crate) fn new(vm: Arc<Vm>, index: usize) -> Result<Self, HostError> {
        let vcpu_mmu = vm.mmu.vcpu_mmu()?;
        Ok(Self {
            vm,
            index,
            vcpu_mmu,
            blocked: None,
        })
    }

    pub(crate) fn vcpu_mmu(&mut self) -> &mut VcpuMmu {
        &mut self.vcpu_mmu
    }

    /// The vCPU leaves guest code: marks the pages in its log before it counts as offline. The
    /// harvesting thread waits for this flush.
    #[inline]
    pub(crate) fn leave(&mut self) {
        self.vm.mmu.flush_log(&mut self.vcpu_mmu);
    }

    /// As [`Bus::page`], but works with a full ring, because rings have a reserve: for the few
    /// pages that the vCPU accesses outside guest code.
    #[inline]
    pub(crate) fn page_now(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop> {
        let vm = &self.vm;
        // Before the walk: a thread that unmaps what the walk finds must know that this vCPU may
        // hold it.
        vm.qsbr().vcpu(self.index).note(gfn.block());
        if let Walk::Hit(hit) = vm.mmu.walk(&mut self.vcpu_mmu, gfn, access) {
            let page = Page {
                pfn: hit.pfn,
                level: hit.level,
                writable: hit.writable,
            };
            return Ok(self.host_page(gfn, page));
        }
        self.fault(gfn, access)
    }

    /// Out of line: inside `page_now` its stack frame would cost each walk that hits.
    #[inline(never)]
    fn fault(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop> {
        match self.vm.mmu.fault(&mut self.vcpu_mmu, gfn, access) {
            Outcome::Mapped(page) => Ok(self.host_page(gfn, page)),
            other => Err(self.stop(gfn, access, other)),
        }
    }

    #[cold]
    fn ring_full(&mut self) -> Stop {
        self.blocked = Some(Blocked::RingFull);
        Stop::Wait
    }

    // Always inlined: a call would return the page through memory in pieces, and the caller, which
    // reads it as a whole, would wait 12 ns for the stores.
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
        let tracked = self.vm.code.is_write_tracked(gfn);
        // SAFETY: `base` is the start of a pool frame, page-aligned, readable and writable as long
        // as the host lives, which the VM holds. It stays *this page's* frame until the next
        // quiescent point: the leaf that named it was read, or installed, while this vCPU was
        // online. Code that unmaps it requests a grace period afterwards and waits for this vCPU
        // before the frame is reused (`Invalidation::finish`, `Mmu::delete_slot` and similar
        // calls). All code that accesses frames of mapped pages uses atomics (`lacuna_host`'s
        // contract for `frame`).
        let page = unsafe { HostPage::new(base, writable, tracked) };
        if level == Level::L4K || self.vm.code.is_block_write_tracked(gfn) {
            return page;
        }
        // SAFETY: a leaf of 2 MiB (or more) maps the block around `gfn` to as many consecutive
        // frames, all with its rights. It is unmapped, split and write-tracked by the same rules as
        // a page: before a newly tracked page is relied on, all TLB entries for it are shot down.
        // No page of it is write-tracked.
        unsafe { page.of_block() }
    }

    #[cold]
    fn stop(&mut self, gfn: Gfn, access: Access, outcome: Outcome) -> Stop {
        let (blocked, stop) = match outcome {
            Outcome::Busy => (Blocked::Busy, Stop::Wait),
            Outcome::Pending(ticket) | Outcome::Missing(ticket) => {
                let fault = PageFault {
                    gfn,
                    access,
                    ticket,
                };
                (Blocked::Page(fault), Stop::Wait)
            }
            Outcome::NoMemory => (Blocked::Memory, Stop::Wait),
            Outcome::Mmio => return Stop::Mmio(gfn.gpa()),
            Outcome::Lost(page) => (Blocked::Lost(gfn.gpa(), page.to_string()), Stop::Lost),
            Outcome::NoTables(e) => (Blocked::NoTables(e.to_string()), Stop::Lost),
            Outcome::Mapped(_) => unreachable!("a mapped page stops nothing"),
        };
        self.blocked = Some(blocked);
        stop
    }
}

// SAFETY: see `host_page`. Frames are given out only while the vCPU is online (`Vcpu::step` brings
// it online around every entry of the processor), and the processor's TLB is flushed before it
// comes online again after any grace period.
#[allow(unsafe_code, reason = "the vCPU's guest-memory fast path")]
unsafe impl Bus for SoftBus {
    #[inline]
    fn page(&mut self, gfn: Gfn, access: Access) -> Result<HostPage, Stop> {
        match self.vcpu_mmu.room() {
            Room::Yes => self.page_now(gfn, access),
            Room::SoftFull => Err(self.ring_full()),
        }
    }

    fn track_code(&mut self, gfn: Gfn) -> Result<(), Stop> {
        let vm = &self.vm;
        if vm.code.is_settled(gfn) {
            return Ok(());
        }
        vm.code.track(gfn);
        vm.mmu.flush_log(&mut self.vcpu_mmu);
        // Any vCPU, this one too, may hold a writable TLB entry. Wait offline: two vCPUs that track
        // pages at the same time must not wait for each other.
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
