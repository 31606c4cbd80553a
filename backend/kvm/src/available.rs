//! Whether this machine can run the backend, and if not, why. What its KVM can do with a guest's
//! memory beyond the requirements.

use crate::arch;
use crate::error::{API_VERSION, Unavailable};
use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_CAP_MEMORY_FAULT_INFO,
    KVM_CAP_PRE_FAULT_MEMORY, KVM_DIRTY_LOG_INITIALLY_SET,
};
use kvm_ioctls::{Cap, Kvm};
use lacuna_sys::{Errno, Userfaultfd};

/// Whether this machine can run the backend.
///
/// # Errors
/// The first missing requirement, with a remedy for the host's administrator.
pub fn available() -> Result<(), Unavailable> {
    open().map(drop)
}

/// The frequency of the TSC of this host's guests in kHz, for
/// [`CpuModel::Common`](lacuna_machine::CpuModel::Common) of a guest that will move here. `None` if
/// no guest can run.
pub fn tsc_khz() -> Option<u32> {
    let vm = open().ok()?.create_vm().ok()?;
    arch::tsc_khz(&vm.create_vcpu(0).ok()?)
}

/// Opens `/dev/kvm`, if the other requirements are met too.
pub(crate) fn open() -> Result<Kvm, Unavailable> {
    arch::check()?;
    let kvm = Kvm::new().map_err(|e| match Errno::from_raw_os_error(e.errno()) {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => Unavailable::NoDevice,
        Errno::ACCESS | Errno::PERM => Unavailable::NoPermission,
        errno => Unavailable::Open(errno),
    })?;
    match kvm.get_api_version() {
        API_VERSION => {}
        version => return Err(Unavailable::Version(version)),
    }
    let needs = [
        (Cap::UserMemory, "memory slots"),
        (Cap::Irqchip, "in-kernel interrupt controllers"),
        (Cap::ImmediateExit, "immediate exits"),
    ];
    if let Some((_, what)) = needs.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        return Err(Unavailable::Lacks(what));
    }
    match Userfaultfd::open() {
        Ok(_) => Ok(kvm),
        Err(Errno::NOSYS) => Err(Unavailable::NoUserfaultfd),
        Err(Errno::PERM) => Err(Unavailable::UserfaultfdPermission),
        Err(errno) => Err(Unavailable::OldUserfaultfd(errno)),
    }
}

/// `KVM_CAP_GUEST_MEMFD_FLAGS`, and `GUEST_MEMFD_FLAG_MMAP` in its answer (Linux 6.18;
/// `linux/kvm.h`).
const KVM_CAP_GUEST_MEMFD_FLAGS: u32 = 244;
const GUEST_MEMFD_FLAG_MMAP: u32 = 1 << 0;

/// A capability of KVM for a guest's memory that the backend can run without. Decision 0043 says
/// what the backend does with each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryCapability {
    /// A log of writes begins with all pages set, and write-protects a page when its bit is cleared
    /// (`KVM_DIRTY_LOG_INITIALLY_SET`, Linux 5.7).
    LogInitiallySet,
    /// Writes are recorded in a ring for each vCPU (`KVM_CAP_DIRTY_LOG_RING`, Linux 5.11).
    DirtyRing,
    /// An access that finds no page of this process ends with the guest's address of the page
    /// (`KVM_EXIT_MEMORY_FAULT`, Linux 6.8). Linux 6.18 on x86 offers it, and reports ordinary
    /// memory without an address.
    MemoryFaultExit,
    /// A vCPU maps a range without a fault of the guest (`KVM_PRE_FAULT_MEMORY`, Linux 6.12).
    PreFault,
    /// The guest's memory is a `guest_memfd` that this process can map (Linux 6.18).
    MappedGuestMemfd,
}

impl MemoryCapability {
    /// Every capability.
    pub const ALL: [Self; 5] = [
        Self::LogInitiallySet,
        Self::DirtyRing,
        Self::MemoryFaultExit,
        Self::PreFault,
        Self::MappedGuestMemfd,
    ];

    /// Whether a KVM has it that answers `KVM_CHECK_EXTENSION` as `check` does.
    pub(crate) fn is_offered(self, check: impl FnOnce(u32) -> i32) -> bool {
        let (extension, flags) = match self {
            Self::LogInitiallySet => (
                KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
                KVM_DIRTY_LOG_INITIALLY_SET,
            ),
            // The answer is the size of the largest ring.
            Self::DirtyRing => (KVM_CAP_DIRTY_LOG_RING, !0),
            Self::MemoryFaultExit => (KVM_CAP_MEMORY_FAULT_INFO, 1),
            Self::PreFault => (KVM_CAP_PRE_FAULT_MEMORY, 1),
            Self::MappedGuestMemfd => (KVM_CAP_GUEST_MEMFD_FLAGS, GUEST_MEMFD_FLAG_MMAP),
        };
        // A negative answer is an error.
        u32::try_from(check(extension)).is_ok_and(|answer| answer & flags != 0)
    }
}

/// The capabilities of this host's KVM for a guest's memory.
///
/// # Errors
/// As [`available`].
pub fn memory_capabilities() -> Result<Vec<MemoryCapability>, Unavailable> {
    let kvm = open()?;
    let check = |extension: u32| kvm.check_extension_raw(extension.into());
    let all = MemoryCapability::ALL.into_iter();
    Ok(all.filter(|one| one.is_offered(check)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use MemoryCapability::{
        DirtyRing, LogInitiallySet, MappedGuestMemfd, MemoryFaultExit, PreFault,
    };

    const MANUAL_PROTECT: u32 = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2;
    const MEMORY_FAULT: u32 = KVM_CAP_MEMORY_FAULT_INFO;
    const PRE_FAULT: u32 = KVM_CAP_PRE_FAULT_MEMORY;
    const MEMFD_FLAGS: u32 = KVM_CAP_GUEST_MEMFD_FLAGS;
    const RING: u32 = KVM_CAP_DIRTY_LOG_RING;

    /// Each kernel answers for what its version and the ones before have added. The answers with
    /// `kvm_pvm` were read on a host.
    #[test]
    fn each_kernel_has_its_capabilities() {
        type Answers = &'static [(u32, i32)];
        let kernels: [(&str, Answers, &[MemoryCapability]); 7] = [
            ("5.1", &[(MANUAL_PROTECT, 1)], &[]),
            ("5.10", &[(MANUAL_PROTECT, 3)], &[LogInitiallySet]),
            (
                "6.8",
                &[(MANUAL_PROTECT, 3), (RING, 1 << 20), (MEMORY_FAULT, 1)],
                &[LogInitiallySet, DirtyRing, MemoryFaultExit],
            ),
            (
                "6.12",
                &[
                    (MANUAL_PROTECT, 3),
                    (RING, 1 << 20),
                    (MEMORY_FAULT, 1),
                    (PRE_FAULT, 1),
                ],
                &[LogInitiallySet, DirtyRing, MemoryFaultExit, PreFault],
            ),
            (
                "6.18",
                &[
                    (MANUAL_PROTECT, 3),
                    (RING, 1 << 20),
                    (MEMORY_FAULT, 1),
                    (PRE_FAULT, 1),
                    (MEMFD_FLAGS, 3),
                ],
                &MemoryCapability::ALL,
            ),
            (
                "6.18 with kvm_pvm",
                &[
                    (MANUAL_PROTECT, 3),
                    (RING, 1 << 20),
                    (MEMORY_FAULT, 1),
                    (MEMFD_FLAGS, 3),
                ],
                &[
                    LogInitiallySet,
                    DirtyRing,
                    MemoryFaultExit,
                    MappedGuestMemfd,
                ],
            ),
            (
                "one that refuses to answer",
                &[
                    (MANUAL_PROTECT, -1),
                    (RING, -1),
                    (MEMORY_FAULT, -1),
                    (MEMFD_FLAGS, -1),
                ],
                &[],
            ),
        ];
        for (kernel, answers, expected) in kernels {
            let check = |extension| {
                let answer = answers.iter().find(|(known, _)| *known == extension);
                answer.map_or(0, |(_, answer)| *answer)
            };
            let all = MemoryCapability::ALL.into_iter();
            let found: Vec<_> = all.filter(|one| one.is_offered(check)).collect();
            assert_eq!(found, expected, "{kernel}");
        }
    }
}
