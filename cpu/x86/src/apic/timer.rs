//! The APIC timer: one-shot, periodic, TSC deadline (SDM vol 3 11.5.4).
//!
//! The timer counts down at 1 GHz divided by its divisor. No code counts: an armed timer is a point
//! in time, and a read of the count computes it from the clock.

use crate::tsc::Tsc;
use lacuna_sync::Nanos;

/// LVT bits 18:17.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    OneShot,
    Periodic,
    Deadline,
}

impl Mode {
    /// `None` for the reserved encoding.
    pub(super) const fn from_lvt(lvt: u32) -> Option<Self> {
        match lvt >> 17 & 3 {
            0 => Some(Self::OneShot),
            1 => Some(Self::Periodic),
            2 => Some(Self::Deadline),
            _ => None,
        }
    }
}

/// The shortest period, also for a guest that asks for less: otherwise it could keep its vCPU
/// thread in timer exits for ever (KVM has `min_timer_period_us` for the same reason).
pub(super) const MIN_PERIOD_NS: u64 = 20_000;

#[derive(Debug)]
pub(super) struct Timer {
    mode: Mode,
    /// Initial count register.
    initial: u32,
    /// Divide configuration register: bits 3, 1, 0.
    divide: u32,
    /// The next firing time, if the timer is armed.
    due: Option<Nanos>,
    /// `IA32_TSC_DEADLINE`; 0 when disarmed.
    deadline: u64,
}

impl Timer {
    pub(super) const fn new() -> Self {
        Self {
            mode: Mode::OneShot,
            initial: 0,
            divide: 0,
            due: None,
            deadline: 0,
        }
    }

    pub(super) const fn due(&self) -> Option<Nanos> {
        self.due
    }

    pub(super) const fn initial(&self) -> u32 {
        self.initial
    }

    pub(super) const fn divide(&self) -> u32 {
        self.divide
    }

    pub(super) const fn deadline(&self) -> u64 {
        self.deadline
    }

    /// Whether it has fired by `now`. A periodic timer counts missed periods as one.
    pub(super) fn tick(&mut self, now: Nanos) -> bool {
        let Some(due) = self.due.filter(|&due| due <= now) else {
            return false;
        };
        self.deadline = 0;
        self.due = (self.mode == Mode::Periodic).then(|| {
            let missed = now.since(due) / self.period();
            due.after((missed + 1).saturating_mul(self.period()))
        });
        true
    }

    /// Counts left at `now`: the current count register.
    pub(super) fn current(&self, now: Nanos) -> u32 {
        if self.mode == Mode::Deadline {
            return 0;
        }
        let left = self
            .due
            .map_or(0, |due| due.since(now).div_ceil(self.divisor()));
        u32::try_from(left).unwrap_or(u32::MAX)
    }

    /// Starts counting from `count`; zero stops. Ignored in deadline mode.
    pub(super) fn set_initial(&mut self, count: u32, now: Nanos) {
        if self.mode == Mode::Deadline {
            return;
        }
        self.initial = count;
        let ns = match self.mode {
            Mode::Periodic => self.period(),
            _ => u64::from(count) * self.divisor(),
        };
        self.due = (count != 0).then(|| now.after(ns));
    }

    /// Changes the divisor; a running timer keeps its count.
    pub(super) fn set_divide(&mut self, divide: u32, now: Nanos) {
        let left = u64::from(self.current(now));
        self.divide = divide;
        if self.mode != Mode::Deadline && self.due.is_some() {
            self.due = Some(now.after(left * self.divisor()));
        }
    }

    /// A change into or out of deadline mode disarms the timer; a change between one-shot and
    /// periodic keeps its count.
    pub(super) fn set_mode(&mut self, mode: Mode) {
        if mode != self.mode && (mode == Mode::Deadline || self.mode == Mode::Deadline) {
            self.due = None;
            self.deadline = 0;
            self.initial = 0;
        }
        self.mode = mode;
    }

    /// Arms the timer for TSC value `deadline`, zero disarms. Ignored outside deadline mode.
    pub(super) fn set_deadline(&mut self, deadline: u64, tsc: Tsc, now: Nanos) {
        if self.mode != Mode::Deadline {
            return;
        }
        self.deadline = deadline;
        self.due = (deadline != 0).then(|| tsc.when(deadline, now));
    }

    /// Restores the timer, with `current` left of the count.
    pub(super) fn restore(
        &mut self,
        mode: Mode,
        initial: u32,
        divide: u32,
        current: u32,
        now: Nanos,
    ) {
        *self = Self::new();
        (self.mode, self.divide) = (mode, divide);
        if mode == Mode::Deadline {
            return;
        }
        self.initial = initial;
        let left = match (mode, current) {
            (Mode::Periodic, 0) if initial != 0 => self.period(),
            (_, current) => u64::from(current) * self.divisor(),
        };
        self.due = (left != 0).then(|| now.after(left));
    }

    fn period(&self) -> u64 {
        (u64::from(self.initial) * self.divisor()).max(MIN_PERIOD_NS)
    }

    /// 1 to 128: encoding 0b111 is 1, and 0b000 is 2.
    const fn divisor(&self) -> u64 {
        let encoding = (self.divide & 3) | (self.divide >> 1 & 4);
        1 << ((encoding + 1) & 7)
    }
}
