//! The state of 32 interrupts, one word of bits for each property, as in the registers (GICv3
//! specification, IHI 0069, 4.1.2 and 12.9).

use lacuna_state::arm64::Interrupts;

/// Interrupts in one bank.
pub(super) const BANK: u32 = 32;
/// The implemented bits of a priority: 32 levels.
pub(super) const PRIORITY_MASK: u8 = 0xf8;

/// The group of an interrupt. With one security state, group 0 is signalled as FIQ and group 1 as
/// IRQ (IHI 0069, 4.6.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Group {
    /// Signalled as FIQ.
    Zero,
    /// Signalled as IRQ.
    One,
}

/// A set of groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Groups {
    pub(super) zero: bool,
    pub(super) one: bool,
}

impl Groups {
    pub(super) const fn and(self, other: Self) -> Self {
        Self {
            zero: self.zero && other.zero,
            one: self.one && other.one,
        }
    }
}

/// The level of an interrupt's input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    /// Not asserted.
    Low,
    /// Asserted.
    High,
}

/// 32 interrupts; bit `n` of each word belongs to interrupt `n` of the bank. A priority has
/// only its five high bits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Bank(pub(super) Interrupts);

/// An interrupt to signal to a processor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Candidate {
    pub(super) intid: u32,
    pub(super) priority: u8,
    pub(super) group: Group,
}

impl Bank {
    /// After a reset: everything disabled; `edge` says which interrupts are edge-triggered.
    pub(super) const fn new(edge: u32) -> Self {
        Self(Interrupts {
            group: 0,
            enabled: 0,
            pending: 0,
            level: 0,
            active: 0,
            edge,
            priority: [0; BANK as usize],
        })
    }

    /// Pending until acknowledged, or level-sensitive with its input high.
    pub(super) const fn pending(&self) -> u32 {
        self.0.pending | (self.0.level & !self.0.edge)
    }

    /// Pending, enabled, not active, and in a forwarded group.
    pub(super) const fn forwarded(&self, groups: Groups) -> u32 {
        let zero = if groups.zero { !self.0.group } else { 0 };
        let one = if groups.one { self.0.group } else { 0 };
        self.pending() & self.0.enabled & !self.0.active & (zero | one)
    }

    pub(super) const fn group_of(&self, bit: u32) -> Group {
        if self.0.group >> bit & 1 == 0 {
            Group::Zero
        } else {
            Group::One
        }
    }

    /// The more urgent of `best` and the interrupts `bits`; `first` is the INTID of bit 0. Of two
    /// with one priority, the lower INTID wins.
    pub(super) fn more_urgent(
        &self,
        mut bits: u32,
        first: u32,
        mut best: Option<Candidate>,
    ) -> Option<Candidate> {
        while bits != 0 {
            let bit = bits.trailing_zeros();
            bits &= bits - 1;
            let priority = self.0.priority[bit as usize];
            if best.is_none_or(|best| priority < best.priority) {
                best = Some(Candidate {
                    intid: first + bit,
                    priority,
                    group: self.group_of(bit),
                });
            }
        }
        best
    }

    /// Sets the level of the input of interrupt `bit`. A rising input of an edge-triggered
    /// interrupt makes it pending.
    pub(super) const fn set_line(&mut self, bit: u32, line: Line) {
        let mask = 1 << bit;
        match line {
            Line::High => {
                self.0.pending |= mask & !self.0.level & self.0.edge;
                self.0.level |= mask;
            }
            Line::Low => self.0.level &= !mask,
        }
    }

    /// The processor has acknowledged interrupt `bit`. A level-sensitive interrupt stays pending as
    /// long as its input is high.
    pub(super) const fn acknowledge(&mut self, bit: u32) {
        self.0.active |= 1 << bit;
        self.0.pending &= !(1 << bit);
    }
}

/// A priority with unimplemented bits, if there is one.
pub(super) fn wrong_priority(interrupts: &Interrupts) -> Option<u8> {
    let is_wrong = |priority: &u8| priority & !PRIORITY_MASK != 0;
    interrupts.priority.into_iter().find(is_wrong)
}

/// A property of interrupts in a distributor's or redistributor's registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Property {
    Group,
    SetEnable,
    ClearEnable,
    SetPending,
    ClearPending,
    SetActive,
    ClearActive,
    /// Four priorities, from this interrupt of the bank on.
    Priority(u32),
    /// Sixteen configurations of two bits, from this interrupt of the bank on.
    Configuration(u32),
}

/// The bank and the property behind a register offset. The offsets are the same in a distributor's
/// page and in a redistributor's second page (IHI 0069, tables 12-25 and 12-29).
pub(super) const fn locate(offset: u32) -> Option<(u32, Property)> {
    let word = (offset & 0x7f) / 4;
    let property = match offset & !0x7f {
        0x080 => Property::Group,
        0x100 => Property::SetEnable,
        0x180 => Property::ClearEnable,
        0x200 => Property::SetPending,
        0x280 => Property::ClearPending,
        0x300 => Property::SetActive,
        0x380 => Property::ClearActive,
        0x400..=0x780 => {
            let intid = (offset - 0x400) & !3;
            return Some((intid / BANK, Property::Priority(intid % BANK)));
        }
        0xc00 | 0xc80 => {
            let intid = ((offset - 0xc00) & !3) * 4;
            return Some((intid / BANK, Property::Configuration(intid % BANK)));
        }
        _ => return None,
    };
    Some((word, property))
}

impl Bank {
    /// The 32-bit register for `property`.
    pub(super) fn read(&self, property: Property) -> u32 {
        match property {
            Property::Group => self.0.group,
            Property::SetEnable | Property::ClearEnable => self.0.enabled,
            Property::SetPending | Property::ClearPending => self.pending(),
            Property::SetActive | Property::ClearActive => self.0.active,
            Property::Priority(first) => (0..4).fold(0, |word, i| {
                word | u32::from(self.0.priority[(first + i) as usize]) << (8 * i)
            }),
            Property::Configuration(first) => (0..16).fold(0, |word, i| {
                word | (self.0.edge >> (first + i) & 1) << (2 * i + 1)
            }),
        }
    }

    /// Writes the bytes of `mask` in the 32-bit register for `property`. `fixed` has the interrupts
    /// with a fixed configuration.
    pub(super) fn write(&mut self, property: Property, value: u32, mask: u32, fixed: u32) {
        let bits = value & mask;
        match property {
            Property::Group => self.0.group = self.0.group & !mask | bits,
            Property::SetEnable => self.0.enabled |= bits,
            Property::ClearEnable => self.0.enabled &= !bits,
            Property::SetPending => self.0.pending |= bits,
            Property::ClearPending => self.0.pending &= !bits,
            Property::SetActive => self.0.active |= bits,
            Property::ClearActive => self.0.active &= !bits,
            Property::Priority(first) => {
                for i in 0..4 {
                    if mask >> (8 * i) & 0xff != 0 {
                        let priority = (value >> (8 * i)) as u8 & PRIORITY_MASK;
                        self.0.priority[(first + i) as usize] = priority;
                    }
                }
            }
            Property::Configuration(first) => {
                for i in 0..16 {
                    let bit = 1 << (first + i);
                    if mask >> (2 * i) & 2 != 0 && fixed & bit == 0 {
                        let edge = if value >> (2 * i) & 2 != 0 { bit } else { 0 };
                        self.0.edge = self.0.edge & !bit | edge;
                    }
                }
            }
        }
    }
}
