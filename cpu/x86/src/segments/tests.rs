//! Loads of segment, table and task registers: the accepted values, and the error codes of
//! refusals.

use super::*;
use crate::linear::mock;
use crate::linear::mock::*;

fn np(selector: u32) -> Result<(), Trap> {
    Err(Exception::with_error(11, selector).into())
}

fn gp(error: u32) -> Result<(), Trap> {
    Err(Exception::gp(error).into())
}

#[test]
fn data_segments() {
    // (selector, at CPL 0, at CPL 3)
    let cases = [
        (0, Ok(()), Ok(())),
        (3, Ok(()), Ok(())),
        (KERNEL_DS, Ok(()), gp(0x10)),
        (KERNEL_DS | 3, gp(0x10), gp(0x10)),
        (USER_DS, Ok(()), Ok(())),
        (READ_ONLY_DS, Ok(()), Ok(())),
        (KERNEL_CS, Ok(()), gp(8)),
        (CONFORMING_CS | 3, Ok(()), Ok(())),
        (ABSENT_DS, np(0x60), np(0x60)),
        (TSS_SEL, gp(0x30), gp(0x30)),
        (0x80, gp(0x80), gp(0x80)),
        (0x0c, gp(0x0c), gp(0x0c)),
    ];
    for (selector, at_0, at_3) in cases {
        for (mut m, want) in [(Mock::new(), at_0), (Mock::user(), at_3)] {
            let before = m.sys.selectors;
            assert_eq!(load(&mut m, Segment::Ds, selector), want, "{selector:#x}");
            let expected = if want.is_ok() {
                selector
            } else {
                before[Segment::Ds as usize]
            };
            assert_eq!(m.sys.selectors[Segment::Ds as usize], expected);
        }
    }
    assert_eq!(
        load(&mut Mock::new(), Segment::Cs, KERNEL_CS),
        Err(Exception::UD.into())
    );
}

#[test]
fn execute_only_code_is_not_data() {
    let mut m = Mock::new();
    m.put(GDT + 8, 0x0020_9900_0000_0000);
    assert_eq!(load(&mut m, Segment::Es, KERNEL_CS), gp(8));
}

#[test]
fn fs_and_gs_take_the_base_and_mark_the_descriptor() {
    for segment in [Segment::Fs, Segment::Gs] {
        let mut m = Mock::user();
        (m.sys.fs_base, m.sys.gs_base) = (1 << 40, 1 << 40);
        load(&mut m, segment, BASED_DS).unwrap();
        let bases = (m.sys.fs_base, m.sys.gs_base);
        let other = 1 << 40;
        let expected = if segment == Segment::Fs {
            (0x1234_5678, other)
        } else {
            (other, 0x1234_5678)
        };
        assert_eq!(bases, expected);
        let descriptor = GDT + u64::from(BASED_DS & !7);
        assert_eq!(m.get(descriptor), 0x1200_f334_5678_0000, "accessed");
        load(&mut m, segment, 0).unwrap();
        let base = if segment == Segment::Fs {
            m.sys.fs_base
        } else {
            m.sys.gs_base
        };
        assert_eq!(base, 0, "null clears the base, as on Intel's");
    }
}

#[test]
fn ss_wants_its_own_level() {
    let ss = |m: &mut Mock, selector| load(m, Segment::Ss, selector);
    assert_eq!(ss(&mut Mock::new(), 0), Ok(()));
    assert_eq!(ss(&mut Mock::new(), 3), gp(0));
    assert_eq!(ss(&mut Mock::new(), KERNEL_DS), Ok(()));
    assert_eq!(ss(&mut Mock::new(), USER_DS), gp(0x20));
    assert_eq!(ss(&mut Mock::new(), KERNEL_CS), gp(8));
    assert_eq!(ss(&mut Mock::user(), 3), gp(0));
    assert_eq!(ss(&mut Mock::user(), USER_DS), Ok(()));
    assert_eq!(ss(&mut Mock::user(), READ_ONLY_DS), gp(0x58));
    let absent = Err(Exception::with_error(12, 0x60).into());
    assert_eq!(ss(&mut Mock::user(), ABSENT_DS), absent);
}

#[test]
fn the_task_register_marks_its_descriptor_busy() {
    let mut m = Mock::new();
    m.sys.tr = Table::default();
    load_tr(&mut m, TSS_SEL).unwrap();
    assert_eq!(
        m.sys.tr,
        Table {
            base: TSS,
            limit: 0x67,
            selector: TSS_SEL
        }
    );
    assert_eq!(m.get(GDT + u64::from(TSS_SEL)) >> 40 & 0xf, 11);
    assert_eq!(load_tr(&mut m, TSS_SEL), gp(0x30), "busy");
    assert_eq!(load_tr(&mut m, 0), gp(0));
    assert_eq!(load_tr(&mut m, KERNEL_DS), gp(0x10));
    assert_eq!(load_tr(&mut m, LDT_SEL), gp(0x70));
    assert_eq!(load_tr(&mut m, 0x78), gp(0x78), "half past the limit");
    assert_eq!(load_tr(&mut Mock::user(), TSS_SEL), gp(0));
    let mut m = Mock::new();
    m.put(GDT + 0x30, m.get(GDT + 0x30) & !(1 << 47));
    assert_eq!(load_tr(&mut m, TSS_SEL), np(0x30));
    let mut m = Mock::new();
    m.put(GDT + 0x38, 0x8000);
    assert_eq!(load_tr(&mut m, TSS_SEL), gp(0x30), "base not canonical");
}

#[test]
fn an_ldt_serves_selectors_with_ti() {
    let mut m = Mock::new();
    m.put(mock::LDT + 8, 0x0000_9300_0000_0000);
    assert_eq!(load(&mut m, Segment::Ds, 0x0c), gp(0x0c));
    load_ldtr(&mut m, LDT_SEL).unwrap();
    assert_eq!(
        m.sys.ldtr,
        Table {
            base: mock::LDT,
            limit: 0xf,
            selector: LDT_SEL
        }
    );
    assert_eq!(load(&mut m, Segment::Ds, 0x0c), Ok(()));
    assert_eq!(load(&mut m, Segment::Ds, 0x14), gp(0x14));
    assert_eq!(load_ldtr(&mut m, TSS_SEL), gp(0x30));
    load_ldtr(&mut m, 0).unwrap();
    assert_eq!(load(&mut m, Segment::Ds, 0x0c), gp(0x0c));
    assert_eq!(load_ldtr(&mut Mock::user(), 0), gp(0));
}

#[test]
fn descriptor_table_registers() {
    let m = Mock::new();
    let table = pseudo_descriptor(&m.sys, 0xffff, IDT).unwrap();
    assert_eq!(
        table,
        Table {
            base: IDT,
            limit: 0xffff,
            selector: 0
        }
    );
    assert!(pseudo_descriptor(&m.sys, 0, 1 << 47).is_err());
    assert!(pseudo_descriptor(&Mock::user().sys, 0, 0).is_err());
}

#[test]
fn a_limit_in_pages_is_scaled() {
    let descriptor = Descriptor {
        raw: 0x008f_9200_0000_1234,
        address: 0,
    };
    assert_eq!(descriptor.limit(), 0xf123_4fff);
    let descriptor = Descriptor {
        raw: 0x000f_9200_0000_1234,
        address: 0,
    };
    assert_eq!(descriptor.limit(), 0xf_1234);
}

/// Selectors, and the results of VERR, VERW, LAR and LSL at CPL 0.
#[test]
fn a_visible_descriptor_gives_rights_and_limit() {
    type Found = Option<(bool, bool, Option<u32>, Option<u32>)>;
    let find = |m: &mut Mock, selector| -> Found {
        let found = visible(m, selector).unwrap()?;
        let (readable, writable) = (found.is_readable(), found.is_writable_data());
        Some((
            readable,
            writable,
            found.access_rights(),
            found.segment_limit(),
        ))
    };
    const CALL: u64 = 0x0000_8c00_0008_0000;
    const BUSY_TSS: u64 = 0x0080_8b00_0000_0001;
    const INTERRUPT_GATE: u64 = 0x0000_8e00_0008_0000;
    let kernel = [
        (0, None),
        (3, None),
        (KERNEL_CS, Some((true, false, Some(0x0020_9b00), Some(0)))),
        (KERNEL_DS | 3, None),
        (USER_DS, Some((true, true, Some(0xf300), Some(0)))),
        (
            COMPAT_CS,
            Some((true, false, Some(0xcf_fb00), Some(u32::MAX))),
        ),
        (READ_ONLY_DS, Some((true, false, Some(0xf100), Some(0)))),
        (ABSENT_DS, Some((true, true, Some(0x7300), Some(0)))),
        (
            CONFORMING_CS | 3,
            Some((true, false, Some(0x0020_9f00), Some(0))),
        ),
        (TSS_SEL, Some((false, false, Some(0x8900), Some(0x67)))),
        // An LDT has a limit, and no access rights.
        (LDT_SEL, Some((false, false, None, Some(0xf)))),
        (0x80, None),
        (0x0c, None),
    ];
    for (selector, found) in kernel {
        assert_eq!(find(&mut Mock::new(), selector), found, "{selector:#x}");
    }
    for (selector, raw, found) in [
        (USER_DS, CALL, (false, false, Some(0x8c00), None)),
        (
            USER_DS,
            BUSY_TSS,
            (false, false, Some(0x0080_8b00), Some(0x1fff)),
        ),
        (USER_DS, INTERRUPT_GATE, (false, false, None, None)),
    ] {
        let mut m = Mock::new();
        m.put(GDT + u64::from(selector & !7), raw);
        assert_eq!(find(&mut m, selector & !3), Some(found), "{raw:#x}");
        assert_eq!(find(&mut m, selector), None, "{raw:#x}: RPL above DPL");
    }
    assert_eq!(find(&mut Mock::user(), KERNEL_DS), None);
    assert_eq!(find(&mut Mock::user(), TSS_SEL), None);
    assert!(find(&mut Mock::user(), USER_DS).is_some());
    let mut m = Mock::new();
    m.absent.insert(GDT >> 12);
    let fault = Exception::page_fault(0, GDT + u64::from(KERNEL_DS));
    assert_eq!(visible(&mut m, KERNEL_DS).err(), Some(fault.into()));
}
