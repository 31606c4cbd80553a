//! Why a run cannot start: the machine lacks a requirement, or a request is refused.

use lacuna_host::{HostError, SetupFailed};
use lacuna_machine::{BackendError, BootError, ErrorKind, HandlerError, MachineError};
use lacuna_slots::{DirtyError, SlotError};

use lacuna_sys::Errno;

const DEVICE: &str = "/dev/kvm";
/// `KVM_API_VERSION`, the same since Linux 2.6.22.
pub const API_VERSION: i32 = 12;

/// Why this machine cannot run the backend.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum Unavailable {
    /// The host's processor has another architecture.
    #[error("the kvm backend runs on x86-64 hosts only: use the soft backend")]
    Architecture,
    /// There is no device.
    #[error("no {DEVICE}: load KVM's module (kvm_intel or kvm_amd), or use the soft backend")]
    NoDevice,
    /// This process has no permission to open the device.
    #[error("no permission to open {DEVICE}: become a member of its group, usually `kvm`")]
    NoPermission,
    /// The device cannot be opened for another reason.
    #[error("cannot open {DEVICE}: {0}")]
    Open(Errno),
    /// KVM has an unknown API version.
    #[error(
        "{DEVICE} has API version {0}, not {API_VERSION}: use another kernel, or the soft backend"
    )]
    Version(i32),
    /// KVM lacks a necessary capability.
    #[error("{DEVICE} lacks {0}: use a newer kernel, or the soft backend")]
    Lacks(&'static str),
    /// The kernel has no userfaultfd.
    #[error(
        "the kernel has no userfaultfd (CONFIG_USERFAULTFD): use another one, or the soft backend"
    )]
    NoUserfaultfd,
    /// This process has no permission to use userfaultfd.
    #[error(
        "no permission for userfaultfd on the kernel's own faults: run as root, with \
         CAP_SYS_PTRACE, or with sysctl vm.unprivileged_userfaultfd=1"
    )]
    UserfaultfdPermission,
    /// The kernel is too old for the necessary operations of userfaultfd.
    #[error("userfaultfd cannot move pages ({0}): use Linux 6.8 or later, or the soft backend")]
    OldUserfaultfd(Errno),
}

/// Why a run cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvmError {
    /// The backend cannot run on this machine.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The number of vCPUs is zero or too large.
    #[error("{asked} vCPUs: give 1 to {max}")]
    Vcpus {
        /// The requested number.
        asked: usize,
        /// The largest number.
        max: usize,
    },
    /// The budget is too small.
    #[error("a resident budget of {pages} pages is too small: give at least {min} (2M)")]
    Resident {
        /// The smaller of the requested budget and the guest's memory.
        pages: u64,
        /// The minimum.
        min: u64,
    },
    /// KVM has no asynchronous page faults.
    #[error(
        "this KVM does not offer asynchronous page faults (CPUID 0x40000001 bits 4 and 14): turn \
         them off, or use the soft backend"
    )]
    NoApf,
    /// KVM here lacks a feature of the common processor model.
    #[error(
        "this KVM does not offer {0}, which the common processor model has: use the host's model \
         (`CpuModel::Host`), or the soft backend"
    )]
    NoFeature(&'static str),
    /// KVM cannot run the guest's TSC at this frequency.
    #[error(
        "this KVM cannot run a TSC at {khz} kHz: leave the frequency to it (`tsc_khz: None`), or \
         start a guest that will move here with the frequency `kvm::tsc_khz` of this host"
    )]
    TscFrequency {
        /// The requested frequency.
        khz: u32,
    },
    /// KVM has no dirty rings.
    #[error("this KVM has no dirty rings (KVM_CAP_DIRTY_LOG_RING): use `Delivery::Bitmap`")]
    NoRing,
    /// The rings are too large for this KVM.
    #[error("dirty rings of {bytes} bytes are too large: this KVM takes at most {max}")]
    Ring {
        /// The requested size.
        bytes: usize,
        /// The largest size.
        max: usize,
    },
    /// The page map loses the record of a write when the page is evicted.
    #[error(
        "the page map loses writes to pages that are swapped out: make all of the guest's memory \
         resident, or let KVM detect writes (`Tracker::Kvm`)"
    )]
    PartlyResident,
    /// This memory is in small pages.
    #[error(
        "of memory that is all resident, only private memory without a page source may have huge \
         pages: give the guest a smaller budget, memory in hugetlbfs, or the soft backend"
    )]
    HugePages,
    /// A handler fills private memory that is all resident.
    #[error(
        "a handler outside of this process fills private memory that is all resident: give the \
         guest a budget of all its memory, or the soft backend"
    )]
    HandlerMemory,
    /// A discarded page of a private file would leave the userfaultfd that records writes.
    #[error(
        "the page map records no writes to a private file: give the VM Tracker::Kvm, or another \
         memory"
    )]
    RecordedFile,
    /// The handler's userfaultfd knows no accesses of the kernel.
    #[error(
        "KVM's accesses to the guest's memory would not wait for the handler: make it with \
         `External::for_kernel`"
    )]
    HandlerOfUserSpace,
    /// The handler does not take the guest's memory.
    #[error(transparent)]
    Handler(#[from] HandlerError),
    /// Dirty tracking failed.
    #[error(transparent)]
    Dirty(#[from] DirtyError),
    /// Page numbers of this backend have 32 bits.
    #[error(
        "guest memory of {0} bytes: this backend takes less than 16T; give less, or use the soft \
         backend"
    )]
    TooLarge(u64),
    /// There is no memory for the guest.
    #[error(transparent)]
    Memory(#[from] HostError),
    /// The image does not fit.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The memory does not fit into slots.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The guest cannot start.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The VM has its vCPUs already.
    #[error("this VM has its vCPUs already: make another one")]
    Booted,
    /// The swap device cannot be opened.
    #[error(transparent)]
    Swap(#[from] SetupFailed),
    /// The guest's missing pages cannot be brought.
    #[error("userfaultfd: cannot {step}: {errno}")]
    Userfaultfd {
        /// The refused step.
        step: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// KVM refused.
    #[error("KVM: cannot {step}: {errno}")]
    Kvm {
        /// The refused step.
        step: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
}

impl BackendError for KvmError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Vcpus { .. }
            | Self::Resident { .. }
            | Self::Ring { .. }
            | Self::PartlyResident
            | Self::HugePages
            | Self::HandlerMemory
            | Self::RecordedFile
            | Self::HandlerOfUserSpace
            | Self::TooLarge(_)
            | Self::Slot(_)
            | Self::Booted => ErrorKind::Request,
            Self::Memory(error) if error.is_of_request() => ErrorKind::Request,
            Self::Machine(error) => error.kind(),
            Self::Boot(error) => error.kind(),
            Self::Unavailable(_)
            | Self::NoApf
            | Self::NoFeature(_)
            | Self::TscFrequency { .. }
            | Self::NoRing
            | Self::Dirty(_)
            | Self::Memory(_)
            | Self::Swap(_)
            | Self::Handler(_)
            | Self::Userfaultfd { .. }
            | Self::Kvm { .. } => ErrorKind::Host,
        }
    }
}

impl KvmError {
    /// For `map_err`: Linux has no transparent huge pages.
    pub(crate) fn no_huge_pages(errno: Errno) -> Self {
        let step = "use transparent huge pages (CONFIG_TRANSPARENT_HUGEPAGE)";
        Self::Kvm { step, errno }
    }

    /// For `map_err`: KVM refused to `step`.
    pub(crate) fn step(step: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |e| Self::Kvm {
            step,
            errno: Errno::from_raw_os_error(e.errno()),
        }
    }
}
