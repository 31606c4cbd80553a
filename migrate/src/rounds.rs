//! Copies the memory of a running guest until few pages remain, and pauses the guest for these.
//!
//! ```text
//! log writes ─► round 1: all pages ─► harvest ─► round 2: the written pages ─► ... ─► pause
//!                                                                  harvest, the last pages, state
//! ```
//! An already paused guest is copied in one round.

use crate::bandwidth::Bandwidth;
use crate::changes::Changes;
use crate::copy::{PageSink, Stop, copy, is_cancelled};
use crate::guest::PausedGuest;
use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_machine::{Running, Vm};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tracing::debug;

/// How long a guest may be paused for the last pages.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// The guest is paused when the remaining pages fit into this time at the rate so far. Another
    /// round comes first if they take more than a sixteenth of it, and a round more than halves
    /// them.
    pub downtime: Duration,
    /// After this many rounds the guest is paused, however many pages are left.
    pub rounds: u32,
}

impl Default for Budget {
    /// 50 ms, 30 rounds.
    fn default() -> Self {
        Self {
            downtime: Duration::from_millis(50),
            rounds: 30,
        }
    }
}

/// A finished round.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Pages copied.
    pub pages: u64,
    /// Its duration.
    pub time: Duration,
}

/// How far a copy is.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Progress {
    /// Which round, from 1; the last one of a pre-copy or snapshot is after the pause. 0: the
    /// destination gets the guest, and then the pages that it lacks.
    pub round: u32,
    /// Copied pages of this round.
    pub done: u64,
    /// Pages of this round.
    pub pages: u64,
    /// How many pages a second the running guest has written during the last round. A page counts
    /// once for a round, however often it was written.
    pub dirty_rate: u64,
    /// For how many percent of the time the guest's vCPUs are held, so that it writes fewer pages.
    pub throttle: u32,
}

/// The next step of a copy.
pub(crate) enum Next {
    /// Copies the remaining pages while the guest runs.
    Round,
    /// Pauses the guest, and copies the rest.
    Pause,
}

/// How the source slows down a guest that writes pages as fast as they are copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Throttle {
    /// Not at all: such a guest is paused, however many pages are left.
    Never,
    /// Its vCPUs are held for this percentage of the time, and for more if that is not enough.
    Held(u32),
}

impl Throttle {
    /// Not yet, and step by step when other rounds do not help.
    pub const LAST_RESORT: Self = Self::Held(0);

    /// For how many percent of the time the vCPUs are held.
    const fn percent(self) -> u32 {
        match self {
            Self::Never => 0,
            Self::Held(percent) => percent,
        }
    }

    /// The next step. `None`: there is none.
    const fn next(self) -> Option<Self> {
        match self {
            Self::Held(0) => Some(Self::Held(50)),
            Self::Held(50) => Some(Self::Held(75)),
            Self::Held(75) => Some(Self::Held(90)),
            Self::Held(_) | Self::Never => None,
        }
    }

    /// Does `work` while the guest is slowed down.
    fn during<V: Vm, T>(self, guest: &Running<V>, work: impl FnOnce() -> T) -> T {
        let Self::Held(percent @ 1..) = self else {
            return work();
        };
        let held = HELD_EACH * percent / 100;
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let named = thread::Builder::new().name("lacuna-throttle".into());
            // Without the thread the guest is not slowed down, and its pause is longer.
            let _ = named.spawn_scoped(scope, || {
                while !is_over.load(Ordering::Relaxed) {
                    // The guest may have ended.
                    let paused = guest.pause();
                    thread::sleep(held);
                    drop(paused);
                    thread::sleep(HELD_EACH - held);
                }
            });
            let _over = Over(&is_over);
            work()
        })
    }
}

/// How long one hold of a slowed guest takes. Most guests' schedulers have longer time slices, so
/// no process has all of the pause.
const HELD_EACH: Duration = Duration::from_millis(10);

/// Marks some work as over, also after a panic.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A pause of at most the budget divided by this needs no further round to make it shorter.
const SHORT: u32 = 16;

/// The next step after the rounds `done`, with `left` remaining pages. Slows the guest down if that
/// may help.
pub(crate) fn next(budget: &Budget, throttle: &mut Throttle, done: &[Round], left: u64) -> Next {
    let Some(last) = done.last() else {
        return Next::Round;
    };
    let rest = rest_takes(done, left);
    let fits = rest <= budget.downtime;
    // A round leaves less than half of the pages that it copies: another one makes the downtime
    // shorter.
    let is_worth_it = 2 * left < last.pages && rest > budget.downtime / SHORT;
    if fits && !is_worth_it || done.len() as u32 >= budget.rounds {
        return Next::Pause;
    }
    // If the guest writes pages as fast as they are copied, each round leaves as many.
    if done.len() > 1 && left >= last.pages {
        let Some(more) = throttle.next() else {
            return Next::Pause;
        };
        *throttle = more;
    }
    Next::Round
}

/// The time that `left` pages take, at the rate of the rounds before.
fn rest_takes(done: &[Round], left: u64) -> Duration {
    let pages: u64 = done.iter().map(|round| round.pages).sum();
    let time: Duration = done.iter().map(|round| round.time).sum();
    time.mul_f64(left as f64 / pages.max(1) as f64)
}

/// A paused guest, after a copy while it ran.
pub(crate) struct Copied<'a, V: Vm> {
    pub paused: PausedGuest<'a, V>,
    pub rounds: Vec<Round>,
    /// Pages not copied, or written since.
    pub left: PageSet,
    /// The caller has asked for the pause: [`Stop::Pause`].
    pause_requested: bool,
}

impl<'a, V: Vm> Copied<'a, V> {
    /// A guest that was paused before any copy.
    pub fn nothing(paused: PausedGuest<'a, V>, pages: u64) -> Self {
        Self {
            paused,
            rounds: Vec::new(),
            left: PageSet::full(pages),
            pause_requested: true,
        }
    }

    /// Whether the guest waits for the remaining pages: they fit into the budget, at the rate of
    /// the rounds before.
    pub fn fits(&self, budget: &Budget) -> bool {
        !self.pause_requested && rest_takes(&self.rounds, self.left.len()) <= budget.downtime
    }

    /// Copies the remaining pages.
    pub fn copy_rest(
        &mut self,
        vm: &V,
        layout: &MemoryLayout,
        sinks: &mut [impl PageSink + Send],
        progress: OnProgress<'_>,
    ) -> Result<(), MigrateError> {
        let before = self.rounds.len();
        let round = last_round(vm, layout, (&self.left, before), sinks, progress)?;
        self.rounds.push(round);
        self.left = PageSet::empty(layout.pages());
        Ok(())
    }
}

/// Gets the progress of a copy, and ends it by `Break`.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<Stop>;

/// When a copy of a running guest pauses it, and what slows down the guest or the copy.
pub(crate) struct Pace<'p> {
    pub budget: &'p Budget,
    pub throttle: Throttle,
    /// The pages of a paused guest are sent without it.
    pub limit: Option<&'p Bandwidth>,
}

/// Copies changed pages of `guest` while it runs. Pauses it when the remaining pages fit into the
/// budget, or another round would not help.
pub(crate) fn copy_live<'a, V: Vm>(
    guest: &'a Running<V>,
    changes: &mut Changes<'_, V>,
    mut pace: Pace<'_>,
    sinks: &mut [impl PageSink + Send],
    progress: OnProgress<'_>,
) -> Result<Copied<'a, V>, MigrateError> {
    let layout = changes.layout().clone();
    changes.harvest()?;
    let mut left = changes.changed().clone();
    let (mut rounds, mut dirty_rate, mut pause_requested) = (Vec::new(), 0, false);
    while !pause_requested
        && let Next::Round = next(pace.budget, &mut pace.throttle, &rounds, left.len())
    {
        let before = rounds.len();
        let mut rings = Rings::of(changes);
        let throttle = pace.throttle.percent();
        let round = pace.throttle.during(guest, || {
            let each = &mut |now| {
                if rings.empty().is_break() {
                    return ControlFlow::Break(Stop::Cancel);
                }
                let step = progress(Progress {
                    dirty_rate,
                    throttle,
                    ..now
                });
                pause_requested |= step == ControlFlow::Break(Stop::Pause);
                match pause_requested && !is_cancelled(step) {
                    true => ControlFlow::Break(Stop::Pause),
                    false => step,
                }
            };
            let (vm, set) = (&**guest.vm(), (&left, before));
            one_round(vm, &layout, set, sinks, pace.limit, each)
        });
        // An error of the log cancels the round.
        left = rings.end()?;
        let (round, rest) = round?;
        left.add(&rest);
        debug!(
            target: "lacuna::migration",
            round = before + 1,
            pages = round.pages,
            time = ?round.time,
            left = left.len(),
            throttle,
            "round ends"
        );
        dirty_rate = (left.len() as f64 / round.time.as_secs_f64()) as u64;
        rounds.push(round);
    }
    // A vCPU whose dirty ring is full completes its instruction after a harvest.
    let paused = PausedGuest::pause_between(guest, &mut || {
        left.add(&changes.harvest()?);
        Ok(())
    })?;
    left.add(&changes.harvest()?);
    changes.check_slots()?;
    debug!(target: "lacuna::migration", left = left.len(), pause_requested, "guest is paused");
    Ok(Copied {
        paused,
        rounds,
        left,
        pause_requested,
    })
}

/// The time between two harvests of rings during a round. In that time, a vCPU that writes a
/// million pages a second fills a quarter of a ring of 4096 entries.
const EMPTIED: Duration = Duration::from_millis(1);

/// The log of writes during a round. A vCPU with a full ring is stopped until the ring is
/// harvested. So rings are harvested during the round, and bitmaps only at its end.
struct Rings<'c, 'a, V: Vm> {
    changes: &'c mut Changes<'a, V>,
    /// When the rings were emptied; `None`: the VM has none.
    since: Option<Instant>,
    /// What was written in this round.
    written: Result<PageSet, MigrateError>,
}

impl<'c, 'a, V: Vm> Rings<'c, 'a, V> {
    fn of(changes: &'c mut Changes<'a, V>) -> Self {
        Self {
            since: changes.vm().dirty_rings().map(|_| Instant::now()),
            written: Ok(PageSet::empty(changes.layout().pages())),
            changes,
        }
    }

    /// Empties the rings from time to time. `Break`: it has failed.
    fn empty(&mut self) -> ControlFlow<()> {
        if self.since.is_some_and(|since| since.elapsed() >= EMPTIED) {
            self.harvest();
            self.since = Some(Instant::now());
        }
        match self.written {
            Ok(_) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }

    fn harvest(&mut self) {
        if let Ok(written) = &mut self.written {
            match self.changes.harvest() {
                Ok(more) => written.add(&more),
                Err(why) => self.written = Err(why),
            }
        }
    }

    /// What was written in this round.
    fn end(mut self) -> Result<PageSet, MigrateError> {
        self.harvest();
        self.written
    }
}

/// Copies the changed pages of a paused guest.
pub(crate) fn copy_paused<V: Vm>(
    vm: &V,
    changes: &mut Changes<'_, V>,
    sinks: &mut [impl PageSink + Send],
    progress: OnProgress<'_>,
) -> Result<Round, MigrateError> {
    changes.harvest()?;
    changes.check_slots()?;
    let all = (changes.changed(), 0);
    last_round(vm, changes.layout(), all, sinks, progress)
}

/// Copies all pages of a paused guest.
pub(crate) fn copy_all(
    vm: &impl Vm,
    layout: &MemoryLayout,
    sinks: &mut [impl PageSink + Send],
    progress: OnProgress<'_>,
) -> Result<Round, MigrateError> {
    let all = PageSet::full(layout.pages());
    last_round(vm, layout, (&all, 0), sinks, progress)
}

/// Copies the pages of a paused guest.
fn last_round<V: Vm>(
    vm: &V,
    layout: &MemoryLayout,
    set: (&PageSet, usize),
    sinks: &mut [impl PageSink + Send],
    progress: OnProgress<'_>,
) -> Result<Round, MigrateError> {
    let each = &mut |now| match is_cancelled(progress(now)) {
        true => ControlFlow::Break(Stop::Cancel),
        false => ControlFlow::Continue(()),
    };
    Ok(one_round(vm, layout, set, sinks, None, each)?.0)
}

/// Copies the pages of `set` after the rounds before. Returns what it has not copied, because of
/// [`Stop::Pause`].
fn one_round<V: Vm>(
    vm: &V,
    layout: &MemoryLayout,
    (set, before): (&PageSet, usize),
    sinks: &mut [impl PageSink + Send],
    limit: Option<&Bandwidth>,
    progress: OnProgress<'_>,
) -> Result<(Round, PageSet), MigrateError> {
    let start = Instant::now();
    let pages = set.len();
    let mut now = Progress {
        round: before as u32 + 1,
        pages,
        ..Progress::default()
    };
    if is_cancelled(progress(now)) {
        return Err(MigrateError::Cancelled);
    }
    let rest = copy(vm, layout, set, sinks, limit, &mut |more| {
        now.done += more;
        progress(now)
    })?;
    let round = Round {
        pages: pages - rest.len(),
        time: start.elapsed(),
    };
    Ok((round, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(pages: u64, ms: u64) -> Round {
        let time = Duration::from_millis(ms);
        Round { pages, time }
    }

    fn pauses(done: &[Round], left: u64) -> bool {
        let budget = Budget {
            downtime: Duration::from_millis(10),
            rounds: 3,
        };
        matches!(next(&budget, &mut Throttle::Never, done, left), Next::Pause)
    }

    #[test]
    fn a_guest_that_writes_as_fast_is_slowed_down_before_it_is_paused() {
        let budget = Budget {
            downtime: Duration::from_millis(10),
            rounds: 30,
        };
        let mut throttle = Throttle::LAST_RESORT;
        let mut done = vec![round(1000, 100)];
        let mut steps = Vec::new();
        while let Next::Round = next(&budget, &mut throttle, &done, 900) {
            done.push(round(900, 90));
            steps.push(throttle);
        }
        let expected = [0, 0, 50, 75, 90].map(Throttle::Held);
        assert_eq!(steps, expected[1..]);
        // The guest is not slowed down while rounds help.
        let mut throttle = Throttle::LAST_RESORT;
        let rounds = [round(1000, 100), round(900, 90)];
        assert!(matches!(
            next(&budget, &mut throttle, &rounds, 800),
            Next::Round
        ));
        assert_eq!(throttle, Throttle::LAST_RESORT);
    }

    #[test]
    fn the_guest_is_paused_when_the_rest_fits_or_more_rounds_do_not_help() {
        // 10 pages a millisecond.
        let first = round(1000, 100);
        assert!(!pauses(&[], 1000), "before the first round");
        assert!(!pauses(&[first], 101), "too long");
        assert!(!pauses(&[first], 100), "another round makes it shorter");
        assert!(pauses(&[first], 6), "short enough");
        assert!(!pauses(&[first, round(100, 10)], 49));
        assert!(pauses(&[first, round(100, 10)], 50), "as long again");
        assert!(!pauses(&[first, round(500, 50)], 499));
        assert!(pauses(&[first, round(500, 50)], 500), "it writes as fast");
        assert!(
            pauses(&[first, round(500, 50), round(400, 40)], 300),
            "3 rounds"
        );
    }
}
