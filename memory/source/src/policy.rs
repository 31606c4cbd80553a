//! How long a source tries to provide a page, and what becomes of the page then.

use crate::PageRequest;
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, PoisonError};
use std::time::{Duration, Instant};

/// What a source does about pages that it cannot provide at present.
#[derive(Clone, Debug)]
pub struct Policy {
    /// How long it tries again, counted from the request. After that the source is *gone*.
    pub patience: Duration,
    /// What becomes of the pages of a gone source.
    pub when_gone: WhenGone,
}

/// What becomes of the pages of a gone source. No choice provides zeros.
#[derive(Clone)]
pub enum WhenGone {
    /// The source keeps the requests and keeps trying. The vCPUs wait.
    Hold,
    /// The function is called once, with the reason: it ends the run. Then the pages are lost, so
    /// that no vCPU waits for them.
    Kill(Arc<dyn Fn(&str) + Send + Sync>),
    /// The pages are lost. An access to one fails, as an access to memory with an uncorrectable
    /// error does.
    Poison,
}

/// Ten seconds, then [`WhenGone::Poison`].
impl Default for Policy {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(10),
            when_gone: WhenGone::Poison,
        }
    }
}

impl fmt::Debug for WhenGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hold => "Hold",
            Self::Kill(_) => "Kill",
            Self::Poison => "Poison",
        })
    }
}

/// A request, and its time.
#[derive(Debug)]
pub(crate) struct Asked {
    pub request: PageRequest,
    pub at: Instant,
}

impl Asked {
    pub fn now(request: PageRequest) -> Self {
        Self {
            request,
            at: Instant::now(),
        }
    }
}

/// A source's policy, and whether the source is gone at present. A source has one for all its
/// requests.
pub struct Outage {
    policy: Policy,
    gone: AtomicBool,
    killed: Once,
    /// Whether there is a reason.
    fails: AtomicBool,
    /// Why the last try failed; `None` after a page was provided.
    reason: Mutex<Option<String>, lock_order::SourceOutage>,
}

impl Outage {
    /// The status of a source before any failure.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            gone: AtomicBool::new(false),
            killed: Once::new(),
            fails: AtomicBool::new(false),
            reason: Mutex::default(),
        }
    }

    /// Records a failed try, and its reason.
    pub fn failed(&self, reason: &str) {
        *self.lock() = Some(reason.to_owned());
        self.fails.store(true, Ordering::Release);
    }

    /// Records that tries no longer fail: a page was provided, or may be.
    pub fn ended(&self) {
        // The first test keeps the cache line shared.
        if self.fails.load(Ordering::Relaxed) && self.fails.swap(false, Ordering::Acquire) {
            *self.lock() = None;
        }
    }

    /// Why the source provides no page at present: the reason of its last failed try.
    pub fn reason(&self) -> Option<String> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// When a request made at `at` is given up. `None`: never.
    pub fn deadline(&self, at: Instant) -> Option<Instant> {
        match self.policy.when_gone {
            WhenGone::Hold => None,
            WhenGone::Kill(_) | WhenGone::Poison => at.checked_add(self.policy.patience),
        }
    }

    /// As [`Outage::deadline`], after a failed try: while the source is gone, one failed try is
    /// enough.
    pub fn deadline_after_failure(&self, at: Instant) -> Option<Instant> {
        let deadline = self.deadline(at)?;
        Some(match self.gone.load(Ordering::Relaxed) {
            true => at,
            false => deadline,
        })
    }

    /// Records a provided page: the source is not gone.
    pub fn provided(&self) {
        self.ended();
        // The first test keeps the cache line shared.
        if self.gone.load(Ordering::Relaxed) {
            self.gone.store(false, Ordering::Relaxed);
        }
    }

    /// Gives up `request`, which is past its deadline: the source is gone for `reason`. The calling
    /// thread holds no lock.
    pub fn give_up(&self, request: &PageRequest, reason: &str) {
        self.gone.store(true, Ordering::Relaxed);
        if let WhenGone::Kill(end) = &self.policy.when_gone {
            // Other threads wait until the function has returned.
            self.killed.call_once(|| end(reason));
        }
        // Late: the page was provided in another way.
        let _ = request.fail(reason);
    }
}
