//! The generic timer: a counter, and two timers compared with it (Arm ARM, DDI 0487, D11).
//!
//! ```text
//! counter  1 GHz: one tick for each nanosecond of the processor's clock, plus an offset
//! timer    ISTATUS = ENABLE and counter >= CVAL     TVAL = CVAL - counter, 32 bits, signed
//! line     ISTATUS and not IMASK, a level: PPI 27 for the virtual timer, 30 for the physical one
//! ```
//! No code counts: the clock gives a line's level when the run loop asks, and when the guest writes
//! a register. The virtual and the physical counter read the same, because there is no EL2 to set
//! an offset.

use crate::gic::{CpuInterface, Line};
use lacuna_state::StateError;
use lacuna_state::arm64::{self, Timer};
use lacuna_sync::Nanos;
use lacuna_sync::shim::{AtomicU64, Ordering};

/// `CNTFRQ_EL0`: ticks a second. Armv8.6 prescribes this frequency: a tick is one nanosecond of the
/// clock.
pub const FREQUENCY: u64 = 1_000_000_000;

const ENABLE: u64 = 1 << 0;
const IMASK: u64 = 1 << 1;
const ISTATUS: u64 = 1 << 2;

/// Which of the two timers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Which {
    /// `CNTV_*`.
    Virtual,
    /// `CNTP_*`.
    Physical,
}

/// A register of a timer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Register {
    Ctl,
    Cval,
    Tval,
}

/// The counter that all vCPUs of a machine read (D11.1): the processors' clock plus an offset.
///
/// A vCPU copies the offset at its reset, and when it gets a saved state. So a restored machine
/// gets its counter before the states of its vCPUs.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// The value of CNTVCT_EL0 while the clock reads `now`.
    pub fn value(&self, now: Nanos) -> u64 {
        now.0.wrapping_add(self.offset())
    }

    /// Sets the counter to `value` while the clock reads `now`. No vCPU runs meanwhile.
    pub fn set(&self, value: u64, now: Nanos) {
        self.0.store(value.wrapping_sub(now.0), Ordering::Relaxed);
    }

    /// The counter's value when the clock read zero.
    pub(crate) fn offset(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The timers of one vCPU.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Timers {
    /// The offset of the machine's [`Counter`].
    pub(crate) offset: u64,
    /// `CNTV_*`.
    pub virt: Timer,
    /// `CNTP_*`.
    pub phys: Timer,
}

/// The levels last passed to the interrupt controller; `None` before the first time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Driven([Option<Line>; 2]);

/// The interrupts of the virtual and the physical timer.
pub const VIRTUAL_INTID: u32 = 27;
/// See [`VIRTUAL_INTID`].
pub const PHYSICAL_INTID: u32 = 30;

fn is_met(timer: &Timer, count: u64) -> bool {
    timer.ctl & ENABLE != 0 && count >= timer.cval
}

fn line(timer: &Timer, count: u64) -> Line {
    if is_met(timer, count) && timer.ctl & IMASK == 0 {
        Line::High
    } else {
        Line::Low
    }
}

/// How many ticks after `count` the timer meets its condition, if it raises its line then.
fn rises_in(timer: &Timer, count: u64) -> Option<u64> {
    let raises = timer.ctl & (ENABLE | IMASK) == ENABLE;
    raises.then(|| timer.cval.saturating_sub(count))
}

impl Timers {
    /// `CNTVCT_EL0`, `CNTPCT_EL0`.
    pub(crate) const fn count(&self, now: Nanos) -> u64 {
        now.0.wrapping_add(self.offset)
    }

    /// Reads a register of a timer.
    pub(crate) fn read(&self, which: Which, register: Register, now: Nanos) -> u64 {
        let (timer, count) = (self.timer(which), self.count(now));
        match register {
            Register::Ctl if is_met(timer, count) => timer.ctl | ISTATUS,
            Register::Ctl => timer.ctl,
            Register::Cval => timer.cval,
            Register::Tval => u64::from(timer.cval.wrapping_sub(count) as u32),
        }
    }

    /// Writes a register of a timer. The caller updates the lines afterwards.
    pub(crate) fn write(&mut self, which: Which, register: Register, value: u64, now: Nanos) {
        let count = self.count(now);
        let timer = match which {
            Which::Virtual => &mut self.virt,
            Which::Physical => &mut self.phys,
        };
        match register {
            Register::Ctl => timer.ctl = value & (ENABLE | IMASK),
            Register::Cval => timer.cval = value,
            Register::Tval => timer.cval = count.wrapping_add(value as i32 as u64),
        }
    }

    /// The time for the next [`Timers::drive`], because a line rises.
    ///
    /// That is `now` if the condition was met after the last call: the interrupt controller does
    /// not know of it yet, and a waiting processor would wait for ever.
    pub(crate) fn next_deadline(&self, driven: &Driven, now: Nanos) -> Option<Nanos> {
        let count = self.count(now);
        let timers = [self.virt, self.phys].into_iter().zip(driven.0);
        let low = timers.filter(|(_, line)| *line != Some(Line::High));
        let rises = low.filter_map(|(timer, _)| rises_in(&timer, count));
        rises.map(|ticks| now.after(ticks)).min()
    }

    /// Passes the changed lines to the interrupt controller. Cheap if there is none.
    #[inline]
    pub(crate) fn drive(&self, driven: &mut Driven, now: Nanos, interface: &CpuInterface) {
        let count = self.count(now);
        let lines = [self.virt, self.phys].map(|timer| Some(line(&timer, count)));
        if driven.0 != lines {
            let intids = [VIRTUAL_INTID, PHYSICAL_INTID];
            for ((old, new), intid) in driven.0.iter().zip(lines).zip(intids) {
                if let (true, Some(line)) = (*old != new, new) {
                    interface.gic().set_own_ppi(interface.index(), intid, line);
                }
            }
            driven.0 = lines;
        }
    }

    /// The timers `saved`, compared with a counter with this offset.
    pub(crate) fn restored(saved: &arm64::Timers, offset: u64) -> Self {
        let arm64::Timers { virt, phys } = *saved;
        Self { offset, virt, phys }
    }

    /// The timers without the counter.
    pub(crate) fn saved(&self) -> arm64::Timers {
        let Self { virt, phys, .. } = *self;
        arm64::Timers { virt, phys }
    }

    fn timer(&self, which: Which) -> &Timer {
        match which {
            Which::Virtual => &self.virt,
            Which::Physical => &self.phys,
        }
    }
}

/// Whether timers can have this state.
///
/// # Errors
/// The first impossible field.
pub(crate) fn check(saved: &arm64::Timers) -> Result<(), StateError> {
    let fields = [
        ("timers.virt.ctl", saved.virt.ctl),
        ("timers.phys.ctl", saved.phys.ctl),
    ];
    let wrong = |(_, value): &(_, u64)| value & !(ENABLE | IMASK) != 0;
    match fields.into_iter().find(wrong) {
        Some((field, value)) => StateError::invalid(field, value),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gic::Gic;
    use lacuna_cpu::testing::Wakes;
    use std::sync::Arc;

    fn now(ns: u64) -> Nanos {
        Nanos(ns)
    }

    /// D11.2.4: the timer condition, and the effect of IMASK and ENABLE on the line.
    #[test]
    fn the_condition_is_an_unsigned_compare() {
        let mut t = Timers::default();
        t.write(Which::Virtual, Register::Cval, 100, now(0));
        for (ctl, at, read, line) in [
            (0, 100, 0, Line::Low),
            (1, 99, 1, Line::Low),
            (1, 100, 5, Line::High),
            (3, 100, 7, Line::Low),
            (u64::MAX, 100, 7, Line::Low),
            (1, u64::MAX, 5, Line::High),
        ] {
            t.write(Which::Virtual, Register::Ctl, ctl, now(at));
            assert_eq!(
                t.read(Which::Virtual, Register::Ctl, now(at)),
                read,
                "{ctl} at {at}"
            );
            assert_eq!(
                super::line(&t.virt, t.count(now(at))),
                line,
                "{ctl} at {at}"
            );
        }
        t.write(Which::Virtual, Register::Cval, u64::MAX, now(0));
        t.write(Which::Virtual, Register::Ctl, 1, now(0));
        let deadline = t.next_deadline(&Driven::default(), now(5));
        assert_eq!(deadline, Some(now(u64::MAX)));
        assert_eq!(
            t.read(Which::Physical, Register::Ctl, now(0)),
            0,
            "the other timer"
        );
    }

    /// D11.2.4: TVAL is a signed 32-bit view of CVAL - counter.
    #[test]
    fn timer_values_are_relative() {
        let mut t = Timers {
            offset: 1 << 40,
            ..Timers::default()
        };
        t.write(Which::Physical, Register::Tval, 1000, now(7));
        assert_eq!(t.phys.cval, (1 << 40) + 1007);
        assert_eq!(t.read(Which::Physical, Register::Tval, now(507)), 500);
        assert_eq!(
            t.read(Which::Physical, Register::Tval, now(1008)),
            0xffff_ffff
        );
        t.write(Which::Physical, Register::Tval, 0xffff_ffff, now(7));
        assert_eq!(t.phys.cval, (1 << 40) + 6, "sign-extended");
    }

    /// A line that rises is due until the interrupt controller knows of it, not until its time.
    #[test]
    fn a_deadline_ends_when_its_line_is_up() {
        let gic = Arc::new(Gic::new(1, Arc::new(Wakes::default())));
        let cpu = CpuInterface::new(0, gic);
        let (mut t, mut driven) = (Timers::default(), Driven::default());
        let deadline = |t: &Timers, driven: &Driven, at| t.next_deadline(driven, now(at));
        assert_eq!(deadline(&t, &driven, 7), None);
        t.write(Which::Physical, Register::Cval, 17, now(7));
        t.write(Which::Physical, Register::Ctl, 1, now(7));
        assert_eq!(deadline(&t, &driven, 7), Some(now(17)));
        t.drive(&mut driven, now(16), &cpu);
        assert_eq!(deadline(&t, &driven, 16), Some(now(17)));
        assert_eq!(deadline(&t, &driven, 19), Some(now(19)), "the line is low");
        t.drive(&mut driven, now(19), &cpu);
        assert_eq!(deadline(&t, &driven, 19), None, "the line is up");
        t.write(Which::Virtual, Register::Cval, 40, now(19));
        t.write(Which::Virtual, Register::Ctl, 1, now(19));
        assert_eq!(
            deadline(&t, &driven, 19),
            Some(now(40)),
            "the other timer's"
        );
        t.write(Which::Physical, Register::Cval, 30, now(19));
        t.drive(&mut driven, now(19), &cpu);
        assert_eq!(deadline(&t, &driven, 19), Some(now(30)), "the earlier one");
        t.write(Which::Physical, Register::Ctl, 3, now(19));
        t.drive(&mut driven, now(19), &cpu);
        assert_eq!(deadline(&t, &driven, 19), Some(now(40)), "masked: no rise");
    }

    #[test]
    fn the_lines_follow_the_clock() {
        let wakes = Arc::new(Wakes::default());
        let gic = Arc::new(Gic::new(1, wakes.clone()));
        let cpu = CpuInterface::new(0, gic.clone());
        let (mut t, mut driven) = (Timers::default(), Driven::default());
        let line = || cpu.save().private.level;
        t.write(Which::Virtual, Register::Cval, 100, now(0));
        t.write(Which::Virtual, Register::Ctl, 1, now(0));
        t.drive(&mut driven, now(99), &cpu);
        assert_eq!(line(), 0);
        t.drive(&mut driven, now(100), &cpu);
        assert_eq!(line(), 1 << 27);
        t.write(Which::Physical, Register::Ctl, 1, now(0));
        t.drive(&mut driven, now(100), &cpu);
        assert_eq!(line(), 1 << 27 | 1 << 30);
        t.write(Which::Virtual, Register::Tval, 5, now(100));
        t.drive(&mut driven, now(101), &cpu);
        assert_eq!(line(), 1 << 30);
        assert_eq!(wakes.take(), [], "the vCPU itself runs");
    }

    #[test]
    fn a_saved_timer_keeps_its_distance() {
        let mut t = Timers::default();
        t.write(Which::Virtual, Register::Cval, 1500, now(0));
        t.write(Which::Virtual, Register::Ctl, 1, now(0));
        let (value, saved) = (Counter::default().value(now(1000)), t.saved());
        assert_eq!(value, 1000);
        for start in [0, 3, 5000, u64::MAX - 600] {
            let counter = Counter::default();
            counter.set(value, now(start));
            let restored = Timers::restored(&saved, counter.offset());
            assert_eq!(restored.count(now(start)), 1000);
            let deadline = restored.next_deadline(&Driven::default(), now(start));
            assert_eq!(deadline, Some(now(start + 500)));
        }
        assert_eq!(check(&saved), Ok(()));
        t.phys.ctl = 8;
        let (field, value) = ("timers.phys.ctl", 8);
        let refused = Err(StateError::Invalid { field, value });
        assert_eq!(check(&t.saved()), refused, "a bit that does not exist");
    }
}
