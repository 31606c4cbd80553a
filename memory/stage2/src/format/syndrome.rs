//! How an arm64 processor reports a stage-2 abort to its hypervisor: ESR_EL2 and HPFAR_EL2 (Arm
//! ARM, D24.2.40 and D24.2.62).
//!
//! ```text
//! ESR_EL2    31  26  25        7      6   5        2 1     0
//!           |  EC  | IL |   |S1PTW|WnR | fault status | level |
//! HPFAR_EL2  bits 43:4 = bits 47:12 of the intermediate physical address
//! ```
//! The address within the page is in FAR_EL2, which has the guest-virtual address of the access;
//! only the processor knows it. There are no access-flag faults, because the processor sets the
//! flag itself.

use crate::{Cause, LookupLevel, Violation};
use lacuna_addr::{Access, Gfn};

const INSTRUCTION_ABORT_LOWER_EL: u64 = 0x20 << 26;
const DATA_ABORT_LOWER_EL: u64 = 0x24 << 26;
const INSTRUCTION_LENGTH_32: u64 = 1 << 25;
const STAGE_1_WALK: u64 = 1 << 7;
const WRITE_NOT_READ: u64 = 1 << 6;
const TRANSLATION_FAULT: u64 = 0b0001 << 2;
const PERMISSION_FAULT: u64 = 0b0011 << 2;

/// The aborted access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AbortedAccess {
    /// A load, a store or an instruction fetch.
    Direct,
    /// An access to a descriptor, by the guest's stage-1 walk for a load or a store.
    WalkForData,
    /// The same, by the walk for a fetch.
    WalkForFetch,
}

/// A stage-2 abort from a guest, as EL2 sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stage2Abort {
    /// ESR_EL2, with no valid instruction syndrome (ISV is 0).
    pub esr: u64,
    /// HPFAR_EL2.
    pub hpfar: u64,
}

impl Stage2Abort {
    /// The abort for `violation`, which a walk of `gfn` finds at `level`
    /// ([`Stage2::violation`](crate::Stage2::violation)).
    pub const fn new(
        violation: Violation,
        level: LookupLevel,
        gfn: Gfn,
        access: AbortedAccess,
    ) -> Self {
        let class = match (access, violation.access) {
            (AbortedAccess::WalkForFetch, _) | (AbortedAccess::Direct, Access::Fetch) => {
                INSTRUCTION_ABORT_LOWER_EL
            }
            (_, Access::Write) => DATA_ABORT_LOWER_EL | WRITE_NOT_READ,
            (_, Access::Read | Access::Fetch) => DATA_ABORT_LOWER_EL,
        };
        let walk = match access {
            AbortedAccess::Direct => 0,
            AbortedAccess::WalkForData | AbortedAccess::WalkForFetch => STAGE_1_WALK,
        };
        let status = match violation.cause {
            Cause::Absent => TRANSLATION_FAULT,
            Cause::Denied(_) => PERMISSION_FAULT,
        };
        Self {
            esr: class | INSTRUCTION_LENGTH_32 | walk | status | level.get() as u64,
            hpfar: gfn.get() << 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Leaf;
    use lacuna_addr::Pfn;

    fn esr(access: Access, cause: Cause, level: LookupLevel, of: AbortedAccess) -> u64 {
        let gfn = Gfn::new(0x8_0001).expect("a frame");
        let abort = Stage2Abort::new(Violation { access, cause }, level, gfn, of);
        assert_eq!(abort.hpfar, 0x80_0010);
        abort.esr
    }

    #[test]
    fn the_status_has_the_level_of_the_walk() {
        let leaf = Leaf::clean(Pfn::new(512));
        for (number, level) in (0..).zip(LookupLevel::ALL) {
            let read = esr(Access::Read, Cause::Absent, level, AbortedAccess::Direct);
            assert_eq!(read, 0x9200_0004 + number, "translation");
            let denied = Cause::Denied(leaf);
            let write = esr(Access::Write, denied, level, AbortedAccess::Direct);
            assert_eq!(write, 0x9200_004c + number, "write, permission");
        }
    }

    #[test]
    fn a_fetch_is_an_instruction_abort_and_a_stage_1_walk_says_so() {
        use AbortedAccess::{Direct, WalkForData, WalkForFetch};
        for (access, of, expected) in [
            (Access::Fetch, Direct, 0x8200_0007),
            (Access::Read, WalkForData, 0x9200_0087),
            (Access::Write, WalkForData, 0x9200_00c7),
            (Access::Read, WalkForFetch, 0x8200_0087),
        ] {
            let found = esr(access, Cause::Absent, LookupLevel::ALL[3], of);
            assert_eq!(found, expected, "{access:?} {of:?}");
        }
    }
}
