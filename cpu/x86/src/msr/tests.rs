//! Every existing MSR, every refusal, and random accesses to all other indexes.

use super::*;
use crate::apic::tests::one;
use crate::state::bits::*;
use proptest::prelude::*;

const NOW: Nanos = Nanos(5_000);
const GP: Trap = Trap::Exception(Exception::GP0);

fn cpu() -> (System, Lapic) {
    (System::long_mode(0), one())
}

fn exists(index: u32) -> bool {
    matches!(
        index,
        TSC | APIC_BASE
            | MTRRCAP
            | MISC_ENABLE
            | PAT
            | TSC_DEADLINE
            | X2APIC_FIRST..=X2APIC_LAST
            | EFER..=FMASK
            | FS_BASE..=TSC_AUX
    )
}

#[test]
fn what_is_written_is_read() {
    let (mut sys, mut apic) = cpu();
    let high = 0xffff_8000_1234_5678;
    let cases = [
        (MISC_ENABLE, 0x8 | 0x1800),
        (MISC_ENABLE, 1 << 34 | 0x1800),
        (PAT, 0x0001_0405_0607_0406),
        (STAR, u64::MAX),
        (LSTAR, high),
        (CSTAR, high),
        (FMASK, 0xffff_ffff),
        (FS_BASE, high),
        (GS_BASE, 0x7fff_ffff_ffff),
        (KERNEL_GS_BASE, high),
        (TSC_AUX, 0xffff_ffff),
        (APIC_BASE, 0xfee0_0d00),
        (0x808, 0x20),
        (TSC, 77),
    ];
    for (index, value) in cases {
        let flush = wrmsr(&mut sys, &mut apic, NOW, index, value);
        assert_eq!(flush, Ok(Flush::Keep), "{index:#x}");
        assert_eq!(rdmsr(&sys, &mut apic, NOW, index), Ok(value), "{index:#x}");
    }
    assert_eq!(rdmsr(&sys, &mut apic, NOW, MTRRCAP), Ok(0));
    assert_eq!(sys.tsc.at(NOW.after(3)), 80);
}

#[test]
fn values_that_are_refused() {
    let (mut sys, mut apic) = cpu();
    let hole = 1 << 47;
    let cases = [
        (APIC_BASE, 0xfee0_0001),
        (MTRRCAP, 0),
        (MISC_ENABLE, 1 << 35),
        (PAT, 2),
        (PAT, 3 << 56),
        (PAT, 8),
        (LSTAR, hole),
        (CSTAR, hole),
        (FS_BASE, hole),
        (GS_BASE, hole),
        (KERNEL_GS_BASE, hole),
        (FMASK, 1 << 32),
        (TSC_AUX, 1 << 32),
        (EFER, EFER_LMA | EFER_NXE),
        (EFER, EFER_LME | 1 << 1),
        (EFER, EFER_LME | 1 << 12),
        (EFER, EFER_LME | 1 << 63),
        // KVM's MSRs, if an access reaches this table: wall clock and system time old and new,
        // async page faults, steal time, PV EOI.
        (0x11, 0),
        (0x12, 0),
        (0x4b56_4d00, 0),
        (0x4b56_4d01, 0),
        (0x4b56_4d02, 0),
        (0x4b56_4d03, 0),
        (0x4b56_4d04, 0),
        (0x4b56_4d06, 0),
        (0x4b56_4d07, 0),
    ];
    for (index, value) in cases {
        let before = format!("{sys:?}{apic:?}");
        assert_eq!(
            wrmsr(&mut sys, &mut apic, NOW, index, value),
            Err(GP),
            "{index:#x} {value:#x}"
        );
        assert_eq!(format!("{sys:?}{apic:?}"), before, "{index:#x}");
    }
}

#[test]
fn efer_keeps_long_mode_and_flushes_for_nx() {
    let (mut sys, mut apic) = cpu();
    let value = EFER_LME | EFER_NXE;
    assert_eq!(wrmsr(&mut sys, &mut apic, NOW, EFER, value), Ok(Flush::All));
    assert_eq!(sys.efer, value | EFER_LMA);
    let value = value | EFER_SCE;
    assert_eq!(
        wrmsr(&mut sys, &mut apic, NOW, EFER, value),
        Ok(Flush::Keep)
    );
}

#[test]
fn a_tsc_write_moves_the_deadline() {
    let (mut sys, mut apic) = cpu();
    let mut write = |index, value| {
        assert_eq!(
            wrmsr(&mut sys, &mut apic, NOW, index, value),
            Ok(Flush::Keep)
        );
        apic.next_deadline()
    };
    assert_eq!(write(0x832, 2 << 17 | 0x40), None);
    assert_eq!(write(TSC_DEADLINE, 105_000), Some(Nanos(105_000)));
    assert_eq!(write(TSC, 100_000), Some(NOW.after(5_000)));
    assert_eq!(rdmsr(&sys, &mut apic, NOW, TSC_DEADLINE), Ok(105_000));
}

#[test]
fn only_cpl_0() {
    let (mut sys, mut apic) = cpu();
    sys.cpl = 3;
    assert_eq!(rdmsr(&sys, &mut apic, NOW, TSC), Err(GP));
    assert_eq!(wrmsr(&mut sys, &mut apic, NOW, TSC, 0), Err(GP));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Random accesses, in the whole range of indexes and near the existing MSRs: an access to a
    /// missing MSR changes nothing.
    #[test]
    fn nonsense(index: u32, near in 0..8usize, step in 0..0x200u32, value: u64) {
        let (mut sys, mut apic) = cpu();
        let bases = [0, 0x180, 0x200, 0x400, 0x6c0, 0x780, 0xc000_0000, 0x4b56_4c80];
        for index in [index, bases[near] + step] {
            let before = format!("{sys:?}{apic:?}");
            let read = rdmsr(&sys, &mut apic, NOW, index);
            let written = wrmsr(&mut sys, &mut apic, NOW, index, value);
            if !exists(index) {
                prop_assert_eq!(read, Err(GP), "{:#x}", index);
                prop_assert_eq!(written, Err(GP), "{:#x}", index);
                prop_assert_eq!(format!("{sys:?}{apic:?}"), before);
            }
            prop_assert!(matches!(written, Ok(_) | Err(GP)));
        }
    }
}

/// A sample of all 2^32 indexes, with a stride coprime to 2^32.
#[test]
fn the_whole_index_space() {
    let (mut sys, mut apic) = cpu();
    let mut index = 0u32;
    for _ in 0..1 << 20 {
        index = index.wrapping_add(0x9e37_79b1);
        let read = rdmsr(&sys, &mut apic, NOW, index);
        assert!(read == Err(GP) || exists(index), "{index:#x}");
        let written = wrmsr(&mut sys, &mut apic, NOW, index, u64::from(index) << 13);
        assert!(written == Err(GP) || exists(index), "{index:#x}");
    }
}

/// SDM vol 4, `IA32_MISC_ENABLE` bit 34.
#[test]
fn with_xd_disabled_nxe_is_reserved() {
    let (mut sys, mut apic) = cpu();
    let mut write = |index, value| wrmsr(&mut sys, &mut apic, NOW, index, value);
    let refused = Err(Exception::GP0.into());
    assert_eq!(write(MISC_ENABLE, 1 << 34), Ok(Flush::Keep));
    assert_eq!(write(EFER, EFER_LME | EFER_NXE), refused);
    assert_eq!(write(EFER, EFER_LME), Ok(Flush::Keep));
    assert_eq!(write(MISC_ENABLE, 0), Ok(Flush::Keep));
    assert_eq!(write(EFER, EFER_LME | EFER_NXE), Ok(Flush::All));
}
