//! Async page faults of a VM with a page source. Their host side is in this process.
//!
//! ```text
//! vCPU: touches a missing page ─► KVM starts a worker, halts the vCPU; the worker waits
//! reader of faults: the event; note the page, kick the vCPU
//! vCPU's thread, outside:
//!     slot exits:  Exit::MemoryFault; the VMM accepts ─► not_present ─► #PF pending
//!     slot waits, or the page is swapped out ─► not_present ─► #PF pending
//! KVM_RUN: the pending #PF ends KVM's halt; the guest runs another process
//!     ... the page arrives, on any thread: the completion ─► wake the vCPU
//! vCPU's thread, outside: poll ─► token := token, interrupt
//! ```
//! The state machine is `lacuna_apf`, as in the soft backend. Here a vCPU can take an event only
//! outside the guest, because inside KVM has its registers. The guest's accesses to the registers
//! of async page faults exit, and this file answers them. KVM's own async page faults stay
//! disabled: KVM still starts its workers and halts vCPUs, but sends no guest an event.

use crate::arch;
use crate::kick::VcpuKicks;
use crate::vm::Vm;
use kvm_ioctls::{Error, VcpuFd};
use lacuna_addr::{Access, Gfn, Gpa};
use lacuna_apf::x86::{Control, CpuState, Features, Msr, Queue};
use lacuna_apf::{Completion, Guest, NotPresent, Prefault, SharedWords, Unwritable};
use lacuna_machine::x86::AsyncFaults;
use lacuna_machine::{GuestMemory as _, StateError, VcpuState};
use lacuna_sync::{Clock as _, HostClock, Nanos};
use std::cell::OnceCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The async page faults of one vCPU.
pub struct VcpuApf {
    queue: Queue,
    clock: HostClock,
    /// Why no event can be delivered any more.
    failed: Option<String>,
}

/// A vCPU whose thread is outside `KVM_RUN`. Only then may this process read and change the vCPU's
/// registers.
pub struct ExitedVcpu<'a> {
    pub fd: &'a VcpuFd,
    pub vm: &'a Vm,
    pub index: usize,
    /// Whether an instruction of the guest is half done. KVM completes it at the next `KVM_RUN`. No
    /// event may be delivered before.
    pub midway: bool,
}

/// The vCPU during one call of the queue, with KVM's answers so far and its first error.
struct Call<'a> {
    vcpu: &'a ExitedVcpu<'a>,
    interruptible: OnceCell<bool>,
    state: OnceCell<CpuState>,
    /// Whether an event was raised, so that the guest runs.
    raised: bool,
    failed: Option<Error>,
}

impl<'a> Call<'a> {
    fn new(vcpu: &'a ExitedVcpu<'a>) -> Self {
        Self {
            vcpu,
            interruptible: OnceCell::new(),
            state: OnceCell::new(),
            raised: false,
            failed: None,
        }
    }

    fn note(&mut self, done: Result<(), Error>) {
        if let Err(error) = done {
            self.failed.get_or_insert(error);
        }
    }
}

impl Guest for Call<'_> {
    fn is_interruptible(&self) -> bool {
        let ExitedVcpu { fd, midway, .. } = self.vcpu;
        let now = || !midway && arch::apf::is_interruptible(fd).unwrap_or(false);
        *self.interruptible.get_or_init(now)
    }

    /// KVM's worker maps the page.
    fn prefault(&mut self, _: Gfn, _: Access) -> Prefault {
        Prefault::NotMapped
    }

    fn resume(&mut self) {
        if !self.raised {
            let done = arch::apf::unhalt(self.vcpu.fd);
            self.note(done);
        }
    }
}

impl SharedWords for Call<'_> {
    fn read_u32(&mut self, at: Gpa) -> Option<u32> {
        let mut word = [0; 4];
        self.vcpu.vm.read(at, &mut word).ok()?;
        Some(u32::from_le_bytes(word))
    }

    fn write_u32(&mut self, at: Gpa, value: u32) -> Result<(), Unwritable> {
        let written = self.vcpu.vm.write(at, &value.to_le_bytes());
        written.map_err(|_| Unwritable)
    }
}

impl lacuna_apf::x86::Guest for Call<'_> {
    fn state(&self) -> CpuState {
        let unknown = CpuState {
            user: false,
            paging: false,
            lapic: false,
        };
        let now = || arch::apf::state(self.vcpu.fd).unwrap_or(unknown);
        *self.state.get_or_init(now)
    }

    fn inject_page_fault(&mut self, address: u64) {
        let done = arch::apf::inject_page_fault(self.vcpu.fd, address);
        self.note(done);
        self.raised = true;
        self.interruptible = OnceCell::from(false);
    }

    fn interrupt(&mut self, vector: u8) {
        let ExitedVcpu { vm, index, .. } = self.vcpu;
        let done = arch::apf::interrupt(&vm.fd, *index, vector);
        self.note(done);
        self.raised = true;
    }
}

impl VcpuApf {
    /// The async page faults of vCPU `index`, as at power-on. `features` are KVM's leaf of CPUID.
    pub fn new(index: usize, features: u32, kicks: &Arc<VcpuKicks>) -> Self {
        let control = Control::new(Features::from_bits_truncate(features));
        let kicks = Arc::clone(kicks);
        Self {
            queue: Queue::new(index as u32, control, move || kicks.wake(index)),
            clock: HostClock::default(),
            failed: None,
        }
    }

    fn with<T>(
        &mut self,
        vcpu: &ExitedVcpu<'_>,
        on_queue: impl FnOnce(&mut Queue, Nanos, &mut Call<'_>) -> T,
    ) -> T {
        if arch::apf::has_forgotten(vcpu.fd) && self.is_enabled() {
            self.queue.reset();
        }
        let mut call = Call::new(vcpu);
        let result = on_queue(&mut self.queue, self.clock.now(), &mut call);
        if let Some(error) = call.failed {
            let why = format!("cannot notify the guest of a page: {error}");
            self.failed.get_or_insert(why);
        }
        let in_flight = self.queue.stats().in_flight;
        vcpu.vm.apf_in_flight[vcpu.index].store(in_flight, Ordering::Relaxed);
        #[cfg(debug_assertions)]
        self.queue.verify();
        result
    }

    fn is_enabled(&self) -> bool {
        self.queue.shared_page().is_some()
    }

    /// Why the guest cannot continue, if KVM has refused an event.
    pub fn failure(&self) -> Option<String> {
        self.failed.clone()
    }

    /// Whether [`VcpuApf::poll`] may find something. Costs one load of an atomic.
    pub fn has_arrivals(&self) -> bool {
        self.queue.has_arrivals()
    }

    /// Delivers page-ready for arrived pages, as long as events may be delivered.
    pub fn poll(&mut self, vcpu: &ExitedVcpu<'_>) {
        let poll = |queue: &mut Queue, now, call: &mut Call<'_>| queue.poll(now, call);
        self.with(vcpu, poll);
    }

    /// Whether the guest has halted the vCPU.
    pub fn is_idle(&mut self, vcpu: &ExitedVcpu<'_>) -> bool {
        arch::apf::is_halted(vcpu.fd).unwrap_or(false)
    }

    /// Whether the guest got page-not-present for `gfn`, and the page has not arrived yet.
    pub fn awaits(&self, gfn: Gfn) -> bool {
        self.queue.awaits(gfn)
    }

    /// Whether [`VcpuApf::not_present`] would notify the guest now.
    pub fn can_notify(&mut self, gfn: Gfn, vcpu: &ExitedVcpu<'_>) -> bool {
        let is_on = self.is_enabled() && !vcpu.vm.apf_paused.load(Ordering::Relaxed);
        is_on && self.with(vcpu, |queue, _, call| queue.can_notify(gfn, call))
    }

    /// Delivers page-not-present for `gfn`. `None`: it cannot be delivered now.
    pub fn not_present(
        &mut self,
        gfn: Gfn,
        access: Access,
        vcpu: &ExitedVcpu<'_>,
    ) -> Option<Completion> {
        if !self.is_enabled() || vcpu.vm.apf_paused.load(Ordering::Relaxed) {
            return None;
        }
        let answer = self.with(vcpu, |queue, now, call| {
            queue.not_present(gfn, access, now, call)
        });
        match answer {
            NotPresent::Injected(completion) => Some(completion),
            // KVM has halted the vCPU, and ends that halt. The completion is dropped, so the queue
            // forgets the fault.
            NotPresent::Halt(_) | NotPresent::Wait => None,
        }
    }

    /// RDMSR. `None` raises #GP.
    pub fn read_msr(&mut self, index: u32, vcpu: &ExitedVcpu<'_>) -> Option<u64> {
        let msr = Msr::of(index)?;
        self.with(vcpu, |queue, _, _| queue.read_msr(msr))
    }

    /// The page that [`VcpuApf::write_msr`] accesses.
    pub fn page_accessed_by(&self, index: u32, value: u64) -> Option<Gfn> {
        let (gfn, _) = self.queue.page_accessed_by(Msr::of(index)?, value)?;
        Some(gfn)
    }

    /// WRMSR. `None` raises #GP.
    pub fn write_msr(&mut self, index: u32, value: u64, vcpu: &ExitedVcpu<'_>) -> Option<()> {
        let msr = Msr::of(index)?;
        self.set(msr, value, vcpu)
    }

    fn set(&mut self, msr: Msr, value: u64, vcpu: &ExitedVcpu<'_>) -> Option<()> {
        let written = self.with(vcpu, |queue, now, call| {
            queue.write_msr(msr, value, now, call)
        });
        written.ok()?;
        arch::apf::remember(vcpu.fd).ok()
    }

    /// The registers, for a saved state.
    pub fn save(&mut self, vcpu: &ExitedVcpu<'_>) -> AsyncFaults {
        let mut read = |msr| {
            let read = self.with(vcpu, |queue, _, _| queue.read_msr(msr));
            read.unwrap_or(0)
        };
        AsyncFaults {
            enable: read(Msr::Enable),
            vector: read(Msr::Vector),
        }
    }

    /// Whether [`VcpuApf::restore`] would take these registers.
    pub fn check(&mut self, apf: &AsyncFaults, vcpu: &ExitedVcpu<'_>) -> Result<(), StateError> {
        for (msr, value) in registers(apf) {
            let checked = self.with(vcpu, |queue, _, call| queue.check_msr(msr, value, call));
            checked.map_err(|_| refused(msr, value))?;
        }
        Ok(())
    }

    /// Forgets everything in flight, and gives the registers these values.
    pub fn restore(&mut self, apf: &AsyncFaults, vcpu: &ExitedVcpu<'_>) -> Result<(), StateError> {
        self.queue.reset();
        self.failed = None;
        for (msr, value) in registers(apf) {
            let set = self.set(msr, value, vcpu);
            set.ok_or_else(|| refused(msr, value))?;
        }
        Ok(())
    }
}

/// The vector is first: the wake-all that EN causes uses it.
fn registers(apf: &AsyncFaults) -> impl Iterator<Item = (Msr, u64)> {
    let registers = [(Msr::Vector, apf.vector), (Msr::Enable, apf.enable)];
    registers.into_iter().filter(|(_, value)| *value != 0)
}

fn refused(msr: Msr, value: u64) -> StateError {
    let index = msr.index();
    StateError::Msr { index, value }
}

/// Splits `state` into KVM's part and this process's part, the registers of async page faults.
pub fn split(state: &VcpuState) -> Option<(VcpuState, AsyncFaults)> {
    let VcpuState::X86(state) = state else {
        return None;
    };
    let mut rest = state.clone();
    let apf = std::mem::take(&mut rest.apf);
    Some((VcpuState::X86(rest), apf))
}

/// Puts the registers of async page faults into `state`, which KVM has saved without them.
pub fn join(mut state: VcpuState, apf: AsyncFaults) -> VcpuState {
    if let VcpuState::X86(state) = &mut state {
        state.apf = apf;
    }
    state
}

#[cfg(test)]
mod tests;
