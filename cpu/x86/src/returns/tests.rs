//! Round trips with delivery, every refusal of IRET, flags by level, SYSCALL and SYSRET, port
//! rights.

use super::*;
use crate::deliver::{Event, Outcome, deliver};
use crate::linear::mock::*;
use lacuna_cpu::Stop;
use proptest::prelude::*;

const STACK: u64 = 0xffff_8000_0000_b000;
const RIP: u64 = 0x40_2000;
const USER_RSP: u64 = 0x7fff_2008;

/// A kernel about to return by this frame: RIP, CS, RFLAGS, RSP, SS.
fn kernel(frame: [u64; 5]) -> (Mock, Flow) {
    let mut m = Mock::new();
    for (i, value) in frame.into_iter().enumerate() {
        m.put(STACK + 8 * i as u64, value);
    }
    (
        m,
        Flow {
            rip: HANDLER,
            rsp: STACK,
            rflags: 2,
        },
    )
}

fn to_user() -> [u64; 5] {
    [RIP, USER_CS.into(), 0x202, USER_RSP, USER_DS.into()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Delivery and then IRET restore everything, from either level.
    #[test]
    fn iret_undoes_delivery(
        user: bool, rip: u64, rsp: u64, flags: u64, vector: u8, ist in 0..2u64, error: bool,
    ) {
        let canonical = |va: u64| ((va << 16) as i64 >> 16) as u64;
        let mut m = if user { Mock::user() } else { Mock::new() };
        m.gate(vector, KERNEL_CS, 0x8e00 | ist);
        let settable = USER_FLAGS | rflags::IF | rflags::IOPL | rflags::VIF_VIP;
        let flags = flags & settable & !rflags::NT | rflags::ONE;
        // Away from the hole and from the mock's absent page.
        let rsp = if user { rsp & 0x7fff_ffff_fff8 } else { STACK + (rsp & 0xff8) };
        let from = Flow { rip: canonical(rip), rsp, rflags: flags };
        let before = m.registers();
        let mut flow = from;
        let fault = Exception { vector, error: error.then_some(0x18), cr2: None };
        let outcome = deliver(&mut m, &mut flow, Event::Exception(fault)).unwrap();
        prop_assert_eq!(outcome, Outcome::Entered(vector));
        if error {
            flow.rsp += 8;
        }
        iret(&mut m, &mut flow, Width::W64).unwrap();
        prop_assert_eq!(flow, from);
        prop_assert_eq!(m.registers(), before);
    }
}

#[test]
fn iret_to_user_mode_drops_the_kernels_segments() {
    let (mut m, mut flow) = kernel(to_user());
    segments::load(&mut m, Segment::Ds, KERNEL_DS).unwrap();
    segments::load(&mut m, Segment::Es, USER_DS).unwrap();
    segments::load(&mut m, Segment::Fs, CONFORMING_CS).unwrap();
    iret(&mut m, &mut flow, Width::W64).unwrap();
    assert_eq!(
        flow,
        Flow {
            rip: RIP,
            rsp: USER_RSP,
            rflags: 0x202
        }
    );
    assert_eq!(m.sys.cpl, 3);
    assert_eq!(
        m.sys.selectors,
        [USER_DS, USER_CS, USER_DS, 0, CONFORMING_CS, 0]
    );
}

#[test]
fn narrower_irets_pop_narrower_words() {
    for width in [Width::W32, Width::W16] {
        let (mut m, mut flow) = kernel([0; 5]);
        for (i, value) in [0x2000, USER_CS.into(), 0x202, 0x2008, USER_DS.into()]
            .iter()
            .enumerate()
        {
            let at = STACK + i as u64 * width.bytes();
            m.write(at, width, *value, User::Supervisor).unwrap();
        }
        iret(&mut m, &mut flow, width).unwrap();
        assert_eq!(
            flow,
            Flow {
                rip: 0x2000,
                rsp: 0x2008,
                rflags: 0x202
            }
        );
    }
}

/// The frame's defect, and the resulting exception.
const REFUSED: &[(&str, [u64; 5], Exception)] = &[
    ("null CS", [RIP, 3, 2, 0, 0x23], Exception::GP0),
    (
        "CS past the GDT",
        [RIP, 0x83, 2, 0, 0x23],
        Exception::gp(0x80),
    ),
    ("CS is data", [RIP, 0x23, 2, 0, 0x23], Exception::gp(0x20)),
    ("CS is a TSS", [RIP, 0x30, 2, 0, 0x10], Exception::gp(0x30)),
    (
        "CS RPL is not its DPL",
        [RIP, 0x2a, 2, 0, 0x22],
        Exception::gp(0x28),
    ),
    (
        "compatibility mode",
        [RIP, 0x4b, 2, 0, 0x23],
        Exception::gp(0x48),
    ),
    (
        "CS absent",
        [RIP, 0x50, 2, 0, 0x10],
        Exception::with_error(11, 0x50),
    ),
    (
        "RIP not canonical",
        [1 << 47, 0x2b, 2, 0, 0x23],
        Exception::GP0,
    ),
    ("null SS at CPL 3", [RIP, 0x2b, 2, 0, 3], Exception::GP0),
    (
        "null SS of another level",
        [RIP, 0x08, 2, 0, 1],
        Exception::GP0,
    ),
    (
        "SS of another level",
        [RIP, 0x2b, 2, 0, 0x10],
        Exception::gp(0x10),
    ),
    ("SS RPL only", [RIP, 0x2b, 2, 0, 0x13], Exception::gp(0x10)),
    (
        "SS past the GDT",
        [RIP, 0x2b, 2, 0, 0x83],
        Exception::gp(0x80),
    ),
    ("SS read-only", [RIP, 0x2b, 2, 0, 0x5b], Exception::gp(0x58)),
    ("SS is code", [RIP, 0x2b, 2, 0, 0x2b], Exception::gp(0x28)),
    (
        "SS absent",
        [RIP, 0x2b, 2, 0, 0x63],
        Exception::with_error(12, 0x60),
    ),
];

#[test]
fn iret_refuses() {
    for (what, frame, exception) in REFUSED {
        let (mut m, mut flow) = kernel(*frame);
        let before = (m.registers(), flow);
        let got = iret(&mut m, &mut flow, Width::W64);
        assert_eq!(got, Err((*exception).into()), "{what}");
        assert_eq!((m.registers(), flow), before, "{what}");
    }
    let (mut m, mut flow) = kernel(to_user());
    flow.rflags |= rflags::NT;
    assert_eq!(
        iret(&mut m, &mut flow, Width::W64),
        Err(Exception::GP0.into()),
        "NT"
    );
    let mut m = Mock::user();
    for (i, value) in [RIP, KERNEL_CS.into(), 2, 0, KERNEL_DS.into()]
        .into_iter()
        .enumerate()
    {
        m.put(0x7000 + 8 * i as u64, value);
    }
    let mut flow = Flow {
        rip: 0,
        rsp: 0x7000,
        rflags: 2,
    };
    let got = iret(&mut m, &mut flow, Width::W64);
    assert_eq!(got, Err(Exception::gp(8).into()), "to an inner level");
    let mut flow = Flow {
        rip: 0,
        rsp: 1 << 47,
        rflags: 2,
    };
    let got = iret(&mut m, &mut flow, Width::W64);
    assert_eq!(
        got,
        Err(Exception::with_error(12, 0).into()),
        "stack not canonical"
    );
}

/// AC and ID, which are outside of a 16-bit operand.
const AC_ID: u64 = 1 << 18 | 1 << 21;

#[test]
fn flags_by_level() {
    let all = u64::MAX;
    let kernel = USER_FLAGS | rflags::IF | rflags::IOPL | rflags::VIF_VIP | rflags::ONE;
    assert_eq!(returned_flags(0, 2, all, Width::W64), kernel);
    assert_eq!(
        returned_flags(3, 2, all, Width::W64),
        USER_FLAGS | rflags::ONE
    );
    let with_iopl = rflags::IOPL | rflags::ONE;
    assert_eq!(
        returned_flags(3, with_iopl, all, Width::W64),
        USER_FLAGS | rflags::IF | with_iopl
    );
    assert_eq!(
        returned_flags(3, rflags::IF, 0, Width::W64),
        rflags::IF | rflags::ONE
    );
    let kept = returned_flags(0, AC_ID | rflags::RF, 0, Width::W16);
    assert_eq!(kept, AC_ID | rflags::ONE);
    assert_eq!(returned_flags(0, 0, all, Width::W16), kernel & 0xffff);
}

#[test]
fn a_stop_half_way_changes_nothing() {
    let mut stops = 0;
    let (mut m, start) = kernel(to_user());
    let before = m.registers();
    loop {
        m.stop_after = Some(stops);
        let mut flow = start;
        let Err(trap) = iret(&mut m, &mut flow, Width::W64) else {
            break;
        };
        assert_eq!(trap, Trap::Stop(Stop::Wait));
        assert_eq!((m.registers(), flow), (before.clone(), start));
        stops += 1;
    }
    assert_eq!(stops, 7, "five words, two descriptors");
}

#[test]
fn far_returns() {
    // Same level: RIP and CS only.
    let (mut m, mut flow) = kernel([RIP, CONFORMING_CS.into(), 0, 0, 0]);
    ret_far(&mut m, &mut flow, Width::W64, 24).unwrap();
    assert_eq!(
        flow,
        Flow {
            rip: RIP,
            rsp: STACK + 16 + 24,
            rflags: 2
        }
    );
    assert_eq!(
        (m.sys.cpl, m.sys.selectors[1], m.sys.selectors[2]),
        (0, CONFORMING_CS, KERNEL_DS)
    );
    // To user mode, with arguments to drop on both stacks.
    let (mut m, mut flow) = kernel([RIP, USER_CS.into(), 0, USER_RSP, USER_DS.into()]);
    ret_far(&mut m, &mut flow, Width::W64, 8).unwrap();
    assert_eq!(
        flow,
        Flow {
            rip: RIP,
            rsp: USER_RSP + 8,
            rflags: 2
        }
    );
    assert_eq!((m.sys.cpl, m.sys.selectors[2]), (3, USER_DS));
    let (mut m, mut flow) = kernel([1 << 63, KERNEL_CS.into(), 0, 0, 0]);
    assert_eq!(
        ret_far(&mut m, &mut flow, Width::W64, 0),
        Err(Exception::GP0.into())
    );
}

#[test]
fn far_jumps() {
    let gp = |error| Err(Exception::gp(error).into());
    let cases = [
        (KERNEL_CS, RIP, Ok(())),
        (CONFORMING_CS, RIP, Ok(())),
        (3, RIP, gp(0)),
        (KERNEL_CS | 3, RIP, gp(8)),
        (USER_CS, RIP, gp(0x28)),
        (KERNEL_DS, RIP, gp(0x10)),
        (TSS_SEL, RIP, gp(0x30)),
        (ABSENT_CS, RIP, Err(Exception::with_error(11, 0x50).into())),
        (KERNEL_CS, 1 << 47, gp(0)),
    ];
    for (selector, rip, want) in cases {
        let (mut m, mut flow) = kernel([0; 5]);
        assert_eq!(
            jump_far(&mut m, &mut flow, selector, rip),
            want,
            "{selector:#x}"
        );
        let expected = if want.is_ok() {
            (selector, rip)
        } else {
            (KERNEL_CS, HANDLER)
        };
        assert_eq!((m.sys.selectors[1], flow.rip), expected);
    }
}

#[test]
fn syscall_and_sysret() {
    let mut m = Mock::user();
    let sys = &mut m.sys;
    let mut flow = Flow {
        rip: RIP,
        rsp: USER_RSP,
        rflags: 0x246 | rflags::RF,
    };
    assert_eq!(syscall(sys, &mut flow), Err(Exception::UD.into()));
    sys.efer |= EFER_SCE;
    sys.lstar = HANDLER;
    sys.star = 0x0018_0008 << 32;
    sys.fmask = rflags::IF;
    let saved = syscall(sys, &mut flow).unwrap();
    assert_eq!(
        saved,
        Saved {
            rcx: RIP,
            r11: 0x246
        }
    );
    assert_eq!(
        flow,
        Flow {
            rip: HANDLER,
            rsp: USER_RSP,
            rflags: 0x46
        }
    );
    assert_eq!(
        (sys.cpl, sys.selectors[1], sys.selectors[2]),
        (0, KERNEL_CS, KERNEL_DS)
    );

    let bad = Saved {
        rcx: 1 << 47,
        ..saved
    };
    assert_eq!(sysret(sys, &mut flow, bad), Err(Exception::GP0.into()));
    assert_eq!(sys.cpl, 0);
    let r11 = saved.r11 | rflags::RF | rflags::VM;
    sysret(sys, &mut flow, Saved { r11, ..saved }).unwrap();
    assert_eq!(
        flow,
        Flow {
            rip: RIP,
            rsp: USER_RSP,
            rflags: 0x246
        }
    );
    assert_eq!(
        (sys.cpl, sys.selectors[1], sys.selectors[2]),
        (3, USER_CS, USER_DS)
    );
    assert_eq!(
        sysret(sys, &mut flow, saved),
        Err(Exception::GP0.into()),
        "at CPL 3"
    );
}

#[test]
fn ports_by_iopl_and_bitmap() {
    let refused = Err(Exception::GP0.into());
    let mut m = Mock::user();
    m.put(TSS + 0x60, 0x68 << 48);
    // Ports 0 to 15: all refused but 8 to 11.
    m.put(TSS + 0x68, !0x0f00);
    assert_eq!(
        check_io(&mut m, 0, 8, Width::W8),
        refused,
        "no bitmap within the limit"
    );
    // The check reads two bytes, so one byte past the last relevant one must exist.
    m.sys.tr.limit = 0x68 + 2;
    assert_eq!(check_io(&mut m, 0, 8, Width::W32), Ok(()));
    assert_eq!(check_io(&mut m, 0, 9, Width::W32), refused);
    assert_eq!(check_io(&mut m, 0, 7, Width::W8), refused);
    assert_eq!(check_io(&mut m, 0, 0xffff, Width::W8), refused);
    assert_eq!(check_io(&mut m, rflags::IOPL, 0xffff, Width::W8), Ok(()));
    m.sys.tr.limit = 0x66;
    assert_eq!(check_io(&mut m, 0, 8, Width::W8), refused);
    assert_eq!(check_io(&mut Mock::new(), 0, 7, Width::W8), Ok(()), "CPL 0");
}
