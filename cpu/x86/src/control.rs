//! Control and debug registers, and the small privileged instructions (SDM vol 2 "MOV CRn", 2.5).
//!
//! The processor never leaves long mode. An instruction that would leave it (clearing PE, PG, PAE
//! or LME) raises #GP(0), which the architecture also specifies for 64-bit code.

use crate::apic::Lapic;
use crate::state::bits::*;
use crate::state::{Exception, System, Trap, is_canonical};
use lacuna_cpu::{Retain, Space};
use lacuna_sync::Nanos;

/// The executor's action on its [`Translations`](lacuna_cpu::Translations) after the instruction.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flush {
    /// Nothing.
    Keep,
    /// INVLPG of this address (SDM vol 3 4.10.4.1).
    Address(u64),
    /// After a write to CR3, this address space is current. Global pages stay.
    Space(Space, Retain),
    /// Forget every translation.
    All,
}

impl Flush {
    fn if_any(changed: u64) -> Self {
        if changed == 0 { Self::Keep } else { Self::All }
    }
}

const CR0_KEPT: u64 =
    CR0_PE | CR0_MP | CR0_EM | CR0_TS | CR0_NE | CR0_WP | CR0_AM | CR0_NW | CR0_CD | CR0_PG;
/// CR4 bits of CPUID's features. Left out are SMAP (a TLB would have to know EFLAGS.AC), FSGSBASE,
/// UMIP, OSFXSR and OSXSAVE.
const CR4_VALID: u64 = CR4_TSD | CR4_DE | CR4_PSE | CR4_PAE | CR4_PGE | CR4_PCIDE | CR4_SMEP;
const CR4_PAGING: u64 = CR4_PSE | CR4_PGE | CR4_PCIDE | CR4_SMEP;
/// Bits above the 48 physical address bits.
const CR3_RESERVED: u64 = !0 << 48;
const EFER_VALID: u64 = EFER_SCE | EFER_LME | EFER_LMA | EFER_NXE;
/// DR6: B0 to B3, BD, BS, BT; DR7: all but GD (not supported) and the reserved bits.
const DR6_VALID: u64 = 0xe00f;
const DR6_ONES: u64 = 0xffff_0ff0;
const DR7_VALID: u64 = 0xffff_03ff;
const DR7_ONES: u64 = 0x400;

/// # Errors
/// #GP(0) above CPL 0: HLT, INVLPG, WBINVD and the like.
pub(crate) fn privileged(sys: &System) -> Result<(), Trap> {
    if sys.cpl == 0 {
        Ok(())
    } else {
        Err(Exception::GP0.into())
    }
}

/// MOV from CR0, 2, 3, 4 or 8.
///
/// # Errors
/// #UD for a register that does not exist, #GP(0) above CPL 0.
pub(crate) fn read_cr(sys: &System, apic: &Lapic, number: u32) -> Result<u64, Trap> {
    let value = match number {
        0 => sys.cr0,
        2 => sys.cr2,
        3 => sys.cr3,
        4 => sys.cr4,
        8 => apic.cr8(),
        _ => return Err(Exception::UD.into()),
    };
    privileged(sys).map(|()| value)
}

/// MOV to CR0, 2, 3, 4 or 8. After a CR8 write the caller must check again for pending interrupts.
///
/// # Errors
/// #UD for a register that does not exist; #GP(0) above CPL 0, for reserved bits, for impossible
/// combinations, and for leaving long mode.
pub(crate) fn write_cr(
    sys: &mut System,
    apic: &mut Lapic,
    number: u32,
    value: u64,
) -> Result<Flush, Trap> {
    if !matches!(number, 0 | 2 | 3 | 4 | 8) {
        return Err(Exception::UD.into());
    }
    privileged(sys)?;
    match number {
        0 => write_cr0(sys, value),
        2 => {
            sys.cr2 = value;
            Ok(Flush::Keep)
        }
        3 => write_cr3(sys, value),
        4 => write_cr4(sys, value),
        _ => apic.set_cr8(value).map(|()| Flush::Keep),
    }
}

fn write_cr0(sys: &mut System, value: u64) -> Result<Flush, Trap> {
    let long_mode = CR0_PE | CR0_PG;
    if value >> 32 != 0 || value & long_mode != long_mode || value & (CR0_NW | CR0_CD) == CR0_NW {
        return Err(Exception::GP0.into());
    }
    let value = value & CR0_KEPT | CR0_ET;
    let changed = sys.cr0 ^ value;
    sys.cr0 = value;
    Ok(Flush::if_any(changed & CR0_WP))
}

fn write_cr3(sys: &mut System, value: u64) -> Result<Flush, Trap> {
    let (value, retain) = match sys.cr4 & CR4_PCIDE {
        0 => (value, Retain::Forget),
        _ if value & CR3_NO_FLUSH == 0 => (value, Retain::Forget),
        _ => (value & !CR3_NO_FLUSH, Retain::Keep),
    };
    if value & CR3_RESERVED != 0 {
        return Err(Exception::GP0.into());
    }
    sys.cr3 = value;
    Ok(Flush::Space(sys.pcid(), retain))
}

/// PCIDE may be set only in long mode, which holds here, and only while CR3 has PCID 0.
fn write_cr4(sys: &mut System, value: u64) -> Result<Flush, Trap> {
    let changed = sys.cr4 ^ value;
    let first_pcid = value & changed & CR4_PCIDE != 0 && sys.cr3 & CR3_PCID != 0;
    if value & !CR4_VALID != 0 || value & CR4_PAE == 0 || first_pcid {
        return Err(Exception::GP0.into());
    }
    sys.cr4 = value;
    Ok(Flush::if_any(changed & CR4_PAGING))
}

/// LMSW: the low four bits of CR0. It cannot clear PE.
///
/// # Errors
/// #GP(0) above CPL 0.
pub(crate) fn lmsw(sys: &mut System, value: u16) -> Result<(), Trap> {
    privileged(sys)?;
    let writable = CR0_MP | CR0_EM | CR0_TS;
    sys.cr0 = sys.cr0 & !writable | u64::from(value) & writable;
    Ok(())
}

/// CLTS.
///
/// # Errors
/// #GP(0) above CPL 0.
pub(crate) fn clts(sys: &mut System) -> Result<(), Trap> {
    privileged(sys)?;
    sys.cr0 &= !CR0_TS;
    Ok(())
}

/// FWAIT. There is no FPU, so no FPU exception is pending.
///
/// # Errors
/// #NM with both CR0.MP and CR0.TS (SDM vol 3 2.5).
pub(crate) fn wait(sys: &System) -> Result<(), Trap> {
    if sys.cr0 & (CR0_MP | CR0_TS) == CR0_MP | CR0_TS {
        return Err(Exception::NM.into());
    }
    Ok(())
}

/// Writes `IA32_EFER`.
///
/// # Errors
/// #GP(0) for reserved bits (NXE is one while XD is disabled), and for clearing LME. LMA is
/// read-only and ignored.
pub(crate) fn write_efer(sys: &mut System, value: u64) -> Result<Flush, Trap> {
    let hidden = if sys.has_nx() { 0 } else { EFER_NXE };
    if value & (!EFER_VALID | hidden) != 0 || value & EFER_LME == 0 {
        return Err(Exception::GP0.into());
    }
    let value = value | EFER_LMA;
    let changed = sys.efer ^ value;
    sys.efer = value;
    Ok(Flush::if_any(changed & EFER_NXE))
}

/// MOV from a debug register.
///
/// # Errors
/// #UD for DR4 and DR5 with CR4.DE, and past DR7; #GP(0) above CPL 0.
pub(crate) fn read_dr(sys: &System, number: u32) -> Result<u64, Trap> {
    match debug_register(sys, number)? {
        6 => Ok(sys.dr6),
        7 => Ok(sys.dr7),
        n => Ok(sys.dr[n]),
    }
}

/// MOV to a debug register. Breakpoints are stored but never hit.
///
/// # Errors
/// As [`read_dr`], and #GP(0) for the high half of DR6 and DR7.
pub(crate) fn write_dr(sys: &mut System, number: u32, value: u64) -> Result<(), Trap> {
    match debug_register(sys, number)? {
        6 | 7 if value >> 32 != 0 => return Err(Exception::GP0.into()),
        6 => sys.dr6 = value & DR6_VALID | DR6_ONES,
        7 => sys.dr7 = value & DR7_VALID | DR7_ONES,
        n => sys.dr[n] = value,
    }
    Ok(())
}

/// The register that `number` names: 0 to 3, 6 or 7.
fn debug_register(sys: &System, number: u32) -> Result<usize, Trap> {
    let register = match number {
        4 | 5 if sys.cr4 & CR4_DE == 0 => number + 2,
        4 | 5 | 8.. => return Err(Exception::UD.into()),
        _ => number,
    };
    privileged(sys).map(|()| register as usize)
}

/// RDTSC, and the time half of RDTSCP.
///
/// # Errors
/// #GP(0) above CPL 0 with CR4.TSD.
pub(crate) fn rdtsc(sys: &System, now: Nanos) -> Result<u64, Trap> {
    if sys.cr4 & CR4_TSD != 0 && sys.cpl != 0 {
        return Err(Exception::GP0.into());
    }
    Ok(sys.tsc.at(now))
}

/// SWAPGS.
///
/// # Errors
/// #GP(0) above CPL 0.
pub(crate) fn swapgs(sys: &mut System) -> Result<(), Trap> {
    privileged(sys)?;
    std::mem::swap(&mut sys.gs_base, &mut sys.kernel_gs_base);
    Ok(())
}

/// Stores a linear address into `slot`, as WRMSR does.
///
/// # Errors
/// #GP(0) if it is not canonical.
pub(crate) fn set_canonical(slot: &mut u64, value: u64) -> Result<(), Trap> {
    if !is_canonical(value) {
        return Err(Exception::GP0.into());
    }
    *slot = value;
    Ok(())
}

#[cfg(test)]
mod tests;
