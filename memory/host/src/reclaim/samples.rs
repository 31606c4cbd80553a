//! The compound pages from which reclaim chooses the next sampled split.

use lacuna_frames::{BlockNo, Warmth};

/// The compound pages that the clock hand has met in this round.
#[derive(Default)]
pub(crate) struct SampledSplits {
    pub met: usize,
    pub coldest: Option<(Warmth, BlockNo)>,
    /// The block to split when the hand meets it again.
    pub chosen: Option<BlockNo>,
    /// Pages read back from swap until the choice of the last sampled split.
    pub read_back: u64,
}
