//! Frames byte by byte, error codes, the double-fault table, and deliveries stopped half-way.

use super::*;
use crate::linear::mock::*;
use crate::state::Table;
use lacuna_cpu::Stop;

/// IF, CF and ID set.
const FLAGS: u64 = 0x20_0203;
const FROM: Flow = Flow {
    rip: 0x40_1234,
    rsp: 0x7fff_1238,
    rflags: FLAGS,
};
const KERNEL_RSP: u64 = 0xffff_8000_0000_f00c;

fn kernel_flow() -> Flow {
    Flow {
        rsp: KERNEL_RSP,
        ..FROM
    }
}

/// A two-byte INT at `FROM.rip`.
fn int(vector: u8) -> Event {
    Event::Software {
        vector,
        next: FROM.rip + 2,
    }
}

/// The quadwords from `rsp` up.
fn frame<const N: usize>(m: &Mock, rsp: u64) -> [u64; N] {
    std::array::from_fn(|i| m.get(rsp + 8 * i as u64))
}

fn entered(m: &mut Mock, flow: &mut Flow, event: Event) -> u8 {
    match deliver(m, flow, event).unwrap() {
        Outcome::Entered(vector) => vector,
        Outcome::Shutdown => panic!("triple fault"),
    }
}

#[test]
fn an_interrupt_at_cpl_0_pushes_five_words_on_its_aligned_stack() {
    let mut m = Mock::new();
    m.sys.halted = true;
    m.sys.interrupt_shadow = true;
    let mut flow = kernel_flow();
    flow.rflags |= rflags::TF | rflags::NT | rflags::RF;
    let pushed = flow.rflags;
    assert_eq!(entered(&mut m, &mut flow, Event::Interrupt(0x41)), 0x41);
    let rsp = (KERNEL_RSP & !15) - 40;
    let (cs, ss) = (KERNEL_CS.into(), KERNEL_DS.into());
    assert_eq!(frame(&m, rsp), [FROM.rip, cs, pushed, KERNEL_RSP, ss]);
    assert_eq!(
        flow,
        Flow {
            rip: HANDLER + 0x41,
            rsp,
            rflags: FLAGS & !rflags::IF
        }
    );
    assert_eq!(
        m.sys.selectors[2], KERNEL_DS,
        "SS stays without a change of level"
    );
    assert!(!m.sys.halted && !m.sys.interrupt_shadow);
}

#[test]
fn a_trap_gate_leaves_if() {
    let mut m = Mock::new();
    m.gate(0x41, KERNEL_CS, 0x8f00);
    let mut flow = kernel_flow();
    entered(&mut m, &mut flow, Event::Interrupt(0x41));
    assert_eq!(flow.rflags, FLAGS);
}

#[test]
fn a_page_fault_at_cpl_3_pushes_six_words_on_rsp0_and_loads_cr2() {
    let mut m = Mock::user();
    let mut flow = FROM;
    let fault = Exception::page_fault(6, 0xdead_b000);
    assert_eq!(entered(&mut m, &mut flow, Event::Exception(fault)), 14);
    let rsp = (RSP0 & !15) - 48;
    let (cs, ss) = (USER_CS.into(), USER_DS.into());
    assert_eq!(
        frame(&m, rsp),
        [6, FROM.rip, cs, FLAGS | rflags::RF, FROM.rsp, ss]
    );
    assert_eq!(
        flow,
        Flow {
            rip: HANDLER + 14,
            rsp,
            rflags: FLAGS & !rflags::IF
        }
    );
    assert_eq!((m.sys.cpl, m.sys.cr2), (0, 0xdead_b000));
    assert_eq!(
        m.sys.selectors[1..3],
        [KERNEL_CS, 0],
        "SS is null on a change of level"
    );
}

#[test]
fn an_ist_stack_is_used_at_every_level() {
    for (mut m, from) in [(Mock::new(), kernel_flow()), (Mock::user(), FROM)] {
        m.gate(0x41, KERNEL_CS, 0x8e01);
        let mut flow = from;
        entered(&mut m, &mut flow, Event::Interrupt(0x41));
        assert_eq!(flow.rsp, (IST1 & !15) - 40);
        assert_eq!(m.get(flow.rsp + 24), from.rsp);
    }
}

#[test]
fn handlers_outside_ring_0() {
    // Conforming code runs at the interrupted level, on the interrupted stack.
    let mut m = Mock::user();
    m.gate(0x41, CONFORMING_CS, 0x8e00);
    let mut flow = FROM;
    entered(&mut m, &mut flow, Event::Interrupt(0x41));
    assert_eq!((m.sys.cpl, m.sys.selectors[1]), (3, CONFORMING_CS | 3));
    assert_eq!(flow.rsp, (FROM.rsp & !15) - 40);
    // Its pushes are user accesses.
    let mut m = Mock::user();
    m.gate(0x41, USER_CS, 0x8e00);
    m.supervisor.insert(FROM.rsp >> 12);
    let mut flow = FROM;
    assert_eq!(entered(&mut m, &mut flow, Event::Interrupt(0x41)), 14);
    assert_eq!(m.get(flow.rsp), 1 | 2 | 4);
}

#[test]
fn rf_is_pushed_for_faults_only() {
    for vector in 0..32u8 {
        let mut m = Mock::new();
        let mut flow = kernel_flow();
        entered(
            &mut m,
            &mut flow,
            Event::Exception(Exception::plain(vector)),
        );
        let fault = !matches!(vector, 1..=4 | 8 | 9 | 18 | 22..);
        assert_eq!(
            m.get(flow.rsp + 16) & rflags::RF != 0,
            fault,
            "vector {vector}"
        );
    }
    let mut m = Mock::new();
    let mut flow = kernel_flow();
    entered(&mut m, &mut flow, Event::Interrupt(14));
    assert_eq!(m.get(flow.rsp + 16), FLAGS);
}

#[test]
fn software_interrupts_obey_the_gate() {
    let mut m = Mock::user();
    let mut flow = FROM;
    assert_eq!(entered(&mut m, &mut flow, int(3)), 13);
    assert_eq!(
        frame(&m, flow.rsp),
        [3 * 8 + 2, FROM.rip],
        "no EXT, at INT3 itself"
    );
    let mut m = Mock::user();
    m.gate(3, KERNEL_CS, 0xee00);
    let mut flow = FROM;
    assert_eq!(entered(&mut m, &mut flow, int(3)), 3);
    assert_eq!(m.get(flow.rsp), FROM.rip + 2);
}

type Change = fn(&mut Mock);

/// The defect of vector 0x41's gate, and the resulting vector and error code.
const BAD_GATES: &[(&str, Change, u8, u64)] = &[
    (
        "IDT limit",
        |m| m.sys.idtr.limit = 0x41 * 16 + 14,
        13,
        0x41 * 8 + 3,
    ),
    (
        "call gate",
        |m| m.gate(0x41, KERNEL_CS, 0x8c00),
        13,
        0x41 * 8 + 3,
    ),
    (
        "not a system type",
        |m| m.gate(0x41, KERNEL_CS, 0x9e00),
        13,
        0x41 * 8 + 3,
    ),
    (
        "not present",
        |m| m.gate(0x41, KERNEL_CS, 0x0e00),
        11,
        0x41 * 8 + 3,
    ),
    ("null CS", |m| m.gate(0x41, 3, 0x8e00), 13, 1),
    ("CS past the GDT", |m| m.gate(0x41, 0x80, 0x8e00), 13, 0x81),
    ("CS in no LDT", |m| m.gate(0x41, 0x0c, 0x8e00), 13, 0x0d),
    ("CS is data", |m| m.gate(0x41, KERNEL_DS, 0x8e00), 13, 0x11),
    ("CS is a TSS", |m| m.gate(0x41, TSS_SEL, 0x8e00), 13, 0x31),
    ("CS is outer", |m| m.gate(0x41, USER_CS, 0x8e00), 13, 0x29),
    (
        "CS is absent",
        |m| m.gate(0x41, ABSENT_CS, 0x8e00),
        11,
        0x51,
    ),
    (
        "target not canonical",
        |m| m.gate_to(0x41, KERNEL_CS, 0x8e00, 1 << 47),
        13,
        1,
    ),
    (
        "IST not canonical",
        |m| m.gate(0x41, KERNEL_CS, 0x8e02),
        12,
        1,
    ),
    ("IST past the TSS", |m| m.sys.tr.limit = 0x2a, 10, 0x31),
    ("IST absent", |m| m.gate(0x41, KERNEL_CS, 0x8e03), 14, 2),
];

#[test]
fn bad_gates_name_what_is_wrong() {
    for (what, spoil, vector, error) in BAD_GATES {
        let mut m = Mock::new();
        m.gate(0x41, KERNEL_CS, 0x8e01);
        spoil(&mut m);
        // The fault's own gate must work: a shortened IDT ends before vector 0x41 but after 14.
        let mut flow = kernel_flow();
        assert_eq!(
            entered(&mut m, &mut flow, Event::Interrupt(0x41)),
            *vector,
            "{what}"
        );
        assert_eq!(m.get(flow.rsp), *error, "{what}");
        assert_eq!(m.get(flow.rsp + 8), FROM.rip, "{what}");
    }
    // 32-bit code: reachable from CPL 3 only.
    let mut m = Mock::user();
    m.gate(0x41, COMPAT_CS, 0x8e00);
    let mut flow = FROM;
    assert_eq!(entered(&mut m, &mut flow, Event::Interrupt(0x41)), 13);
    assert_eq!(m.get(flow.rsp), 0x49);
    // A software interrupt's error codes have no EXT.
    let mut m = Mock::new();
    m.gate(0x41, KERNEL_DS, 0x8e00);
    let mut flow = kernel_flow();
    assert_eq!(entered(&mut m, &mut flow, int(0x41)), 13);
    assert_eq!(m.get(flow.rsp), 0x10);
}

#[test]
fn a_stack_that_cannot_take_the_frame_is_a_stack_fault() {
    let mut m = Mock::new();
    m.gate(12, KERNEL_CS, 0x8e01);
    // The push reaches below the canonical upper half.
    let mut flow = Flow {
        rsp: 0xffff_8000_0000_0010,
        ..FROM
    };
    assert_eq!(entered(&mut m, &mut flow, Event::Interrupt(0x41)), 12);
    assert_eq!(m.get(flow.rsp), 1);
}

/// The result of a delivery through a gate: success, #NP (contributory) or #PF.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Spoil {
    Good,
    Contributory,
    PageFault,
}

impl Spoil {
    fn apply(self, m: &mut Mock, vector: u8) {
        match self {
            Self::Good => m.gate(vector, KERNEL_CS, 0x8e00),
            Self::Contributory => m.gate(vector, KERNEL_CS, 0x0e00),
            Self::PageFault => m.gate(vector, KERNEL_CS, 0x8e03),
        }
    }
}

/// SDM vol 3 table 6-5 and its text: each first event, the state of its gate and of the gates of
/// #NP, #PF and #DF, and the handler that runs in the end (`None`: a triple fault).
#[test]
fn double_and_triple_faults() {
    use Spoil::{Contributory as C, Good as G, PageFault as P};
    let ud = Event::Exception(Exception::UD);
    let gp = Event::Exception(Exception::GP0);
    let de = Event::Exception(Exception::DE);
    let pf = Event::Exception(Exception::page_fault(0, 0x5000));
    let df = Event::Exception(Exception::with_error(8, 0));
    let irq = Event::Interrupt(0x41);
    // (first, its gate, #NP's gate, #PF's gate, #DF's gate, the handler that runs)
    let cases = [
        (irq, G, C, C, C, Some(0x41)),
        (irq, C, G, G, G, Some(11)),
        (irq, P, G, G, G, Some(14)),
        (int(0x41), C, G, G, G, Some(11)),
        (ud, C, G, G, G, Some(11)),
        (ud, P, G, G, G, Some(14)),
        (gp, C, G, G, G, Some(8)),
        (de, C, G, G, G, Some(8)),
        (gp, P, G, G, G, Some(14)),
        (pf, C, G, C, G, Some(8)),
        (pf, P, G, P, G, Some(8)),
        // Benign, then contributory, then contributory.
        (irq, C, C, G, G, Some(8)),
        // Contributory, then #PF, then contributory or #PF.
        (gp, P, G, C, G, Some(8)),
        (gp, P, G, P, G, Some(8)),
        (gp, C, G, G, C, None),
        (gp, C, G, G, P, None),
        (pf, P, G, P, P, None),
        (df, C, G, G, C, None),
        (df, P, G, G, P, None),
    ];
    for (first, own, np, page, double, want) in cases {
        let mut m = Mock::new();
        NP_PF_DF
            .into_iter()
            .zip([np, page, double])
            .for_each(|(v, s)| s.apply(&mut m, v));
        if !NP_PF_DF.contains(&vector(first)) {
            own.apply(&mut m, vector(first));
        }
        let mut flow = kernel_flow();
        let before = m.registers();
        let got = deliver(&mut m, &mut flow, first).unwrap();
        let what = format!("{first:x?} {own:?} {np:?} {page:?} {double:?}");
        assert_eq!(
            got,
            want.map_or(Outcome::Shutdown, Outcome::Entered),
            "{what}"
        );
        match want {
            Some(8) => assert_eq!(frame(&m, flow.rsp), [0, FROM.rip], "{what}"),
            None => assert_eq!((m.registers(), flow), (before, kernel_flow()), "{what}"),
            _ => {}
        }
    }
}

const NP_PF_DF: [u8; 3] = [11, 14, 8];

#[test]
fn cr2_is_the_last_page_faults_address() {
    let mut m = Mock::new();
    m.gate(14, KERNEL_CS, 0x8e03);
    let mut flow = kernel_flow();
    let fault = Event::Exception(Exception::page_fault(0, 0x5000));
    assert_eq!(entered(&mut m, &mut flow, fault), 8);
    assert_eq!(m.sys.cr2, IST3 - 8);
}

/// Each access of a delivery is stopped in turn. Nothing changes, and the next delivery gives the
/// same result as without a stop.
#[test]
fn a_stop_half_way_changes_nothing() {
    let fault = Event::Exception(Exception::page_fault(7, 0xdead_b000));
    // First a plain delivery, then a double fault.
    for spoil in [Spoil::Good, Spoil::Contributory] {
        let fresh = || {
            let mut m = Mock::user();
            spoil.apply(&mut m, 14);
            m
        };
        let mut reference = fresh();
        let mut end = FROM;
        let outcome = deliver(&mut reference, &mut end, fault).unwrap();
        let mut m = fresh();
        let before = m.registers();
        let mut stops = 0;
        loop {
            m.stop_after = Some(stops);
            let mut flow = FROM;
            match deliver(&mut m, &mut flow, fault) {
                Err(stop) => {
                    assert_eq!(stop, Trap::Stop(Stop::Wait));
                    assert_eq!(
                        (m.registers(), flow),
                        (before.clone(), FROM),
                        "access {stops}"
                    );
                    stops += 1;
                }
                Ok(got) => {
                    assert_eq!((got, flow), (outcome, end));
                    assert_eq!(m.registers(), reference.registers());
                    assert_eq!(frame::<6>(&m, end.rsp), frame::<6>(&reference, end.rsp));
                    break;
                }
            }
        }
        assert!(stops >= 10, "{stops}");
    }
}

#[test]
fn an_empty_idt_is_a_triple_fault() {
    let mut m = Mock::user();
    m.sys.idtr = Table::default();
    m.sys.idtr.limit = 0;
    let mut flow = FROM;
    let outcome = deliver(&mut m, &mut flow, Event::Exception(Exception::UD)).unwrap();
    assert_eq!(outcome, Outcome::Shutdown);
}
