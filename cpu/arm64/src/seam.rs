//! The processor's interface to a hypervisor: [`lacuna_cpu::Processor`].
//!
//! Beside that trait, a hypervisor drives it so:
//!
//! ```text
//! a VM          one Fabric for all its vCPUs; no memory slot where Gic::claims, because the
//!               processor answers those accesses itself
//! a device      Gic::set_spi, Gic::set_ppi, from any thread
//! a vCPU        is entered only while Power::is_on; else it waits until Power::take_start says
//!               where it starts, and is then reset and started (Cpu::start)
//! Hypercall     Call::architecture, else Power::call, else a service of the hypervisor's own, else
//!               NOT_SUPPORTED; the answer is given by Cpu::complete_hypercall. If something has
//!               to come first: Cpu::repeat_hypercall
//! async fault   Cpu::inject_abort, if is_interruptible and the contract with the guest allow it;
//!               PSTATE masks no abort. Or an event of firmware (SDEI): Cpu::return_from_firmware
//! save          Gic::distributor, Counter::value; each vCPU, and its Power::state
//! restore       Gic::set_distributor, Counter::set; then each vCPU, Power::set
//! reset         Gic::reset_distributor, then each vCPU
//! ```

use crate::smccc::Call;
use crate::state::Exception;

/// Why the processor returned from its run loop.
pub type Exit = lacuna_cpu::Exit<Own>;

/// The exits of arm64 only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Own {
    /// HVC of EL1: answer with [`crate::Cpu::complete_hypercall`] before the next run, or let the
    /// guest repeat the call ([`crate::Cpu::repeat_hypercall`]). PC is behind it.
    Hypercall(Call),
    /// No progress is possible: this is an instruction abort at the vector of this very exception.
    /// The guest has crashed.
    Exception(Exception),
}
