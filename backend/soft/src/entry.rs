//! Entering a processor: between two quiescent points, with a TLB that holds nothing stale.

use crate::bus::{Blocked, SoftBus};
use crate::code::Stale;
use crate::{SoftError, Vm};
use lacuna_addr::{Access, Gfn};
use lacuna_cpu::{Bus as _, HostPage};
use lacuna_sync::{Epoch, Quiescence, VcpuSlot};
use lacuna_x86::Cpu;
use std::sync::Arc;

/// A processor with its bus.
pub(crate) struct Entry {
    pub(crate) vm: Arc<Vm>,
    index: usize,
    pub(crate) cpu: Cpu,
    pub(crate) bus: SoftBus,
    /// When the TLB was last known to hold nothing stale.
    flushed: Epoch,
}

/// A vCPU that is online; offline again on drop, also when it panics: shoot-downs must not wait for
/// a thread that is gone.
struct Online<'a> {
    quiescence: &'a Quiescence,
    index: usize,
}

impl Drop for Online<'_> {
    fn drop(&mut self) {
        self.quiescence.offline(self.index);
    }
}

impl Entry {
    pub(crate) fn new(vm: Arc<Vm>, index: usize) -> Result<Self, SoftError> {
        Ok(Self {
            cpu: Cpu::new(index, Arc::clone(&vm.apics), Arc::clone(&vm.clock)),
            bus: SoftBus::new(Arc::clone(&vm), index)?,
            vm,
            index,
            flushed: Epoch::default(),
        })
    }

    /// Does what others have asked this vCPU for by a poke.
    pub(crate) fn obey(&mut self) {
        if self.vm.quiescence().vcpu(self.index).take() & VcpuSlot::CODE == 0 {
            return;
        }
        match self.vm.code.take(self.index) {
            Stale::All => self.cpu.drop_all_code(),
            Stale::Pages(pages) => pages.into_iter().for_each(|gfn| self.cpu.drop_code(gfn)),
        }
    }

    /// Runs guest code for about `fuel` instructions.
    pub(crate) fn run(&mut self, fuel: u64) -> lacuna_x86::Exit {
        self.online(|entry| {
            let slot = entry.vm.bells.quiescence.vcpu(entry.index);
            entry.cpu.run(&mut entry.bus, slot, fuel)
        })
    }

    /// One instruction with the world to itself.
    pub(crate) fn run_alone(&mut self) -> lacuna_x86::Exit {
        let vm = Arc::clone(&self.vm);
        let quiescence = vm.quiescence();
        vm.exclusive.alone(quiescence, self.index, || {
            let epoch = quiescence.online(self.index);
            let _online = Online {
                quiescence,
                index: self.index,
            };
            self.flush_since(epoch);
            self.cpu
                .run_exclusive(&mut self.bus, quiescence.vcpu(self.index))
        })
    }

    /// Lets `touch` have the page `gfn`, if that needs no waiting. A page that is elsewhere is sent
    /// for.
    pub(crate) fn with_page<R>(
        &mut self,
        gfn: Gfn,
        access: Access,
        touch: impl FnOnce(HostPage) -> R,
    ) -> Option<R> {
        let touched = self.online(|entry| entry.bus.page(gfn, access).map(touch));
        if let Some(Blocked::Page(fault)) = self.bus.blocked.take() {
            self.vm.host.start(&fault.ticket);
        }
        touched.ok()
    }

    /// Runs `body` between two quiescent points.
    fn online<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let vm = Arc::clone(&self.vm);
        let epoch = vm.exclusive.online(vm.quiescence(), self.index);
        let _online = Online {
            quiescence: vm.quiescence(),
            index: self.index,
        };
        self.flush_since(epoch);
        body(self)
    }

    fn flush_since(&mut self, epoch: Epoch) {
        if epoch > self.flushed {
            self.cpu.flush_tlb();
            self.flushed = epoch;
        }
    }
}
