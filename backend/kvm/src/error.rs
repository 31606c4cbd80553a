//! Why a run cannot start.

use crate::available::Unavailable;
use crate::dirty::DirtyError;
use crate::memory::MapError;
use lacuna_machine::BootError;
use lacuna_sys::Errno;

/// Why a run cannot start.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// Not on this machine.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// Nonsense, or more than KVM has.
    #[error("{asked} vCPUs: give 1 to {most}")]
    Vcpus {
        /// How many were asked for.
        asked: usize,
        /// How many there can be.
        most: usize,
    },
    /// Too small a budget.
    #[error("a resident budget of {pages} pages: the kvm backend needs at least {least} (2M)")]
    Resident {
        /// What was asked for, or all of the guest's memory if that is less.
        pages: u64,
        /// The minimum.
        least: u64,
    },
    /// No asynchronous page faults.
    #[error("this KVM does not offer asynchronous page faults (CPUID 0x40000001 bits 4 and 14)")]
    NoApf,
    /// No dirty rings.
    #[error("this KVM has no dirty rings (KVM_CAP_DIRTY_LOG_RING): use its bitmap")]
    NoRing,
    /// A ring that is too large for this KVM.
    #[error("dirty rings of {bytes} bytes: this KVM takes up to {most}")]
    Ring {
        /// What was asked for.
        bytes: usize,
        /// What there can be.
        most: usize,
    },
    /// Pages may leave whose writes nobody would hear of.
    #[error(
        "writes are to be read from the page map, which knows nothing of pages that are elsewhere: \
         make all of the guest's memory resident, or use KVM's bitmap or rings"
    )]
    Away,
    /// Which pages were written cannot be told.
    #[error(transparent)]
    Dirty(#[from] DirtyError),
    /// No memory for the guest.
    #[error(transparent)]
    Memory(#[from] MapError),
    /// The image does not fit.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The page source cannot start.
    #[error("userfaultfd: cannot {step}: {errno}")]
    Userfaultfd {
        /// What it was doing.
        step: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
    /// KVM refused.
    #[error("KVM: cannot {step}: {errno}")]
    Kvm {
        /// What we were doing.
        step: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
}

impl KvmError {
    /// For `map_err`: KVM refused to `step`.
    pub(crate) fn step(step: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |e| Self::Kvm {
            step,
            errno: Errno::from_raw_os_error(e.errno()),
        }
    }
}
