//! Rules of the GICv3 specification (IHI 0069), and a property test against a model that keeps
//! interrupts in a map.

use super::*;
use lacuna_addr::Gpa;
use lacuna_cpu::testing::Wakes;
use lacuna_state::{StateError, arm64};
use proptest::prelude::*;
use std::sync::Arc;

const SPURIOUS: u64 = 1023;

/// A machine after a kernel's setup: everything in group 1, all groups enabled.
struct Machine {
    gic: Arc<Gic>,
    wakes: Arc<Wakes>,
    cpus: Vec<CpuInterface>,
}

fn gicd(offset: u64) -> Gpa {
    Gpa::truncate(DISTRIBUTOR.get() + offset)
}

fn gicr(index: usize, offset: u64) -> Gpa {
    let (start, index) = match index.checked_sub(FIRST_REGION_VCPUS) {
        None => (REDISTRIBUTORS, index),
        Some(index) => (REDISTRIBUTORS_2, index),
    };
    Gpa::truncate(start.get() + index as u64 * REDISTRIBUTOR_STRIDE + offset)
}

/// A register of INTIDs 0 to 31.
fn sgi_base(index: usize, offset: u64) -> Gpa {
    gicr(index, REGISTER_PAGE + offset)
}

impl Machine {
    /// As after a reset.
    fn reset(vcpus: usize) -> Self {
        let wakes = Arc::new(Wakes::default());
        let gic = Arc::new(Gic::new(vcpus, wakes.clone()));
        let cpus = (0..vcpus).map(|i| CpuInterface::new(i, gic.clone()));
        let cpus = cpus.collect();
        Self { gic, wakes, cpus }
    }

    /// The steps of Linux's driver for GICv3.
    fn new(vcpus: usize) -> Self {
        let mut machine = Self::reset(vcpus);
        for intid in 32..128_u64 {
            machine.write4(gicd(0x80 + intid / 32 * 4), u32::MAX);
            machine.write1(gicd(0x400 + intid), 0xa0);
        }
        machine.write4(gicd(0), 0x13);
        for index in 0..vcpus {
            machine.write4(gicr(index, 0x14), 0);
            assert_eq!(machine.read4(gicr(index, 0x14)), 0, "awake at once");
            machine.write4(sgi_base(index, 0x80), u32::MAX);
            for quad in 0..8 {
                machine.write4(sgi_base(index, 0x400 + quad * 4), 0xa0a0_a0a0);
            }
            machine.write4(sgi_base(index, 0x100), u32::MAX);
            let cpu = &mut machine.cpus[index];
            cpu.set_pmr(0xf0);
            cpu.set_enabled(Group::One, 1);
        }
        machine.wakes.take();
        machine
    }

    fn write4(&self, gpa: Gpa, value: u32) {
        self.gic.mmio_write(0, gpa, 4, value.into());
    }

    fn write1(&self, gpa: Gpa, value: u8) {
        self.gic.mmio_write(0, gpa, 1, value.into());
    }

    fn read4(&self, gpa: Gpa) -> u32 {
        u32::try_from(self.gic.mmio_read(gpa, 4)).expect("4 bytes")
    }

    /// Enables an SPI, level-sensitive, at vCPU `to`.
    fn enable_spi(&self, intid: u64, to: u64) {
        self.write4(gicd(0x100 + intid / 32 * 4), 1 << (intid % 32));
        self.gic.mmio_write(0, gicd(0x6000 + intid * 8), 8, to);
    }
}

/// 12.9: a driver's first reads.
#[test]
fn identification_registers() {
    let m = Machine::reset(3);
    assert_eq!(m.read4(gicd(0xffe8)) >> 4 & 0xf, 3, "architecture version");
    assert_eq!(m.read4(gicr(1, 0xffe8)) >> 4 & 0xf, 3);
    let typer = m.read4(gicd(4));
    assert_eq!(32 * ((typer & 31) + 1), 128, "INTIDs");
    assert_eq!(typer >> 17 & 1, 0, "no LPIs");
    assert_eq!(
        m.read4(gicd(0)),
        0x50,
        "affinity routing, one security state"
    );
    for index in 0..3 {
        let typer = m.gic.mmio_read(gicr(index, 8), 8);
        assert_eq!(typer >> 32, affinity(index).into());
        assert_eq!(typer >> 8 & 0xffff, index as u64, "processor number");
        assert_eq!(typer >> 4 & 1, u64::from(index == 2), "last");
        assert_eq!(
            m.gic.mmio_read(gicr(index, 12), 4),
            typer >> 32,
            "its high half"
        );
    }
}

/// 12.11: a driver reads each region up to `GICR_TYPER`.Last.
#[test]
fn a_second_region_has_the_redistributors_beyond_the_first() {
    let m = Machine::reset(256);
    for index in 0..256 {
        let typer = m.gic.mmio_read(gicr(index, 8), 8);
        assert_eq!(typer >> 32, affinity(index).into());
        assert_eq!(typer >> 4 & 1 != 0, [122, 255].contains(&index), "{index}");
    }
    let first_end = Gpa::truncate(gicr(122, 0).get() + REDISTRIBUTOR_STRIDE);
    let before = Gpa::truncate(gicr(123, 0).get() - 1);
    for outside in [first_end, before, gicr(256, 0)] {
        assert!(!m.gic.claims(outside), "{outside}");
    }
    let m = Machine::reset(123);
    assert!(m.gic.claims(gicr(122, 0)) && !m.gic.claims(gicr(123, 0)));
}

#[test]
fn affinities_name_their_processor() {
    for index in 0..0x2000 {
        assert_eq!(fabric::index_of(affinity(index)), Some(index));
    }
    assert_eq!(fabric::index_of(0x10), None, "Aff0 above 15");
    assert_eq!(fabric::index_of(1 << 24), None, "Aff3");
}

/// 4.1.2: a level-sensitive interrupt is pending as long as its input is high.
#[test]
fn a_level_sensitive_interrupt() {
    let mut m = Machine::new(1);
    m.enable_spi(33, 0);
    m.gic.set_spi(33, Line::High);
    assert_eq!(m.wakes.take(), [0]);
    assert_eq!(m.cpus[0].signalled(), Some(Group::One));
    assert_eq!(m.cpus[0].highest_pending(Group::One), 33);
    assert_eq!(m.cpus[0].acknowledge(Group::One), 33);
    assert_eq!(m.cpus[0].running_priority(), 0xa0);
    assert_eq!(m.cpus[0].signalled(), None, "active and pending");
    assert_eq!(m.cpus[0].acknowledge(Group::One), SPURIOUS);
    m.cpus[0].end(Group::One, 33);
    assert_eq!(m.cpus[0].signalled(), Some(Group::One), "still high");
    assert_eq!(m.cpus[0].acknowledge(Group::One), 33);
    m.gic.set_spi(33, Line::Low);
    m.cpus[0].end(Group::One, 33);
    assert_eq!(m.cpus[0].signalled(), None);
    assert_eq!(m.cpus[0].running_priority(), 0xff);
}

/// 4.1.2: an edge is latched until it is acknowledged. An edge during an active interrupt makes it
/// active and pending.
#[test]
fn an_edge_triggered_interrupt() {
    let mut m = Machine::new(1);
    m.enable_spi(40, 0);
    m.write4(gicd(0xc00 + 40 / 16 * 4), 2 << (40 % 16 * 2));
    m.gic.set_spi(40, Line::High);
    m.gic.set_spi(40, Line::Low);
    assert_eq!(m.cpus[0].acknowledge(Group::One), 40, "latched");
    m.gic.set_spi(40, Line::High);
    m.gic.set_spi(40, Line::High);
    m.cpus[0].end(Group::One, 40);
    assert_eq!(m.cpus[0].acknowledge(Group::One), 40, "the second edge");
    m.cpus[0].end(Group::One, 40);
    assert_eq!(m.cpus[0].signalled(), None, "a high input is no edge");
}

/// 4.8.6: with EOImode 1, the end drops the priority and ICC_DIR deactivates.
#[test]
fn end_and_deactivation_apart() {
    let mut m = Machine::new(1);
    m.cpus[0].set_ctlr(2);
    assert_eq!(m.cpus[0].ctlr() & 2, 2);
    m.gic.set_ppi(0, 27, Line::High);
    assert_eq!(m.cpus[0].acknowledge(Group::One), 27);
    m.cpus[0].end(Group::One, 27);
    assert_eq!(m.cpus[0].running_priority(), 0xff);
    assert_eq!(m.cpus[0].signalled(), None, "still active");
    m.cpus[0].deactivate(27);
    assert_eq!(m.cpus[0].acknowledge(Group::One), 27);
    m.cpus[0].set_ctlr(0);
    m.cpus[0].deactivate(27);
    assert_eq!(
        m.read4(sgi_base(0, 0x300)),
        1 << 27,
        "DIR does nothing with EOImode 0"
    );
}

/// 4.8.3, 4.8.5: a more urgent interrupt preempts, and an equal one does not. The priority mask
/// blocks every interrupt that is not below it.
#[test]
fn priorities_decide() {
    let mut m = Machine::new(1);
    for (intid, priority) in [(33, 0x80), (34, 0x80), (35, 0x40)] {
        m.enable_spi(intid, 0);
        m.write1(gicd(0x400 + intid), priority);
    }
    m.gic.set_spi(34, Line::High);
    m.gic.set_spi(33, Line::High);
    assert_eq!(
        m.cpus[0].acknowledge(Group::One),
        33,
        "the lower number first"
    );
    assert_eq!(m.cpus[0].signalled(), None, "34 is no more urgent");
    m.gic.set_spi(35, Line::High);
    assert_eq!(m.cpus[0].acknowledge(Group::One), 35, "preempts");
    assert_eq!(m.cpus[0].running_priority(), 0x40);
    assert_eq!(m.cpus[0].registers().active[1][0], 1 << 16 | 1 << 8);
    m.cpus[0].end(Group::One, 35);
    m.cpus[0].end(Group::One, 33);
    m.gic.set_spi(35, Line::Low);
    m.gic.set_spi(33, Line::Low);
    m.cpus[0].set_pmr(0x80);
    assert_eq!(
        m.cpus[0].signalled(),
        None,
        "the mask's own priority is held back"
    );
    assert_eq!(
        m.cpus[0].highest_pending(Group::One),
        34,
        "which HPPIR does not regard"
    );
    m.cpus[0].set_pmr(0x88);
    assert_eq!(m.cpus[0].acknowledge(Group::One), 34);
}

/// 4.8.2: the binary point makes priorities equal for preemption.
#[test]
fn the_binary_point_divides_a_priority() {
    let mut m = Machine::new(1);
    m.cpus[0].set_bpr(Group::One, 0);
    assert_eq!(m.cpus[0].bpr(Group::One), 3, "the smallest");
    m.cpus[0].set_bpr(Group::One, 7);
    m.enable_spi(33, 0);
    m.enable_spi(34, 0);
    m.write1(gicd(0x400 + 34), 0x80);
    m.gic.set_spi(33, Line::High);
    assert_eq!(m.cpus[0].acknowledge(Group::One), 33);
    m.gic.set_spi(34, Line::High);
    assert_eq!(m.cpus[0].signalled(), None, "0xa0 and 0x80 are one level");
    m.cpus[0].set_bpr(Group::One, 3);
    assert_eq!(
        m.cpus[0].running_priority(),
        0x80,
        "kept as it was acknowledged"
    );
    m.cpus[0].set_ctlr(1);
    m.cpus[0].set_bpr(Group::One, 6);
    assert_eq!(
        m.cpus[0].bpr(Group::One),
        3,
        "CBPR: BPR0 + 1, and no writes"
    );
}

/// 4.8.5: the group priorities of both interrupts are compared with the same bits, which the
/// pending interrupt's group decides. So a less urgent interrupt does not preempt one of the other
/// group.
#[test]
fn a_less_urgent_interrupt_of_the_other_group_does_not_preempt() {
    let mut m = Machine::new(1);
    for (spi, priority) in [(33, 0x40), (34, 0x60), (35, 0x20)] {
        m.enable_spi(spi, 0);
        m.write1(gicd(0x400 + spi), priority);
    }
    m.write4(gicd(0x84), !(1 << 1));
    m.cpus[0].set_enabled(Group::Zero, 1);
    m.cpus[0].set_bpr(Group::One, 7);
    m.gic.set_spi(33, Line::High);
    assert_eq!(m.cpus[0].acknowledge(Group::Zero), 33);
    m.gic.set_spi(34, Line::High);
    assert_eq!(m.cpus[0].signalled(), None, "0x60 does not preempt 0x40");
    assert_eq!(m.cpus[0].acknowledge(Group::One), SPURIOUS);
    m.cpus[0].set_bpr(Group::One, 3);
    m.gic.set_spi(35, Line::High);
    assert_eq!(m.cpus[0].acknowledge(Group::One), 35, "0x20 does");
}

/// 4.6.2: group 0 is an FIQ, acknowledged by ICC_IAR0 only.
#[test]
fn group_0_is_an_fiq() {
    let mut m = Machine::new(1);
    m.enable_spi(33, 0);
    m.write4(gicd(0x84), !(1 << 1));
    m.gic.set_spi(33, Line::High);
    assert_eq!(
        m.cpus[0].signalled(),
        None,
        "the interface's group 0 is disabled"
    );
    m.cpus[0].set_enabled(Group::Zero, 1);
    assert_eq!(m.cpus[0].signalled(), Some(Group::Zero));
    assert_eq!(m.cpus[0].acknowledge(Group::One), SPURIOUS);
    assert_eq!(m.cpus[0].highest_pending(Group::One), SPURIOUS);
    assert_eq!(m.cpus[0].acknowledge(Group::Zero), 33);
    m.cpus[0].end(Group::One, 33);
    assert_eq!(
        m.cpus[0].running_priority(),
        0xa0,
        "not this group's priority"
    );
    m.cpus[0].end(Group::Zero, 33);
    assert_eq!(m.cpus[0].running_priority(), 0xff);
}

/// 12.2.19: targets by affinity and list, or all but the sender.
#[test]
fn software_generated_interrupts() {
    let mut m = Machine::new(18);
    m.cpus[0].send(5 << 24 | 0b110, Reach::Both);
    assert_eq!(m.wakes.take(), [1, 2]);
    m.cpus[0].send(5 << 24 | 0b110, Reach::Both);
    assert_eq!(m.wakes.take(), [], "already pending");
    assert_eq!(m.cpus[1].acknowledge(Group::One), 5);
    assert_eq!(m.cpus[0].signalled(), None);
    m.cpus[0].send(6 << 24 | 1 << 16 | 0b10, Reach::Both);
    assert_eq!(m.wakes.take(), [17], "Aff1 = 1, bit 1");
    m.cpus[0].send(6 << 24 | 1 << 16 | 0b100, Reach::Both);
    m.cpus[0].send(6 << 24 | 1 << 48 | 1, Reach::Both);
    m.cpus[0].send(6 << 24 | 1 << 32 | 1, Reach::Both);
    assert_eq!(m.wakes.take(), [], "no such processor");
    m.cpus[3].send(1 << 40 | 7 << 24, Reach::Both);
    let woken = m.wakes.take();
    assert_eq!(
        woken.len(),
        15,
        "2 and 17 have a more urgent one already, 3 is the sender"
    );
    assert!(![2, 3, 17].iter().any(|index| woken.contains(index)));
    m.cpus[4].send(9 << 24 | 1 << 4, Reach::Both);
    assert_eq!(m.wakes.take(), [], "the sender needs no wake-up");
    m.cpus[0].send(10 << 24 | 1 << 5, Reach::Zero);
    assert_eq!(
        m.read4(sgi_base(5, 0x200)) >> 10 & 1,
        0,
        "group 1 is out of reach"
    );
}

/// KVM's redistributors are awake after a reset, so a guest need not wake them.
#[test]
fn a_redistributor_is_awake_after_a_reset() {
    let mut m = Machine::reset(2);
    m.write4(gicd(0), 0x13);
    for index in 0..2 {
        assert_eq!(m.read4(gicr(index, 0x14)), 0);
        m.write4(sgi_base(index, 0x80), u32::MAX);
        m.write4(sgi_base(index, 0x100), u32::MAX);
        m.cpus[index].set_pmr(0xf0);
        m.cpus[index].set_enabled(Group::One, 1);
        m.gic.set_ppi(index, 27, Line::High);
        assert_eq!(m.cpus[index].signalled(), Some(Group::One));
    }
}

/// 12.11.42: a redistributor whose processor sleeps forwards nothing.
#[test]
fn a_sleeping_redistributor() {
    let m = Machine::new(1);
    m.write4(gicr(0, 0x14), 2);
    assert_eq!(m.read4(gicr(0, 0x14)), 6);
    m.gic.set_ppi(0, 27, Line::High);
    assert_eq!(m.cpus[0].signalled(), None);
    m.write4(gicr(0, 0x14), 0);
    assert_eq!(m.cpus[0].signalled(), Some(Group::One));
}

/// 4.7: SPIs follow `GICD_IROUTER<n>`.
#[test]
fn routes() {
    let mut m = Machine::new(2);
    m.enable_spi(50, 1);
    m.gic.set_spi(50, Line::High);
    assert_eq!(m.wakes.take(), [1]);
    m.gic.mmio_write(0, gicd(0x6000 + 50 * 8), 8, 0);
    assert_eq!(m.cpus[1].signalled(), None);
    assert_eq!(m.cpus[0].signalled(), Some(Group::One));
    m.gic.mmio_write(0, gicd(0x6000 + 50 * 8), 8, u64::MAX);
    assert_eq!(m.gic.mmio_read(gicd(0x6000 + 50 * 8), 8), 0xff_00ff_ffff);
    assert_eq!(m.cpus[0].signalled(), None, "to a processor that is absent");
    m.gic.mmio_write(0, gicd(0x6004 + 50 * 8), 4, 0);
    m.gic.mmio_write(0, gicd(0x6000 + 50 * 8), 4, 1);
    assert_eq!(m.cpus[1].acknowledge(Group::One), 50);
}

/// 12.1.3: odd sizes, reserved registers and the registers of other INTIDs.
#[test]
fn reserved_accesses_have_no_effect() {
    let m = Machine::new(1);
    for size in [0, 1, 2, 3, 4, 5, 8, 16, 255] {
        for offset in (0..0x1_0000)
            .step_by(4)
            .chain([1, 2, 3, 0x81, 0x402, 0xfff9])
        {
            if !matches!(offset, 0x400..0x480) {
                let before = m.gic.distributor();
                if (0x20..0x80).contains(&offset) || offset < 0x20 && size != 4 {
                    m.gic.mmio_write(0, gicd(offset), size, u64::MAX);
                    assert_eq!(m.gic.distributor(), before, "{offset:#x} {size}");
                }
            }
            for page in [gicd(offset), gicr(0, offset), sgi_base(0, offset)] {
                let value = m.gic.mmio_read(page, size);
                let bits = 8 * u32::from(size.min(8));
                assert!(bits == 64 || value >> bits == 0, "{page:?} {size}");
            }
        }
    }
    assert_eq!(
        m.read4(gicd(0x100)),
        0,
        "INTIDs 0 to 31 are in the redistributor"
    );
    assert_eq!(m.read4(gicd(0x110)), 0, "INTIDs from 128 on do not exist");
    m.write4(sgi_base(0, 0xc04), u32::MAX);
    assert_eq!(m.read4(sgi_base(0, 0xc04)), 0, "PPIs stay level-sensitive");
    assert_eq!(
        m.read4(sgi_base(0, 0xc00)),
        0xaaaa_aaaa,
        "SGIs stay edge-triggered"
    );
    assert!(!m.gic.claims(gicr(1, 0)) && !m.gic.claims(Gpa::truncate(0x0801_0000)));
    m.gic.set_spi(u32::MAX, Line::High);
    m.gic.set_spi(128, Line::High);
    m.gic.set_ppi(0, 3, Line::High);
    m.gic.set_ppi(9, 27, Line::High);
    m.gic.post(0, 128);
    assert_eq!(m.wakes.take(), []);
}

#[test]
fn a_saved_state_goes_on_elsewhere() {
    let mut m = Machine::new(2);
    m.enable_spi(33, 1);
    m.gic.set_spi(33, Line::High);
    m.gic.set_ppi(1, 27, Line::High);
    assert_eq!(m.cpus[1].acknowledge(Group::One), 27);
    let (distributor, vcpu) = (m.gic.distributor(), m.cpus[1].save());
    check(&vcpu).unwrap();
    let mut n = Machine::reset(2);
    n.gic.set_distributor(&distributor).unwrap();
    n.cpus[1].restore(&vcpu);
    assert_eq!(
        (n.cpus[1].save(), n.gic.distributor()),
        (vcpu.clone(), distributor.clone())
    );
    assert_eq!(
        n.cpus[1].signalled(),
        None,
        "27 is being handled at the same priority"
    );
    n.cpus[1].end(Group::One, 27);
    assert_eq!(n.cpus[1].acknowledge(Group::One), 27);
    for (field, spoil) in [
        ("gic.cpu.pmr", (|v| v.cpu.pmr = 1) as fn(&mut arm64::Gic)),
        ("gic.cpu.bpr", |v| v.cpu.bpr[0] = 1),
        ("gic.cpu.bpr", |v| v.cpu.bpr[1] = 8),
        ("gic.private.edge", |v| v.private.edge = 0),
        ("gic.private.priority", |v| v.private.priority[3] = 7),
    ] {
        let mut bad = vcpu.clone();
        spoil(&mut bad);
        let refused = check(&bad).expect_err(field);
        assert!(refused.to_string().starts_with(field), "{refused}");
    }
    let mut bad = distributor;
    bad.spis[0].route[0] = 1 << 31;
    let refused = StateError::invalid("distributor.spis.route", 1_u64 << 31);
    assert_eq!(n.gic.set_distributor(&bad), refused, "a reserved bit");
    bad.spis.pop();
    let refused = StateError::unsupported("distributor.spis", 2_u64);
    assert_eq!(n.gic.set_distributor(&bad), refused);
}

/// One step of a random run.
#[derive(Clone, Debug)]
enum Do {
    Line(u32, bool),
    Send(u64),
    Write(u64, u8, u64),
    Acknowledge,
    End,
    Pmr(u8),
}

fn step() -> impl Strategy<Value = Do> {
    prop_oneof![
        4 => (24..72u32, any::<bool>()).prop_map(|(intid, high)| Do::Line(intid, high)),
        1 => any::<u64>().prop_map(Do::Send),
        3 => (0..0x6400u64, prop::sample::select(vec![1u8, 4, 8]), any::<u64>())
            .prop_map(|(offset, size, value)| Do::Write(offset, size, value)),
        4 => Just(Do::Acknowledge),
        3 => Just(Do::End),
        1 => any::<u8>().prop_map(Do::Pmr),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever a guest writes, an acknowledged interrupt was enabled, pending, in the group, above
    /// the mask and above the active interrupt, and no such interrupt was more urgent. After the
    /// end of all, the running priority is idle.
    #[test]
    fn only_the_most_urgent_is_acknowledged(steps in prop::collection::vec(step(), 1..120)) {
        let mut m = Machine::new(1);
        for intid in 32..72 {
            m.enable_spi(intid, 0);
        }
        let mut handling: Vec<(u64, u64)> = Vec::new();
        for step in steps {
            match step {
                Do::Line(intid, high) => {
                    let line = if high { Line::High } else { Line::Low };
                    match intid {
                        ..32 => m.gic.set_ppi(0, intid, line),
                        _ => m.gic.set_spi(intid, line),
                    }
                }
                Do::Send(value) => m.cpus[0].send(value, Reach::Both),
                Do::Write(offset, size, value) => {
                    m.gic.mmio_write(0, gicd(offset), size, value);
                    m.gic.mmio_write(0, sgi_base(0, offset & !7), size, value);
                }
                Do::Pmr(value) => m.cpus[0].set_pmr(value.into()),
                Do::Acknowledge => {
                    let want = model(&m);
                    let running = m.cpus[0].running_priority();
                    let got = m.cpus[0].acknowledge(Group::One);
                    prop_assert_eq!(got, want);
                    if got != SPURIOUS {
                        prop_assert!(m.cpus[0].running_priority() < running);
                        handling.push((got, running));
                    }
                }
                Do::End => {
                    if let Some((intid, running)) = handling.pop() {
                        m.cpus[0].end(Group::One, intid);
                        prop_assert_eq!(m.cpus[0].running_priority(), running);
                    }
                }
            }
        }
    }
}

/// The interrupt that an acknowledge must return, from the guest's readable registers.
fn model(m: &Machine) -> u64 {
    let enabled_group = m.read4(gicd(0)) >> 1 & 1 != 0;
    let pmr = u64::from(m.cpus[0].registers().pmr);
    let running = m.cpus[0].running_priority();
    let mut best: Option<(u64, u64, bool)> = None;
    for intid in 0..128_u64 {
        let register = |base: u64| {
            let offset = base + intid / 32 * 4;
            let word = match intid {
                ..32 => m.read4(sgi_base(0, offset)),
                _ => m.read4(gicd(offset)),
            };
            word >> (intid % 32) & 1 != 0
        };
        let priority = match intid {
            ..32 => m.gic.mmio_read(sgi_base(0, 0x400 + intid), 1),
            _ => m.gic.mmio_read(gicd(0x400 + intid), 1),
        };
        let here = intid < 32 || m.gic.mmio_read(gicd(0x6000 + 8 * intid), 8) == 0;
        // The interface's group 0 is disabled, so only group 1 is a candidate.
        let candidate =
            register(0x100) && register(0x200) && !register(0x300) && register(0x80) && here;
        if candidate && enabled_group && best.is_none_or(|(p, ..)| priority < p) {
            best = Some((priority, intid, true));
        }
    }
    match best {
        Some((priority, intid, _)) if priority < pmr && priority & !7 < running => intid,
        _ => SPURIOUS,
    }
}
