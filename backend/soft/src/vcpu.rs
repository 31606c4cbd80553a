//! One vCPU: a step, which never waits, and the thread-mode loop around it, which does.
//!
//! ```text
//! step:  handle requests -> page-ready for arrived pages -> run the processor (`entry`)
//!        -> a page is missing: page-not-present to the guest, or Wait
//!        -> Ran | Exit | Wait(for what) | Failed
//! run:   step; wait for what it names; until Exit              (threads: `machine::Machine`)
//! Simulator: step; record what it names; step another          (one thread: `seeded`)
//! ```

mod sleep;

use crate::bus::{Blocked, Origin};
use crate::entry::Entry;
use crate::error::SoftError;
use crate::meter::{Meter, VcpuState};
use crate::platform::{Platform, Power};
use crate::stall::FaultKind;
use crate::step::{Step, Wait, width};
use crate::tokens::Faulted;
use crate::vm::Vm;
use lacuna_addr::{Access, Gpa};
use lacuna_apf::Queue;
use lacuna_cpu::{Exit as Left, Stop, Wake};
use lacuna_host::fine_sleeps;
use lacuna_machine::{Exit, FaultToken, IoAddress, MissingMemory, TokenError, VcpuError};
use lacuna_mmu::RingSpace;
use lacuna_sync::Nanos;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::yield_now;

/// After this many instructions, some 100 us, a vCPU polls for arrived pages. The number is a
/// compromise between computing and faulting threads: docs/speed-apf.md.
const FUEL: u64 = 35_000;

/// One virtual processor of the soft backend.
// A VM's vCPUs are in one vector, and each runs on a thread of its own. Without the alignment,
// neighbouring vCPUs would share a cache line.
#[repr(align(128))]
pub struct VcpuOf<P: Platform> {
    pub(crate) vm: Arc<Vm>,
    pub(crate) index: usize,
    pub(crate) entry: Entry<P>,
    pub(crate) apf: Queue<P::Apf>,
    /// Its initial state; `None` if a restore gives it its state.
    boot: Option<P::Boot>,
    /// Instructions retired when its pins were last released.
    held_at: u64,
    pub(crate) stalled_since: Option<Nanos>,
    /// The page's origin, if the stall is the wait of one access for its page.
    pub(crate) stalled_for: Option<FaultKind>,
    /// Its last exit on missing memory, until it is entered or the token is accepted.
    pub(crate) faulted: Option<Faulted>,
    /// Whether its thread is elsewhere since a kick, or has not run it yet.
    is_outside: bool,
}

impl<P: Platform> VcpuOf<P> {
    pub(crate) fn new(
        vm: Arc<Vm>,
        index: usize,
        fabric: Arc<P::Fabric>,
        boot: Option<P::Boot>,
    ) -> Result<Self, SoftError> {
        let kicks = Arc::clone(&vm.kicks);
        let contract = P::contract(vm.config.apf);
        let id = u32::try_from(index).expect("at most VCPUS_MAX");
        let mut vcpu = Self {
            entry: Entry::new(Arc::clone(&vm), index, fabric)?,
            apf: Queue::new(id, contract, move || kicks.wake(index)),
            vm,
            index,
            boot,
            held_at: 0,
            stalled_since: None,
            stalled_for: None,
            faulted: None,
            is_outside: true,
        };
        vcpu.start();
        Ok(vcpu)
    }

    /// Puts the vCPU back into its state after the boot, as INIT or a reset by the VMM does.
    pub fn reset(&mut self) {
        self.forget_stop();
        self.entry.cpu.reset();
        self.start();
    }

    /// Forgets why it has stopped: all faults in flight, and any unreported failure.
    pub(crate) fn forget_stop(&mut self) {
        self.forget_faults();
        (self.entry.failed, self.entry.bus.blocked) = (None, None);
        self.entry.again = None;
        self.entry.forget_losses();
        (self.stalled_since, self.stalled_for) = (None, None);
    }

    /// Forgets all pages on their way, and the contract with the guest.
    fn forget_faults(&mut self) {
        self.apf.reset();
        self.forget_exits();
        self.publish();
    }

    fn start(&mut self) {
        let (config, boot) = (&self.vm.config, self.boot.as_ref());
        self.entry.cpu.start(config, self.index, boot);
    }

    /// The processor, between two steps.
    pub fn processor(&mut self) -> &mut P {
        &mut self.entry.cpu
    }

    /// Instructions retired so far.
    pub fn retired(&self) -> u64 {
        self.entry.cpu.retired()
    }

    /// Checks its asynchronous page faults, between two steps. For tests and fuzzers.
    ///
    /// # Panics
    /// If an invariant is broken.
    pub fn verify(&self) {
        self.apf.verify();
    }

    /// Runs about `fuel` instructions at most. Never sleeps.
    pub fn step(&mut self, fuel: u64) -> Step {
        self.vm.host.unblock_sigbus();
        if self.entry.cpu.retired() != self.held_at {
            self.held_at = self.entry.cpu.retired();
            self.entry.bus.vcpu_mmu().retired();
        }
        self.end_exit();
        self.entry.handle_requests();
        // This check precedes any write of this step, because beyond its soft limit a ring has room
        // for few pages. It precedes any wait, because a full ring delays the report of an arrived
        // page, and that page does not arrive again.
        if self.is_ring_full() {
            return Step::Exit(Exit::DirtyRingFull);
        }
        // Power changes precede all events: a guest gets no event for a page needed before a reset.
        match P::power(&mut self.entry) {
            Power::On => {}
            Power::Started => self.forget_faults(),
            Power::Off => {
                self.forget_faults();
                return Step::Wait(Wait::Halt(None));
            }
        }
        if self.apf.has_arrivals()
            && let Some(wait) = self.shared_page()
        {
            return wait;
        }
        self.tell_of_pages();
        if let Some(error) = self.entry.lost() {
            return Step::Failed(error);
        }
        if let Some(error) = self.entry.failed.take() {
            return Step::Failed(error);
        }
        if let Some(halt) = self.artificial_halt() {
            return halt;
        }
        self.end_stall();
        P::enter(&mut self.entry, &mut self.apf);
        let exit = match self.entry.again.take() {
            Some(own) => Left::Own(own),
            None => self.entry.run(fuel),
        };
        self.meter()
            .retired
            .store(self.entry.cpu.retired(), Ordering::Relaxed);
        match self.entry.lost() {
            None => self.finish(exit),
            Some(error) => Step::Failed(error),
        }
    }

    /// Ends the stall, because the vCPU continues.
    fn end_stall(&mut self) {
        let kind = self.stalled_for.take();
        if let Some(since) = self.stalled_since.take() {
            let faults = self.meter().faults.lock();
            let mut faults = faults.expect("no panic under this lock");
            let now = self.vm.clock.now();
            faults.stalls.record(since, now);
            kind.into_iter()
                .for_each(|kind| faults.record(kind, since, now));
        }
    }

    /// Whether the vCPU must leave for its VMM until its dirty ring is reset.
    fn is_ring_full(&mut self) -> bool {
        self.entry.bus.vcpu_mmu().space() == RingSpace::SoftFull
    }

    /// The wait for the page with the words of async faults, if that page is not resident. A kick
    /// ends this wait, but not a wait inside the notification.
    pub(crate) fn shared_page(&mut self) -> Option<Step> {
        let gfn = self.apf.shared_page()?;
        self.entry.wait_for(gfn, Access::Write)
    }

    /// Notifies the guest of arrived pages. Returns their number.
    fn tell_of_pages(&mut self) -> usize {
        if !self.apf.has_arrivals() {
            return 0;
        }
        let events = self.apf.poll(self.vm.clock.now(), &mut self.entry);
        if events > 0 {
            self.publish();
        }
        events
    }

    /// The step of a vCPU in an artificial halt, after page-not-present could not be delivered. An
    /// interrupt that the vCPU can take ends the halt.
    fn artificial_halt(&mut self) -> Option<Step> {
        if !self.apf.halted() {
            return None;
        }
        if self.entry.cpu.has_interrupt() {
            self.apf.break_halt();
            return None;
        }
        let now = self.vm.clock.now();
        let _ = self.stalled_since.get_or_insert(now);
        Some(Step::Wait(Wait::Halt(self.entry.cpu.next_deadline())))
    }

    /// Handles HLT and WFI. First notifies the guest of arrived pages: before, interrupts may have
    /// been off or the last event unread.
    fn halt(&mut self) -> Step {
        if self.is_ring_full() {
            return Step::Exit(Exit::DirtyRingFull);
        }
        match self.tell_of_pages() {
            0 => Step::Wait(Wait::Halt(self.entry.cpu.next_deadline())),
            _ => Step::Ran,
        }
    }

    /// Publishes its counters for other threads.
    pub(crate) fn publish(&self) {
        self.meter().publish(self.apf.stats());
    }

    /// Steps as long as the vCPU can run. Handles pages that arrive meanwhile, so that no other
    /// thread is woken for them.
    fn run_until_idle(&mut self) -> Step {
        fine_sleeps();
        let vm = Arc::clone(&self.vm);
        let _polling = vm.host.polling();
        while !self.is_kicked() {
            vm.host.poll(vm.clock.now());
            match (self.step(FUEL), vm.host.next_due()) {
                (Step::Ran, _) => {}
                (Step::Wait(Wait::Halt(until)), _) if self.waits_for_ever(until) => {
                    return Step::Failed(self.time_stands_still());
                }
                // The next due page most likely belongs to this vCPU. So this thread sleeps until
                // then, and no other thread has to wake it.
                (Step::Wait(Wait::Halt(until)), Some(due)) => {
                    let until = until.map_or(due, |until| until.min(due));
                    self.sleeps(VcpuState::Halted, |vcpu| {
                        vm.kicks.parker(vcpu.index).park(&*vm.clock, Some(until));
                    });
                }
                (Step::Wait(Wait::Halt(until)), None)
                    if self.sleeps(VcpuState::Halted, |vcpu| vcpu.halt_poll(until)) => {}
                (other, _) => return other,
            }
        }
        self.leave()
    }

    /// Whether only time can end this halt, and the time of its VM is stopped.
    fn waits_for_ever(&self, until: Option<Nanos>) -> bool {
        self.vm.stands_still && (until.is_some() || self.apf.awaits_pages())
    }

    fn time_stands_still(&self) -> VcpuError {
        VcpuError::TimeStandsStill { vcpu: self.index }
    }

    fn is_kicked(&self) -> bool {
        self.meter().kicked.load(Ordering::Relaxed)
    }

    /// Leaves because of a kick. If an instruction holds a device's answer, completes it first, so
    /// that the VMM can save the vCPU. Does not complete it if it has to wait for a page, or for a
    /// reset of the dirty ring.
    fn leave(&mut self) -> Step {
        while self.entry.cpu.save().is_none() {
            match self.step(1) {
                Step::Ran => {}
                Step::Wait(Wait::Page(ticket)) => {
                    self.vm.host.start(&ticket);
                    break;
                }
                Step::Wait(_) | Step::Exit(Exit::DirtyRingFull) => break,
                other => return other,
            }
        }
        self.meter().kicked.store(false, Ordering::Release);
        Step::Exit(Exit::Interrupted)
    }

    fn meter(&self) -> &Meter {
        self.entry.meter()
    }

    fn finish(&mut self, exit: Left<P::Own>) -> Step {
        match exit {
            Left::Fuel | Left::Requested | Left::Stop(Stop::Again) => Step::Ran,
            Left::Halt => self.halt(),
            Left::Stop(Stop::Wait | Stop::Lost) => self.blocked(),
            Left::Stop(Stop::Mmio(gpa)) => self.unbacked(gpa),
            Left::MmioRead { gpa, size } => Step::Exit(Exit::MmioRead {
                gpa,
                width: width(size),
            }),
            Left::MmioWrite { gpa, size, value } => {
                let (at, width) = (IoAddress::Memory(gpa), width(size));
                match self.vm.ioeventfds.signal(at, width, value) {
                    true => Step::Ran,
                    false => Step::Exit(Exit::MmioWrite { gpa, width, value }),
                }
            }
            Left::Exclusive => {
                let exit = self.entry.run_alone();
                match self.entry.lost() {
                    None => self.finish(exit),
                    Some(error) => Step::Failed(error),
                }
            }
            Left::Own(exit) => P::finish(&mut self.entry, &mut self.apf, exit),
        }
    }

    pub(crate) fn blocked(&mut self) -> Step {
        let vcpu = self.index;
        let wait = match self.entry.bus.blocked.take() {
            Some(blocked @ (Blocked::Page(_) | Blocked::NotAtHand(..)))
                if let Some(wait) = self.shared_page() =>
            {
                // The guest may never retry its access, and an unstarted ticket would keep its
                // frame for ever.
                if let Blocked::Page(fault) = blocked {
                    self.vm.host.start(&fault.ticket);
                }
                return wait;
            }
            Some(Blocked::Page(fault)) => {
                let kind = match fault.origin {
                    Origin::Swap => FaultKind::SwapIn,
                    Origin::Source => FaultKind::Missing,
                };
                match self.page_not_present(fault) {
                    Some(ticket) => {
                        self.stalled_for = Some(kind);
                        Wait::Page(ticket)
                    }
                    None => return Step::Ran,
                }
            }
            Some(Blocked::NotAtHand(gfn, access)) => return self.missing(gfn, access),
            Some(Blocked::Memory) => Wait::Memory,
            Some(Blocked::RingFull) => return Step::Exit(Exit::DirtyRingFull),
            Some(Blocked::Busy) | None => return Step::Wait(Wait::Busy),
            Some(Blocked::Lost(gfn, access, lost)) => {
                let cause = lost.to_string() + &P::syndrome(&self.entry, gfn, access);
                return Step::Failed(VcpuError::no_page(vcpu, gfn.gpa(), lost.kind, cause));
            }
            Some(Blocked::NoTables(gfn, access, cause)) => {
                let cause = cause + &P::syndrome(&self.entry, gfn, access);
                return Step::Failed(VcpuError::NoMemory { vcpu, cause });
            }
        };
        self.stalled_since = Some(self.vm.clock.now());
        Step::Wait(wait)
    }

    /// The error of a guest with code or page tables at an address without memory. Hardware would
    /// fetch ones from the bus and end in the same way.
    fn unbacked(&self, gpa: Gpa) -> Step {
        let text = format!(
            "vCPU {}: code, page table or system structure at {gpa}, where there is no memory \
             (pc {:#x})",
            self.index,
            self.entry.cpu.pc()
        );
        Step::Exit(Exit::Shutdown(text))
    }

    /// Whether another thread has a request: an interrupt, a shoot-down.
    pub(crate) fn is_poked(&self) -> bool {
        self.vm.qsbr().vcpu(self.index).has_request()
    }
}

impl<P: Platform> lacuna_machine::Vcpu for VcpuOf<P> {
    fn index(&self) -> usize {
        self.index
    }

    fn run(&mut self) -> Result<Exit, VcpuError> {
        if self.is_outside {
            self.enters(VcpuState::Running);
            self.is_outside = false;
        }
        loop {
            match self.run_until_idle() {
                Step::Ran => {}
                Step::Exit(exit) => {
                    self.meter().exits.count(&exit);
                    if exit == Exit::Interrupted {
                        self.enters(VcpuState::Outside);
                        self.is_outside = true;
                    }
                    return Ok(exit);
                }
                Step::Failed(error) => return Err(error),
                Step::Wait(Wait::Busy) => yield_now(),
                Step::Wait(Wait::Halt(until)) => {
                    self.sleeps(VcpuState::Halted, |vcpu| vcpu.park(until));
                }
                Step::Wait(wait) => {
                    self.sleeps(VcpuState::Waiting, |vcpu| vcpu.wait(&wait))?;
                }
            }
        }
    }

    fn complete_read(&mut self, value: u64) {
        self.entry.cpu.complete_read(value);
    }

    fn missing_memory(&self) -> Option<&dyn MissingMemory> {
        lacuna_machine::Vm::missing_memory(&*self.vm)
    }

    fn accept(&mut self, token: FaultToken) -> Result<(), TokenError> {
        self.accept_fault(token)
    }
}
