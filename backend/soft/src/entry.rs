//! Enters a processor between two quiescent points, with a TLB without stale entries.

mod losses;

use crate::bus::{Blocked, SoftBus};
use crate::code::Stale;
use crate::error::SoftError;
use crate::meter::Meter;
use crate::platform::Platform;
use crate::step::{Step, Wait};
use crate::vm::Vm;
use lacuna_addr::{Access, Gfn};
use lacuna_cpu::{Exit, HostPage, Processor, Stop};
use lacuna_host::{SeenLosses, Ticket, major_faults};
use lacuna_machine::VcpuError;
use lacuna_mmu::Outcome;
use lacuna_sync::{GracePeriod, Qsbr, VcpuSlot};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A processor with its bus.
pub struct Entry<P: Platform> {
    pub(crate) vm: Arc<Vm>,
    pub(crate) index: usize,
    pub(crate) cpu: P,
    pub(crate) bus: SoftBus<P::Format>,
    /// The error of an access to the words shared with the guest, if there is memory but its page
    /// cannot be brought in.
    pub(crate) failed: Option<VcpuError>,
    /// The error after the kernel has taken away memory of the vCPU: see `losses`.
    pub(crate) lost: Option<VcpuError>,
    /// An exit of the processor that needs a page first. The next step handles it again.
    pub(crate) again: Option<P::Own>,
    /// The losses of Linux memory known to this vCPU.
    pub(crate) seen: SeenLosses,
    /// The grace period at which the TLB was last known to have no stale entry.
    flushed: GracePeriod,
}

/// An online vCPU. Drop brings it offline, also after a panic: shoot-downs must not wait for an
/// ended thread.
struct Online<'a> {
    qsbr: &'a Qsbr,
    index: usize,
}

impl Drop for Online<'_> {
    fn drop(&mut self) {
        self.qsbr.offline(self.index);
    }
}

/// Why a page is not available at once.
pub(crate) enum Absent {
    /// There is no memory, or no writable memory.
    NoMemory,
    /// The page is not resident. It arrives after a thread has started the ticket.
    Pending(Ticket),
    /// Another operation on the page is in progress, for a moment.
    Busy,
}

impl<P: Platform> Entry<P> {
    pub(crate) fn new(
        vm: Arc<Vm>,
        index: usize,
        fabric: Arc<P::Fabric>,
    ) -> Result<Self, SoftError> {
        let seen = vm.host.seen_losses();
        Ok(Self {
            lost: None,
            again: None,
            seen,
            cpu: P::new(index, fabric, Arc::clone(&vm.clock)),
            bus: SoftBus::new(Arc::clone(&vm), index)?,
            vm,
            index,
            failed: None,
            flushed: GracePeriod::default(),
        })
    }

    /// The processor, between two steps.
    pub fn processor(&mut self) -> &mut P {
        &mut self.cpu
    }

    pub(crate) fn meter(&self) -> &Meter {
        &self.vm.meters[self.index]
    }

    /// Handles the requests of other threads to this vCPU.
    pub(crate) fn handle_requests(&mut self) {
        if self.vm.qsbr().vcpu(self.index).take() & VcpuSlot::CODE == 0 {
            return;
        }
        match self.vm.code.take(self.index) {
            Stale::All => self.cpu.drop_all_code(),
            Stale::Pages(pages) => pages.into_iter().for_each(|gfn| self.cpu.drop_code(gfn)),
        }
    }

    /// Runs guest code for about `fuel` instructions. In Linux memory, counts the pages that Linux
    /// reads meanwhile: no page word has said that they had left.
    pub(crate) fn run(&mut self, fuel: u64) -> Exit<P::Own> {
        let faults = |vm: &Vm| vm.backing.as_ref().map_or(0, |_| major_faults());
        let before = faults(&self.vm);
        let exit = self.online(|cpu, bus, slot| cpu.run(bus, slot, fuel));
        let read = faults(&self.vm) - before;
        if read > 0 {
            let count = &self.meter().major_faults;
            count.fetch_add(read, Ordering::Relaxed);
        }
        exit
    }

    /// Runs one instruction while all other vCPUs are stopped.
    pub(crate) fn run_alone(&mut self) -> Exit<P::Own> {
        let qsbr = self.vm.qsbr();
        self.vm.exclusive.alone(qsbr, self.index, || {
            let grace = qsbr.online(self.index);
            let _online = Online {
                qsbr,
                index: self.index,
            };
            let slot = qsbr.vcpu(self.index);
            flush_since(&mut self.cpu, slot, &mut self.flushed, grace);
            let exit = self.cpu.run_exclusive(&mut self.bus, slot);
            self.bus.leave();
            exit
        })
    }

    /// Calls `touch` with the page `gfn`, if this needs no wait.
    pub(crate) fn with_page<R>(
        &mut self,
        gfn: Gfn,
        access: Access,
        touch: impl FnOnce(HostPage) -> R,
    ) -> Result<R, Absent> {
        let touched = self.provided_page(gfn, access, touch);
        touched.map_err(|absent| absent.unwrap_or_else(|| self.absent(gfn, access)))
    }

    /// As [`Entry::with_page`]. `Err(None)`: the page is not at hand, in a slot that exits. The
    /// source is not asked, and no read begins.
    pub(crate) fn provided_page<R>(
        &mut self,
        gfn: Gfn,
        access: Access,
        touch: impl FnOnce(HostPage) -> R,
    ) -> Result<R, Option<Absent>> {
        match self.online(|_, bus, _| bus.page_now(gfn, access).map(touch)) {
            Ok(touched) => Ok(touched),
            Err(Stop::Mmio(_)) => Err(Some(Absent::NoMemory)),
            Err(_) => Err(match self.bus.blocked.take() {
                Some(Blocked::Page(fault)) => Some(Absent::Pending(fault.ticket)),
                Some(Blocked::NotAtHand(..)) => None,
                _ => Some(Absent::Busy),
            }),
        }
    }

    /// The wait for the page `gfn`, if it is not resident.
    pub(crate) fn wait_for(&mut self, gfn: Gfn, access: Access) -> Option<Step> {
        match self.with_page(gfn, access, |_| ()) {
            Err(Absent::Pending(ticket)) => Some(Step::Wait(Wait::Page(ticket))),
            // If another thread fills or takes the page at this moment, the access itself waits.
            Ok(()) | Err(Absent::NoMemory | Absent::Busy) => None,
        }
    }

    /// The wait for a page in a slot that exits. Only the accesses of instructions exit; this
    /// access waits for the page source, or for the read.
    #[cold]
    fn absent(&mut self, gfn: Gfn, access: Access) -> Absent {
        match self.bus.wait_for_page(gfn, access) {
            Some(Outcome::Missing(ticket) | Outcome::Pending(ticket)) => Absent::Pending(ticket),
            _ => Absent::Busy,
        }
    }

    /// Runs `body` between two quiescent points.
    fn online<R>(
        &mut self,
        body: impl FnOnce(&mut P, &mut SoftBus<P::Format>, &VcpuSlot) -> R,
    ) -> R {
        let qsbr = self.vm.qsbr();
        let grace = self.vm.exclusive.online(qsbr, self.index);
        let _online = Online {
            qsbr,
            index: self.index,
        };
        let slot = qsbr.vcpu(self.index);
        flush_since(&mut self.cpu, slot, &mut self.flushed, grace);
        let done = body(&mut self.cpu, &mut self.bus, slot);
        self.bus.leave();
        done
    }
}

fn flush_since(
    cpu: &mut impl Processor,
    slot: &VcpuSlot,
    flushed: &mut GracePeriod,
    grace: GracePeriod,
) {
    if grace > *flushed {
        cpu.flush_tlb();
        slot.flushed();
        *flushed = grace;
    }
}
