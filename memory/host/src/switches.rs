//! The values that a running host's settings change: see `settings`.

use crate::region::HugePages;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The settings beside the budget, which [`Frames`](lacuna_frames::Frames) has.
pub(crate) struct Switches {
    /// The policy with which the host was made.
    pub huge: HugePages,
    /// Whether the host makes compound pages.
    pub huge_on: AtomicBool,
    /// Added to each transfer, and to each request to a page source.
    pub delay_ns: AtomicU64,
}

impl Switches {
    pub fn new(huge: HugePages) -> Self {
        Self {
            huge,
            huge_on: AtomicBool::new(huge != HugePages::Never),
            delay_ns: AtomicU64::new(0),
        }
    }

    /// The policy at present.
    #[inline]
    pub fn huge_now(&self) -> HugePages {
        match (self.huge_on.load(Ordering::Relaxed), self.huge) {
            (false, _) => HugePages::Never,
            (true, HugePages::Never) => HugePages::Madvise,
            (true, policy) => policy,
        }
    }
}
