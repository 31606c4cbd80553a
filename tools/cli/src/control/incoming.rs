//! An incoming or arrived guest: its stage, and what clients want of it.
//!
//! ```text
//! Memory ──► Rest ──────────► Whole
//!   │        ▲ │ ▲ connected again
//!   ▼        │ ▼ │
//! Unknown ───┘ Cut ──► Lost
//! ```

use super::message::Refused;
use super::words::{RANGES_SHOWN, undecided_at_destination};
use crate::output::{complain, visible};
use lacuna_migrate::session::{IncomingProgress, IncomingStage, MissingRange, again};
use lacuna_migrate::stream::Incoming;
use lacuna_migrate::transport::Link;
use lacuna_migrate::{MemoryLayout, MigrateError, PageSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time between two attempts to accept a connection, if the first one failed.
const PAUSE: Duration = Duration::from_millis(100);
/// How long this side waits for a source after its guest has ended here, if the connection was cut.
const LINGER: Duration = Duration::from_secs(5);
/// Why an ended run cannot keep a guest.
const OVER: &str = "the run is over: the guest does not run here";

/// An incoming or arrived guest. Any thread may call its methods.
pub struct IncomingGuest {
    layout: MemoryLayout,
    link: Arc<Link>,
    since: Instant,
    state: Mutex<IncomingState>,
    changed: Condvar,
}

/// Pages that only the source has.
type Missing = Box<dyn Fn() -> PageSet + Send + Sync>;

struct IncomingState {
    now: IncomingProgress,
    /// `None`: the guest has not arrived.
    missing: Option<Missing>,
    decision: Option<Decision>,
    /// The source knows that all pages have arrived, or a client has decided without it.
    is_settled: bool,
    /// The guest has ended.
    is_over: bool,
    /// How the guest has ended, if a client or a signal has ended it.
    ended: Option<String>,
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

/// The decision of a client, or the end of the run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    /// The guest runs here, although its source has not said so.
    Keep,
    /// This side does not wait for the source: missing pages are lost.
    Cancel,
    /// The run ends.
    End,
}

impl IncomingGuest {
    /// A guest announced at `at`.
    pub fn new(at: String, incoming: &Incoming, link: &Arc<Link>) -> Self {
        let now = IncomingProgress {
            at,
            mode: incoming.mode(),
            ..IncomingProgress::default()
        };
        Self {
            layout: incoming.machine().layout.clone(),
            link: Arc::clone(link),
            since: Instant::now(),
            state: Mutex::new(IncomingState {
                now,
                missing: None,
                decision: None,
                is_settled: false,
                is_over: false,
                ended: None,
            }),
            changed: Condvar::new(),
        }
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
                MissingRange::of(&self.layout, shown, ranges)
            }),
            stage,
            missing: missing.map(|missing| missing.len()),
            seconds: match state.missing {
                Some(_) => state.now.seconds,
                None => self.since.elapsed().as_secs_f64(),
            },
            bytes: self.link.bytes(),
            rate: self.link.rate(),
            ..state.now.clone()
        }
    }

    /// Present pages of the guest.
    pub fn present(&self) -> u64 {
        let missing = self
            .locked()
            .missing
            .as_ref()
            .map(|missing| missing().len());
        self.layout.pages().saturating_sub(missing.unwrap_or(0))
    }

    /// Whether the guest does not run here yet.
    pub fn is_awaited(&self) -> bool {
        matches!(
            self.locked().now.stage,
            IncomingStage::Memory | IncomingStage::Unknown
        )
    }

    /// Refuses to copy a guest with missing memory.
    pub fn check_whole(&self) -> Result<(), Refused> {
        match self.locked().stage_now() {
            IncomingStage::Whole => Ok(()),
            IncomingStage::Lost => Err(Refused::request(
                "pages of the guest were lost when its source ended, and a copy of its memory \
                 would need them, which ends the run: let the guest run, or stop it",
            )),
            _ => Err(Refused::request(
                "the rest of the guest's memory has not arrived: wait until the status says \
                 that it is whole",
            )),
        }
    }

    /// What is undecided, and what to do.
    pub fn undecided(&self) -> Option<String> {
        undecided_at_destination(&self.progress(RANGES_SHOWN))
    }

    /// Pages with content have arrived before the guest.
    pub fn count_arrived(&self, pages: u64) -> u64 {
        let mut state = self.locked();
        state.now.came += pages;
        state.now.came
    }

    /// The guest is prepared, and the connection was cut. Returns the decision; `None`: take the
    /// next connection.
    pub fn was_cut_while_prepared(&self, why: &MigrateError) -> Option<Decision> {
        self.was_cut(IncomingStage::Unknown, why);
        let decision = self.decision();
        self.locked().is_settled = decision == Some(Decision::Keep);
        decision
    }

    /// The guest runs, and these pages are missing.
    pub fn set_running(&self, missing: Missing, downtime: Duration, rounds: &[u64]) {
        let mut state = self.locked();
        state.now.late = missing().len();
        state.now.downtime_us = downtime.as_micros() as u64;
        state.now.again = again(rounds, state.now.late);
        state.now.seconds = self.since.elapsed().as_secs_f64();
        state.missing = Some(missing);
        // The source has to know how the guest ends, so a signal ends the guest first.
        self.link.outlive_signals();
        // A `keep` may have arrived after the source had handed the guest over: it is too late.
        state.decision = None;
        self.enter(state, IncomingStage::Rest);
    }

    /// The connection was cut, or a page cannot be put in place.
    pub fn was_cut_while_running(&self, why: &MigrateError) {
        let lacks = self.present() < self.layout.pages();
        let stage = match lacks {
            true => IncomingStage::Cut,
            // Only its source does not know that yet.
            false => IncomingStage::Whole,
        };
        self.was_cut(stage, why);
    }

    /// The source has connected again.
    pub fn reconnected(&self) {
        let mut state = self.locked();
        if state.decision == Some(Decision::Cancel) {
            // The request and the source arrived at the same time.
            state.decision = None;
        }
        if state.now.stage == IncomingStage::Cut {
            complain("the source of the guest has connected again");
            self.enter(state, IncomingStage::Rest);
        }
    }

    /// All pages have arrived, and the source knows it.
    pub fn set_whole(&self) {
        let mut state = self.locked();
        state.is_settled = true;
        self.enter(state, IncomingStage::Whole);
    }

    /// The missing pages never arrive.
    pub fn set_lost(&self) {
        let state = self.locked();
        if state.now.stage != IncomingStage::Whole {
            self.enter(state, IncomingStage::Lost);
        }
    }

    fn was_cut(&self, stage: IncomingStage, why: &MigrateError) {
        let why = visible(&why.to_string()).into_owned();
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
        // Otherwise the run ends anyway.
        let is_news = is_first && self.link.is_open();
        if let Some(text) = self.undecided().filter(|_| is_news) {
            complain(&text);
        }
    }

    fn enter(&self, mut state: MutexGuard<'_, IncomingState>, stage: IncomingStage) {
        state.now.stage = stage;
        drop(state);
        self.changed.notify_all();
    }

    /// The decision about the next connection; `None`: take it. Waits a little after a connection
    /// that `failed`.
    pub fn next(&self, failed: bool) -> Option<Decision> {
        if failed {
            let state = self.locked();
            if state.decision.is_none() {
                drop(self.changed.wait_timeout(state, PAUSE));
            }
        }
        self.decision()
    }

    /// The decision; `None`: take the next connection, which nothing has cut yet.
    fn decision(&self) -> Option<Decision> {
        let mut state = self.locked();
        // `decide` notes a decision and cuts the link under this lock. An earlier decision is taken
        // here, and its cut with it. The cut of a later decision stays.
        self.link.renew();
        let is_done = state.is_over && state.is_settled;
        let ends = is_done || !self.link.is_open();
        let decision = state.decision.take();
        decision.or(ends.then_some(Decision::End))
    }

    /// The guest shall run here, although its source has not said so. Waits until it does.
    pub fn keep(&self) -> Result<(), Refused> {
        let mut state = self.locked();
        if state.is_over {
            return Err(Refused::request(OVER));
        }
        match state.now.stage {
            IncomingStage::Unknown => {}
            IncomingStage::Memory => {
                return Err(Refused::request(
                    "the guest has not arrived: it is with its source",
                ));
            }
            _ => {
                return Err(Refused::request(
                    "no migration waits for a decision: ask for the status",
                ));
            }
        }
        self.decide(&mut state, Decision::Keep);
        while state.now.stage == IncomingStage::Unknown && !state.is_over {
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        match state.now.stage {
            IncomingStage::Unknown => Err(Refused::request(OVER)),
            _ => Ok(()),
        }
    }

    /// Ends the wait for the source: the missing pages are lost.
    pub fn cancel(&self) -> Result<(), Refused> {
        let mut state = self.locked();
        Err(Refused::request(match state.stage_now() {
            IncomingStage::Cut => {
                self.decide(&mut state, Decision::Cancel);
                return Ok(());
            }
            IncomingStage::Memory => {
                "the guest has not come: cancel its migration at its source, or stop this run"
            }
            IncomingStage::Unknown => {
                "it is not known whether the guest was handed over: keep it here, or stop this run"
            }
            IncomingStage::Rest => "the rest of the guest's memory is on its way: wait for its end",
            IncomingStage::Lost | IncomingStage::Whole => {
                "no migration is in progress: ask for the status"
            }
        }))
    }

    /// The guest has ended. `why`: a client or a signal has ended it, so this side does not wait
    /// for the rest of its memory.
    pub fn end(&self, why: Option<&str>) {
        let mut state = self.locked();
        state.is_over = true;
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
            None => self.changed.notify_all(),
        }
        self.link.wait_until(Instant::now() + linger);
        if why.is_none() && waits_for_source {
            complain(&format!(
                "the guest has ended; this side ends when its source knows that, and waits \
                 {LINGER:?} for another connection if there is none"
            ));
        }
    }

    /// How a client or a signal has ended the guest, if its source waits for more.
    pub fn has_ended(&self) -> Option<String> {
        let state = self.locked();
        let is_known = state.is_settled || state.now.stage == IncomingStage::Lost;
        state.ended.clone().filter(|_| !is_known)
    }

    fn decide(&self, state: &mut IncomingState, decision: Decision) {
        state.decision = Some(decision);
        self.link.cut();
        self.changed.notify_all();
    }

    fn locked(&self) -> MutexGuard<'_, IncomingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// A guest whose connection was cut while its source handed it over.
    fn unknown() -> IncomingGuest {
        let now = IncomingProgress {
            stage: IncomingStage::Unknown,
            ..IncomingProgress::default()
        };
        IncomingGuest {
            layout: serde_json::from_str(r#"{"slots":[]}"#).unwrap(),
            link: Arc::new(Link::of_destination(Arc::default())),
            since: Instant::now(),
            state: Mutex::new(IncomingState {
                now,
                missing: None,
                decision: None,
                is_settled: false,
                is_over: false,
                ended: None,
            }),
            changed: Condvar::new(),
        }
    }

    /// A decision also cuts the link, which must not count as the end of the run.
    #[test]
    fn a_decision_is_taken_whenever_it_comes() {
        let incoming_guest = unknown();
        assert_eq!(
            incoming_guest.was_cut_while_prepared(&MigrateError::Cancelled),
            None
        );
        incoming_guest.decide(&mut incoming_guest.locked(), Decision::Keep);
        assert!(
            !incoming_guest.link.is_open(),
            "a connection that is awaited ends"
        );
        assert_eq!(incoming_guest.decision(), Some(Decision::Keep));
        assert!(
            incoming_guest.link.is_open(),
            "the source may connect again"
        );
        incoming_guest.decide(&mut incoming_guest.locked(), Decision::Keep);
        assert_eq!(
            incoming_guest.was_cut_while_prepared(&MigrateError::Cancelled),
            Some(Decision::Keep)
        );
    }

    #[test]
    fn a_run_that_ends_answers_a_client_that_keeps_its_guest() {
        let incoming_guest = unknown();
        let kept = thread::scope(|scope| {
            let keeping = scope.spawn(|| incoming_guest.keep());
            incoming_guest.end(Some("stopped"));
            keeping.join().unwrap()
        });
        assert_eq!(kept, Err(Refused::request(OVER)));
        assert_eq!(incoming_guest.decision(), Some(Decision::End));
    }
}
