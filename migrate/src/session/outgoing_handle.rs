//! A migration in progress at its source: its stage, and what other threads want of it.
//!
//! ```text
//! Here ── the guest is handed over ─► There ──► moved
//!   │                                  │ ▲
//!   └─► Unknown ── connected again ────┼─┤
//!                                      ▼ │ connected again
//!                                      Cut
//! ```

use super::report::{OutgoingProgress, OutgoingStage};
use super::watches::Watches;
use crate::stream::Mode;
use crate::transport::{Address, Link};
use crate::{MigrateError, Progress, Stop};
use lacuna_sync::{Condvar, Mutex, MutexGuard, lock, lock_order};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The time between the end of an attempt to connect again and the next one.
const RETRY: Duration = Duration::from_secs(1);
/// How often a wait looks whether the run has ended.
const LOOK: Duration = Duration::from_millis(100);

/// A migration in progress. Any thread may call its methods.
#[derive(Clone)]
pub struct OutgoingHandle(Arc<OutgoingShared>);

struct OutgoingShared {
    link: Arc<Link>,
    /// Bytes over the connections of an earlier request.
    before: u64,
    state: Mutex<OutgoingState, lock_order::OutgoingSession>,
    changed: Condvar,
}

struct OutgoingState {
    /// The last report.
    now: OutgoingProgress,
    /// When the round of this report began.
    began: Instant,
    /// Pages that remained when the guest was handed over.
    late: u64,
    /// Pages that the destination lacks, as far as is known here.
    lacks: u64,
    wanted: Wanted,
    /// [`OutgoingHandle::post_copy`].
    post_copy_requested: bool,
    /// The guest is resumed here by a decision.
    is_kept: bool,
    is_over: bool,
    watches: Watches,
}

/// Why a migration does not become a post-copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoPostCopy {
    /// Its first message has announced that all memory comes before the guest.
    #[error(
        "this migration sends all memory before the guest: only one that begins as `hybrid` can \
         send the guest first"
    )]
    PreCopy,
    /// The guest was handed over before.
    #[error("the guest was handed over already")]
    Gone,
}

/// A decision about a migration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    /// Continue it.
    Continue,
    /// Keep the guest here; after the hand-over: do not connect again.
    Cancel,
    /// Resume the guest here, although it was handed over.
    Keep,
    /// End the run.
    End,
}

impl OutgoingHandle {
    pub(super) fn new(to: &Address, mode: Mode, link: Arc<Link>) -> Self {
        let state = OutgoingState {
            now: OutgoingProgress {
                to: to.to_string(),
                mode,
                ..OutgoingProgress::default()
            },
            began: Instant::now(),
            late: 0,
            lacks: 0,
            wanted: Wanted::Continue,
            post_copy_requested: false,
            is_kept: false,
            is_over: false,
            watches: Watches::default(),
        };
        Self::with_state(state, link, 0)
    }

    /// The same migration with new attempts to connect, after the earlier ones were cancelled.
    pub(super) fn again(&self, to: &Address, link: Arc<Link>) -> Self {
        let before = self.bytes();
        let state = self.locked();
        let state = OutgoingState {
            now: OutgoingProgress {
                to: to.to_string(),
                ..state.now.clone()
            },
            wanted: Wanted::Continue,
            is_over: false,
            watches: Watches::default(),
            ..*state
        };
        Self::with_state(state, link, before)
    }

    fn with_state(state: OutgoingState, link: Arc<Link>, before: u64) -> Self {
        Self(Arc::new(OutgoingShared {
            link,
            before,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }))
    }

    /// Bytes over its connections.
    fn bytes(&self) -> u64 {
        self.0.before + self.0.link.bytes()
    }

    /// Where to.
    pub fn to(&self) -> String {
        self.locked().now.to.clone()
    }

    /// Its progress.
    pub fn progress(&self) -> OutgoingProgress {
        let (bytes, rate) = (self.bytes(), self.0.link.rate());
        let state = self.locked();
        let now = state.now.clone();
        OutgoingProgress {
            bytes,
            rate,
            seconds_left: seconds_left(state.began.elapsed(), now.done, now.remaining),
            ..now
        }
    }

    /// A descriptor for an event loop. It is readable at first, after each change of the stage, and
    /// after the end of the session. A read of its 8 bytes, as of any eventfd, resets it for all
    /// descriptors of this session; read it, then ask for the [`OutgoingHandle::progress`].
    /// [`Outgoing::follow`](super::Outgoing::follow) makes a new handle with a new descriptor.
    ///
    /// # Errors
    /// This process has too many descriptors.
    pub fn watch(&self) -> io::Result<OwnedFd> {
        self.locked().watches.watch()
    }

    /// Pages sent after the guest.
    pub(super) fn late(&self) -> u64 {
        self.locked().late
    }

    /// Whether the guest runs there, or may, and needs pages of this process.
    pub(super) fn is_needed(&self) -> bool {
        let now = &self.locked().now;
        match now.stage {
            OutgoingStage::Here => false,
            OutgoingStage::There | OutgoingStage::Cut => true,
            OutgoingStage::Unknown => now.mode != Mode::PreCopy,
        }
    }

    /// Pages that the destination lacks, as far as is known here, after a cut.
    pub fn lacks(&self) -> u64 {
        self.locked().lacks
    }

    /// Notes a report, and returns what was decided meanwhile.
    pub(super) fn note(&self, now: &Progress) -> ControlFlow<Stop> {
        let mut state = self.locked();
        // Round 0 asks whether the guest may be handed over.
        if state.now.stage == OutgoingStage::Here && state.wanted != Wanted::Continue {
            return ControlFlow::Break(Stop::Cancel);
        }
        if state.now.round != now.round || state.now.done > now.done {
            state.began = Instant::now();
        }
        state.now.dirty_rate = now.dirty_rate;
        state.now.throttle = now.throttle;
        state.now.round = now.round;
        state.now.done = now.done;
        state.now.pages = now.pages;
        state.now.remaining = now.pages.saturating_sub(now.done);
        if now.round == 0 {
            state.late = state.late.max(now.pages);
            state.lacks = state.now.remaining;
            self.enter(&mut state, OutgoingStage::There);
        }
        match state.wanted {
            Wanted::End => ControlFlow::Break(Stop::Cancel),
            _ if state.post_copy_requested => ControlFlow::Break(Stop::Pause),
            _ => ControlFlow::Continue(()),
        }
    }

    /// The connection was cut after the guest was handed over. `runs_there`: the destination has
    /// said so.
    pub(super) fn was_cut(&self, runs_there: bool, why: &MigrateError, lacks: u64) {
        warn!(target: "lacuna::migration", %why, runs_there, lacks, "connection is cut");
        let mut state = self.locked();
        state.now.cuts += 1;
        state.now.cut = Some(why.to_string());
        state.lacks = lacks;
        let stage = match runs_there {
            true => OutgoingStage::Cut,
            false => OutgoingStage::Unknown,
        };
        self.enter(&mut state, stage);
    }

    fn enter(&self, state: &mut OutgoingState, stage: OutgoingStage) {
        let before = std::mem::replace(&mut state.now.stage, stage);
        if before == stage {
            return;
        }
        info!(target: "lacuna::migration", ?stage, "outgoing guest");
        // A decision about an earlier stage is too late. Above all, a guest running there is not
        // kept here. The attempts to connect again may be cancelled in both of their stages.
        let is_cancelled_attempt = state.wanted == Wanted::Cancel && before != OutgoingStage::Here;
        let holds = match stage {
            OutgoingStage::Here | OutgoingStage::There => false,
            OutgoingStage::Cut | OutgoingStage::Unknown => is_cancelled_attempt,
        };
        if state.wanted != Wanted::End && !holds {
            state.wanted = Wanted::Continue;
            self.0.link.renew();
        }
        state.watches.notify();
        self.0.changed.notify_all();
    }

    /// Waits until it is time to connect again, or something else is wanted, or the run `is over`.
    pub(super) fn wait(&self, is_over: &dyn Fn() -> bool) -> Wanted {
        let until = Instant::now() + RETRY;
        let mut state = self.locked();
        loop {
            if is_over() {
                return Wanted::End;
            }
            let left = until.saturating_duration_since(Instant::now());
            if state.wanted != Wanted::Continue || left.is_zero() {
                self.0.link.renew();
                return std::mem::replace(&mut state.wanted, Wanted::Continue);
            }
            let waited = self.0.changed.wait_timeout(state, left.min(LOOK));
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The guest shall stay here. After the hand-over: this side shall not connect again.
    ///
    /// # Errors
    /// [`OutgoingStage::There`]: the rest of the guest's memory is on its way.
    pub fn cancel(&self) -> Result<(), OutgoingStage> {
        let mut state = self.locked();
        match state.now.stage {
            there @ OutgoingStage::There => Err(there),
            OutgoingStage::Here => {
                self.stay(&mut state);
                Ok(())
            }
            OutgoingStage::Cut | OutgoingStage::Unknown => {
                self.want(&mut state, Wanted::Cancel);
                Ok(())
            }
        }
    }

    /// Asks to hand the guest over now, before the rest of its memory. Without effect on a
    /// post-copy, and after [`OutgoingHandle::cancel`].
    ///
    /// # Errors
    /// [`NoPostCopy`]: the other side expects all memory before the guest, or the guest has gone.
    pub fn post_copy(&self) -> Result<(), NoPostCopy> {
        let mut state = self.locked();
        match (state.now.mode, state.now.stage) {
            (Mode::PreCopy, _) => return Err(NoPostCopy::PreCopy),
            (_, OutgoingStage::Here) => state.post_copy_requested = true,
            _ => return Err(NoPostCopy::Gone),
        }
        Ok(())
    }

    /// The guest shall stay here, unless it was handed over.
    pub fn leave(&self) {
        let mut state = self.locked();
        if state.now.stage == OutgoingStage::Here {
            self.stay(&mut state);
        }
    }

    /// Cancels a migration whose guest is still here. The peer gets one more second.
    fn stay(&self, state: &mut OutgoingState) {
        self.0.link.hurry();
        state.wanted = Wanted::Cancel;
    }

    /// The run has ended.
    pub fn end(&self) {
        self.want(&mut self.locked(), Wanted::End);
    }

    /// Whether the migration was cancelled before the hand-over.
    pub(super) fn is_cancelled(&self) -> bool {
        self.locked().wanted == Wanted::Cancel
    }

    /// Refuses to run a guest here if it is known to run there, or to be here.
    pub(super) fn check_keep(&self) -> Result<(), OutgoingStage> {
        match self.locked().now.stage {
            OutgoingStage::Unknown => Ok(()),
            known => Err(known),
        }
    }

    /// The guest shall resume here, although it was handed over. First end the other side, or make
    /// sure that it has ended. Waits until the migration has ended.
    ///
    /// # Errors
    /// The stage, which leaves nothing to decide. [`OutgoingStage::Unknown`]: another decision, or
    /// the end of the run, was first.
    pub fn keep(&self) -> Result<(), OutgoingStage> {
        self.check_keep()?;
        let mut state = self.locked();
        self.want(&mut state, Wanted::Keep);
        let is_open =
            |state: &mut OutgoingState| state.now.stage == OutgoingStage::Unknown && !state.is_over;
        let waited = self.0.changed.wait_while(state, is_open);
        let state = waited.unwrap_or_else(PoisonError::into_inner);
        match state.now.stage {
            OutgoingStage::Unknown if state.is_kept => Ok(()),
            stage => Err(stage),
        }
    }

    /// The guest is resumed here by a decision.
    pub(super) fn has_kept(&self) {
        self.locked().is_kept = true;
    }

    fn want(&self, state: &mut OutgoingState, wanted: Wanted) {
        state.wanted = wanted;
        self.0.link.cut();
        self.0.changed.notify_all();
    }

    /// The migration has ended.
    pub(super) fn settle(&self) {
        let mut state = self.locked();
        state.is_over = true;
        state.watches.notify();
        self.0.changed.notify_all();
    }

    fn locked(&self) -> MutexGuard<'_, OutgoingState> {
        lock(&self.0.state)
    }
}

/// How long the remaining pages take if `done` pages took this time.
fn seconds_left(took: Duration, done: u64, remaining: u64) -> Option<f64> {
    (done > 0).then(|| took.as_secs_f64() * remaining as f64 / done as f64)
}

#[cfg(test)]
mod tests {
    use super::super::watches::was_readable;
    use super::*;

    fn migration() -> OutgoingHandle {
        let to = "unix:/there".parse().unwrap();
        OutgoingHandle::new(&to, Mode::PostCopy, Arc::new(Link::of_source()))
    }

    fn cut() -> MigrateError {
        MigrateError::Cut(io::ErrorKind::ConnectionReset.into())
    }

    /// A thread decides to keep the guest during an attempt to connect. The attempt finds that the
    /// other side runs the guest.
    #[test]
    fn a_guest_that_runs_there_is_not_kept() {
        let migration = migration();
        migration.was_cut(false, &cut(), 9);
        migration.check_keep().unwrap();
        migration.want(&mut migration.locked(), Wanted::Keep);
        migration.was_cut(true, &cut(), 9);
        assert_eq!(migration.locked().wanted, Wanted::Continue);
        assert_eq!(migration.keep(), Err(OutgoingStage::Cut));
        assert!(migration.is_needed());
    }

    /// A decision to keep the guest and another request arrive at one time, and the other request
    /// is carried out.
    #[test]
    fn a_guest_that_was_not_kept_is_not_said_to_be() {
        let migration = migration();
        migration.was_cut(false, &cut(), 9);
        migration.settle();
        assert_eq!(migration.keep(), Err(OutgoingStage::Unknown));
        migration.has_kept();
        migration.keep().unwrap();
    }

    /// A late cancel does not end the attempts to connect again. The next cancel does, and so does
    /// the end of the run.
    #[test]
    fn what_is_wanted_depends_on_the_stage() {
        let migration = migration();
        migration.cancel().unwrap();
        assert!(migration.is_cancelled());
        migration.was_cut(false, &cut(), 9);
        assert!(!migration.is_cancelled());
        migration.cancel().unwrap();
        migration.was_cut(true, &cut(), 9);
        assert_eq!(migration.wait(&|| false), Wanted::Cancel);
        assert_eq!(migration.wait(&|| true), Wanted::End);
        migration.end();
        migration.was_cut(true, &cut(), 9);
        assert_eq!(migration.wait(&|| false), Wanted::End);
        let now = Progress {
            done: 1,
            pages: 5,
            ..Progress::default()
        };
        assert!(migration.note(&now).is_continue());
        assert_eq!(migration.cancel(), Err(OutgoingStage::There));
        assert_eq!(migration.post_copy(), Err(NoPostCopy::Gone));
        assert_eq!((migration.late(), migration.progress().remaining), (5, 4));
    }

    #[test]
    fn a_descriptor_has_each_change_of_the_stage_and_the_end() {
        let migration = migration();
        let watch = migration.watch().unwrap();
        assert!(was_readable(&watch), "at first");
        assert!(migration.note(&Progress::default()).is_continue());
        assert!(was_readable(&watch), "it was handed over");
        assert!(!was_readable(&watch));
        assert!(migration.note(&Progress::default()).is_continue());
        assert!(!was_readable(&watch), "nothing has changed");
        migration.was_cut(true, &cut(), 9);
        assert!(was_readable(&migration.watch().unwrap()));
        migration.settle();
        assert!(was_readable(&watch));
    }

    #[test]
    fn the_report_has_the_pace() {
        let migration = migration();
        let mut now = Progress {
            round: 2,
            pages: 1000,
            dirty_rate: 300,
            throttle: 50,
            ..Progress::default()
        };
        assert!(migration.note(&now).is_continue());
        assert_eq!(migration.progress().seconds_left, None);
        now.done = 250;
        assert!(migration.note(&now).is_continue());
        let report = migration.progress();
        assert_eq!((report.dirty_rate, report.throttle), (300, 50));
        assert!(report.seconds_left.is_some());
        assert_eq!(seconds_left(Duration::from_secs(2), 250, 750), Some(6.0));
    }
}
