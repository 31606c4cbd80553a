//! Whether a processor has the features reported to a guest.

use super::SysReg;
use crate::StateError;
use std::collections::BTreeMap;

/// Masks of the lowest bits of 4-bit fields in which 0xf means "none" and 0 "the least": FP and
/// AdvSIMD.
const SIGNED_PFR0: u64 = 1 << 16 | 1 << 20;
/// PMUVer.
const SIGNED_DFR0: u64 = 1 << 8;
/// TGran64 and TGran4.
const SIGNED_MMFR0: u64 = 1 << 24 | 1 << 28;

/// Checks that a processor with the ID registers `have` can resume a guest that reads `saved`.
///
/// # Errors
/// [`StateError::SystemRegister`].
pub fn check_id(
    saved: &BTreeMap<SysReg, u64>,
    have: &BTreeMap<SysReg, u64>,
) -> Result<(), StateError> {
    let missing = missing_in(saved, have);
    missing.map_or(Ok(()), |(register, value)| {
        Err(StateError::SystemRegister { register, value })
    })
}

/// The first register, with its value in `saved`, that reported more to the guest than a processor
/// with the ID registers `have` offers: a feature register (`ID_AA64*_EL1`) with a greater field,
/// or another, different register. A register missing in `have` reads as zero.
///
/// A field of a feature register counts upwards: each value includes the features of the ones below
/// (Arm ARM D17.1.3).
fn missing_in(
    saved: &BTreeMap<SysReg, u64>,
    have: &BTreeMap<SysReg, u64>,
) -> Option<(SysReg, u64)> {
    let mut saved = saved.iter().map(|(register, value)| (*register, *value));
    saved.find(|(register, saved)| {
        let have = have.get(register).copied().unwrap_or(0);
        match is_feature(*register) {
            true => is_more(*saved, have, signed_fields(*register)),
            false => *saved != have,
        }
    })
}

/// ID_AA64PFR0_EL1 to ID_AA64MMFR7_EL1: CRm 4 to 7.
fn is_feature(register: SysReg) -> bool {
    matches!(register.numbers(), [3, 0, 0, 4..=7, _])
}

fn signed_fields(register: SysReg) -> u64 {
    match register.numbers() {
        [3, 0, 0, 4, 0] => SIGNED_PFR0,
        [3, 0, 0, 5, 0] => SIGNED_DFR0,
        [3, 0, 0, 7, 0] => SIGNED_MMFR0,
        _ => 0,
    }
}

/// Whether a field of 4 bits is greater in `saved` than in `have`. `signed` has the lowest bit of
/// each signed field.
fn is_more(saved: u64, have: u64, signed: u64) -> bool {
    (0..64).step_by(4).any(|low| {
        // A signed field is compared as a field that counts from 8 on.
        let bias = if signed >> low & 1 == 1 { 8 } else { 0 };
        let value = |register: u64| (register >> low & 0xf) ^ bias;
        value(saved) > value(have)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PFR0: SysReg = SysReg::new([3, 0, 0, 4, 0]);
    const ISAR0: SysReg = SysReg::new([3, 0, 0, 6, 0]);
    const MMFR0: SysReg = SysReg::new([3, 0, 0, 7, 0]);

    fn is_missing(register: SysReg, saved: u64, have: u64) -> bool {
        let of = |value| BTreeMap::from([(register, value)]);
        let missing = missing_in(&of(saved), &of(have));
        assert!(missing.is_none_or(|found| found == (register, saved)));
        missing.is_some()
    }

    #[test]
    fn less_than_the_processor_has_is_taken() {
        assert!(!is_missing(ISAR0, 0x0021_0000, 0x0021_0000));
        assert!(!is_missing(ISAR0, 0x0010_0000, 0x0021_0000));
        assert!(is_missing(ISAR0, 0x0021_0010, 0x0021_0000));
        assert!(is_missing(ISAR0, 0x0031_0000, 0x0021_0000));
    }

    /// 0xf in FP and AdvSIMD means that there are none; so does TGran4 for its granule.
    #[test]
    fn a_field_may_count_from_none() {
        assert!(!is_missing(PFR0, 0xff_0011, 0x00_0011));
        assert!(is_missing(PFR0, 0x00_0011, 0xff_0011));
        assert!(!is_missing(MMFR0, 0xf000_0005, 0x5));
        assert!(is_missing(MMFR0, 0x5, 0xf000_0005));
    }

    #[test]
    fn other_registers_must_be_equal() {
        assert!(!is_missing(SysReg::MPIDR, 1 << 31, 1 << 31));
        assert!(is_missing(SysReg::MPIDR, 1 << 31 | 1, 1 << 31));
        assert!(is_missing(SysReg::MPIDR, 1 << 31, 1 << 31 | 1));
    }

    #[test]
    fn a_register_that_is_not_listed_reads_as_zero() {
        let (none, register) = (BTreeMap::new(), SysReg::new([3, 0, 0, 4, 7]));
        let saved = |value| BTreeMap::from([(register, value)]);
        assert_eq!(missing_in(&saved(0), &none), None);
        assert_eq!(missing_in(&saved(1), &none), Some((register, 1)));
        assert_eq!(missing_in(&none, &saved(1)), None);
    }
}
