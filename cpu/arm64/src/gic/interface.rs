//! One vCPU's interface to the interrupt controller: the `ICC_*_EL1` registers (IHI 0069, 4.8 and
//! 12.2).
//!
//! The interface belongs to its vCPU's thread. It reads the vCPU's most urgent interrupt from the
//! shared part, and changes the shared part to acknowledge, deactivate and send interrupts.

use super::bank::{Bank, Candidate, Group, Groups, PRIORITY_MASK, wrong_priority};
use super::fabric::{Concerns, Gic, Redistributor, SGIS, index_of};
use lacuna_state::{StateError, arm64};
use std::sync::Arc;

/// The result of an acknowledge without an interrupt.
pub(crate) const SPURIOUS: u64 = 1023;
/// The running priority while no interrupt is being handled.
const IDLE: u8 = 0xff;
/// INTIDs from here on are special: no interrupt has them.
const SPECIAL: u64 = 1020;
/// The smallest binary points: all five bits of a priority decide about preemption.
const MIN_BPR: [u8; 2] = [2, 3];
/// `ICC_CTLR_EL1`: 5 bits of priority, 16 bits of INTID, one security state's view.
const CTLR_FIXED: u64 = 4 << 8;
const CTLR_CBPR: u64 = 1 << 0;
const CTLR_EOI_MODE: u64 = 1 << 1;
/// `ICC_SRE_EL1`: system registers only, no bypass. All of it is fixed.
pub(crate) const SRE: u64 = 7;

/// A CPU interface.
#[derive(Debug)]
pub(crate) struct CpuInterface {
    index: usize,
    gic: Arc<Gic>,
    registers: arm64::CpuInterface,
}

const RESET: arm64::CpuInterface = arm64::CpuInterface {
    pmr: 0,
    bpr: MIN_BPR,
    cbpr: false,
    eoi_mode: false,
    enabled: [false; 2],
    active: [[0; 4]; 2],
};

/// The groups that an access to an SGI register can reach.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reach {
    /// SGIs in group 0: `ICC_SGI0R_EL1`, `ICC_ASGI1R_EL1`.
    Zero,
    /// All SGIs: `ICC_SGI1R_EL1`, with one security state.
    Both,
}

impl CpuInterface {
    /// The interface of vCPU `index` as after a reset.
    ///
    /// # Panics
    /// If the machine has no such vCPU.
    pub(crate) fn new(index: usize, gic: Arc<Gic>) -> Self {
        assert!(index < gic.vcpus(), "vCPU {index} of {}", gic.vcpus());
        Self {
            index,
            gic,
            registers: RESET,
        }
    }

    /// The vCPU's number.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// The controller of the machine's vCPUs.
    pub(crate) fn gic(&self) -> &Arc<Gic> {
        &self.gic
    }

    /// Resets the interface and the vCPU's private interrupts, its inputs' included.
    pub(crate) fn reset(&mut self) {
        self.registers = RESET;
        let index = self.index;
        self.gic.change(Some(index), |shared| {
            shared.redistributors[index] = Redistributor::new();
            Concerns::One(index)
        });
    }

    /// The group of the vCPU's present signalled interrupt: group 1 is an IRQ, group 0 an FIQ. This
    /// costs one load, and one compare if no interrupt is pending.
    #[inline]
    pub(crate) fn signalled(&self) -> Option<Group> {
        let candidate = self.gic.signal(self.index)?;
        self.permits(candidate).then_some(candidate.group)
    }

    /// `ICC_IAR0_EL1`, `ICC_IAR1_EL1`: acknowledges the most urgent interrupt, if it is in `group`
    /// and signalled.
    pub(crate) fn acknowledge(&mut self, group: Group) -> u64 {
        let index = self.index;
        let mut taken = None;
        self.gic.change(Some(index), |shared| {
            taken = shared
                .candidate(index)
                .filter(|c| c.group == group && self.permits(*c));
            let found = taken.and_then(|c| shared.find(index, c.intid));
            found.map_or(Concerns::None, |(bank, bit, concerns)| {
                bank.acknowledge(bit);
                concerns
            })
        });
        let Some(taken) = taken else {
            return SPURIOUS;
        };
        let level = (taken.priority & self.group_bits(taken.group)) >> 3;
        self.registers.active[group as usize][0] |= 1 << level;
        u64::from(taken.intid)
    }

    /// `ICC_HPPIR0_EL1`, `ICC_HPPIR1_EL1`: the result of an acknowledge without regard to priority.
    pub(crate) fn highest_pending(&self, group: Group) -> u64 {
        let candidate = self.gic.signal(self.index).filter(|c| c.group == group);
        candidate.map_or(SPURIOUS, |c| u64::from(c.intid))
    }

    /// `ICC_EOIR0_EL1`, `ICC_EOIR1_EL1`: drops the running priority, and deactivates the interrupt
    /// unless EOImode is set. An end for another group than the running priority's drops nothing
    /// (unpredictable in the specification).
    pub(crate) fn end(&mut self, group: Group, value: u64) {
        let intid = value & 0xff_ffff;
        if intid >= SPECIAL {
            return;
        }
        let [zero, one] = self.registers.active.map(|words| words[0].trailing_zeros());
        let (own, other) = match group {
            Group::Zero => (zero, one),
            Group::One => (one, zero),
        };
        if own < 32 && own <= other {
            self.registers.active[group as usize][0] &= !(1 << own);
        }
        if !self.registers.eoi_mode {
            self.make_inactive(intid);
        }
    }

    /// `ICC_DIR_EL1`: deactivates an interrupt, if EOImode is set.
    pub(crate) fn deactivate(&mut self, value: u64) {
        let intid = value & 0xff_ffff;
        if self.registers.eoi_mode && intid < SPECIAL {
            self.make_inactive(intid);
        }
    }

    fn make_inactive(&self, intid: u64) {
        let index = self.index;
        self.gic.change(Some(index), |shared| {
            match shared.find(index, intid as u32) {
                Some((bank, bit, concerns)) => {
                    bank.0.active &= !(1 << bit);
                    concerns
                }
                None => Concerns::None,
            }
        });
    }

    /// `ICC_SGI1R_EL1` and its siblings: makes an SGI pending on each vCPU that `value` names.
    pub(crate) fn send(&self, value: u64, reach: Reach) {
        let bit = 1_u32 << (value >> 24 & 0xf);
        let to = |shared: &mut super::fabric::GicState, target: usize| {
            let redistributor = shared.redistributors.get_mut(target)?;
            let private = &mut redistributor.private;
            if reach == Reach::Both || private.0.group & bit == 0 {
                private.0.pending |= bit;
            }
            Some(target)
        };
        if value >> 40 & 1 != 0 {
            // Interrupt routing mode: every processor but this one.
            self.gic.change(Some(self.index), |shared| {
                for target in (0..shared.redistributors.len()).filter(|t| *t != self.index) {
                    to(shared, target);
                }
                Concerns::All
            });
            return;
        }
        let high = value >> 48 & 0xff;
        let cluster = (high << 24 | (value >> 32 & 0xff) << 16 | (value >> 16 & 0xff) << 8) as u32;
        let mut targets = value as u16;
        while targets != 0 {
            let target = index_of(cluster | targets.trailing_zeros());
            targets &= targets - 1;
            if let Some(target) = target {
                self.gic.change(Some(self.index), |shared| {
                    to(shared, target).map_or(Concerns::None, Concerns::One)
                });
            }
        }
    }

    /// `ICC_PMR_EL1`.
    pub(crate) fn set_pmr(&mut self, value: u64) {
        self.registers.pmr = value as u8 & PRIORITY_MASK;
    }

    /// `ICC_BPR0_EL1`, `ICC_BPR1_EL1`. A binary point below the smallest becomes the smallest.
    pub(crate) fn set_bpr(&mut self, group: Group, value: u64) {
        if group == Group::One && self.registers.cbpr {
            return;
        }
        let number = group as usize;
        self.registers.bpr[number] = (value as u8 & 7).max(MIN_BPR[number]);
    }

    /// `ICC_CTLR_EL1`.
    pub(crate) fn set_ctlr(&mut self, value: u64) {
        self.registers.cbpr = value & CTLR_CBPR != 0;
        self.registers.eoi_mode = value & CTLR_EOI_MODE != 0;
    }

    /// `ICC_IGRPEN0_EL1`, `ICC_IGRPEN1_EL1`.
    pub(crate) fn set_enabled(&mut self, group: Group, value: u64) {
        self.registers.enabled[group as usize] = value & 1 != 0;
        self.publish_groups();
    }

    /// `ICC_AP0R0_EL1`, `ICC_AP1R0_EL1`.
    pub(crate) fn set_active(&mut self, group: Group, value: u64) {
        self.registers.active[group as usize][0] = value as u32;
    }

    /// `ICC_CTLR_EL1`.
    pub(crate) fn ctlr(&self) -> u64 {
        let flag = |set, bit| if set { bit } else { 0 };
        CTLR_FIXED
            | flag(self.registers.cbpr, CTLR_CBPR)
            | flag(self.registers.eoi_mode, CTLR_EOI_MODE)
    }

    /// `ICC_BPR0_EL1`, `ICC_BPR1_EL1`.
    pub(crate) fn bpr(&self, group: Group) -> u64 {
        match group {
            Group::One if self.registers.cbpr => (u64::from(self.registers.bpr[0]) + 1).min(7),
            _ => u64::from(self.registers.bpr[group as usize]),
        }
    }

    /// `ICC_RPR_EL1`: the running priority; 0xff if no interrupt is being handled.
    pub(crate) fn running_priority(&self) -> u64 {
        self.running().into()
    }

    /// The other registers, which read as they were written.
    pub(crate) fn registers(&self) -> &arm64::CpuInterface {
        &self.registers
    }

    fn publish_groups(&self) {
        let (index, [zero, one]) = (self.index, self.registers.enabled);
        self.gic.change(Some(index), |shared| {
            shared.redistributors[index].interface = Groups { zero, one };
            Concerns::One(index)
        });
    }

    /// The vCPU's part of the interrupt controller.
    pub(crate) fn save(&self) -> arm64::Gic {
        let redistributor = &self.gic.lock().redistributors[self.index];
        arm64::Gic {
            cpu: self.registers,
            asleep: redistributor.asleep,
            private: redistributor.private.0,
        }
    }

    /// Takes over a state checked by [`check`]. Forgets the interrupts that were pending here.
    pub(crate) fn restore(&mut self, saved: &arm64::Gic) {
        self.registers = saved.cpu;
        let index = self.index;
        self.gic.change(Some(index), |shared| {
            let [zero, one] = saved.cpu.enabled;
            shared.redistributors[index] = Redistributor {
                private: Bank(saved.private),
                asleep: saved.asleep,
                interface: Groups { zero, one },
            };
            Concerns::One(index)
        });
    }

    /// The running priority, or [`IDLE`].
    fn running(&self) -> u8 {
        let [zero, one] = &self.registers.active;
        match (zero[0] | one[0]).trailing_zeros() {
            32 => IDLE,
            level => (level as u8) << 3,
        }
    }

    /// The bits of a priority that decide about preemption by an interrupt of `group` (IHI 0069,
    /// 4.8.2).
    fn group_bits(&self, group: Group) -> u8 {
        let ignored = match group {
            Group::One if !self.registers.cbpr => self.registers.bpr[1],
            _ => self.registers.bpr[0] + 1,
        };
        (0xff_u32 << ignored) as u8
    }

    /// Whether an interrupt is signalled: its priority is above the mask, and its group priority
    /// above the active interrupt's (IHI 0069, 4.8.3 to 4.8.5).
    fn permits(&self, candidate: Candidate) -> bool {
        let (running, bits) = (self.running(), self.group_bits(candidate.group));
        let preempts = running == IDLE || candidate.priority & bits < running & bits;
        candidate.priority < self.registers.pmr && preempts
    }
}

/// Whether a vCPU's part of the interrupt controller can have this state.
///
/// # Errors
/// The first impossible field.
pub(crate) fn check(saved: &arm64::Gic) -> Result<(), StateError> {
    let (cpu, private) = (&saved.cpu, &saved.private);
    // The state has more priorities than this processor.
    let mut more = cpu.active.iter().flat_map(|words| &words[1..]);
    if let Some(&word) = more.find(|word| **word != 0) {
        return StateError::unsupported("gic.cpu.active", word);
    }
    if cpu.pmr & !PRIORITY_MASK != 0 {
        return StateError::invalid("gic.cpu.pmr", cpu.pmr);
    }
    for (bpr, least) in cpu.bpr.into_iter().zip(MIN_BPR) {
        if !(least..=7).contains(&bpr) {
            return StateError::invalid("gic.cpu.bpr", bpr);
        }
    }
    if private.edge != SGIS {
        return StateError::invalid("gic.private.edge", private.edge);
    }
    match wrong_priority(private) {
        Some(value) => StateError::invalid("gic.private.priority", value),
        None => Ok(()),
    }
}
