//! Words of instructions. A field of 0 is for the caller.

/// SVC #0.
pub const SVC: u32 = 0xd400_0001;
/// HVC #0.
pub const HVC: u32 = 0xd400_0002;
/// ERET.
pub const ERET: u32 = 0xd69f_03e0;
/// ISB.
pub const ISB: u32 = 0xd503_3fdf;
/// DSB ISH.
pub const DSB: u32 = 0xd503_3b9f;
/// NOP.
pub const NOP: u32 = 0xd503_201f;
/// WFE.
pub const WFE: u32 = 0xd503_205f;
/// WFI.
pub const WFI: u32 = 0xd503_207f;
/// UDF #0.
pub const UDF: u32 = 0;
/// RET; BR with another register.
pub const RET: u32 = 0xd65f_03c0;
/// BR, with its register in bits 9 to 5.
pub const BR: u32 = 0xd61f_0000;

/// B, for [`Asm::branch`](crate::Asm::branch).
pub const B: u32 = 0x1400_0000;
/// B.cond, with the condition in the lowest bits.
pub const B_COND: u32 = 0x5400_0000;
/// CBZ of 64 bits, with the register in the lowest bits.
pub const CBZ: u32 = 0xb400_0000;
/// CBNZ of 64 bits.
pub const CBNZ: u32 = 0xb500_0000;
/// ADR, with the register in the lowest bits, for [`Asm::branch`](crate::Asm::branch) too.
pub const ADR: u32 = 0x1000_0000;

/// MSR VBAR_EL1.
pub const VBAR: u32 = sysreg([3, 0, 12, 0, 0]);
/// MSR SCTLR_EL1.
pub const SCTLR: u32 = sysreg([3, 0, 1, 0, 0]);
/// MSR TTBR0_EL1.
pub const TTBR0: u32 = sysreg([3, 0, 2, 0, 0]);
/// MSR TCR_EL1.
pub const TCR: u32 = sysreg([3, 0, 2, 0, 2]);
/// MSR MAIR_EL1.
pub const MAIR: u32 = sysreg([3, 0, 10, 2, 0]);

/// MSR, or SYS, from X0 to the register that op0, op1, CRn, CRm and op2 name.
pub const fn sysreg([op0, op1, crn, crm, op2]: [u16; 5]) -> u32 {
    let word = (op0 as u32) << 19 | (op1 as u32) << 16 | (crn as u32) << 12;
    0xd500_0000 | word | (crm as u32) << 8 | (op2 as u32) << 5
}
