//! Priorities, timers, messages between processors, and the refusals of x2APIC and xAPIC mode.

use super::*;
use crate::state::{Exception, Trap};
use crate::tsc::{Tsc, TscRate};
use lacuna_cpu::Wake;
use lacuna_sync::Nanos;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Counts wake-ups by vCPU.
#[derive(Default)]
pub(crate) struct Wakes(Mutex<Vec<usize>>);

impl Wake for Wakes {
    fn wake(&self, index: usize) {
        self.0.lock().unwrap().push(index);
    }
}

impl Wakes {
    pub(super) fn take(&self) -> Vec<usize> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

const X2: u64 = 0xfee0_0c00;
const TPR: u32 = 0x808;
const EOI: u32 = 0x80b;
const LDR: u32 = 0x80d;
const SVR: u32 = 0x80f;
const ESR: u32 = 0x828;
const ICR: u32 = 0x830;
const LVT_TIMER: u32 = 0x832;
const LVT_ERROR: u32 = 0x837;
const INITIAL: u32 = 0x838;
const CURRENT: u32 = 0x839;
const DIVIDE: u32 = 0x83e;
const SELF_IPI: u32 = 0x83f;
const T0: Nanos = Nanos(1_000_000);

fn machine(vcpus: usize) -> (Vec<Lapic>, Arc<Wakes>) {
    let wakes = Arc::new(Wakes::default());
    let bus = Arc::new(ApicBus::new(vcpus, wakes.clone()));
    (
        (0..vcpus).map(|i| Lapic::new(i, bus.clone())).collect(),
        wakes,
    )
}

/// One enabled x2APIC of `vcpus`.
pub(super) fn x2(vcpus: usize) -> (Vec<Lapic>, Arc<Wakes>) {
    let (mut apics, wakes) = machine(vcpus);
    for (i, apic) in apics.iter_mut().enumerate() {
        apic.set_base(X2 | if i == 0 { 0x100 } else { 0 }).unwrap();
        set(apic, SVR, 0x1ff);
    }
    (apics, wakes)
}

pub(super) fn set(apic: &mut Lapic, msr: u32, value: u64) {
    apic.wrmsr(msr, value, T0).unwrap();
}

fn get(apic: &mut Lapic, msr: u32) -> u64 {
    apic.rdmsr(msr, T0).unwrap()
}

/// A new enabled x2APIC on a machine of one.
pub(crate) fn one() -> Lapic {
    x2(1).0.remove(0)
}

#[test]
fn priorities() {
    let mut apic = one();
    for vector in [0x31, 0x52, 0x55, 0x41] {
        apic.bus.clone().post(0, vector);
    }
    assert_eq!(apic.pending(), Some(0x55));
    apic.accept(0x55);
    assert_eq!(apic.pending(), None, "0x52 is of the same class");
    apic.bus.clone().post(0, 0x61);
    assert_eq!(apic.pending(), Some(0x61), "a higher class nests");
    apic.accept(0x61);
    set(&mut apic, EOI, 0);
    assert_eq!(apic.pending(), None);
    set(&mut apic, EOI, 0);
    assert_eq!(apic.pending(), Some(0x52));
    apic.set_cr8(5).unwrap();
    assert_eq!(
        (apic.pending(), get(&mut apic, TPR), get(&mut apic, 0x80a)),
        (None, 0x50, 0x50)
    );
    apic.set_cr8(4).unwrap();
    assert_eq!((apic.pending(), apic.cr8()), (Some(0x52), 4));
    assert!(apic.set_cr8(16).is_err());
    // The accept of an unrequested vector (after a reset) puts nothing in service.
    apic.accept(0x99);
    assert_eq!(apic.ppr(), 0x40);
}

#[test]
fn isr_and_irr_are_readable() {
    let mut apic = one();
    for vector in [0x10, 0x2f, 0x60, 0xff] {
        apic.bus.clone().post(0, vector);
    }
    let irr: Vec<u64> = (0x820..0x828).map(|msr| get(&mut apic, msr)).collect();
    assert_eq!(irr, [1 << 16, 1 << 15, 0, 1, 0, 0, 0, 1 << 31]);
    apic.accept(0xff);
    assert_eq!(get(&mut apic, 0x817), 1 << 31);
    assert_eq!(get(&mut apic, 0x827), 0);
    assert_eq!(get(&mut apic, 0x81f), 0, "TMR");
}

/// Whether the value is small, register, value, nanoseconds since the last.
fn write() -> impl Strategy<Value = (bool, u32, u64, u64)> {
    (any::<bool>(), 0..0x100u32, any::<u64>(), 0..1u64 << 40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Compares with a plain model: sets of requested and in-service vectors.
    #[test]
    fn delivery_order_matches_sets(steps in prop::collection::vec((0..4u8, any::<u8>()), 1..200)) {
        let mut apic = one();
        let (mut irr, mut isr) = (BTreeSet::new(), BTreeSet::new());
        let mut tpr = 0u8;
        for (step, value) in steps {
            match step {
                0 | 1 => {
                    apic.bus.clone().post(0, value);
                    if value >= 16 {
                        irr.insert(value);
                    }
                }
                2 => {
                    set(&mut apic, EOI, 0);
                    isr.pop_last();
                }
                _ => {
                    set(&mut apic, TPR, (value & 0x7f).into());
                    tpr = value & 0x7f;
                }
            }
            let class = (tpr >> 4).max(isr.last().copied().unwrap_or(0u8) >> 4);
            let want = irr.last().copied().filter(|v| v >> 4 > class);
            prop_assert_eq!(apic.pending(), want);
            if let (Some(vector), true) = (want, value & 1 == 0) {
                apic.accept(vector);
                irr.remove(&vector);
                isr.insert(vector);
            }
        }
    }

    /// Any sequence of register writes in either mode ends, never panics, and leaves a deadline
    /// that `tick` reaches.
    #[test]
    fn nonsense(
        writes in prop::collection::vec(write(), 1..60),
    ) {
        let (mut apics, _) = machine(3);
        let apic = &mut apics[1];
        apic.mmio_write(0xf0, 0x1ff, T0);
        let mut now = T0;
        for (narrow, register, value, ns) in writes {
            now = now.after(ns);
            let value = if narrow { value & 0x7_03ff } else { value };
            let _ = apic.set_base(0xfee0_0000 | value & 0xc00);
            let refused = apic.wrmsr(0x800 + register, value, now);
            prop_assert!(matches!(refused, Ok(()) | Err(Trap::Exception(Exception::GP0))));
            apic.mmio_write(register as usize * 16, value as u32, now);
            apic.mmio_write(value as usize % 4096, value as u32, now);
            apic.mmio_read(value as usize % 4096, now);
            let _ = apic.rdmsr(0x800 + register, now);
            apic.set_tsc_deadline(value, ghz(value.rotate_left(7)), now);
            apic.tick(now);
            if let Some(vector) = apic.pending() {
                prop_assert!(vector >= 16);
                apic.accept(vector);
            }
            prop_assert!(apic.next_deadline().is_none_or(|due| due > now));
        }
    }
}

#[test]
fn one_shot() {
    let mut apic = one();
    set(&mut apic, LVT_TIMER, 0x40);
    set(&mut apic, DIVIDE, 0b0011);
    set(&mut apic, INITIAL, 1000);
    assert_eq!(apic.next_deadline(), Some(T0.after(16_000)));
    assert_eq!(apic.rdmsr(CURRENT, T0.after(8_000)), Ok(500));
    apic.tick(T0.after(15_999));
    assert_eq!(apic.pending(), None);
    apic.tick(T0.after(16_000));
    assert_eq!((apic.pending(), apic.next_deadline()), (Some(0x40), None));
    assert_eq!(apic.rdmsr(CURRENT, T0.after(17_000)), Ok(0));
    set(&mut apic, INITIAL, 1000);
    set(&mut apic, INITIAL, 0);
    assert_eq!(apic.next_deadline(), None, "zero stops");
}

#[test]
fn divisors() {
    let mut apic = one();
    set(&mut apic, LVT_TIMER, 0x40);
    let divisors = [2, 4, 8, 16, 0, 0, 0, 0, 32, 64, 128, 1];
    for (divide, divisor) in divisors.into_iter().enumerate().filter(|d| d.1 != 0) {
        set(&mut apic, DIVIDE, divide as u64);
        set(&mut apic, INITIAL, 100_000);
        assert_eq!(apic.next_deadline(), Some(T0.after(100_000 * divisor)));
        set(&mut apic, DIVIDE, 0b1011);
        assert_eq!(
            apic.next_deadline(),
            Some(T0.after(100_000)),
            "the count is kept"
        );
    }
}

#[test]
fn periodic() {
    let mut apic = one();
    set(&mut apic, LVT_TIMER, 1 << 17 | 0x40);
    set(&mut apic, DIVIDE, 0b1011);
    set(&mut apic, INITIAL, 100_000);
    apic.tick(T0.after(100_000));
    assert_eq!(apic.next_deadline(), Some(T0.after(200_000)));
    assert_eq!(apic.rdmsr(CURRENT, T0.after(150_000)), Ok(50_000));
    // Three periods late: one interrupt, and the phase is kept.
    apic.tick(T0.after(530_000));
    assert_eq!(apic.next_deadline(), Some(T0.after(600_000)));
    apic.accept(0x40);
    assert_eq!(apic.pending(), None);
    // The period is too short to run a vCPU.
    set(&mut apic, INITIAL, 1);
    assert_eq!(apic.next_deadline(), Some(T0.after(timer::MIN_PERIOD_NS)));
    apic.tick(Nanos(u64::MAX));
}

#[test]
fn a_masked_timer_raises_no_interrupt() {
    let mut apic = one();
    set(&mut apic, LVT_TIMER, 1 << 16 | 0x40);
    set(&mut apic, DIVIDE, 0b1011);
    set(&mut apic, INITIAL, 5000);
    assert_eq!(apic.next_deadline(), None);
    let later = T0.after(5000);
    apic.wrmsr(LVT_TIMER, 0x40, later).unwrap();
    apic.tick(later);
    assert_eq!(apic.pending(), None, "it was due while masked");
}

/// A TSC that counts nanoseconds.
fn ghz(offset: u64) -> Tsc {
    Tsc::new(TscRate::GIGAHERTZ, offset)
}

#[test]
fn a_deadline_follows_the_rate_of_the_tsc() {
    let mut apic = one();
    set(&mut apic, LVT_TIMER, 2 << 17 | 0x40);
    let rate = TscRate::new(NonZeroU32::new(2_500_000).unwrap());
    apic.set_tsc_deadline(5_000_001, Tsc::new(rate, 0), T0);
    let due = Nanos(2_000_001);
    assert_eq!(
        apic.next_deadline(),
        Some(due),
        "the first nanosecond of it"
    );
    apic.tick(Nanos(2_000_000));
    assert_eq!(apic.pending(), None);
    apic.tick(due);
    assert_eq!(apic.pending(), Some(0x40));
}

#[test]
fn tsc_deadline() {
    let mut apic = one();
    apic.set_tsc_deadline(5_000_000, ghz(0), T0);
    assert_eq!(
        (apic.next_deadline(), apic.tsc_deadline(T0)),
        (None, 0),
        "not its mode"
    );
    set(&mut apic, LVT_TIMER, 2 << 17 | 0x40);
    apic.set_tsc_deadline(5_000_000, ghz(1_000_000), T0);
    assert_eq!(apic.next_deadline(), Some(Nanos(4_000_000)));
    assert_eq!(apic.tsc_deadline(T0), 5_000_000);
    set(&mut apic, INITIAL, 7);
    assert_eq!((get(&mut apic, INITIAL), get(&mut apic, CURRENT)), (0, 0));
    assert_eq!(apic.tsc_deadline(Nanos(4_000_000)), 0, "it has fired");
    assert_eq!((apic.pending(), apic.next_deadline()), (Some(0x40), None));
    apic.accept(0x40);
    set(&mut apic, EOI, 0);
    // A deadline in the past fires at once, zero disarms.
    apic.set_tsc_deadline(1, ghz(0), T0);
    assert_eq!((apic.pending(), apic.next_deadline()), (Some(0x40), None));
    apic.accept(0x40);
    set(&mut apic, EOI, 0);
    apic.set_tsc_deadline(2_000_000_000, ghz(0), T0);
    apic.set_tsc_deadline(0, ghz(0), T0);
    assert_eq!((apic.pending(), apic.next_deadline()), (None, None));
    apic.set_tsc_deadline(u64::MAX, ghz(0), T0);
    set(&mut apic, LVT_TIMER, 0x40);
    assert_eq!(apic.next_deadline(), None, "another mode disarms");
}

#[test]
fn messages() {
    let (mut apics, wakes) = x2(20);
    let everyone = |apics: &[Lapic]| -> Vec<usize> {
        apics
            .iter()
            .filter(|a| a.pending() == Some(0x50))
            .map(Lapic::index)
            .collect()
    };
    let cases: &[(u64, &[usize])] = &[
        (7 << 32, &[7]),
        (99 << 32, &[]),
        (1 << 18, &[3]),
        (2 << 18, &(const { all_of::<20>() })),
        (0xffff_ffff << 32, &(const { all_of::<20>() })),
        // Cluster 1, members 0 and 3; no APIC of cluster 0 has that ID.
        (0x0001_0009 << 32 | 1 << 11, &[16, 19]),
        (0x0002_0009 << 32 | 1 << 11, &[]),
        // Lowest priority: one of them.
        (0x0000_0030 << 32 | 1 << 11 | 1 << 8, &[4]),
        // INIT, SIPI: accepted and ignored.
        (7 << 32 | 5 << 8, &[]),
        (7 << 32 | 6 << 8, &[]),
    ];
    for (icr, want) in cases {
        set(&mut apics[3], ICR, icr | 0x50);
        assert_eq!(everyone(&apics), *want, "{icr:#x}");
        assert_eq!(wakes.take(), *want, "{icr:#x}");
        apics.iter_mut().for_each(|apic| {
            apic.accept(0x50);
            apic.eoi();
        });
    }
    // An NMI needs no vector, and no APIC that SVR enables. A second one joins the first.
    set(&mut apics[7], SVR, 0xff);
    for wakes_of in [vec![7], vec![]] {
        set(&mut apics[3], ICR, 7 << 32 | 4 << 8);
        assert_eq!(wakes.take(), wakes_of);
    }
    let waiting: Vec<_> = apics.iter().filter(|apic| apic.has_nmi()).collect();
    assert_eq!(waiting.len(), 1);
    assert_eq!(get(&mut apics[3], ESR), 0);
    set(&mut apics[7], SVR, 0x1ff);
    set(&mut apics[3], ICR, 3 << 18 | 0x50);
    assert_eq!(everyone(&apics).len(), 19);
    assert_eq!(apics[3].pending(), None, "all but itself");
    assert_eq!(get(&mut apics[19], LDR), 0x0001_0008);
    assert_eq!(get(&mut apics[3], ICR), 3 << 18 | 0x50);
}

const fn all_of<const N: usize>() -> [usize; N] {
    let mut all = [0; N];
    let mut i = 0;
    while i < N {
        all[i] = i;
        i += 1;
    }
    all
}

#[test]
fn a_storm_wakes_once() {
    let (apics, wakes) = x2(2);
    for _ in 0..1000 {
        apics[0].bus.post(1, 0x50);
    }
    assert_eq!(wakes.take(), [1]);
}

#[test]
fn posts_that_go_nowhere() {
    let (apics, wakes) = machine(2);
    let bus = &apics[0].bus;
    bus.post(1, 0x50);
    bus.post(9, 0x50);
    assert_eq!(
        (apics[1].pending(), wakes.take()),
        (None, vec![]),
        "software-disabled, not there"
    );
    let (apics, wakes) = x2(1);
    apics[0].bus.post(0, 15);
    assert_eq!(
        (apics[0].pending(), wakes.take()),
        (None, vec![]),
        "an exception's vector"
    );
}

#[test]
fn bad_vectors_are_recorded_as_errors() {
    let mut apic = one();
    set(&mut apic, LVT_ERROR, 0x33);
    set(&mut apic, SELF_IPI, 0x0f);
    assert_eq!(apic.pending(), Some(0x33));
    assert_eq!(get(&mut apic, ESR), 0, "until latched");
    set(&mut apic, ESR, 0);
    assert_eq!(get(&mut apic, ESR), 1 << 5);
    set(&mut apic, ESR, 0);
    assert_eq!(get(&mut apic, ESR), 0);
    // A timer with a bad vector, and an error entry with one too: this must not recurse.
    set(&mut apic, LVT_ERROR, 0x03);
    set(&mut apic, LVT_TIMER, 0x0e);
    set(&mut apic, INITIAL, 1);
    apic.tick(T0.after(1000));
    set(&mut apic, ESR, 0);
    assert_eq!(get(&mut apic, ESR), 1 << 6);
}

#[test]
fn software_disable_masks_everything() {
    let mut apic = one();
    set(&mut apic, LVT_TIMER, 0x40);
    set(&mut apic, SVR, 0xff);
    assert_eq!(get(&mut apic, LVT_TIMER), 1 << 16 | 0x40);
    set(&mut apic, LVT_TIMER, 0x41);
    assert_eq!(get(&mut apic, LVT_TIMER), 1 << 16 | 0x41, "stays masked");
    set(&mut apic, SVR, 0x1ff);
    set(&mut apic, LVT_TIMER, 0x41);
    assert_eq!(get(&mut apic, LVT_TIMER), 0x41);
}

#[test]
fn x2apic_refusals() {
    let gp = Err(Exception::GP0.into());
    // Outside x2APIC mode every access is refused.
    let mut apic = machine(1).0.remove(0);
    for msr in 0x800..0x900 {
        assert_eq!(apic.rdmsr(msr, T0), Err(Exception::GP0.into()), "{msr:#x}");
        assert_eq!(apic.wrmsr(msr, 0, T0), gp, "{msr:#x}");
    }
    let mut apic = one();
    let writable = [0x808, 0x80b, 0x80f, 0x828, 0x830, 0x838, 0x83e, 0x83f];
    for msr in 0x800..0x900 {
        let ok = writable.contains(&msr) || (0x832..0x838).contains(&msr);
        assert_eq!(apic.wrmsr(msr, 0, T0).is_ok(), ok, "write {msr:#x}");
        let wide = apic.wrmsr(msr, 1 << 32, T0);
        assert_eq!(wide.is_ok(), msr == ICR, "64-bit write {msr:#x}");
        let readable = matches!(
            msr,
            0x802 | 0x803 | 0x808 | 0x80a | 0x80d | 0x80f..=0x828 | 0x830 | 0x832..=0x839 | 0x83e
        );
        assert_eq!(apic.rdmsr(msr, T0).is_ok(), readable, "read {msr:#x}");
    }
    let reserved = [
        (TPR, 0x100),
        (EOI, 1),
        (SVR, 0x400),
        (ESR, 1),
        (ICR, 1 << 13),
        (ICR, 1 << 16),
        (ICR, 1 << 20),
        (LVT_TIMER, 3 << 17),
        (LVT_TIMER, 1 << 8),
        (LVT_ERROR, 1 << 8),
        (DIVIDE, 4),
        (SELF_IPI, 0x100),
    ];
    for (msr, value) in reserved {
        assert_eq!(apic.wrmsr(msr, value, T0), gp, "{msr:#x} {value:#x}");
    }
}

#[test]
fn apic_base_transitions() {
    let (mut apics, _) = machine(2);
    let off = 0xfee0_0000;
    let xapic = off | 0x800;
    assert_eq!((apics[0].base(), apics[1].base()), (xapic | 0x100, xapic));
    let apic = &mut apics[1];
    for bad in [
        off | 0x400,
        0xfec0_0800,
        xapic | 0x200,
        xapic | 1,
        xapic | 1 << 48,
    ] {
        assert!(apic.set_base(bad).is_err(), "{bad:#x}");
    }
    assert!(apic.mmio_frame().is_some());
    apic.set_base(X2).unwrap();
    assert!(apic.mmio_frame().is_none());
    assert!(apic.set_base(xapic).is_err());
    set(apic, TPR, 0x50);
    apic.set_base(off).unwrap();
    assert!(!apic.is_enabled() && apic.mmio_frame().is_none());
    assert!(apic.set_base(X2).is_err());
    apic.set_base(xapic).unwrap();
    assert_eq!(apic.cr8(), 0, "disabling resets");
}

#[test]
fn the_xapic_page() {
    let (mut apics, wakes) = machine(3);
    for (i, apic) in apics.iter_mut().enumerate() {
        apic.mmio_write(0xf0, 0x1ff, T0);
        apic.mmio_write(0xd0, 1 << (24 + i), T0);
    }
    let apic = &mut apics[2];
    assert_eq!(apic.mmio_read(0x20, T0), 2 << 24);
    assert_eq!(apic.mmio_read(0x30, T0), 0x5_0014);
    assert_eq!(apic.mmio_read(0xe0, T0), u32::MAX);
    assert_eq!(
        (apic.mmio_read(0x24, T0), apic.mmio_read(0x400, T0)),
        (0, 0)
    );
    // Physical, logical flat, broadcast.
    let ipi = |apic: &mut Lapic, to: u32, low: u32| {
        apic.mmio_write(0x310, to << 24, T0);
        apic.mmio_write(0x300, low, T0);
    };
    ipi(apic, 1, 0x50);
    assert_eq!(wakes.take(), [1]);
    ipi(apic, 0b101, 0x51 | 1 << 11);
    assert_eq!(wakes.take(), [0, 2]);
    ipi(apic, 0xff, 0x52);
    assert_eq!(wakes.take(), [0, 1, 2]);
    assert_eq!(
        (apic.mmio_read(0x300, T0), apic.mmio_read(0x310, T0)),
        (0x52, 0xff00_0000)
    );
    // Cluster model: cluster 1, members 0 and 1.
    for (apic, id) in apics.iter_mut().zip([0x11, 0x12, 0x21]) {
        apic.mmio_write(0xe0, 0, T0);
        apic.mmio_write(0xd0, id << 24, T0);
    }
    ipi(&mut apics[2], 0x13, 0x53 | 1 << 11);
    assert_eq!(wakes.take(), [0, 1]);
    ipi(&mut apics[2], 0xf1, 0x54 | 1 << 11);
    assert_eq!(wakes.take(), [0, 2]);
    // Both modes access one set of registers.
    let apic = &mut apics[0];
    apic.mmio_write(0x80, 0x20, T0);
    apic.set_base(X2 | 0x100).unwrap();
    assert_eq!(get(apic, TPR), 0x20);
    assert_eq!(get(apic, LDR), 1);
}

/// Posts from many threads are neither lost nor doubled.
#[test]
fn posts_from_threads() {
    let (mut apics, _) = x2(1);
    let mut apic = apics.remove(0);
    let posted = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..2u8 {
            let (bus, posted) = (apic.bus.clone(), &posted);
            scope.spawn(move || {
                for vector in (0x20..=0xff).skip(thread.into()).step_by(2) {
                    bus.post(0, vector);
                    posted.fetch_add(1, Ordering::Release);
                }
            });
        }
        let mut seen = 0;
        while seen < 0xe0 {
            if let Some(vector) = apic.pending() {
                apic.accept(vector);
                apic.eoi();
                seen += 1;
            }
        }
        assert_eq!(posted.load(Ordering::Acquire), 0xe0);
    });
    assert_eq!(apic.pending(), None);
}
