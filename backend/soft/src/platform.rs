//! What this backend needs of an architecture besides its processor: the start of a guest, the
//! contract of asynchronous page faults, and the handling of the architecture's own exits.

use crate::entry::Entry;
use crate::step::Step;
use crate::vm::Vm;
use lacuna_apf::{Queue, Tell};
use lacuna_cpu::Processor;
use lacuna_machine::{Apf, BootError, Image, VmConfig};

/// An architecture that VMs of this backend can have. A vCPU is generic over it, so all calls are
/// resolved at compile time. The memory below the vCPU does not depend on the architecture.
pub trait Platform: Processor + 'static {
    /// The state in which a fresh vCPU starts.
    type Boot: Copy + Send;

    /// The contract of asynchronous page faults with a guest.
    type Apf: Tell<Entry<Self>> + Send;

    /// Loads `image` into the memory of `vm`; returns the state in which its vCPUs start.
    ///
    /// # Errors
    /// The image does not fit, or is for another architecture.
    fn load(vm: &Vm, image: &Image<'_>, command_line: &str) -> Result<Self::Boot, BootError>;

    /// The contract of a vCPU, in a VM that offers asynchronous page faults as `offered` says.
    fn contract(offered: Apf) -> Self::Apf;

    /// Puts processor `index` of a VM, which has just been reset, into the state `boot`. `None` for
    /// a vCPU that gets its state by a restore.
    fn start(&mut self, config: &VmConfig, index: usize, boot: Option<&Self::Boot>);

    /// Handles an exit that only this architecture has. `entry` is the vCPU's processor, and `apf`
    /// has its asynchronous page faults.
    fn finish(entry: &mut Entry<Self>, apf: &mut Queue<Self::Apf>, exit: Self::Own) -> Step;
}
