//! What this backend needs of an architecture besides its processor: how it starts, how its guests
//! are told of pages, and what its own exits mean.

use crate::entry::Entry;
use crate::vcpu::{Step, VcpuOf};
use crate::vm::Vm;
use lacuna_apf::Tell;
use lacuna_cpu::Processor;
use lacuna_machine::{Apf, BootError, Image};

/// An architecture that VMs of this backend can have. Everything here is resolved at compile time:
/// a vCPU is generic over its processor, and the memory below it knows none.
pub trait Platform: Processor + 'static {
    /// Where a fresh vCPU starts.
    type Boot: Copy + Send;

    /// The contract by which a guest is told of pages that are on their way.
    type Apf: Tell<Entry<Self>> + Send;

    /// Loads `image` into the memory of `vm`; gives back where its vCPUs start.
    ///
    /// # Errors
    /// The image does not fit, or is for another architecture.
    fn load(vm: &Vm, image: &Image<'_>, command_line: &str) -> Result<Self::Boot, BootError>;

    /// The contract of a vCPU in a VM that offers asynchronous page faults, or does not.
    fn contract(offered: Apf) -> Self::Apf;

    /// Makes a processor that was just reset begin where `boot` says. Without `boot`, its state is
    /// to be restored.
    fn start(&mut self, offered: Apf, boot: Option<&Self::Boot>);

    /// Does what an exit that only this architecture has asks for.
    fn finish(vcpu: &mut VcpuOf<Self>, exit: Self::Own) -> Step;
}
