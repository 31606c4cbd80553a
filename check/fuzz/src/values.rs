//! Numbers that find more bugs than random ones: the edges of pages, slots, canonical addresses and
//! fields.

use crate::place::*;
use crate::runtime::pte;
use fastrand::Rng;
use lacuna_addr::PAGE_SIZE;

const PAGE: u64 = PAGE_SIZE as u64;

/// One of `all`.
pub fn pick<T: Copy>(rng: &mut Rng, all: &[T]) -> T {
    all[rng.usize(..all.len())]
}

/// A number for an operand.
pub fn number(rng: &mut Rng) -> u64 {
    match rng.u8(..8) {
        0 => rng.u64(..16),
        1 => 1 << rng.u32(..64),
        2 => (1u64 << rng.u32(..64)).wrapping_sub(1),
        3 => u64::MAX - rng.u64(..8),
        4 => rng.u64(..1 << 32),
        5 => pick(
            rng,
            &[0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0x7fff_ffff, 0x8000_0000],
        ),
        _ => rng.u64(..),
    }
}

/// An offset in a page, usually near its ends.
fn offset(rng: &mut Rng) -> u64 {
    match rng.u8(..4) {
        0 => PAGE - rng.u64(1..17),
        1 => rng.u64(..16),
        // Across a cache line.
        2 => rng.u64(..PAGE / 64) * 64 + 57 + rng.u64(..7),
        _ => rng.u64(..PAGE) & !7,
    }
}

/// An address in the data of a guest with `memory` bytes of main memory.
pub fn data(rng: &mut Rng, memory: u64) -> u64 {
    let pages = (memory - DATA) / PAGE;
    // Some pages are hot.
    let page = match rng.bool() {
        true => rng.u64(..pages.min(8)),
        false => rng.u64(..pages),
    };
    DATA + page * PAGE + offset(rng)
}

/// A linear address likely to find a bug.
pub fn address(rng: &mut Rng, memory: u64) -> u64 {
    match rng.u8(..32) {
        0 => memory - rng.u64(..16),
        1 => memory + rng.u64(..16) * 8,
        2..5 => EXTRA + rng.u64(..EXTRAS) * EXTRA_STEP + rng.u64(..300) * PAGE + offset(rng),
        5 => HOLE + rng.u64(..64),
        6 => APIC + rng.u64(..64) * 16,
        7 => LOW_EDGE + offset(rng),
        8 => HIGH_EDGE + offset(rng),
        9 => pick(
            rng,
            &[
                LOW_EDGE + PAGE,
                HIGH_EDGE - 1,
                HIGH_EDGE - 8,
                u64::MAX - 6,
                0,
            ],
        ),
        10 => SEQUENCES + rng.u64(..SEQUENCE_COUNT * SEQUENCE_SIZE),
        11 => USER_SEQUENCES + rng.u64(..SEQUENCE_COUNT * SEQUENCE_SIZE),
        12..15 => PLAY_VA + rng.u64(..4 * 512) * PAGE + offset(rng),
        15 => play_entry(rng),
        16 => (4 << 30) + rng.u64(..64) * PAGE + offset(rng),
        17 => number(rng),
        _ => data(rng, memory),
    }
}

/// The address of an entry in the tables that the guest changes at random.
pub fn play_entry(rng: &mut Rng) -> u64 {
    PLAY + rng.u64(..PLAY_TABLES) * PAGE + rng.u64(..512) * 8
}

/// A page-table entry: mostly valid, sometimes with reserved bits, loops or missing memory.
pub fn entry(rng: &mut Rng, memory: u64) -> u64 {
    let frame = match rng.u8(..12) {
        0 => PLAY + rng.u64(..PLAY_TABLES) * PAGE,
        1 => HOLE,
        2 => APIC,
        3 => memory - PAGE,
        4 => memory,
        5 => EXTRA + rng.u64(..EXTRAS) * EXTRA_STEP + rng.u64(..300) * PAGE,
        6 => (rng.u64(..) & 0xf_ffff_ffff_f000) >> rng.u32(..20) & !(PAGE - 1),
        7 => rng.u64(..16) << 21,
        _ => data(rng, memory) & !(PAGE - 1),
    };
    let mut bits = pte::P | pte::W | pte::U;
    for bit in [pte::A, pte::D, pte::LARGE, 1 << 8, 1 << 63] {
        if rng.u8(..4) == 0 {
            bits |= bit;
        }
    }
    match rng.u8(..8) {
        0 => frame | bits & !pte::P,
        1 => frame | bits & !pte::W,
        2 => frame | bits & !pte::U,
        3 => frame | bits ^ 1 << rng.u32(..64),
        _ => frame | bits,
    }
}

/// The accessed MSRs, by name.
pub const MSRS: &[(u32, &str)] = &[
    (0x10, "TSC"),
    (0x1b, "APIC_BASE"),
    (0xfe, "MTRRCAP"),
    (0x1a0, "MISC_ENABLE"),
    (0x277, "PAT"),
    (0x6e0, "TSC_DEADLINE"),
    (0x802, "X2APIC_ID"),
    (0x803, "X2APIC_VERSION"),
    (0x808, "X2APIC_TPR"),
    (0x80a, "X2APIC_PPR"),
    (0x80b, "X2APIC_EOI"),
    (0x80d, "X2APIC_LDR"),
    (0x80f, "X2APIC_SVR"),
    (0x810, "X2APIC_ISR0"),
    (0x827, "X2APIC_IRR7"),
    (0x828, "X2APIC_ESR"),
    (0x830, "X2APIC_ICR"),
    (0x832, "X2APIC_LVT_TIMER"),
    (0x835, "X2APIC_LVT_LINT0"),
    (0x837, "X2APIC_LVT_ERROR"),
    (0x838, "X2APIC_INITIAL"),
    (0x839, "X2APIC_CURRENT"),
    (0x83e, "X2APIC_DIVIDE"),
    (0x83f, "X2APIC_SELF_IPI"),
    (0xc000_0080, "EFER"),
    (0xc000_0081, "STAR"),
    (0xc000_0082, "LSTAR"),
    (0xc000_0083, "CSTAR"),
    (0xc000_0084, "FMASK"),
    (0xc000_0100, "FS_BASE"),
    (0xc000_0101, "GS_BASE"),
    (0xc000_0102, "KERNEL_GS_BASE"),
    (0xc000_0103, "TSC_AUX"),
    (0x4b56_4d00, "KVM_CLOCK"),
    (0x4b56_4d02, "KVM_APF_ENABLE"),
    (0x4b56_4d06, "KVM_APF_VECTOR"),
    (0x4b56_4d07, "KVM_APF_ACK"),
];

/// A value for MSR `index`, usually an acceptable one.
pub fn for_msr(rng: &mut Rng, index: u32, memory: u64) -> u64 {
    if rng.u8(..5) == 0 {
        return number(rng);
    }
    match index {
        0x1b => APIC | pick(rng, &[0x800, 0x900, 0xc00, 0xd00, 0x100, 0]),
        0x1a0 => rng.u64(..) & 0xc5_0009,
        0x277 => (0..8).fold(0, |all, _| all << 8 | pick(rng, &[0, 1, 4, 5, 6, 7])),
        0x6e0 => rng.u64(..1 << 24),
        0x808 => rng.u64(..256),
        0x80b | 0x828 => 0,
        0x80f => 0x100 | rng.u64(..256),
        0x830 => interrupt_command(rng),
        0x832 => rng.u64(..3) << 17 | rng.u64(..2) << 16 | u64::from(TIMER_VECTOR),
        0x835..=0x837 => rng.u64(..2) << 16 | rng.u64(..256),
        0x838 => rng.u64(..1 << 20) >> rng.u32(..20),
        0x83e => rng.u64(..12) & 0b1011,
        0x83f => rng.u64(..256),
        0xc000_0080 => 0x500 | rng.u64(..2) | rng.u64(..2) << 11,
        0xc000_0084 | 0xc000_0103 => rng.u64(..1 << 32),
        0x4b56_4d02 => apf_enable(rng, memory),
        0x4b56_4d06 => match rng.bool() {
            true => READY_VECTOR.into(),
            false => rng.u64(..256),
        },
        0x4b56_4d07 => rng.u64(..2),
        _ => address(rng, memory),
    }
}

/// An interrupt command, mostly fixed: to the vCPU itself, others or all.
fn interrupt_command(rng: &mut Rng) -> u64 {
    let mode = pick(rng, &[0, 0, 0, 0, 4, 5, 6]);
    let vector = match rng.bool() {
        true => rng.u64(0x30..256),
        false => rng.u64(..256),
    };
    rng.u64(..4) << 32 | rng.u64(..4) << 18 | rng.u64(..2) << 14 | mode << 8 | vector
}

/// Enables async page faults for the guest's own area, another page, or an address without memory.
fn apf_enable(rng: &mut Rng, memory: u64) -> u64 {
    let own = PER_CPU + rng.u64(..4) * PAGE + AREA as u64;
    let area = match rng.u8(..8) {
        0 => data(rng, memory) & !63,
        1 => pick(rng, &[memory - 64, memory, HOLE, APIC, EXTRA, 1 << 47]),
        _ => own,
    };
    area | pick(rng, &[1, 1, 3, 9, 9, 11, 0, 5, 15])
}
