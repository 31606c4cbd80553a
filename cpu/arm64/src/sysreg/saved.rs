//! The registers of a saved state, by their encodings.

use super::table::{self, Kind, Row, Special};
use super::{Encoding, System};
use lacuna_state::StateError;
use lacuna_state::arm64::SysReg;
use std::collections::BTreeMap;

/// OSLSR_EL1.OSLM: the OS lock is implemented.
const OSLM: u64 = 1 << 3;
const OSLK: u64 = 1 << 1;
/// CCSIDR_EL1: one of several registers, selected by CSSELR_EL1.
const CCSIDR: Encoding = Encoding::new(3, 1, 0, 0, 0);

impl System {
    /// The registers that a guest can write, without PSTATE, SP_EL0, the timers and the interrupt
    /// controller.
    pub(crate) fn saved(&self) -> impl Iterator<Item = (SysReg, u64)> + use<> {
        let mut copy = self.clone();
        table::ROWS.iter().filter_map(move |row| {
            let value = match row.kind {
                Kind::Value { place, .. } => *place(&mut copy),
                Kind::Special(Special::OsLsr) => OSLM | copy.os_lock << 1,
                _ => return None,
            };
            Some((SysReg::from_bits(row.encoding.0), value))
        })
    }

    /// Sets one of the registers of [`System::saved`]. A register that reads as zero and ignores
    /// writes is accepted with the value zero. For another register, or a value that no write of a
    /// guest can give, returns `false` and changes nothing.
    fn restore_register(&mut self, register: SysReg, value: u64) -> bool {
        let Some(row) = table::find(Encoding(register.bits())) else {
            return false;
        };
        match row.kind {
            Kind::Value {
                place, writable, ..
            } => {
                let fixed = *place(&mut Self::default()) & !writable;
                let is_possible = value & !writable == fixed;
                if is_possible {
                    *place(self) = value;
                }
                is_possible
            }
            Kind::Special(Special::OsLsr) => {
                let is_possible = value & !OSLK == OSLM;
                if is_possible {
                    self.os_lock = value >> 1 & 1;
                }
                is_possible
            }
            Kind::Ignored => value == 0,
            Kind::Constant(_) | Kind::Special(_) => false,
        }
    }

    /// The registers of vCPU `index` with the values `saved`. A register that is left out has its
    /// reset value.
    pub(crate) fn restored(
        index: usize,
        saved: &BTreeMap<SysReg, u64>,
    ) -> Result<Self, StateError> {
        let mut system = Self::reset(index);
        for (&register, &value) in saved {
            if !system.restore_register(register, value) {
                return Err(StateError::SystemRegister { register, value });
            }
        }
        Ok(system)
    }

    /// The registers that identify the processor to a guest, as EL1 reads them.
    pub(crate) fn id_registers(&self) -> impl Iterator<Item = (SysReg, u64)> + use<> {
        let mpidr = self.mpidr;
        let is_id = |row: &&Row| {
            let op0 = row.encoding.0 >> 14;
            (op0, row.encoding.crn()) == (3, 0) && row.encoding != CCSIDR
        };
        table::ROWS.iter().filter(is_id).filter_map(move |row| {
            let value = match row.kind {
                Kind::Constant(value) => value,
                Kind::Special(Special::Mpidr) => mpidr,
                Kind::Special(Special::Dczid) => super::access::DCZID,
                _ => return None,
            };
            Some((SysReg::from_bits(row.encoding.0), value))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bit of every register: an accepted value is saved again, and a refused one changes
    /// nothing.
    #[test]
    fn what_a_guest_can_write_is_saved_and_restored() {
        let fresh = System::reset(3);
        for (register, before) in fresh.saved() {
            let mut taken = 0;
            for bit in 0..64 {
                let (mut system, value) = (fresh.clone(), before ^ 1 << bit);
                let is_taken = system.restore_register(register, value);
                let now = system.saved().find(|(other, _)| *other == register);
                let expected = if is_taken { value } else { before };
                assert_eq!(now, Some((register, expected)), "{register}");
                taken += u32::from(is_taken);
                if is_taken {
                    assert!(system.restore_register(register, before));
                }
                assert_eq!(system, fresh, "{register}");
            }
            assert!(taken > 0, "{register}");
        }
    }

    #[test]
    fn other_registers_are_refused() {
        let mut system = System::reset(0);
        let fresh = system.clone();
        let e = |op0, op1, crn, crm, op2| SysReg::new([op0, op1, crn, crm, op2]);
        for (register, value) in [
            (e(3, 0, 0, 0, 0), 0x000f_4c00), // MIDR_EL1
            (e(3, 0, 4, 1, 0), 0),           // SP_EL0
            (e(3, 3, 14, 3, 1), 0),          // CNTV_CTL_EL0
            (e(3, 0, 4, 6, 0), 0),           // ICC_PMR_EL1
            (e(3, 7, 15, 15, 7), 0),
            (e(3, 0, 1, 0, 1), 1), // ACTLR_EL1
        ] {
            assert!(!system.restore_register(register, value), "{register}");
        }
        assert!(system.restore_register(e(3, 0, 1, 0, 1), 0), "ACTLR_EL1");
        assert_eq!(system, fresh);
    }

    #[test]
    fn the_id_registers_name_the_processor() {
        let ids = |index| System::reset(index).id_registers().collect::<Vec<_>>();
        let (zero, nineteen) = (ids(0), ids(19));
        let differ = zero.iter().zip(&nineteen).filter(|(a, b)| a != b);
        let mpidr = SysReg::MPIDR;
        assert_eq!(
            differ.collect::<Vec<_>>(),
            [(&(mpidr, 1 << 31), &(mpidr, 1 << 31 | 0x103))]
        );
        assert!(zero.len() > 10);
    }
}
