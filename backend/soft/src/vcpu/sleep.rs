//! The sleeps of a vCPU's thread: in a halt, for a page, for free memory. Each is noted, with what
//! the vCPU does meanwhile.

use super::VcpuOf;
use crate::meter::VcpuState;
use crate::platform::Platform;
use crate::step::Wait;
use lacuna_machine::VcpuError;
use lacuna_sync::Nanos;
use std::thread::yield_now;

/// How long the thread of a halted vCPU polls for pages before it sleeps. After a sleep, a page
/// needs the wake-up of two threads, which takes some 80 us on a quiet machine. KVM's
/// `halt_poll_ns` has the same value.
const HALT_POLL_NS: u64 = 200_000;

impl<P: Platform> VcpuOf<P> {
    /// Calls `sleep`, in `state`.
    pub(super) fn sleeps<T>(&mut self, state: VcpuState, sleep: impl FnOnce(&mut Self) -> T) -> T {
        self.enters(state);
        let slept = sleep(self);
        self.enters(VcpuState::Running);
        slept
    }

    pub(super) fn enters(&self, state: VcpuState) {
        self.meter().times.enter(state, self.vm.clock.now());
    }

    /// Sleeps in a halt, until a wake-up or until `until`.
    pub(super) fn park(&mut self, until: Option<Nanos>) {
        if self.vm.host.wants_balance() {
            // Other vCPUs need the free frames in this vCPU's page cache.
            self.entry.bus.vcpu_mmu().frames().flush();
        }
        let parker = self.vm.kicks.parker(self.index);
        parker.park(&*self.vm.clock, until);
    }

    /// Waits for a page, or for free memory. A failed read is found when the page is resolved
    /// again: then the page is lost.
    pub(super) fn wait(&mut self, wait: &Wait) -> Result<(), VcpuError> {
        let (host, meter) = (&self.vm.host, self.meter());
        match wait {
            Wait::Page(ticket) => {
                let _ = host.wait_touching(ticket, &meter.kicked, &meter.toucher);
            }
            Wait::Provided(ticket) => {
                let _ = host.wait_provided(ticket, &meter.kicked);
            }
            Wait::Memory => self.reclaim()?,
            Wait::Halt(_) | Wait::Busy => {}
        }
        Ok(())
    }

    /// Polls for pages instead of sleeping, if pages have arrived soon on average. Returns whether
    /// the vCPU has a reason to run again.
    pub(super) fn halt_poll(&self, until: Option<Nanos>) -> bool {
        let expected = self.apf.stats().swap_in.mean_ns();
        if !self.apf.awaits_pages() || expected > HALT_POLL_NS {
            return false;
        }
        let mut now = self.vm.clock.now();
        let end = now.after(HALT_POLL_NS);
        let end = until.map_or(end, |until| until.min(end));
        while now < end {
            if self.vm.host.poll(now) > 0 || self.is_poked() {
                return true;
            }
            // Another thread may need the core, and this thread has no work.
            yield_now();
            now = self.vm.clock.now();
        }
        false
    }

    /// Handles [`Wait::Memory`]: takes pages from others, or from this vCPU. In real time it waits
    /// until it has a frame, or its VM is being stopped.
    pub fn reclaim(&mut self) -> Result<(), VcpuError> {
        let vm = &self.vm;
        let frames = self.entry.bus.vcpu_mmu().frames();
        match vm
            .host
            .reclaim_direct_until(frames, &vm.meters[self.index].kicked)
        {
            // Frames become free only when writes are complete, which takes time.
            Ok(progress) if vm.stands_still && progress.freed == 0 => Err(self.time_stands_still()),
            Ok(_) => Ok(()),
            Err(e) => Err(VcpuError::NoMemory {
                vcpu: self.index,
                cause: e.to_string(),
            }),
        }
    }
}
