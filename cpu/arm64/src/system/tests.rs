//! Hypercalls, waits, PSTATE by immediates, cache maintenance, AT, and TLBI on one vCPU and on
//! several.

use super::*;
use crate::sysreg::tcr;
use crate::testing::{CODE, DATA, EL1H, End, Machine, mrs, msr};
use lacuna_a64::{DSB, HVC, NOP, WFE, WFI};
use lacuna_addr::Gfn;
use lacuna_cpu::Processor;

const EL0: u64 = 0;
const UNDEFINED: End = End::Vector(0x200);
const LDR_X0_X1: u32 = 0xf940_0020;
const STR_X0_X1: u32 = 0xf900_0020;

/// DEN 0028: X0 to X7 are arguments, X0 to X3 are results, and the guest continues behind the HVC.
#[test]
fn a_hypercall() {
    let mut m = Machine::new(1);
    for n in 0..8 {
        m.cpus[0].core.r[n] = 0x1_0000_0000 + n as u64;
    }
    let call = Call {
        function: 0,
        args: std::array::from_fn(|n| 0x1_0000_0001 + n as u64),
        immediate: 0,
    };
    let done = execute(&mut View::new(&mut m.cpus[0].core, &mut m.ram), HVC);
    assert_eq!(done, Ok(Done::Exit(Exit::Own(Own::Hypercall(call)))));
    m.cpus[0].complete_hypercall([9, 8, 7, 6]);
    assert_eq!(m.cpus[0].core.r[..5], [9, 8, 7, 6, 0x1_0000_0004]);
    m.cpus[0].complete_hypercall_in_x0(5);
    assert_eq!(m.cpus[0].core.r[..2], [5, 8]);
    m.cpus[0].suspend();
    assert_eq!((m.x0(), m.cpus[0].is_halted()), (0, true));
}

/// The hypervisor does nothing: the guest repeats the call, as often as needed.
#[test]
fn a_hypercall_is_repeated() {
    let mut m = Machine::new(1);
    assert_eq!(m.exec(EL1H, &[]), End::Code);
    for _ in 0..2 {
        m.cpus[0].repeat_hypercall();
        assert_eq!(m.cpus[0].regs().pc, CODE);
        assert_eq!(m.go(0), End::Code);
    }
    assert_eq!(m.cpus[0].regs().pc, CODE + 4);
}

/// D17.2.118, nTWI: class 1.
#[test]
fn waits_of_el0() {
    let mut m = Machine::new(1);
    assert_eq!(m.exec(EL0, &[WFI]), End::Vector(0x400));
    assert_eq!(m.syndrome(), (1, 1 << 24 | 0xe << 20));
    assert_eq!(m.cpus[0].system().elr, CODE);
    m.cpus[0].core.sys.sctlr = sctlr::RES1 | sctlr::NTWI;
    assert_eq!(m.exec(EL0, &[WFI]), End::Other(Exit::Halt));
}

/// D17.2.118, nTWE: WFE traps only if it would wait. SEVL, and any other reason to end, lets it
/// complete at once.
#[test]
fn wfe_neither_waits_nor_traps() {
    const SEVL: u32 = 0xd503_20bf;
    let mut m = Machine::new(1);
    for (code, ntwe) in [
        (&[SEVL, WFE][..], 0),
        (&[SEVL, WFE], sctlr::NTWE),
        (&[WFE, WFE], 0),
        (&[WFE, WFE], sctlr::NTWE),
    ] {
        m.cpus[0].core.sys.sctlr = sctlr::RES1 | ntwe;
        assert_eq!(m.exec(EL1H, code), End::Code);
        // At EL0 the HVC behind them is undefined.
        assert_eq!(m.exec(EL0, code), End::Vector(0x400));
        assert_eq!(m.syndrome(), (0, 0));
        assert_eq!(m.cpus[0].system().elr, CODE + 8);
    }
}

/// C5.1.4: MSR (immediate).
#[test]
fn pstate_by_immediates() {
    let mut m = Machine::new(1);
    let word = |op1: u32, crm: u32, op2: u32| 0xd500_401f | op1 << 16 | crm << 8 | op2 << 5;
    let daif = |m: &Machine| (m.cpus[0].core.pstate() & pstate::DAIF) >> 6;
    assert_eq!(m.exec(EL1H, &[word(3, 0b1010, 6)]), End::Code);
    assert_eq!(daif(&m), 0b1010, "DAIFSet");
    assert_eq!(
        m.exec(EL1H | pstate::DAIF, &[word(3, 0b0110, 7)]),
        End::Code
    );
    assert_eq!(daif(&m), 0b1001, "DAIFClr");
    assert_eq!(m.exec(EL1H, &[word(0, 1, 4)]), End::Code);
    assert!(m.cpus[0].core.sys.pan, "PAN");
    assert_eq!(m.exec(EL1H, &[word(0, 0, 5)]), End::Code);
    assert_eq!(m.cpus[0].core.pstate() & pstate::SP, 0, "SPSel");
    for undefined in [
        word(0, 2, 4),
        word(0, 2, 5),
        word(0, 0, 3),
        word(0, 0, 0),
        word(3, 0, 1),
    ] {
        assert_eq!(m.exec(EL1H, &[undefined]), UNDEFINED, "{undefined:#x}");
        assert_eq!(m.syndrome(), (0, 0));
    }
    for (word, sctlr, class) in [
        (word(0, 1, 4), !0, 0),
        (word(0, 1, 5), !0, 0),
        (word(3, 2, 6), 0, 0x18),
        (word(3, 2, 7), 0, 0x18),
    ] {
        m.cpus[0].core.sys.sctlr = sctlr::RES1 | sctlr & sctlr::UMA;
        assert_eq!(m.exec(EL0, &[word]), End::Vector(0x400));
        assert_eq!((m.syndrome().0, m.cpus[0].system().elr), (class, CODE));
    }
    m.cpus[0].core.sys.sctlr = sctlr::RES1 | sctlr::UMA;
    m.exec(EL0, &[word(3, 2, 6)]);
    assert_eq!(
        m.cpus[0].system().spsr,
        pstate::I,
        "with UMA, EL0 masks IRQs"
    );
}

/// C5.3: the existing forms of IC and DC, and their levels.
#[test]
fn cache_maintenance() {
    let mut m = Machine::new(1);
    m.set_x0(DATA);
    let el1 = [
        [0, 7, 1, 0],
        [0, 7, 5, 0],
        [0, 7, 6, 1],
        [0, 7, 6, 2],
        [0, 7, 10, 2],
        [0, 7, 14, 2],
    ];
    let all = [[3, 7, 5, 1], [3, 7, 10, 1], [3, 7, 11, 1], [3, 7, 14, 1]];
    let sys = |[op1, crn, crm, op2]: [u16; 4]| msr([1, op1, crn, crm, op2]);
    for operation in el1.into_iter().chain(all) {
        assert_eq!(m.exec(EL1H, &[sys(operation)]), End::Code, "{operation:?}");
    }
    for (uci, elr, class) in [(0, CODE, 0x18), (sctlr::UCI, CODE + 4, 0)] {
        m.cpus[0].core.sys.sctlr = sctlr::RES1 | uci;
        for operation in all {
            m.exec(EL0, &[sys(operation)]);
            assert_eq!(
                (m.syndrome().0, m.cpus[0].system().elr),
                (class, elr),
                "{operation:?}"
            );
        }
        for operation in el1 {
            m.exec(EL0, &[sys(operation)]);
            assert_eq!(
                (m.syndrome().0, m.cpus[0].system().elr),
                (0, CODE),
                "{operation:?}"
            );
        }
    }
    // Maintenance by address faults as an access does: a data abort with CM and WnR.
    m.set_x0(1 << 50);
    assert_eq!(m.exec(EL1H, &[sys([3, 7, 10, 1])]), UNDEFINED);
    assert_eq!(m.syndrome(), (0x25, 1 << 8 | 1 << 6));
    for unknown in [
        [3, 7, 12, 1],
        [4, 8, 7, 0],
        [0, 8, 2, 1],
        [0, 8, 7, 4],
        [0, 7, 9, 0],
    ] {
        assert_eq!(m.exec(EL1H, &[sys(unknown)]), UNDEFINED, "{unknown:?}");
    }
    assert_eq!(
        m.exec(EL1H, &[sys([0, 7, 1, 0]) | 1 << 21]),
        UNDEFINED,
        "SYSL"
    );
}

/// Every word of the system space, at both levels: no panic.
#[test]
fn every_system_instruction() {
    let mut m = Machine::new(2);
    for low in (0..1 << 22).step_by(37) {
        for pstate in [EL0, EL1H] {
            let core = &mut m.cpus[0].core;
            core.set_pstate(pstate);
            core.pc = CODE;
            core.halted = false;
            core.r[..32].fill(u64::from(low).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let _ = execute(&mut View::new(core, &mut m.ram), 0xd500_0000 | low);
        }
    }
}

/// Page tables at fixed addresses: VA 0 to 2 MiB by pages, for programs and the kernel.
struct Tables {
    m: Machine,
}

const ROOT: u64 = 0x10_0000;
const LEVEL_3: u64 = 0x13_0000;
const LEAF: u64 = 3 | 1 << 10 | 1 << 11;
const USER: u64 = 1 << 6;
const CLEAN: u64 = 1 << 51 | 1 << 7;

impl Tables {
    /// Code, vectors and data have an identity map; the kernel's pages are global.
    fn new(vcpus: usize) -> Self {
        let mut tables = Self {
            m: Machine::new(vcpus),
        };
        for level in 0..3 {
            let at = ROOT + level * 0x1_0000;
            tables.m.ram.add(gfn(at)).store_u64(0, (at + 0x1_0000) | 3);
        }
        for page in [CODE, crate::testing::VECTORS] {
            tables.map(page, page | 3 | 1 << 10 | 1 << 7);
        }
        for cpu in &mut tables.m.cpus {
            let sys = &mut cpu.core.sys;
            sys.tcr = 16 | 16 << 16 | 2 << 30 | 5 << 32 | tcr::AS | tcr::HA | tcr::HD;
            sys.ttbr0 = ROOT;
            sys.mair = 0xff;
            sys.sctlr |= sctlr::M;
            cpu.flush_tlb();
        }
        tables
    }

    fn map(&mut self, va: u64, entry: u64) {
        self.m
            .ram
            .add(gfn(LEVEL_3))
            .store_u64((va >> 12) as usize * 8, entry);
    }

    fn entry(&mut self, va: u64) -> u64 {
        self.m
            .ram
            .add(gfn(LEVEL_3))
            .load_u64((va >> 12) as usize * 8)
    }

    /// The value that processor 0 loads at EL1; `None` if it faults.
    fn load(&mut self, va: u64) -> Option<u64> {
        self.m.cpus[0].core.r[1] = va;
        match self.m.exec(EL1H, &[LDR_X0_X1]) {
            End::Code => Some(self.m.x0()),
            End::Vector(0x200) => None,
            end => panic!("{end:?}"),
        }
    }

    fn sys(&mut self, operation: [u16; 4], x0: u64) -> End {
        let [op1, crn, crm, op2] = operation;
        self.m.set_x0(x0);
        self.m.exec(EL1H, &[msr([1, op1, crn, crm, op2])])
    }
}

fn gfn(gpa: u64) -> Gfn {
    Gfn::new(gpa >> 12).unwrap()
}

/// Two pages with different contents.
fn two_pages(t: &mut Tables) -> [u64; 2] {
    [(0x5_0000, 111), (0x6_0000, 222)].map(|(gpa, value)| {
        t.m.ram.add(gfn(gpa)).store_u64(0, value);
        gpa
    })
}

/// D8.13: the processor may use a changed descriptor only after a TLBI, and must use it then. Each
/// form that names the page drops it; forms that name other pages need not.
#[test]
fn each_form_of_tlbi() {
    let va = 0x3_0000;
    let asid = 7 << 48;
    for (op2, operand) in [
        (0, 0),
        (1, va >> 12 | asid),
        (2, asid),
        (3, va >> 12),
        (5, va >> 12 | asid),
        (7, va >> 12),
    ] {
        for crm in [3, 7] {
            let mut t = Tables::new(1);
            let [one, two] = two_pages(&mut t);
            t.m.cpus[0].core.sys.ttbr0 |= asid;
            t.m.cpus[0].flush_tlb();
            t.map(va, one | LEAF);
            assert_eq!(t.load(va), Some(111));
            t.map(va, two | LEAF);
            assert_eq!(t.load(va), Some(111), "no invalidation yet: the TLB has it");
            assert_eq!(t.sys([0, 8, crm, op2], operand), End::Code);
            assert_eq!(t.load(va), Some(222), "TLBI {crm} {op2}");
        }
    }
    let mut t = Tables::new(1);
    for op2 in [4, 6] {
        assert_eq!(t.sys([0, 8, 7, op2], 0), UNDEFINED);
    }
}

/// D8.13.3: entries of two ASIDs do not mix, survive the switch, and ASIDE1 drops the entries of
/// one.
#[test]
fn address_spaces_are_kept_apart() {
    let va = 0x3_0000;
    let mut t = Tables::new(1);
    let [one, two] = two_pages(&mut t);
    let switch = |t: &mut Tables, asid: u64| {
        assert_eq!(t.m.msr([3, 0, 2, 0, 0], ROOT | asid << 48), End::Code);
    };
    t.map(va, one | LEAF | USER);
    switch(&mut t, 1);
    assert_eq!(t.load(va), Some(111));
    t.map(va, two | LEAF | USER);
    switch(&mut t, 2);
    assert_eq!(t.load(va), Some(222), "not the other space's");
    // EL0's entries of a space are kept while another one is current.
    t.map(CODE, CODE | 3 | 1 << 10 | 1 << 7 | USER);
    let user_load = |t: &mut Tables| {
        t.m.cpus[0].core.r[1] = va;
        t.m.set_x0(0);
        // The HVC behind the load is undefined at EL0.
        assert_eq!(t.m.exec(EL0, &[LDR_X0_X1]), End::Vector(0x400));
        assert_eq!(t.m.cpus[0].system().elr, CODE + 4);
        t.m.x0()
    };
    assert_eq!(user_load(&mut t), 222);
    switch(&mut t, 1);
    assert_eq!(user_load(&mut t), 222);
    t.map(va, one | LEAF | USER);
    assert_eq!(t.sys([0, 8, 7, 2], 2 << 48), End::Code);
    assert_eq!(user_load(&mut t), 222, "ASID 1 has not been invalidated");
    switch(&mut t, 2);
    assert_eq!(user_load(&mut t), 111, "ASID 2 has");
}

/// D8.4.2: EL1 may not access a program's page while PAN is set, whatever the TLB has cached.
#[test]
fn pan_reaches_the_tlb() {
    let va = 0x3_0000;
    let mut t = Tables::new(1);
    let [one, _] = two_pages(&mut t);
    t.m.cpus[0].core.sys.sctlr |= sctlr::SPAN;
    t.map(va, one | LEAF | USER);
    for _ in 0..3 {
        assert_eq!(t.load(va), Some(111), "PAN is clear");
        t.m.cpus[0].core.r[1] = va;
        let end = t.m.exec(EL1H | pstate::PAN, &[LDR_X0_X1]);
        assert_eq!(end, UNDEFINED);
        assert_eq!(
            t.m.syndrome(),
            (0x25, 0x0f),
            "a permission fault of level 3"
        );
        // LDTR has the rights of EL0.
        assert_eq!(t.m.exec(EL1H | pstate::PAN, &[0xf840_0820]), End::Code);
        assert_eq!(t.m.x0(), 111);
    }
    // More pages than are recorded one by one.
    for page in 0..40 {
        t.map(va + page * 0x1000, one | LEAF | USER);
        assert_eq!(t.load(va + page * 0x1000), Some(111));
    }
    for page in 0..40 {
        t.m.cpus[0].core.r[1] = va + page * 0x1000;
        assert_eq!(t.m.exec(EL1H | pstate::PAN, &[LDR_X0_X1]), UNDEFINED);
    }
}

/// D8.4.5: the first store to a clean page makes it dirty, also if a load has filled the TLB.
#[test]
fn the_tlb_sees_the_first_store() {
    let va = 0x3_0000;
    let mut t = Tables::new(1);
    let [one, _] = two_pages(&mut t);
    t.map(va, one | 3 | 1 << 11 | CLEAN);
    assert_eq!(t.load(va), Some(111));
    assert_eq!(t.entry(va), one | LEAF | CLEAN, "accessed and clean");
    t.m.cpus[0].core.r[1] = va;
    assert_eq!(t.m.exec(EL1H, &[STR_X0_X1]), End::Code);
    assert_eq!(t.entry(va), one | LEAF | 1 << 51, "dirty");
}

/// D17.2.37: WnR of an atomic instruction is set only if a load would not have failed.
#[test]
fn the_abort_of_an_atomic_instruction() {
    // ldadd x0, x0, [x1]; cas x0, x0, [x1]
    for word in [0xf820_0020, 0xc8a0_7c20] {
        let va = 0x3_0000;
        let mut t = Tables::new(1);
        let [one, _] = two_pages(&mut t);
        for (entry, status) in [
            (0, 0x07),
            (one | LEAF | 1 << 7, 0x4f),
            (one | LEAF | USER, 0x0f),
        ] {
            t.map(va, entry);
            t.m.cpus[0].flush_tlb();
            t.m.cpus[0].core.r[1] = va;
            assert_eq!(t.m.exec(EL1H | pstate::PAN, &[word]), End::Vector(0x200));
            assert_eq!(t.m.syndrome(), (0x25, status), "{entry:#x}");
        }
    }
}

/// D8.9: a branch drops the tag of its target, so neither PC nor a link register has it.
#[test]
fn a_branch_to_a_tagged_address() {
    let mut t = Tables::new(1);
    t.m.cpus[0].core.sys.tcr |= tcr::TBI0;
    t.m.cpus[0].flush_tlb();
    for round in 0..3 {
        t.m.cpus[0].core.r[1] = (CODE + 8) | 0xab << 56;
        // br x1; nop; bl 1f; 1: (HVC)
        let code = [0xd61f_0020, NOP, 0x9400_0001];
        assert_eq!(t.m.exec(EL1H, &code), End::Code);
        assert_eq!(t.m.cpus[0].regs().x[30], CODE + 12, "round {round}");
    }
}

/// A tagged address has its own TLB entry; an invalidation by the untagged address drops it.
#[test]
fn tags_and_invalidation() {
    let va = 0x3_0000;
    let mut t = Tables::new(1);
    let [one, two] = two_pages(&mut t);
    t.m.cpus[0].core.sys.tcr |= tcr::TBI0;
    t.m.cpus[0].flush_tlb();
    t.map(va, one | LEAF);
    assert_eq!(t.load(va | 0xab << 56), Some(111));
    t.map(va, two | LEAF);
    assert_eq!(t.load(va | 0xab << 56), Some(111));
    assert_eq!(t.sys([0, 8, 7, 1], va >> 12), End::Code);
    assert_eq!(t.load(va | 0xab << 56), Some(222));
}

/// D17.2.105: AT gives the frame and the memory type, or the fault.
#[test]
fn address_translation_instructions() {
    let va = 0x3_0000;
    let mut t = Tables::new(1);
    let [one, _] = two_pages(&mut t);
    let par = |t: &mut Tables, op2, va| {
        assert_eq!(t.sys([0, 7, 8, op2], va), End::Code);
        t.m.cpus[0].system().par
    };
    t.map(va, one | LEAF | 3 << 8 | 1 << 7);
    assert_eq!(
        par(&mut t, 0, va | 0x123),
        0xff << 56 | one | 1 << 11 | 3 << 7,
        "S1E1R"
    );
    assert_eq!(
        par(&mut t, 1, va),
        1 << 11 | 0x0f << 1 | 1,
        "S1E1W: read-only"
    );
    assert_eq!(
        par(&mut t, 2, va),
        1 << 11 | 0x0f << 1 | 1,
        "S1E0R: the kernel's"
    );
    assert_eq!(
        par(&mut t, 0, va + 0x1000),
        1 << 11 | 0x07 << 1 | 1,
        "not mapped"
    );
    t.map(va, one | LEAF | USER | CLEAN | 1 << 2);
    t.m.cpus[0].core.sys.pan = true;
    assert_eq!(
        par(&mut t, 3, va),
        one | 1 << 11 | 2 << 7,
        "S1E0W: device memory"
    );
    assert_eq!(t.entry(va) & 1 << 7, 1 << 7, "it is still clean");
    let before = t.m.cpus[0].system().par;
    t.m.ram.add(gfn(ROOT)).store_u64(8, 0x7777_0000 | 3);
    assert_eq!(
        t.sys([0, 7, 8, 0], 1 << 39),
        UNDEFINED,
        "an external abort is an exception"
    );
    assert_eq!(t.m.syndrome(), (0x25, 0x155), "CM and WnR");
    assert_eq!(t.m.cpus[0].system().par, before);
    assert_eq!(t.m.exec(EL0, &[msr([1, 0, 7, 8, 0])]), End::Vector(0x400));
    assert_eq!(t.m.syndrome(), (0, 0));
}

/// D8.13.4: an inner-shareable invalidation is complete at DSB on every vCPU; a local one leaves
/// the others alone.
#[test]
fn invalidations_reach_other_vcpus() {
    let va = 0x3_0000;
    let mut t = Tables::new(2);
    let [one, two] = two_pages(&mut t);
    t.map(va, one | LEAF);
    t.m.put(CODE, &[LDR_X0_X1, HVC]);
    let other = |t: &mut Tables| {
        let cpu = &mut t.m.cpus[1];
        cpu.core.set_pstate(EL1H);
        cpu.core.pc = CODE;
        cpu.core.r[1] = va;
        cpu.drop_all_code();
        t.m.put(CODE, &[LDR_X0_X1, HVC]);
        assert_eq!(t.m.go(1), End::Code);
        t.m.cpus[1].core.r[0]
    };
    assert_eq!(other(&mut t), 111);
    t.map(va, two | LEAF);
    assert_eq!(t.sys([0, 8, 7, 1], va >> 12), End::Code);
    assert_eq!(other(&mut t), 111, "VAE1 is local");
    assert_eq!(t.sys([0, 8, 3, 1], va >> 12), End::Code);
    assert_eq!(t.m.wakes.take(), [], "the other one does not run");
    assert_eq!(other(&mut t), 222, "VAE1IS");
    t.map(va, one | LEAF);
    // The other vCPU runs: DSB leaves the run loop until that vCPU has drained its inbox.
    assert_eq!(t.m.fabric.shootdown.enter(1), []);
    t.m.set_x0(0);
    let code = [msr([1, 0, 8, 3, 0]), DSB, mrs([3, 0, 4, 2, 2])];
    assert_eq!(t.m.exec(EL1H, &code), End::Other(Exit::Stop(Stop::Again)));
    assert_eq!(t.m.wakes.take(), [1]);
    assert_eq!(t.m.go(0), End::Other(Exit::Stop(Stop::Again)));
    t.m.fabric.shootdown.leave(1);
    assert_eq!(t.m.go(0), End::Code);
    assert_eq!(other(&mut t), 111);
}

/// The write is reported once, although the undefined instruction leaves no reason of its own.
#[test]
fn an_undefined_instruction_behind_a_device_write() {
    let mut m = Machine::new(1);
    let nothing = msr([3, 7, 15, 15, 7]);
    m.cpus[0].core.r[1] = 0xd000_0000;
    let exit = m.exec(EL1H, &[STR_X0_X1, nothing]);
    assert!(
        matches!(exit, End::Other(Exit::MmioWrite { .. })),
        "{exit:?}"
    );
    assert_eq!(m.go(0), UNDEFINED);
}
