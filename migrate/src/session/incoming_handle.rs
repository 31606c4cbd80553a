//! An incoming or arrived guest: its stage, and what other threads want of it.
//!
//! ```text
//! Memory ──► Rest ──────────► Whole
//!   │        ▲ │ ▲ connected again
//!   ▼        │ ▼ │
//! Unknown ───┘ Cut ──► Lost
//! ```

use super::report::{IncomingProgress, IncomingStage, MissingRange, again};
use super::watches::Watches;
use crate::error::printable;
use crate::stream::Incoming;
use crate::transport::Link;
use crate::{MemoryLayout, MigrateError, PageSet};
use lacuna_sync::{Condvar, Mutex, MutexGuard, lock, lock_order};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The time between two attempts to accept a connection, if the first one failed.
const PAUSE: Duration = Duration::from_millis(100);
/// How long this side waits for a source after its guest has ended here, if the connection was cut.
const LINGER: Duration = Duration::from_secs(5);

/// What a destination reports to its VMM meanwhile. Its `Display` is one line for the user of the
/// VMM.
#[non_exhaustive]
pub enum IncomingEvent<'a> {
    /// A connection that has announced no guest was refused.
    Refused {
        /// Its other end.
        from: &'a str,
        /// Why.
        why: &'a MigrateError,
    },
    /// The connection was cut, and the stage is [`IncomingStage::Unknown`] or
    /// [`IncomingStage::Cut`].
    Cut(&'a IncomingHandle),
    /// The source has connected again after such a cut.
    Reconnected,
    /// The guest has ended. This side waits for so long until its source knows that.
    Lingers(Duration),
}

impl fmt::Display for IncomingEvent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { from, why } => write!(f, "refused {from}, and still waiting: {why}"),
            Self::Cut(handle) if handle.is_awaited() => write!(
                f,
                "the connection was cut, and it is not known whether the source has handed the \
                 guest over: it is paused here until the source connects again"
            ),
            Self::Cut(_) => write!(
                f,
                "the connection was cut: the guest runs here, and waits for its missing pages \
                 until the source connects again"
            ),
            Self::Reconnected => write!(f, "the source of the guest has connected again"),
            Self::Lingers(time) => write!(
                f,
                "the guest has ended; this side ends when its source knows that, and waits \
                 {time:?} for another connection if there is none"
            ),
        }
    }
}

/// The VMM's function for events. Any thread may call it.
pub(super) type OnEvent = Arc<dyn Fn(IncomingEvent<'_>) + Send + Sync>;

/// An incoming or arrived guest. Any thread may call its methods.
#[derive(Clone)]
pub struct IncomingHandle(Arc<IncomingShared>);

struct IncomingShared {
    layout: MemoryLayout,
    link: Arc<Link>,
    since: Instant,
    state: Mutex<IncomingState, lock_order::IncomingSession>,
    changed: Condvar,
    on_event: OnEvent,
}

/// Pages that only the source has.
type Missing = Box<dyn Fn() -> PageSet + Send + Sync>;

struct IncomingState {
    now: IncomingProgress,
    /// `None`: the guest has not arrived.
    missing: Option<Missing>,
    decision: Option<Decision>,
    /// The source knows that all pages have arrived, or it was decided without it.
    is_settled: bool,
    /// The guest has ended.
    is_over: bool,
    /// How the guest has ended, if it was ended from outside.
    ended: Option<String>,
    watches: Watches,
}

impl IncomingState {
    /// The guest's stage, if these pages are missing. The guest is whole as soon as no page is
    /// missing, although arrived pages may not be in place yet: the VM gets those at once.
    fn stage(&self, missing: Option<&PageSet>) -> IncomingStage {
        match self.now.stage {
            IncomingStage::Rest if missing.is_some_and(PageSet::is_empty) => IncomingStage::Whole,
            stage => stage,
        }
    }

    fn stage_now(&self) -> IncomingStage {
        let missing = self.missing.as_ref().map(|missing| missing());
        self.stage(missing.as_ref())
    }
}

/// A decision, or the end of the run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Decision {
    /// The guest runs here, although its source has not said so.
    Keep,
    /// This side does not wait for the source: missing pages are lost.
    Cancel,
    /// The run ends.
    End,
}

impl IncomingHandle {
    /// A guest announced at `at`.
    pub(super) fn new(
        at: String,
        incoming: &Incoming,
        link: &Arc<Link>,
        on_event: OnEvent,
    ) -> Self {
        let now = IncomingProgress {
            at,
            mode: incoming.mode(),
            ..IncomingProgress::default()
        };
        Self::with_stage(
            now,
            incoming.machine().layout.clone(),
            Arc::clone(link),
            on_event,
        )
    }

    fn with_stage(
        now: IncomingProgress,
        layout: MemoryLayout,
        link: Arc<Link>,
        on_event: OnEvent,
    ) -> Self {
        Self(Arc::new(IncomingShared {
            layout,
            link,
            since: Instant::now(),
            state: Mutex::new(IncomingState {
                now,
                missing: None,
                decision: None,
                is_settled: false,
                is_over: false,
                ended: None,
                watches: Watches::default(),
            }),
            changed: Condvar::new(),
            on_event,
        }))
    }

    /// Its progress, with the first `ranges` ranges of missing pages.
    pub fn progress(&self, ranges: usize) -> IncomingProgress {
        let state = self.locked();
        let missing = state.missing.as_ref().map(|missing| missing());
        let stage = state.stage(missing.as_ref());
        let shown = match stage {
            IncomingStage::Cut | IncomingStage::Lost => missing.as_ref(),
            _ => None,
        };
        IncomingProgress {
            ranges: shown.map_or_else(Vec::new, |shown| {
                MissingRange::of(&self.0.layout, shown, ranges)
            }),
            stage,
            missing: missing.map(|missing| missing.len()),
            seconds: match state.missing {
                Some(_) => state.now.seconds,
                None => self.0.since.elapsed().as_secs_f64(),
            },
            bytes: self.0.link.bytes(),
            rate: self.0.link.rate(),
            ..state.now.clone()
        }
    }

    /// A descriptor for an event loop. It is readable at first, after each change of the stage, and
    /// when the guest's run has ended ([`IncomingHandle::end`]) or the guest cannot be taken. A
    /// read of its 8 bytes, as of any eventfd, resets it for all descriptors of this session; read
    /// it, then ask for the [`IncomingHandle::stage`]. The stage is [`IncomingStage::Whole`] as
    /// soon as no page is missing; the descriptor becomes readable when the source knows that.
    ///
    /// # Errors
    /// This process has too many descriptors.
    pub fn watch(&self) -> io::Result<OwnedFd> {
        self.locked().watches.watch()
    }

    /// Makes the descriptor of [`IncomingHandle::watch`] readable.
    pub(super) fn notify(&self) {
        self.locked().watches.notify();
    }

    /// Present pages of the guest.
    pub fn present(&self) -> u64 {
        let missing = self
            .locked()
            .missing
            .as_ref()
            .map(|missing| missing().len());
        self.0.layout.pages().saturating_sub(missing.unwrap_or(0))
    }

    /// Its stage.
    pub fn stage(&self) -> IncomingStage {
        self.locked().stage_now()
    }

    /// Whether the guest does not run here yet.
    pub fn is_awaited(&self) -> bool {
        matches!(
            self.locked().now.stage,
            IncomingStage::Memory | IncomingStage::Unknown
        )
    }

    /// Pages with content have arrived before the guest.
    pub(super) fn count_arrived(&self, pages: u64) {
        self.locked().now.came += pages;
    }

    /// The guest is prepared, and the connection was cut. Returns the decision; `None`: take the
    /// next connection.
    pub(super) fn was_cut_while_prepared(&self, why: &MigrateError) -> Option<Decision> {
        self.was_cut(IncomingStage::Unknown, why);
        let decision = self.decision();
        self.locked().is_settled = decision == Some(Decision::Keep);
        decision
    }

    /// The guest runs, and these pages are missing.
    pub(super) fn set_running(&self, missing: Missing, downtime: Duration, rounds: &[u64]) {
        let mut state = self.locked();
        state.now.late = missing().len();
        state.now.downtime_us = downtime.as_micros() as u64;
        state.now.again = again(rounds, state.now.late, self.0.layout.pages());
        state.now.seconds = self.0.since.elapsed().as_secs_f64();
        state.missing = Some(missing);
        // The source has to know how the guest ends, so a signal ends the guest first.
        self.0.link.outlive_signals();
        // A `keep` may have arrived after the source had handed the guest over: it is too late.
        state.decision = None;
        self.enter(state, IncomingStage::Rest);
    }

    /// The connection was cut, or a page cannot be put in place.
    pub(super) fn was_cut_while_running(&self, why: &MigrateError) {
        let lacks = self.present() < self.0.layout.pages();
        let stage = match lacks {
            true => IncomingStage::Cut,
            // Only its source does not know that yet.
            false => IncomingStage::Whole,
        };
        self.was_cut(stage, why);
    }

    /// The source has connected again.
    pub(super) fn reconnected(&self) {
        let mut state = self.locked();
        if state.decision == Some(Decision::Cancel) {
            // The request and the source arrived at the same time.
            state.decision = None;
        }
        if state.now.stage == IncomingStage::Cut {
            self.enter(state, IncomingStage::Rest);
            (self.0.on_event)(IncomingEvent::Reconnected);
        }
    }

    /// All pages have arrived, and the source knows it.
    pub(super) fn set_whole(&self) {
        let mut state = self.locked();
        state.is_settled = true;
        self.enter(state, IncomingStage::Whole);
    }

    /// The missing pages never arrive.
    pub(super) fn set_lost(&self) {
        let state = self.locked();
        if state.now.stage != IncomingStage::Whole {
            self.enter(state, IncomingStage::Lost);
        }
    }

    fn was_cut(&self, stage: IncomingStage, why: &MigrateError) {
        warn!(target: "lacuna::migration", %why, ?stage, "connection is cut");
        let why = printable(&why.to_string());
        let is_first = {
            let mut state = self.locked();
            if state.ended.is_some() {
                // This side has ended the connection.
                return self.enter(state, stage);
            }
            state.now.cut = Some(why);
            let is_first = state.now.stage != stage;
            state.now.cuts += u32::from(is_first);
            self.enter(state, stage);
            is_first
        };
        let is_undecided = matches!(stage, IncomingStage::Unknown | IncomingStage::Cut);
        // If the link is not open, the run ends anyway.
        if is_first && is_undecided && self.0.link.is_open() {
            (self.0.on_event)(IncomingEvent::Cut(self));
        }
    }

    fn enter(&self, mut state: MutexGuard<'_, IncomingState>, stage: IncomingStage) {
        if std::mem::replace(&mut state.now.stage, stage) != stage {
            state.watches.notify();
        }
        drop(state);
        info!(target: "lacuna::migration", ?stage, "incoming guest");
        self.0.changed.notify_all();
    }

    /// The decision about the next connection; `None`: take it. Waits a little after a connection
    /// that `failed`.
    pub(super) fn next(&self, failed: bool) -> Option<Decision> {
        if failed {
            let state = self.locked();
            if state.decision.is_none() {
                drop(self.0.changed.wait_timeout(state, PAUSE));
            }
        }
        self.decision()
    }

    /// The decision; `None`: take the next connection, which nothing has cut yet.
    fn decision(&self) -> Option<Decision> {
        let mut state = self.locked();
        // `decide` notes a decision and cuts the link under this lock. An earlier decision is taken
        // here, and its cut with it. The cut of a later decision stays.
        self.0.link.renew();
        let is_done = state.is_over && state.is_settled;
        let ends = is_done || !self.0.link.is_open();
        let decision = state.decision.take();
        decision.or(ends.then_some(Decision::End))
    }

    /// The guest shall run here, although its source has not said so. First end the source, or make
    /// sure that it has ended. Waits until the guest runs.
    ///
    /// # Errors
    /// The stage, which leaves nothing to decide. [`IncomingStage::Unknown`]: the run is over.
    pub fn keep(&self) -> Result<(), IncomingStage> {
        let mut state = self.locked();
        if state.now.stage != IncomingStage::Unknown || state.is_over {
            return Err(state.stage_now());
        }
        self.decide(&mut state, Decision::Keep);
        let is_open =
            |state: &mut IncomingState| state.now.stage == IncomingStage::Unknown && !state.is_over;
        let waited = self.0.changed.wait_while(state, is_open);
        match waited.unwrap_or_else(PoisonError::into_inner).now.stage {
            IncomingStage::Unknown => Err(IncomingStage::Unknown),
            _ => Ok(()),
        }
    }

    /// Ends the wait for the source of a running guest: the missing pages are lost.
    ///
    /// # Errors
    /// The stage, if it is not [`IncomingStage::Cut`].
    pub fn cancel(&self) -> Result<(), IncomingStage> {
        let mut state = self.locked();
        match state.stage_now() {
            IncomingStage::Cut => {
                self.decide(&mut state, Decision::Cancel);
                Ok(())
            }
            stage => Err(stage),
        }
    }

    /// The guest has ended. `why`: it was ended from outside, so this side does not wait for the
    /// rest of its memory.
    pub fn end(&self, why: Option<&str>) {
        let mut state = self.locked();
        state.is_over = true;
        state.watches.notify();
        let waits_for_source = match state.now.stage {
            IncomingStage::Rest | IncomingStage::Cut => true,
            IncomingStage::Whole => !state.is_settled,
            IncomingStage::Memory | IncomingStage::Unknown | IncomingStage::Lost => false,
        };
        let linger = if waits_for_source {
            LINGER
        } else {
            Duration::ZERO
        };
        match why {
            Some(_) if state.ended.is_some() => return,
            Some(why) => {
                state.ended = Some(why.to_owned());
                self.decide(&mut state, Decision::End);
            }
            None if !waits_for_source => self.decide(&mut state, Decision::End),
            None => self.0.changed.notify_all(),
        }
        self.0.link.wait_until(Instant::now() + linger);
        drop(state);
        if why.is_none() && waits_for_source {
            (self.0.on_event)(IncomingEvent::Lingers(LINGER));
        }
    }

    /// How the guest was ended from outside, if its source waits for more.
    pub(super) fn has_ended(&self) -> Option<String> {
        let state = self.locked();
        let is_known = state.is_settled || state.now.stage == IncomingStage::Lost;
        state.ended.clone().filter(|_| !is_known)
    }

    fn decide(&self, state: &mut IncomingState, decision: Decision) {
        state.decision = Some(decision);
        self.0.link.cut();
        self.0.changed.notify_all();
    }

    fn locked(&self) -> MutexGuard<'_, IncomingState> {
        lock(&self.0.state)
    }
}

#[cfg(test)]
mod tests {
    use super::super::watches::was_readable;
    use super::*;
    use std::thread;

    /// A guest whose connection was cut while its source handed it over.
    fn unknown() -> IncomingHandle {
        let now = IncomingProgress {
            stage: IncomingStage::Unknown,
            ..IncomingProgress::default()
        };
        let layout = serde_json::from_str(r#"{"slots":[]}"#).unwrap();
        let link = Arc::new(Link::of_destination(Arc::default()));
        IncomingHandle::with_stage(now, layout, link, Arc::new(|_| ()))
    }

    /// A decision also cuts the link, which must not count as the end of the run.
    #[test]
    fn a_decision_is_taken_whenever_it_comes() {
        let handle = unknown();
        assert_eq!(
            handle.was_cut_while_prepared(&MigrateError::Cancelled),
            None
        );
        handle.decide(&mut handle.locked(), Decision::Keep);
        assert!(
            !handle.0.link.is_open(),
            "a connection that is awaited ends"
        );
        assert_eq!(handle.decision(), Some(Decision::Keep));
        assert!(handle.0.link.is_open(), "the source may connect again");
        handle.decide(&mut handle.locked(), Decision::Keep);
        assert_eq!(
            handle.was_cut_while_prepared(&MigrateError::Cancelled),
            Some(Decision::Keep)
        );
    }

    #[test]
    fn a_descriptor_has_each_change_of_the_stage() {
        let handle = unknown();
        let watch = handle.watch().unwrap();
        assert!(was_readable(&watch), "at first");
        handle.was_cut_while_prepared(&MigrateError::Cancelled);
        assert!(!was_readable(&watch), "it was cut before");
        handle.set_running(Box::new(|| PageSet::empty(0)), Duration::ZERO, &[]);
        assert!(was_readable(&watch));
        handle.set_whole();
        assert!(was_readable(&watch));
        handle.set_whole();
        assert!(!was_readable(&watch));
        handle.end(None);
        assert!(was_readable(&watch));
    }

    #[test]
    fn a_run_that_ends_answers_a_thread_that_keeps_its_guest() {
        let handle = unknown();
        let kept = thread::scope(|scope| {
            let keeping = scope.spawn(|| handle.keep());
            handle.end(Some("stopped"));
            keeping.join().unwrap()
        });
        assert_eq!(kept, Err(IncomingStage::Unknown));
        assert_eq!(handle.decision(), Some(Decision::End));
    }
}
