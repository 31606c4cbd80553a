//! Enters a processor between two quiescent points, with a TLB that has no stale entry.

use crate::bus::{Blocked, SoftBus};
use crate::code::Stale;
use crate::error::SoftError;
use crate::meter::Meter;
use crate::vm::Vm;
use lacuna_addr::{Access, Gfn};
use lacuna_cpu::{Exit, HostPage, Processor, Stop};
use lacuna_host::Ticket;
use lacuna_machine::VcpuError;
use lacuna_mmu::Outcome;
use lacuna_sync::{GracePeriod, Qsbr, VcpuSlot};
use std::sync::Arc;

/// A processor with its bus.
pub struct Entry<P> {
    pub(crate) vm: Arc<Vm>,
    pub(crate) index: usize,
    pub(crate) cpu: P,
    pub(crate) bus: SoftBus,
    /// The error of an access to the words that the guest shares with the host, if there is memory
    /// but its page cannot be had.
    pub(crate) failed: Option<VcpuError>,
    /// The grace period at which the TLB was last known to have no stale entry.
    flushed: GracePeriod,
}

/// A vCPU that is online. Drop brings it offline, also after a panic: shoot-downs must not wait for
/// a thread that has ended.
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
    /// There is no memory, or none that may be written.
    NoMemory,
    /// The page is not resident. It comes after a thread has started the ticket.
    Pending(Ticket),
    /// Another operation on the page is in progress, for a moment.
    Busy,
}

impl<P: Processor> Entry<P> {
    pub(crate) fn new(
        vm: Arc<Vm>,
        index: usize,
        fabric: Arc<P::Fabric>,
    ) -> Result<Self, SoftError> {
        Ok(Self {
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

    /// Runs guest code for about `fuel` instructions.
    pub(crate) fn run(&mut self, fuel: u64) -> Exit<P::Own> {
        self.online(|cpu, bus, slot| cpu.run(bus, slot, fuel))
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

    /// Calls `touch` with the page `gfn`, if that needs no waiting.
    pub(crate) fn with_page<R>(
        &mut self,
        gfn: Gfn,
        access: Access,
        touch: impl FnOnce(HostPage) -> R,
    ) -> Result<R, Absent> {
        match self.online(|_, bus, _| bus.page_now(gfn, access).map(touch)) {
            Ok(touched) => Ok(touched),
            Err(Stop::Mmio(_)) => Err(Absent::NoMemory),
            Err(_) => match self.bus.blocked.take() {
                Some(Blocked::Page(fault)) => Err(Absent::Pending(fault.ticket)),
                Some(Blocked::NotProvided(..)) => Err(self.absent(gfn, access)),
                _ => Err(Absent::Busy),
            },
        }
    }

    /// A page that was never provided, in a slot that exits. Only the accesses of instructions
    /// exit; this one waits for the page source.
    #[cold]
    fn absent(&mut self, gfn: Gfn, access: Access) -> Absent {
        let mmu = &self.vm.mmu;
        match mmu.wait_for_page(self.bus.vcpu_mmu(), gfn, access) {
            Some(Outcome::Missing(ticket) | Outcome::Pending(ticket)) => Absent::Pending(ticket),
            _ => Absent::Busy,
        }
    }

    /// Runs `body` between two quiescent points.
    fn online<R>(&mut self, body: impl FnOnce(&mut P, &mut SoftBus, &VcpuSlot) -> R) -> R {
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
