//! Names of system registers.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A system register, by the five numbers in an instruction (Arm ARM C5.1.3).
///
/// They are packed as in `KVM_REG_ARM64_SYSREG`: op0 in bits 15:14, op1 13:11, CRn 10:7, CRm 6:3,
/// op2 2:0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SysReg(u16);

impl SysReg {
    /// MPIDR_EL1, which names the vCPU.
    pub const MPIDR: Self = Self::new([3, 0, 0, 0, 5]);

    /// The register with these op0, op1, CRn, CRm and op2. Bits beyond an instruction's fields are
    /// dropped.
    pub const fn new(numbers: [u8; 5]) -> Self {
        let [op0, op1, crn, crm, op2] = numbers;
        Self(
            (op0 as u16 & 3) << 14
                | (op1 as u16 & 7) << 11
                | (crn as u16 & 15) << 7
                | (crm as u16 & 15) << 3
                | op2 as u16 & 7,
        )
    }

    /// The register with these packed numbers. Every value names a register.
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// The packed numbers.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// op0, op1, CRn, CRm and op2.
    pub const fn numbers(self) -> [u8; 5] {
        let bits = self.0;
        [
            (bits >> 14) as u8,
            (bits >> 11 & 7) as u8,
            (bits >> 7 & 15) as u8,
            (bits >> 3 & 15) as u8,
            (bits & 7) as u8,
        ]
    }

    /// Its name in the manual, if messages may have to name it.
    pub fn name(self) -> Option<&'static str> {
        let found = NAMES
            .iter()
            .find(|(numbers, _)| Self::new(*numbers) == self);
        found.map(|(_, name)| *name)
    }
}

impl fmt::Display for SysReg {
    /// As assemblers write it: `S3_0_C2_C0_0`, with the manual's name behind it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [op0, op1, crn, crm, op2] = self.numbers();
        write!(f, "S{op0}_{op1}_C{crn}_C{crm}_{op2}")?;
        match self.name() {
            Some(name) => write!(f, " ({name})"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for SysReg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[rustfmt::skip]
const NAMES: [([u8; 5], &str); 37] = [
    ([2, 0, 0, 2, 2], "MDSCR_EL1"),
    ([2, 0, 1, 1, 4], "OSLSR_EL1"),
    ([3, 0, 0, 0, 0], "MIDR_EL1"),
    ([3, 0, 0, 0, 5], "MPIDR_EL1"),
    ([3, 0, 0, 0, 6], "REVIDR_EL1"),
    ([3, 0, 0, 4, 0], "ID_AA64PFR0_EL1"),
    ([3, 0, 0, 4, 1], "ID_AA64PFR1_EL1"),
    ([3, 0, 0, 5, 0], "ID_AA64DFR0_EL1"),
    ([3, 0, 0, 6, 0], "ID_AA64ISAR0_EL1"),
    ([3, 0, 0, 6, 1], "ID_AA64ISAR1_EL1"),
    ([3, 0, 0, 7, 0], "ID_AA64MMFR0_EL1"),
    ([3, 0, 0, 7, 1], "ID_AA64MMFR1_EL1"),
    ([3, 0, 0, 7, 2], "ID_AA64MMFR2_EL1"),
    ([3, 0, 1, 0, 0], "SCTLR_EL1"),
    ([3, 0, 1, 0, 1], "ACTLR_EL1"),
    ([3, 0, 1, 0, 2], "CPACR_EL1"),
    ([3, 0, 2, 0, 0], "TTBR0_EL1"),
    ([3, 0, 2, 0, 1], "TTBR1_EL1"),
    ([3, 0, 2, 0, 2], "TCR_EL1"),
    ([3, 0, 4, 0, 0], "SPSR_EL1"),
    ([3, 0, 4, 0, 1], "ELR_EL1"),
    ([3, 0, 5, 2, 0], "ESR_EL1"),
    ([3, 0, 6, 0, 0], "FAR_EL1"),
    ([3, 0, 7, 4, 0], "PAR_EL1"),
    ([3, 0, 10, 2, 0], "MAIR_EL1"),
    ([3, 0, 12, 0, 0], "VBAR_EL1"),
    ([3, 0, 13, 0, 1], "CONTEXTIDR_EL1"),
    ([3, 0, 13, 0, 4], "TPIDR_EL1"),
    ([3, 0, 14, 1, 0], "CNTKCTL_EL1"),
    ([3, 1, 0, 0, 1], "CLIDR_EL1"),
    ([3, 1, 0, 0, 7], "AIDR_EL1"),
    ([3, 2, 0, 0, 0], "CSSELR_EL1"),
    ([3, 3, 0, 0, 1], "CTR_EL0"),
    ([3, 3, 0, 0, 7], "DCZID_EL0"),
    ([3, 3, 13, 0, 2], "TPIDR_EL0"),
    ([3, 3, 13, 0, 3], "TPIDRRO_EL0"),
    ([3, 3, 14, 0, 0], "CNTFRQ_EL0"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_packed_as_kvm_packs_them() {
        // KVM_REG_ARM64_SYSREG of TTBR1_EL1 and of CNTV_CTL_EL0.
        assert_eq!(SysReg::new([3, 0, 2, 0, 1]).bits(), 0xc101);
        assert_eq!(SysReg::new([3, 3, 14, 3, 1]).bits(), 0xdf19);
        for bits in 0..=u16::MAX {
            let register = SysReg::from_bits(bits);
            assert_eq!(SysReg::new(register.numbers()), register);
        }
    }

    #[test]
    fn it_is_shown_by_its_numbers_and_its_name() {
        let shown = |numbers| SysReg::new(numbers).to_string();
        assert_eq!(shown([3, 0, 2, 0, 0]), "S3_0_C2_C0_0 (TTBR0_EL1)");
        assert_eq!(shown([3, 7, 15, 15, 7]), "S3_7_C15_C15_7");
    }
}
