//! A migration in progress: its stage, and what clients want of it.
//!
//! ```text
//! Here ── the guest is handed over ─► There ──► moved
//!   │                                  │ ▲
//!   └─► Unknown ── connected again ────┼─┤
//!                                      ▼ │ connected again
//!                                      Cut
//! ```

use super::message::{Refused, State};
use super::migration::{Moving, MovingStage};
use lacuna_migrate::MigrateError;
use lacuna_migrate::stream::Mode;
use lacuna_migrate::transport::{Address, Link};
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time between the end of an attempt to connect again and the next one.
const RETRY: Duration = Duration::from_secs(1);
/// How often a wait looks whether the run has ended.
const LOOK: Duration = Duration::from_millis(100);

/// A migration in progress. Any thread may call its methods.
#[derive(Clone)]
pub(super) struct OutgoingMigration(Arc<OutgoingShared>);

struct OutgoingShared {
    link: Arc<Link>,
    /// Bytes over the connections of an earlier request.
    before: u64,
    state: Mutex<OutgoingState>,
    changed: Condvar,
}

struct OutgoingState {
    /// The library's last report.
    now: Moving,
    /// Pages that remained when the guest was handed over.
    late: u64,
    /// Pages that the destination lacks, as far as is known here.
    lacks: u64,
    wanted: Wanted,
    /// The guest is resumed here by a decision.
    is_kept: bool,
    is_over: bool,
}

/// A client's decision about a migration.
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

impl OutgoingMigration {
    pub fn new(to: &Address, mode: Mode, link: Arc<Link>) -> Self {
        let state = OutgoingState {
            now: Moving {
                to: to.to_string(),
                mode,
                ..Moving::default()
            },
            late: 0,
            lacks: 0,
            wanted: Wanted::Continue,
            is_kept: false,
            is_over: false,
        };
        Self::with_state(state, link, 0)
    }

    /// The same migration with new attempts to connect. A client wants them after another client
    /// has cancelled the earlier ones.
    pub fn again(&self, to: &Address, link: Arc<Link>) -> Self {
        let before = self.bytes();
        let state = self.locked();
        let state = OutgoingState {
            now: Moving {
                to: to.to_string(),
                ..state.now.clone()
            },
            wanted: Wanted::Continue,
            is_over: false,
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
    pub fn bytes(&self) -> u64 {
        self.0.before + self.0.link.bytes()
    }

    /// Where to.
    pub fn to(&self) -> String {
        self.locked().now.to.clone()
    }

    /// Its progress.
    pub fn progress(&self) -> Moving {
        Moving {
            bytes: self.bytes(),
            rate: self.0.link.rate(),
            ..self.locked().now.clone()
        }
    }

    /// What the guest does here.
    pub fn state(&self) -> State {
        match self.locked().now.stage {
            MovingStage::Here => State::Running,
            MovingStage::There | MovingStage::Cut | MovingStage::Unknown => State::Paused,
        }
    }

    /// Pages sent after the guest.
    pub fn late(&self) -> u64 {
        self.locked().late
    }

    /// Whether the guest runs there, or may, and needs pages of this process.
    pub fn is_needed(&self) -> bool {
        let now = &self.locked().now;
        match now.stage {
            MovingStage::Here => false,
            MovingStage::There | MovingStage::Cut => true,
            MovingStage::Unknown => now.mode != Mode::PreCopy,
        }
    }

    /// Why it is undecided which side runs the guest, or with which memory, and what to do.
    pub fn undecided(&self) -> Option<String> {
        let state = self.locked();
        let cut = state.now.cut.as_deref().unwrap_or_default();
        let (to, lacks) = (&state.now.to, state.lacks);
        match state.now.stage {
            MovingStage::Here | MovingStage::There => None,
            MovingStage::Unknown => Some(format!(
                "the guest was handed over, and then {cut}: it is not known whether it runs at \
                 {to}. It is paused here. If it runs there, or shall run there, end it here: \
                 {{\"command\":\"stop\"}}. If not, end it there first, and then resume it here: \
                 {{\"command\":\"keep\"}}, which is lacuna migrate --keep"
            )),
            MovingStage::Cut => Some(format!(
                "the guest runs at {to}, and then {cut}: it lacks up to {lacks} pages there, \
                 which only this process has. If it has ended there, end it here: \
                 {{\"command\":\"stop\"}}; the pages are lost then"
            )),
        }
    }

    /// Notes the library's report. `Break`: the migration shall end.
    pub fn note(&self, now: &lacuna_migrate::Progress) -> ControlFlow<()> {
        let mut state = self.locked();
        // Round 0 asks whether the guest may be handed over.
        if state.now.stage == MovingStage::Here && state.wanted != Wanted::Continue {
            return ControlFlow::Break(());
        }
        state.now.round = now.round;
        state.now.done = now.done;
        state.now.pages = now.pages;
        state.now.remaining = now.pages.saturating_sub(now.done);
        if now.round == 0 {
            state.late = state.late.max(now.pages);
            state.lacks = state.now.remaining;
            self.enter(&mut state, MovingStage::There);
        }
        match state.wanted {
            Wanted::End => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    }

    /// The connection was cut after the guest was handed over. `runs_there`: the destination has
    /// said so.
    pub fn was_cut(&self, runs_there: bool, why: &MigrateError, lacks: u64) {
        let mut state = self.locked();
        state.now.cuts += 1;
        state.now.cut = Some(why.to_string());
        state.lacks = lacks;
        let stage = match runs_there {
            true => MovingStage::Cut,
            false => MovingStage::Unknown,
        };
        self.enter(&mut state, stage);
    }

    fn enter(&self, state: &mut OutgoingState, stage: MovingStage) {
        let before = std::mem::replace(&mut state.now.stage, stage);
        if before == stage {
            return;
        }
        // A decision about an earlier stage is too late. Above all, a guest running there is not
        // kept here. The attempts to connect again may be cancelled in both of their stages.
        let is_cancelled_attempt = state.wanted == Wanted::Cancel && before != MovingStage::Here;
        let holds = match stage {
            MovingStage::Here | MovingStage::There => false,
            MovingStage::Cut | MovingStage::Unknown => is_cancelled_attempt,
        };
        if state.wanted != Wanted::End && !holds {
            state.wanted = Wanted::Continue;
            self.0.link.renew();
        }
        self.0.changed.notify_all();
    }

    /// Waits until it is time to connect again, or a client wants something else, or the run `is
    /// over`.
    pub fn wait(&self, is_over: &dyn Fn() -> bool) -> Wanted {
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
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The guest shall stay here. After the hand-over: this side shall not connect again.
    pub fn cancel(&self) -> Result<(), Refused> {
        let mut state = self.locked();
        match state.now.stage {
            MovingStage::There => Err(Refused::request(format!(
                "the guest runs at {} already, and the rest of its memory is on its way: wait for \
                 its end",
                state.now.to
            ))),
            MovingStage::Here => {
                self.stay(&mut state);
                Ok(())
            }
            MovingStage::Cut | MovingStage::Unknown => {
                self.want(&mut state, Wanted::Cancel);
                Ok(())
            }
        }
    }

    /// The requesting client has disconnected: the guest stays here, unless it was handed over.
    pub fn leave(&self) {
        let mut state = self.locked();
        if state.now.stage == MovingStage::Here {
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
    pub fn is_cancelled(&self) -> bool {
        self.locked().wanted == Wanted::Cancel
    }

    /// Refuses to run a guest here if it is known to run there, or to be here.
    pub fn check_keep(&self) -> Result<(), Refused> {
        let state = self.locked();
        match state.now.stage {
            MovingStage::Unknown => Ok(()),
            _ => Err(no_decision(&state)),
        }
    }

    /// The guest shall resume here. Waits until that is settled.
    pub fn keep(&self) -> Result<(), Refused> {
        self.check_keep()?;
        let mut state = self.locked();
        self.want(&mut state, Wanted::Keep);
        while state.now.stage == MovingStage::Unknown && !state.is_over {
            state = self
                .0
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        match state.now.stage {
            MovingStage::Unknown if state.is_kept => Ok(()),
            MovingStage::Unknown => Err(Refused::request(
                "another request, or the end of the run, was first: ask for the status, and decide \
                 again if the guest is paused here",
            )),
            _ => Err(no_decision(&state)),
        }
    }

    /// The guest is resumed here by a decision.
    pub fn has_kept(&self) {
        self.locked().is_kept = true;
    }

    fn want(&self, state: &mut OutgoingState, wanted: Wanted) {
        state.wanted = wanted;
        self.0.link.cut();
        self.0.changed.notify_all();
    }

    /// The migration has ended.
    pub fn settle(&self) {
        self.locked().is_over = true;
        self.0.changed.notify_all();
    }

    fn locked(&self) -> MutexGuard<'_, OutgoingState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a guest must not resume here by a decision.
fn no_decision(state: &OutgoingState) -> Refused {
    let to = &state.now.to;
    Refused::request(match state.now.stage {
        MovingStage::Here => {
            format!("the guest is being moved to {to}: wait for its end, or cancel it")
        }
        _ => format!(
            "the guest runs at {to}: what is here is an older state of it, which must not run"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    fn migration() -> OutgoingMigration {
        let to = "unix:/there".parse().unwrap();
        OutgoingMigration::new(&to, Mode::PostCopy, Arc::new(Link::of_source()))
    }

    fn cut() -> MigrateError {
        MigrateError::Cut(io::ErrorKind::ConnectionReset.into())
    }

    /// A client decides to keep the guest during an attempt to connect. The attempt finds that the
    /// other side runs the guest.
    #[test]
    fn a_guest_that_runs_there_is_not_kept() {
        let migration = migration();
        migration.was_cut(false, &cut(), 9);
        migration.check_keep().unwrap();
        migration.want(&mut migration.locked(), Wanted::Keep);
        migration.was_cut(true, &cut(), 9);
        assert_eq!(migration.locked().wanted, Wanted::Continue);
        let text = migration.keep().unwrap_err().text;
        assert!(text.contains("an older state of it"), "{text}");
        assert!(migration.is_needed());
    }

    /// A decision to keep the guest and another request arrive at one time, and the other request
    /// is carried out.
    #[test]
    fn a_guest_that_was_not_kept_is_not_said_to_be() {
        let migration = migration();
        migration.was_cut(false, &cut(), 9);
        migration.settle();
        let text = migration.keep().unwrap_err().text;
        assert!(text.contains("decide again"), "{text}");
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
        let now = lacuna_migrate::Progress {
            round: 0,
            done: 1,
            pages: 5,
        };
        assert!(migration.note(&now).is_continue());
        let text = migration.cancel().unwrap_err().text;
        assert!(text.contains("wait for its end"), "{text}");
        assert_eq!((migration.late(), migration.progress().remaining), (5, 4));
    }
}
