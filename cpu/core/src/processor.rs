//! The interface of a processor to a hypervisor, for any instruction set.

use crate::{Bus, Stop, Wake};
use lacuna_addr::{Gfn, Gpa};
use lacuna_state::StateError;
use lacuna_sync::{Clock, Nanos, VcpuSlot};
use std::fmt::Debug;
use std::sync::Arc;

/// Why a processor returned from its run loop. `A` is the type of one architecture's own exits,
/// such as x86's port I/O. The processor can be entered again, unless an exit of type `A` says
/// otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Exit<A> {
    /// The requested number of instructions has been executed.
    Fuel,
    /// The vCPU has a request: take it, handle it, enter again.
    Requested,
    /// The guest waits for an interrupt: enter again when one may be pending.
    Halt,
    /// The bus could not give a page; the instruction is executed again from its start.
    Stop(Stop),
    /// A load from an address without memory: provide the value with [`Processor::complete_read`]
    /// before the next run.
    MmioRead {
        /// Guest-physical address.
        gpa: Gpa,
        /// 1 to 8 bytes.
        size: u8,
    },
    /// A store to an address without (writable) memory. It counts as done at the next run.
    MmioWrite {
        /// Guest-physical address.
        gpa: Gpa,
        /// 1 to 8 bytes.
        size: u8,
        /// The written value, zero-extended.
        value: u64,
    },
    /// An access during which no other vCPU may run: stop them, then [`Processor::run_exclusive`].
    Exclusive,
    /// An exit of this architecture.
    Own(A),
}

/// An event that the hypervisor can inject into a processor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// An edge-triggered interrupt of the vCPU's own interrupt controller, by its number.
    Interrupt(u32),
    /// The exception that notifies a guest of a page (asynchronous page faults). The next run
    /// begins with it, before any interrupt. The vCPU must be interruptible.
    AsyncFault {
        /// The value of the fault-address register.
        address: u64,
    },
    /// A non-maskable interrupt.
    Nmi,
}

/// The privilege of code or of a memory access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Privilege {
    /// The guest's kernel, and implicit accesses on its behalf. x86: CPL 0 to 2.
    Supervisor,
    /// The guest's programs. x86: CPL 3.
    User,
}

/// The processor has no such event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refused;

/// One vCPU's processor.
///
/// It knows a [`Bus`], not a hypervisor. Its owner may call any function of this trait between two
/// runs. A run is generic over the bus, so that the access path has no virtual call.
pub trait Processor: Send + Sized {
    /// The common state of one VM's processors: the paths of their interrupts.
    type Fabric: Send + Sync;
    /// The exits of this architecture only.
    type Own: Debug + Send;
    /// The whole architectural state, between two instructions.
    type State: Clone + PartialEq + Debug + Send;

    /// The fabric of a VM. `wake` makes a vCPU look at its pending interrupts.
    fn fabric(vcpus: usize, wake: Arc<dyn Wake>) -> Self::Fabric;

    /// Makes processor `index`, in the state after a reset.
    fn new(index: usize, fabric: Arc<Self::Fabric>, clock: Arc<dyn Clock>) -> Self;

    /// Executes until there is a reason to exit. It ends with [`Exit::Fuel`] at the end of the
    /// basic block in which `fuel` instructions are done. The request word in `slot` is read
    /// between basic blocks.
    fn run<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot, fuel: u64) -> Exit<Self::Own>;

    /// Executes one instruction after [`Exit::Exclusive`], while every other vCPU is stopped.
    fn run_exclusive<B: Bus>(&mut self, bus: &mut B, slot: &VcpuSlot) -> Exit<Self::Own>;

    /// Provides the value that the last exit requested.
    fn complete_read(&mut self, value: u64);

    /// Injects `event`.
    ///
    /// # Errors
    /// The architecture, or this model of it, has no such event.
    fn inject(&mut self, event: Event) -> Result<(), Refused>;

    /// Whether an event would be delivered now: the guest has not masked events, none is pending or
    /// half delivered, and no instruction waits for a device's answer.
    fn is_interruptible(&self) -> bool;

    /// The privilege of the code that an interrupt would interrupt.
    fn privilege(&self) -> Privilege;

    /// Whether the next run would take an interrupt before its first instruction. A timer due by
    /// now counts.
    fn has_interrupt(&mut self) -> bool;

    /// When the processor's own timer raises its next interrupt. If the timer became due since the
    /// last run, this is no later than now, so that the processor runs and takes note.
    fn next_deadline(&self) -> Option<Nanos>;

    /// Ends the wait for an interrupt. Execution continues behind the waiting instruction.
    fn unhalt(&mut self);

    /// Forgets every translation, because the host has taken pages back.
    fn flush_tlb(&mut self);

    /// Drops the decoded instructions of a page, because another vCPU or the host wrote to it.
    fn drop_code(&mut self, gfn: Gfn);

    /// Drops all decoded instructions.
    fn drop_all_code(&mut self);

    /// Instructions executed so far.
    fn retired(&self) -> u64;

    /// Address of the next instruction.
    fn pc(&self) -> u64;

    /// Resets the processor. [`Processor::retired`] keeps counting.
    fn reset(&mut self);

    /// The whole architectural state; `None` in the middle of an instruction that waits for a
    /// device's or the machine's answer. Times are relative to now, so that a state may be restored
    /// under another clock.
    fn save(&mut self) -> Option<Self::State>;

    /// Puts the processor into `state`; forgets every translation and a half-done instruction.
    ///
    /// # Errors
    /// The first impossible field; the processor keeps its state.
    fn restore(&mut self, state: &Self::State) -> Result<(), StateError>;
}
