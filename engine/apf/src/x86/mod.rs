//! The Linux guest ABI for x86: three MSRs, two words of guest memory, #PF and one interrupt.
//!
//! | file | job |
//! |---|---|
//! | `numbers` | feature bits and MSR numbers |
//! | `control` | the three MSRs, and every rule that makes a write raise #GP |
//! | `delivery` | the events, with page-ready in the form of 2010 and in today's |
//! | `guest` | the interface to a vCPU |
//!
//! Sources: the Linux guest ABI (`Documentation/virt/kvm/x86/msr.rst`, `cpuid.rst`). The source for
//! the form of 2010, which Linux has dropped, is the talk on asynchronous page faults at that
//! year's KVM Forum.

mod control;
mod delivery;
mod guest;
mod numbers;

use lacuna_addr::{Access, Gfn};
use lacuna_sync::Nanos;

pub use control::{Control, GeneralProtection};
pub use guest::{CpuState, Guest};
pub use numbers::{Features, Msr};

/// The asynchronous page faults of one x86 vCPU.
pub type Queue = crate::Queue<Control>;

impl Queue {
    /// RDMSR. `None` raises #GP(0): the guest's CPUID does not offer the register.
    pub fn read_msr(&self, msr: Msr) -> Option<u64> {
        self.abi().read(msr)
    }

    /// Whether [`Queue::write_msr`] would take the value now.
    ///
    /// # Errors
    /// The write would raise #GP(0).
    pub fn check_msr<G: Guest>(
        &self,
        msr: Msr,
        value: u64,
        guest: &mut G,
    ) -> Result<(), GeneralProtection> {
        self.abi().check(msr, value, guest)
    }

    /// The page that [`Queue::write_msr`] accesses, and how. A backend that must not wait inside
    /// the write brings the page in before.
    pub fn page_accessed_by(&self, msr: Msr, value: u64) -> Option<(Gfn, Access)> {
        self.abi().page_accessed_by(msr, value)
    }

    /// WRMSR.
    ///
    /// # Errors
    /// The write raises #GP(0) and changes nothing.
    pub fn write_msr<G: Guest>(
        &mut self,
        msr: Msr,
        value: u64,
        now: Nanos,
        guest: &mut G,
    ) -> Result<(), GeneralProtection> {
        let request = self.abi_mut().write(msr, value, guest)?;
        self.apply(request, now, guest);
        Ok(())
    }
}
