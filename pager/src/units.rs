//! The state of each unit of a VM.
//!
//! ```text
//! Missing ──ask──► Asked ──arrive: an answer──► Arrived ──settle: it was placed──► Settled
//!    └──────────────arrive: a fill────────────────┘
//! Arrived ──share: the page of the image's file was mapped──► Shared
//! any state ──settle: the VM took the page away──► Settled, where a fault gets zeros
//! any state but Settled ──lose: no content will come──► Lost
//! ```
//! The thread that lets a unit arrive places its content: of two contents the first wins. A fill
//! changes nothing before its content is there, so that a fault asks as without a fill.
//!
//! A settled unit never gets its old content again. A fault there has one of two reasons: the VM
//! has taken the page away, or another thread has placed it meanwhile. In the first case zeros are
//! right, and in the second the kernel refuses them, because the page is there. So one state
//! serves both.
//!
//! A page of a file can be missing for a third reason: the kernel unmaps it without an event when
//! it reclaims or collapses pages. So a unit that was mapped from the file has a state of its own,
//! until the VM takes it away: a fault maps the file's page again.

use crate::state::VmState;
use crate::stats::UnitCounts;
use std::sync::atomic::{AtomicU8, Ordering};

/// The state of one unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum UnitState {
    /// No thread has needed it.
    Missing,
    /// The source was asked for it, and its content is not in place.
    Asked,
    /// Its content has come, and is being placed, or waits to be. Other answers are late.
    Arrived,
    /// Its content was placed or taken away. A fault gets zeros.
    Settled,
    /// The page of the image's file was mapped, and not taken away. A fault maps it again.
    Shared,
    /// There is no content for it. A fault gets what the VM's policy says, never zeros.
    Lost,
}

impl UnitState {
    fn of(word: u8) -> Self {
        match word {
            0 => Self::Missing,
            1 => Self::Asked,
            2 => Self::Arrived,
            3 => Self::Settled,
            4 => Self::Shared,
            _ => Self::Lost,
        }
    }
}

/// The states of all units of a VM, one byte each. The VM's lock orders placements and removals:
/// see `Vm::live`. The next pager finds them in the VM's state: a zero is a missing unit.
pub struct Units(VmState);

impl Units {
    /// The units of `state`.
    pub fn new(state: VmState) -> Self {
        Self(state)
    }

    /// What outlives the pager.
    pub fn state(&self) -> &VmState {
        &self.0
    }

    /// Whether no unit was needed or taken away.
    pub fn are_missing(&self) -> bool {
        let missing = UnitState::Missing as u8;
        let mut all = self.0.units().iter();
        all.all(|state| state.load(Ordering::Relaxed) == missing)
    }

    /// No content is on its way: the pager that has asked for it is dead. If it has placed the
    /// content of such a unit, and could not settle it, the next placement finds it there.
    pub fn forget_requests(&self) {
        let requested = [UnitState::Asked as u8, UnitState::Arrived as u8];
        let states = self.0.units().iter();
        let all = states.filter(|state| requested.contains(&state.load(Ordering::Relaxed)));
        all.for_each(|state| state.store(UnitState::Missing as u8, Ordering::Relaxed));
    }

    /// The state now. A unit that the VMM has not announced is lost.
    pub fn get(&self, unit: u64) -> UnitState {
        let word = self.word(unit);
        UnitState::of(word.map_or(UnitState::Lost as u8, |word| word.load(Ordering::Acquire)))
    }

    /// How many units are in each state, at about one moment.
    pub fn count(&self) -> UnitCounts {
        let mut counts = [0; UnitState::Lost as usize + 1];
        for word in self.0.units() {
            counts[UnitState::of(word.load(Ordering::Relaxed)) as usize] += 1;
        }
        let [missing, asked, arrived, settled, shared, lost] = counts;
        UnitCounts {
            missing,
            waiting: asked + arrived,
            settled: settled + shared,
            lost,
        }
    }

    /// Whether the unit was missing. It is now asked for.
    pub fn ask(&self, unit: u64) -> bool {
        self.change(unit, UnitState::Missing, UnitState::Asked)
    }

    /// The content has come. Returns whether it is the first content: the caller then places it.
    pub fn arrive(&self, unit: u64) -> bool {
        let from = [UnitState::Asked, UnitState::Missing];
        from.into_iter()
            .any(|from| self.change(unit, from, UnitState::Arrived))
    }

    /// The source has no content. Returns whether the unit is lost: a fill may have brought it, or
    /// the VM has taken it away.
    pub fn fail(&self, unit: u64) -> bool {
        self.change(unit, UnitState::Asked, UnitState::Lost)
    }

    /// The content was placed, or taken away. Returns the state before.
    pub fn settle(&self, unit: u64) -> UnitState {
        self.set(unit, UnitState::Settled)
    }

    /// The page of the image's file was mapped.
    pub fn share(&self, unit: u64) {
        self.set(unit, UnitState::Shared);
    }

    fn set(&self, unit: u64, state: UnitState) -> UnitState {
        self.word(unit).map_or(UnitState::Lost, |word| {
            UnitState::of(word.swap(state as u8, Ordering::AcqRel))
        })
    }

    /// The content will not come, or the image's file has lost it. No effect on a settled unit.
    /// Returns the state before, if this call has lost the unit.
    pub fn lose(&self, unit: u64) -> Option<UnitState> {
        let from = [UnitState::Missing, UnitState::Asked, UnitState::Arrived];
        let mut from = from.into_iter().chain([UnitState::Shared]);
        from.find(|from| self.change(unit, *from, UnitState::Lost))
    }

    fn word(&self, unit: u64) -> Option<&AtomicU8> {
        self.0.units().get(usize::try_from(unit).ok()?)
    }

    fn change(&self, unit: u64, from: UnitState, to: UnitState) -> bool {
        let (from, to) = (from as u8, to as u8);
        self.word(unit).is_some_and(|word| {
            word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_legal_changes() {
        let units = Units::new(VmState::anonymous(3).unwrap());
        assert!(units.ask(0) && !units.ask(0));
        assert!(units.arrive(0) && !units.arrive(0) && !units.ask(0));
        assert_eq!(units.settle(0), UnitState::Arrived);
        assert_eq!(units.lose(0), None);
        units.share(0);
        assert_eq!(units.settle(0), UnitState::Shared);
        assert!(!units.arrive(0));
        assert_eq!(units.get(0), UnitState::Settled);
        assert_eq!(units.lose(1), Some(UnitState::Missing));
        assert_eq!(units.lose(1), None);
        assert!(!units.ask(1));
        assert!(!units.arrive(1));
        assert_eq!(units.settle(1), UnitState::Lost);
        assert!(units.arrive(2), "of a fill");
        assert!(!units.fail(2), "the source has failed behind the fill");
        assert_eq!(units.get(2), UnitState::Arrived);
        assert_eq!(units.get(3), UnitState::Lost);
        assert!(!units.ask(3));
        let counts = UnitCounts {
            missing: 0,
            waiting: 1,
            settled: 2,
            lost: 0,
        };
        assert_eq!(units.count(), counts);
    }

    #[test]
    fn the_next_pager_asks_again() {
        let units = Units::new(VmState::anonymous(5).unwrap());
        assert!(units.ask(1) && units.ask(2) && units.arrive(2));
        units.settle(3);
        units.lose(4);
        units.forget_requests();
        let states: Vec<_> = (0..5).map(|unit| units.get(unit)).collect();
        use UnitState::{Lost, Missing, Settled};
        assert_eq!(states, [Missing, Missing, Missing, Settled, Lost]);
    }
}
