//! The model-specific registers of this table. Every other MSR raises #GP(0).
//!
//! | MSR | |
//! |---|---|
//! | 0x10 TSC, 0x6e0 TSC_DEADLINE, 0xc0000103 TSC_AUX | a TSC write moves the deadline |
//! | 0x1b APIC_BASE, 0x800-0x8ff | the local APIC |
//! | 0xfe MTRRCAP | 0: no MTRRs; read-only |
//! | 0x1a0 MISC_ENABLE, 0x277 PAT | kept; XD disable hides NX; memory is write-back |
//! | 0xc0000080-84 EFER STAR LSTAR CSTAR FMASK, 0xc0000100-102 FS, GS, kernel GS base | |
//!
//! KVM's MSRs, [`KVM`] (0x4b564d00-ff), are not here, because the hypervisor defines them. At CPL 0
//! the processor leaves for an answer ([`Own::MsrRead`](crate::Own::MsrRead), `MsrWrite`), and
//! the answer may be #GP(0). The two old kvmclock MSRs, 0x11 and 0x12, do not exist.

use crate::apic::Lapic;
use crate::control::{Flush, privileged, set_canonical, write_efer};
use crate::state::bits::MISC_XD_DISABLE;
use crate::state::{Exception, System, Trap};
use lacuna_sync::Nanos;
use std::ops::RangeInclusive;

/// The indices that the machine answers.
pub(crate) const KVM: RangeInclusive<u32> = 0x4b56_4d00..=0x4b56_4dff;

const TSC: u32 = 0x10;
const APIC_BASE: u32 = 0x1b;
const MTRRCAP: u32 = 0xfe;
const MISC_ENABLE: u32 = 0x1a0;
const PAT: u32 = 0x277;
const TSC_DEADLINE: u32 = 0x6e0;
const X2APIC_FIRST: u32 = 0x800;
const X2APIC_LAST: u32 = 0x8ff;
const EFER: u32 = 0xc000_0080;
const STAR: u32 = 0xc000_0081;
const LSTAR: u32 = 0xc000_0082;
const CSTAR: u32 = 0xc000_0083;
const FMASK: u32 = 0xc000_0084;
const FS_BASE: u32 = 0xc000_0100;
const GS_BASE: u32 = 0xc000_0101;
const KERNEL_GS_BASE: u32 = 0xc000_0102;
const TSC_AUX: u32 = 0xc000_0103;

/// MISC_ENABLE: fast strings, thermal control, SpeedStep, MONITOR, CPUID limit, xTPR disable, XD
/// disable. Only XD disable has an effect: CPUID does not announce NX, and a write of EFER with NXE
/// raises #GP. If NXE is already set, it stays in force. KVM accepts the bit without an effect.
/// Here it has the manual's effect, because a guest that sets it expects that.
const MISC_WRITABLE: u64 =
    1 << 0 | 1 << 3 | 1 << 16 | 1 << 18 | 1 << 22 | 1 << 23 | MISC_XD_DISABLE;
/// No performance monitoring, branch trace or PEBS: read-only, ignored when written.
const MISC_READ_ONLY: u64 = 1 << 7 | 1 << 11 | 1 << 12;

/// RDMSR.
///
/// # Errors
/// #GP(0) above CPL 0 and for an MSR that does not exist.
pub(crate) fn rdmsr(sys: &System, apic: &mut Lapic, now: Nanos, index: u32) -> Result<u64, Trap> {
    privileged(sys)?;
    Ok(match index {
        TSC => sys.tsc.at(now),
        APIC_BASE => apic.base(),
        MTRRCAP => 0,
        MISC_ENABLE => sys.misc_enable,
        PAT => sys.pat,
        TSC_DEADLINE => apic.tsc_deadline(now),
        X2APIC_FIRST..=X2APIC_LAST => apic.rdmsr(index, now)?,
        EFER => sys.efer,
        STAR => sys.star,
        LSTAR => sys.lstar,
        CSTAR => sys.cstar,
        FMASK => sys.fmask,
        FS_BASE => sys.fs_base,
        GS_BASE => sys.gs_base,
        KERNEL_GS_BASE => sys.kernel_gs_base,
        TSC_AUX => sys.tsc_aux,
        _ => return Err(Exception::GP0.into()),
    })
}

/// WRMSR. After a write to the APIC the caller must check again for pending interrupts and
/// deadlines.
///
/// # Errors
/// #GP(0) above CPL 0, for an MSR that does not exist or is read-only, for reserved bits, and for
/// addresses that are not canonical.
pub(crate) fn wrmsr(
    sys: &mut System,
    apic: &mut Lapic,
    now: Nanos,
    index: u32,
    value: u64,
) -> Result<Flush, Trap> {
    privileged(sys)?;
    match index {
        TSC => {
            sys.tsc.set(value, now);
            let deadline = apic.tsc_deadline(now);
            apic.set_tsc_deadline(deadline, sys.tsc, now);
        }
        APIC_BASE => apic.set_base(value)?,
        MISC_ENABLE if value & !(MISC_WRITABLE | MISC_READ_ONLY) == 0 => {
            sys.misc_enable = sys.misc_enable & MISC_READ_ONLY | value & MISC_WRITABLE;
        }
        PAT if value
            .to_le_bytes()
            .iter()
            .all(|t| matches!(t, 0 | 1 | 4..=7)) =>
        {
            sys.pat = value
        }
        TSC_DEADLINE => apic.set_tsc_deadline(value, sys.tsc, now),
        X2APIC_FIRST..=X2APIC_LAST => apic.wrmsr(index, value, now)?,
        EFER => return write_efer(sys, value),
        STAR => sys.star = value,
        LSTAR => set_canonical(&mut sys.lstar, value)?,
        CSTAR => set_canonical(&mut sys.cstar, value)?,
        FMASK if value >> 32 == 0 => sys.fmask = value,
        FS_BASE => set_canonical(&mut sys.fs_base, value)?,
        GS_BASE => set_canonical(&mut sys.gs_base, value)?,
        KERNEL_GS_BASE => set_canonical(&mut sys.kernel_gs_base, value)?,
        TSC_AUX if value >> 32 == 0 => sys.tsc_aux = value,
        _ => return Err(Exception::GP0.into()),
    }
    Ok(Flush::Keep)
}

#[cfg(test)]
mod tests;
