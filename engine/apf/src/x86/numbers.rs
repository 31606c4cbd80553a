//! Numbers that guest and host agree on (`asm/kvm_para.h`, `cpuid.rst`).

bitflags::bitflags! {
    /// The features that the guest may use: bits of EAX in CPUID leaf 0x4000_0001.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Features: u32 {
        /// Asynchronous page faults are offered.
        const ASYNC_PF = 1 << 4;
        /// A nested hypervisor may get page-not-present as a #PF exit.
        const ASYNC_PF_VMEXIT = 1 << 10;
        /// Page-ready may be an interrupt.
        const ASYNC_PF_INT = 1 << 14;
    }
}

/// The three registers by which a guest controls its asynchronous page faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Msr {
    /// `MSR_KVM_ASYNC_PF_EN`: the address of the guest's area, and which events are delivered.
    Enable,
    /// `MSR_KVM_ASYNC_PF_INT`: the vector of the page-ready interrupt.
    Vector,
    /// `MSR_KVM_ASYNC_PF_ACK`: the guest has read the token of a page-ready interrupt.
    Acknowledge,
}

impl Msr {
    const ALL: [Self; 3] = [Self::Enable, Self::Vector, Self::Acknowledge];

    /// The register with number `index`, if that is one of the three.
    pub fn of(index: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|msr| msr.index() == index)
    }

    /// Its number, as in ECX.
    pub const fn index(self) -> u32 {
        match self {
            Self::Enable => 0x4b56_4d02,
            Self::Vector => 0x4b56_4d06,
            Self::Acknowledge => 0x4b56_4d07,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_msr_is_known_by_its_number() {
        for msr in Msr::ALL {
            assert_eq!(Msr::of(msr.index()), Some(msr));
        }
        assert_eq!(Msr::of(0x4b56_4d03), None, "that one is steal time");
    }
}
