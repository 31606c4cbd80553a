//! Numbers that guest and host agree on (`asm/kvm_para.h`, `cpuid.rst`).

bitflags::bitflags! {
    /// What the guest may use: bits of EAX in CPUID leaf 0x4000_0001.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Features: u32 {
        /// Asynchronous page faults at all.
        const ASYNC_PF = 1 << 4;
        /// A nested hypervisor may have page-not-present as a #PF exit.
        const ASYNC_PF_VMEXIT = 1 << 10;
        /// Page-ready may come as an interrupt.
        const ASYNC_PF_INT = 1 << 14;
    }
}

/// The three registers by which a guest controls its asynchronous page faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Msr {
    /// `MSR_KVM_ASYNC_PF_EN`: where the guest's area is, and what is to be delivered.
    Enable,
    /// `MSR_KVM_ASYNC_PF_INT`: the vector of the page-ready interrupt.
    Vector,
    /// `MSR_KVM_ASYNC_PF_ACK`: the guest has read the token of a page-ready interrupt.
    Acknowledge,
}

impl Msr {
    const ALL: [Self; 3] = [Self::Enable, Self::Vector, Self::Acknowledge];

    /// The register that RDMSR and WRMSR know as `index`, if it is one of these.
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

/// What connects a page-ready with its page-not-present.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) struct Token(u32);

impl Token {
    /// Page-ready for every task that sleeps on this vCPU.
    pub const WAKE_ALL: Self = Self(u32::MAX);

    pub const fn get(self) -> u32 {
        self.0
    }

    /// As a #PF brings it: in CR2.
    pub const fn address(self) -> u64 {
        self.0 as u64
    }
}

/// Where a vCPU's tokens come from: `id << 12 | vCPU`, as in KVM. A guest keeps the sleepers of all
/// vCPUs in one table, so that two vCPUs must not give out the same token.
pub(crate) struct Tokens {
    vcpu: u32,
    id: u32,
}

const VCPU_BITS: u32 = 12;

impl Tokens {
    /// # Panics
    /// If `vcpu` does not fit in the token's 12 bits.
    pub fn new(vcpu: u32) -> Self {
        assert!(vcpu < 1 << VCPU_BITS, "a token has 12 bits for the vCPU");
        Self { vcpu, id: 0 }
    }

    /// The next one: never 0, which in the token word means "none", and never the wake-all.
    pub fn next(&mut self) -> Token {
        loop {
            self.id = (self.id + 1) & (u32::MAX >> VCPU_BITS);
            let token = Token(self.id << VCPU_BITS | self.vcpu);
            if self.id != 0 && token != Token::WAKE_ALL {
                return token;
            }
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

    /// Goes round twice, for the first vCPU and for the one whose bits are all ones.
    #[test]
    fn a_token_names_its_vcpu_and_is_never_zero_or_all_ones() {
        for vcpu in [0, 5, 0xfff] {
            let mut tokens = Tokens::new(vcpu);
            for _ in 0..2 << 20 {
                let token = tokens.next();
                assert_eq!(token.get() & 0xfff, vcpu);
                assert!(token.get() >> 12 != 0 && token != Token::WAKE_ALL);
            }
        }
    }

    #[test]
    fn tokens_repeat_only_after_all_ids() {
        let mut tokens = Tokens::new(1);
        let first = tokens.next();
        let again = (1..).find(|_| tokens.next() == first);
        assert_eq!(again, Some((1 << 20) - 1));
    }
}
