//! What this host's KVM can do with a guest's memory beyond the backend's requirements. What the
//! backend does with it is in decision 0043.

use crate::available::open;
use crate::error::Unavailable;
use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_CAP_MEMORY_FAULT_INFO, KVM_CAP_PRE_FAULT_MEMORY,
    KVM_DIRTY_LOG_INITIALLY_SET,
};

/// `KVM_CAP_GUEST_MEMFD_FLAGS`, and `GUEST_MEMFD_FLAG_MMAP` in its answer (Linux 6.18;
/// `linux/kvm.h`).
const KVM_CAP_GUEST_MEMFD_FLAGS: u32 = 244;
const GUEST_MEMFD_FLAG_MMAP: u32 = 1 << 0;

/// A capability of KVM for a guest's memory that the backend can run without.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryCapability {
    /// A log of writes begins with all pages set, and write-protects a page when its bit is cleared
    /// (`KVM_DIRTY_LOG_INITIALLY_SET`, Linux 5.7).
    LogInitiallySet,
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
    pub const ALL: [Self; 4] = [
        Self::LogInitiallySet,
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
/// As [`available`](crate::available()).
pub fn memory_capabilities() -> Result<Vec<MemoryCapability>, Unavailable> {
    let kvm = open()?;
    let check = |extension: u32| kvm.check_extension_raw(extension.into());
    let all = MemoryCapability::ALL.into_iter();
    Ok(all.filter(|one| one.is_offered(check)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use MemoryCapability::{LogInitiallySet, MappedGuestMemfd, MemoryFaultExit, PreFault};

    /// The answers are those of `KVM_CHECK_EXTENSION` in each kernel's source; the last kernel's
    /// were read on a host with `kvm_pvm`.
    #[test]
    fn each_kernel_has_its_capabilities() {
        const MANUAL_PROTECT: u32 = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2;
        const MEMORY_FAULT: u32 = KVM_CAP_MEMORY_FAULT_INFO;
        const PRE_FAULT: u32 = KVM_CAP_PRE_FAULT_MEMORY;
        const MEMFD_FLAGS: u32 = KVM_CAP_GUEST_MEMFD_FLAGS;
        type Answers = &'static [(u32, i32)];
        let kernels: [(&str, Answers, &[MemoryCapability]); 7] = [
            ("5.1", &[(MANUAL_PROTECT, 1)], &[]),
            ("6.1", &[(MANUAL_PROTECT, 3)], &[LogInitiallySet]),
            (
                "6.8",
                &[(MANUAL_PROTECT, 3), (MEMORY_FAULT, 1)],
                &[LogInitiallySet, MemoryFaultExit],
            ),
            (
                "6.12",
                &[(MANUAL_PROTECT, 3), (MEMORY_FAULT, 1), (PRE_FAULT, 1)],
                &[LogInitiallySet, MemoryFaultExit, PreFault],
            ),
            (
                "6.18",
                &[
                    (MANUAL_PROTECT, 3),
                    (MEMORY_FAULT, 1),
                    (PRE_FAULT, 1),
                    (MEMFD_FLAGS, 3),
                ],
                &MemoryCapability::ALL,
            ),
            (
                "6.18 with kvm_pvm",
                &[(MANUAL_PROTECT, 3), (MEMORY_FAULT, 1), (MEMFD_FLAGS, 3)],
                &[LogInitiallySet, MemoryFaultExit, MappedGuestMemfd],
            ),
            (
                "one that refuses to answer",
                &[(MANUAL_PROTECT, -1), (MEMORY_FAULT, -1), (MEMFD_FLAGS, -1)],
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
