//! The values that control and debug registers accept, and at which level.

use super::*;
use crate::apic::tests::one;

const GP: Trap = Trap::Exception(Exception::GP0);
const UD: Trap = Trap::Exception(Exception::UD);

fn write(number: u32, value: u64) -> Result<(Flush, System), Trap> {
    let mut sys = System::long_mode(0x1000);
    let flush = write_cr(&mut sys, &mut one(), number, value)?;
    Ok((flush, sys))
}

#[test]
fn cr0() {
    let base = CR0_PE | CR0_PG | CR0_ET | CR0_NE;
    for bad in [
        base & !CR0_PE,
        base & !CR0_PG,
        base | CR0_NW,
        base | 1 << 32,
    ] {
        assert_eq!(write(0, bad).err(), Some(GP), "{bad:#x}");
    }
    let (flush, sys) = write(0, base | CR0_WP | 1 << 6).unwrap();
    assert_eq!(
        (flush, sys.cr0),
        (Flush::All, base | CR0_WP),
        "reserved bits stay clear"
    );
    let (flush, sys) = write(0, base & !CR0_ET | CR0_TS | CR0_CD | CR0_NW).unwrap();
    assert_eq!(
        (flush, sys.cr0),
        (Flush::Keep, base | CR0_TS | CR0_CD | CR0_NW)
    );
}

#[test]
fn cr3() {
    assert_eq!(write(3, 1 << 48).err(), Some(GP));
    assert_eq!(write(3, 1 << 63).err(), Some(GP));
    for paging in [0, CR4_PGE] {
        let mut sys = System::long_mode(0);
        sys.cr4 |= paging;
        let flush = write_cr(&mut sys, &mut one(), 3, 0xffff_ffff_f018);
        let wanted = Flush::Space(Space(0), Retain::Forget);
        assert_eq!((flush, sys.cr3), (Ok(wanted), 0xffff_ffff_f018));
    }
}

#[test]
fn cr3_with_pcids() {
    let (mut sys, mut apic) = (System::long_mode(0x1000), one());
    let mut write = |number, value| {
        let flush = write_cr(&mut sys, &mut apic, number, value);
        (flush, sys.cr3, sys.pcid())
    };
    let space = |pcid, retain| Ok(Flush::Space(Space(pcid), retain));
    let (forget, keep) = (Retain::Forget, Retain::Keep);
    // Without PCIDE the low bits are PWT and PCD, and bit 63 is reserved.
    assert_eq!(write(3, 0x1ff8), (space(0, forget), 0x1ff8, Space(0)));
    assert_eq!(write(3, CR3_NO_FLUSH | 0x1000), (Err(GP), 0x1ff8, Space(0)));
    // PCIDE only while CR3 names PCID 0.
    assert_eq!(write(4, CR4_PAE | CR4_PCIDE), (Err(GP), 0x1ff8, Space(0)));
    assert_eq!(write(3, 0x1000), (space(0, forget), 0x1000, Space(0)));
    assert_eq!(
        write(4, CR4_PAE | CR4_PCIDE),
        (Ok(Flush::All), 0x1000, Space(0))
    );
    assert_eq!(
        write(3, 0x2fff),
        (space(0xfff, forget), 0x2fff, Space(0xfff))
    );
    assert_eq!(
        write(3, CR3_NO_FLUSH | 0x3001),
        (space(1, keep), 0x3001, Space(1))
    );
    for reserved in [1 << 48, 1 << 62, CR3_NO_FLUSH | 1 << 48] {
        assert_eq!(
            write(3, reserved),
            (Err(GP), 0x3001, Space(1)),
            "{reserved:#x}"
        );
    }
    // With PCIDE set already CR4 takes any CR3; without it all is PCID 0 again.
    let wanted = (Ok(Flush::Keep), 0x3001, Space(1));
    assert_eq!(write(4, CR4_PAE | CR4_PCIDE | CR4_TSD), wanted);
    assert_eq!(write(4, CR4_PAE), (Ok(Flush::All), 0x3001, Space(0)));
}

#[test]
fn cr4() {
    for bad in [0, CR4_PAE | 1 << 9, CR4_PAE | 1 << 12, CR4_PAE | 1 << 21] {
        assert_eq!(write(4, bad).err(), Some(GP), "{bad:#x}");
    }
    for paging in [CR4_PGE, CR4_SMEP, CR4_PSE, CR4_PCIDE] {
        let (flush, sys) = write(4, CR4_PAE | paging).unwrap();
        assert_eq!((flush, sys.cr4), (Flush::All, CR4_PAE | paging));
    }
    assert_eq!(write(4, CR4_PAE | CR4_TSD).unwrap().0, Flush::Keep);
}

#[test]
fn cr8_is_the_task_priority() {
    let (mut sys, mut apic) = (System::long_mode(0), one());
    assert_eq!(write_cr(&mut sys, &mut apic, 8, 9), Ok(Flush::Keep));
    assert_eq!(read_cr(&sys, &apic, 8), Ok(9));
    assert_eq!(write_cr(&mut sys, &mut apic, 8, 16), Err(GP));
}

#[test]
fn registers_that_are_not_there_and_levels() {
    let (mut sys, mut apic) = (System::long_mode(0x1000), one());
    sys.cr2 = 7;
    for (number, value) in [(0, sys.cr0), (2, 7), (3, 0x1000), (4, sys.cr4), (8, 0)] {
        assert_eq!(read_cr(&sys, &apic, number), Ok(value));
    }
    for number in [1, 5, 6, 7, 9, 15] {
        assert_eq!(read_cr(&sys, &apic, number), Err(UD));
        assert_eq!(write_cr(&mut sys, &mut apic, number, 0), Err(UD));
    }
    sys.cpl = 3;
    for number in [0, 2, 3, 4, 8] {
        assert_eq!(read_cr(&sys, &apic, number), Err(GP));
        assert_eq!(write_cr(&mut sys, &mut apic, number, 0), Err(GP));
    }
    assert_eq!(lmsw(&mut sys, 0), Err(GP));
    assert_eq!(clts(&mut sys), Err(GP));
    assert_eq!(swapgs(&mut sys), Err(GP));
    assert_eq!(read_dr(&sys, 0), Err(GP));
    assert_eq!(write_dr(&mut sys, 7, 0), Err(GP));
}

#[test]
fn lmsw_and_clts_touch_ts() {
    let mut sys = System::long_mode(0);
    let base = sys.cr0;
    lmsw(&mut sys, 0xfffe).unwrap();
    assert_eq!(sys.cr0, base | CR0_MP | CR0_EM | CR0_TS);
    clts(&mut sys).unwrap();
    assert_eq!(sys.cr0, base | CR0_MP | CR0_EM);
    lmsw(&mut sys, 0).unwrap();
    assert_eq!(sys.cr0, base, "PE stays");
}

#[test]
fn debug_registers() {
    let mut sys = System::long_mode(0);
    for number in 0..4 {
        write_dr(&mut sys, number, u64::MAX - u64::from(number)).unwrap();
        assert_eq!(read_dr(&sys, number), Ok(u64::MAX - u64::from(number)));
    }
    write_dr(&mut sys, 4, 0xffff_ffff).unwrap();
    assert_eq!(read_dr(&sys, 6), Ok(0xffff_efff & (DR6_VALID | DR6_ONES)));
    write_dr(&mut sys, 5, 0xffff_ffff).unwrap();
    assert_eq!(read_dr(&sys, 7), Ok(DR7_VALID | DR7_ONES));
    assert_eq!(write_dr(&mut sys, 6, 1 << 32), Err(GP));
    assert_eq!(write_dr(&mut sys, 7, 1 << 32), Err(GP));
    sys.cr4 |= CR4_DE;
    for number in [4, 5, 8] {
        assert_eq!(read_dr(&sys, number), Err(UD));
    }
}

#[test]
fn rdtsc_obeys_tsd() {
    let mut sys = System::long_mode(0);
    sys.tsc = crate::tsc::Tsc::new(crate::TscRate::GIGAHERTZ, 5);
    sys.cr4 |= CR4_TSD;
    assert_eq!(rdtsc(&sys, Nanos(10)), Ok(15));
    sys.cpl = 3;
    assert_eq!(rdtsc(&sys, Nanos(10)), Err(GP));
    sys.cr4 &= !CR4_TSD;
    assert_eq!(rdtsc(&sys, Nanos(10)), Ok(15));
}

#[test]
fn swapgs_swaps() {
    let mut sys = System::long_mode(0);
    (sys.gs_base, sys.kernel_gs_base) = (1, 2);
    swapgs(&mut sys).unwrap();
    assert_eq!((sys.gs_base, sys.kernel_gs_base), (2, 1));
}
