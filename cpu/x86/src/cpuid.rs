//! CPUID: exactly the executor's features, and KVM's interface. Or the machine's own leaves, for a
//! model with fewer features.
//!
//! The vendor is Intel, because Intel and AMD differ in corner cases, and the executor follows
//! Intel (SYSRET faults at CPL 0, a null selector clears the FS and GS base). Leaves past the last
//! one read as zeros. There is no FPU, MMX or SSE: guests are built with general registers only.

use crate::apic::Lapic;
use crate::state::System;
use lacuna_state::x86::cpuid;
use std::sync::Arc;

/// The values that CPUID returns in four registers.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Leaf {
    pub eax: u32,
    pub ebx: u32,
    pub ecx: u32,
    pub edx: u32,
}

impl From<[u32; 4]> for Leaf {
    fn from([eax, ebx, ecx, edx]: [u32; 4]) -> Self {
        Self { eax, ebx, ecx, edx }
    }
}

/// TSC and APIC timer frequency in kHz: both count the clock's nanoseconds. A machine with another
/// TSC rate sets the leaves as well.
const TICKS_KHZ: u32 = 1_000_000;

const MAX_BASIC: u32 = 0x15;
const MAX_EXTENDED: u32 = 0x8000_0008;
const MAX_HYPERVISOR: u32 = 0x4000_0010;

/// Family 6, model 15: the first Intel model with all of these features, and with few quirks in
/// kernels.
const SIGNATURE: u32 = 0x0000_06fb;
const BRAND: &[u8; 48] = b"Lacuna software vCPU @ 1.00GHz\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// The vendor's name in the order EBX, ECX, EDX. Software reads EBX, EDX, ECX.
const INTEL: &[u8; 12] = b"GenuntelineI";

/// Leaf 1.
mod one {
    pub(super) const ECX: u32 = PCID | X2APIC | POPCNT | TSC_DEADLINE | HYPERVISOR;
    pub(super) const EDX: u32 = DE | PSE | TSC | MSR | PAE | CX8 | PGE | CMOV | PAT | CLFSH;
    pub(super) const APIC: u32 = 1 << 9;
    pub(super) const HTT: u32 = 1 << 28;

    pub(super) const PCID: u32 = 1 << 17;
    const X2APIC: u32 = 1 << 21;
    const POPCNT: u32 = 1 << 23;
    const TSC_DEADLINE: u32 = 1 << 24;
    const HYPERVISOR: u32 = 1 << 31;
    const DE: u32 = 1 << 2;
    const PSE: u32 = 1 << 3;
    const TSC: u32 = 1 << 4;
    const MSR: u32 = 1 << 5;
    const PAE: u32 = 1 << 6;
    const CX8: u32 = 1 << 8;
    const PGE: u32 = 1 << 13;
    const CMOV: u32 = 1 << 15;
    const PAT: u32 = 1 << 16;
    const CLFSH: u32 = 1 << 19;
}

/// Leaf 7: SMEP.
const SEVEN_EBX: u32 = 1 << 7;

/// Leaf 0x80000001: SYSCALL, 1 GiB pages, RDTSCP, long mode; LAHF in 64-bit mode, LZCNT.
const EXTENDED_EDX: u32 = 1 << 11 | 1 << 26 | 1 << 27 | 1 << 29;
/// NX is announced unless `IA32_MISC_ENABLE` hides it.
const NX: u32 = 1 << 20;
const EXTENDED_ECX: u32 = 1 << 0 | 1 << 5;
/// Leaf 0x80000007: the TSC runs at one rate and never stops.
const INVARIANT_TSC: u32 = 1 << 8;

/// KVM features: a write to port 0x80 needs no delay. There are no clock (bits 0, 3), PV EOI, steal
/// time or hypercalls. The hypervisor may offer async page faults (bits 4, 10, 14) by
/// [`crate::Cpu::set_kvm_features`].
const KVM_FEATURES: u32 = 1 << 1;

/// The machine's choice of announced features. A reset keeps it.
#[derive(Clone, Default, Debug)]
pub(crate) struct Announced {
    /// KVM features besides the processor's own.
    pub(crate) kvm_features: u32,
    /// Leaves in place of the processor's own.
    pub(crate) leaves: Option<Arc<[cpuid::Leaf]>>,
}

const MODEL: u32 = 1;
const STRUCTURED: u32 = 7;
const TOPOLOGY: u32 = 0xb;
const EXTENDED: u32 = 0x8000_0001;

/// CPUID for `leaf` and `subleaf` on the vCPU of `apic`.
pub(crate) fn cpuid(
    sys: &System,
    apic: &Lapic,
    announced: &Announced,
    leaf: u32,
    subleaf: u32,
) -> Leaf {
    let mut answer = match &announced.leaves {
        None => own(apic, announced.kvm_features, leaf, subleaf),
        Some(leaves) => set(leaves, leaf, subleaf),
    };
    match leaf {
        MODEL if !apic.is_enabled() => answer.edx &= !one::APIC,
        EXTENDED if !sys.has_nx() => answer.edx &= !NX,
        _ => {}
    }
    answer
}

/// The machine's own answer. A level of the topology beyond the last has the APIC ID.
fn set(leaves: &[cpuid::Leaf], leaf: u32, subleaf: u32) -> Leaf {
    let looks = matches!(leaf, STRUCTURED | TOPOLOGY);
    let mut of_leaf = leaves.iter().filter(|l| l.function == leaf);
    let exact = of_leaf.clone().find(|l| !looks || l.index == subleaf);
    match (exact, of_leaf.next()) {
        (Some(found), _) => Leaf::from(found.answer),
        (None, Some(first)) if leaf == TOPOLOGY => Leaf {
            ecx: subleaf & 0xff,
            edx: first.answer[3],
            ..Leaf::default()
        },
        (None, _) => Leaf::default(),
    }
}

/// The processor's own answer, with `more` KVM features.
fn own(apic: &Lapic, more: u32, leaf: u32, subleaf: u32) -> Leaf {
    match leaf {
        0 => vendor(MAX_BASIC, INTEL),
        MODEL => features(apic),
        STRUCTURED if subleaf == 0 => Leaf {
            ebx: SEVEN_EBX,
            ..Leaf::default()
        },
        TOPOLOGY => topology(apic, subleaf),
        // TSC = crystal * 1 / 1.
        0x15 => Leaf {
            eax: 1,
            ebx: 1,
            ecx: TICKS_KHZ * 1000,
            edx: 0,
        },
        0x4000_0000 => vendor(MAX_HYPERVISOR, b"KVMKVMKVM\0\0\0"),
        0x4000_0001 => Leaf {
            eax: KVM_FEATURES | more,
            ..Leaf::default()
        },
        0x4000_0010 => Leaf {
            eax: TICKS_KHZ,
            ebx: TICKS_KHZ,
            ..Leaf::default()
        },
        0x8000_0000 => Leaf {
            eax: MAX_EXTENDED,
            ..Leaf::default()
        },
        EXTENDED => Leaf {
            ecx: EXTENDED_ECX,
            edx: EXTENDED_EDX | NX,
            ..Leaf::default()
        },
        0x8000_0002..=0x8000_0004 => brand(leaf - 0x8000_0002),
        0x8000_0007 => Leaf {
            edx: INVARIANT_TSC,
            ..Leaf::default()
        },
        // 48 physical and 48 linear address bits.
        0x8000_0008 => Leaf {
            eax: 48 << 8 | 48,
            ..Leaf::default()
        },
        _ => Leaf::default(),
    }
}

/// A leaf with a name in EBX, ECX, EDX.
fn vendor(max: u32, name: &[u8; 12]) -> Leaf {
    let word = |i: usize| u32::from_le_bytes([name[i], name[i + 1], name[i + 2], name[i + 3]]);
    Leaf {
        eax: max,
        ebx: word(0),
        ecx: word(4),
        edx: word(8),
    }
}

fn features(apic: &Lapic) -> Leaf {
    let id = (apic.index() as u32).min(0xff) << 24;
    let logical = (apic.vcpus() as u32).min(0xff) << 16;
    // In units of 8 bytes.
    let cache_line = (64 / 8) << 8;
    let mut edx = one::EDX | one::APIC;
    if apic.vcpus() > 1 {
        edx |= one::HTT;
    }
    Leaf {
        eax: SIGNATURE,
        ebx: id | logical | cache_line,
        ecx: one::ECX,
        edx,
    }
}

/// One package of cores without hyper-threads. EDX is the x2APIC ID at every level.
fn topology(apic: &Lapic, level: u32) -> Leaf {
    let vcpus = apic.vcpus() as u32;
    let (eax, ebx, kind) = match level {
        0 => (0, 1, 1),
        1 => (vcpus.next_power_of_two().ilog2(), vcpus, 2),
        _ => (0, 0, 0),
    };
    Leaf {
        eax,
        ebx,
        ecx: kind << 8 | level & 0xff,
        edx: apic.index() as u32,
    }
}

fn brand(part: u32) -> Leaf {
    let word = |i: usize| {
        let at = part as usize * 16 + i * 4;
        u32::from_le_bytes([BRAND[at], BRAND[at + 1], BRAND[at + 2], BRAND[at + 3]])
    };
    Leaf {
        eax: word(0),
        ebx: word(1),
        ecx: word(2),
        edx: word(3),
    }
}

#[cfg(test)]
mod tests;
