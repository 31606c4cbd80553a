//! This backend's needs of an architecture besides its processor: the start of a guest, the
//! contract of asynchronous page faults, and the handling of the architecture's own exits.

use crate::entry::Entry;
use crate::mmu::Format;
use crate::step::Step;
use crate::vm::Vm;
use lacuna_addr::{Access, Gfn};
use lacuna_apf::{Deliver, Queue};
use lacuna_cpu::{Processor, Wake};
use lacuna_machine::{Apf, BootError, Image, VmConfig};
use std::sync::Arc;

/// Whether a vCPU may run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Power {
    /// It runs.
    On,
    /// It was off, and runs from now on, from its initial state.
    Started,
    /// It waits for a wake-up, like a halted vCPU. Nothing is in flight for its guest.
    Off,
}

/// An architecture of this backend's VMs. A vCPU is generic over it, so all calls are resolved at
/// compile time. In the memory below the vCPU, only the format of the stage-2 tables depends on the
/// architecture.
pub trait Platform: Processor + 'static {
    /// The format of its stage-2 tables.
    type Format: Format;

    /// The state in which a fresh vCPU starts.
    type Boot: Copy + Send;

    /// The contract of asynchronous page faults with a guest.
    type Apf: Deliver<Entry<Self>> + Send;

    /// Loads `image` into the memory of `vm`; returns the state in which its vCPUs start.
    ///
    /// # Errors
    /// The image does not fit, or is for another architecture.
    fn load(vm: &Vm, image: &Image<'_>, command_line: &str) -> Result<Self::Boot, BootError>;

    /// The state shared by the processors of `vm`.
    fn fabric_of(vm: &Vm) -> Arc<Self::Fabric> {
        let wake = Arc::clone(&vm.kicks) as Arc<dyn Wake>;
        Arc::new(Self::fabric(vm.config.vcpus, wake))
    }

    /// The contract of a vCPU, in a VM that offers asynchronous page faults or not (`offered`).
    fn contract(offered: Apf) -> Self::Apf;

    /// Puts the newly reset processor `index` of a VM into the state `boot`. `None` if a restore
    /// gives the vCPU its state.
    fn start(&mut self, config: &VmConfig, index: usize, boot: Option<&Self::Boot>);

    /// Whether the vCPU may run. If another vCPU has switched it on, this puts its processor into
    /// its initial state.
    #[inline(always)]
    fn power(_entry: &mut Entry<Self>) -> Power {
        Power::On
    }

    /// The processor is about to execute its next instruction: it takes a signalled event, if the
    /// contract has such events.
    #[inline(always)]
    fn enter(_entry: &mut Entry<Self>, _apf: &mut Queue<Self::Apf>) {}

    /// Calls `note` with the registers that a trace records: the program counter, the flags and the
    /// general registers.
    fn note_registers(&self, note: impl FnMut(u64));

    /// The architecture's report to a hypervisor of a stage-2 refusal of `access` at `gfn`, as the
    /// end of an error's text. The vCPU has stopped there.
    fn syndrome(_entry: &Entry<Self>, _gfn: Gfn, _access: Access) -> String {
        String::new()
    }

    /// Handles an exit that only this architecture has. `entry` is the vCPU's processor, `apf` its
    /// asynchronous page faults.
    fn finish(entry: &mut Entry<Self>, apf: &mut Queue<Self::Apf>, exit: Self::Own) -> Step;
}
