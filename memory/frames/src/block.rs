//! The descriptor of a block of frames, and the two changes between compound page and split.
//!
//! ```text
//!            block word CAS won                       isolate (CAS)
//!   Split ----------------> Used <-----------------------------> Isolated
//!     ^                                          publish            |
//!     '-------------------------------------------------------------'
//!                   the compound page is split, or its region removed
//! ```
//! **Split**: each frame of the block has its own state. While the block is a compound page, the
//! descriptors of its frames say Free although the free map does not have them, and only their
//! dirty marks count.
//!
//! The block has one dirty mark for all 512 pages. A split hands this mark to the frames. Another
//! thread may set it at that moment:
//!
//! ```text
//! marker                              splitter
//! dirty := 1; fence                   state := Split; fence
//! state is Split? marks the frame(s)  dirty was 1? marks every frame
//! ```
//! It is a Dekker exchange: at least one of the two threads sees the other's store.

use crate::block_word::{BlockNo, BlockWord, PageBlockState};
use crate::desc::{Desc, Dirt};
use crate::page_no::PageNo;
use crate::residency::{PageState, PageWord};
use lacuna_sync::shim::atomic::AtomicU8;
use lacuna_sync::shim::{AtomicU32, AtomicU64, Ordering, fence};

/// The state of a block of frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FrameBlockState {
    /// The block is split: each frame has its own state.
    Split,
    /// It is a compound page.
    Used,
    /// It is a compound page, and a thread may split it.
    Isolated,
}

/// The descriptor of a block of frames.
pub struct BlockDesc {
    /// The first page of the compound page, while Used or Isolated.
    owner: AtomicU64,
    state: AtomicU8,
    dirty: AtomicU8,
    /// One bit for each of the last eight turns of the clock hand: the block was accessed. The
    /// latest turn is the highest bit.
    history: AtomicU8,
    /// A sampled split is in progress: reclaim spares the pages until the hand's next turn.
    sampled: AtomicU8,
    /// The result of the last sampled split: how often its pages were accessed, compared with pages
    /// in swap, in sixteenths.
    worth: AtomicU8,
    /// Pages read back from swap before the sampled split began, modulo 2^32.
    read_back: AtomicU32,
}

/// A block's result before its first sampled split: exactly the threshold. So each block is sampled
/// once before a block with a better result is sampled again.
const UNTRIED: u8 = 8;

#[cfg(not(loom))]
const _: () = assert!(size_of::<BlockDesc>() == 24);

/// Whether the thread that marks a block dirty has to mark frames too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Marked {
    /// No: the block is a compound page, or the splitting thread sees the mark.
    Done,
    /// Yes: the block may have been split before the mark.
    Split,
}

impl Default for BlockDesc {
    fn default() -> Self {
        Self {
            owner: AtomicU64::new(0),
            state: AtomicU8::new(FrameBlockState::Split as u8),
            dirty: AtomicU8::new(0),
            history: AtomicU8::new(0),
            sampled: AtomicU8::new(0),
            worth: AtomicU8::new(UNTRIED),
            read_back: AtomicU32::new(0),
        }
    }
}

impl BlockDesc {
    /// Sets the future owner, before the block word names a block of fresh frames.
    pub fn prepare(&self, owner: PageNo, dirty: Dirt) {
        self.adopt(owner);
        self.dirty
            .store(u8::from(dirty == Dirt::Dirty), Ordering::Relaxed);
    }

    /// As `prepare`, for possibly mapped frames: the dirty mark stays.
    pub fn adopt(&self, owner: PageNo) {
        self.owner.store(owner.get(), Ordering::Relaxed);
        self.history.store(u8::MAX, Ordering::Relaxed);
        self.sampled.store(0, Ordering::Relaxed);
        self.worth.store(UNTRIED, Ordering::Relaxed);
    }

    /// Ends the preparation or the isolation: the block word names the block of frames, or the
    /// isolating thread does not split it.
    pub fn publish(&self) {
        self.state
            .store(FrameBlockState::Used as u8, Ordering::Release);
    }

    /// From now on the frames of the isolated block have their own states.
    pub fn mark_split(&self) {
        self.state
            .store(FrameBlockState::Split as u8, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// The present state.
    #[inline]
    pub fn state(&self) -> FrameBlockState {
        match self.state.load(Ordering::Acquire) {
            0 => FrameBlockState::Split,
            1 => FrameBlockState::Used,
            _ => FrameBlockState::Isolated,
        }
    }

    /// Takes the right to split the block, or to prevent a split. `None` if another thread has that
    /// right, or if the block is split.
    #[inline]
    pub fn isolate(&self) -> Option<PageNo> {
        let (used, isolated) = (FrameBlockState::Used as u8, FrameBlockState::Isolated as u8);
        self.state
            .compare_exchange(used, isolated, Ordering::AcqRel, Ordering::Relaxed)
            .ok()
            .map(|_| self.owner())
    }

    /// The first page of the compound page. Valid while Used or Isolated.
    #[inline]
    pub fn owner(&self) -> PageNo {
        PageNo::new(self.owner.load(Ordering::Relaxed))
    }

    /// Marks the block dirty: a page of it was written or is about to be.
    #[inline]
    pub fn mark_dirty(&self) -> Marked {
        if self.dirty.load(Ordering::Relaxed) == 0 {
            self.dirty.store(1, Ordering::Release);
        }
        // The fence is needed even if the mark was already set: that mark may have been made after
        // the splitter looked.
        fence(Ordering::SeqCst);
        match self.state() {
            FrameBlockState::Split => Marked::Split,
            FrameBlockState::Used | FrameBlockState::Isolated => Marked::Done,
        }
    }

    /// Records whether the clock hand found the block accessed. Returns its warmth before that.
    pub fn remember(&self, young: Youth) -> Warmth {
        let history = self.history.load(Ordering::Relaxed);
        let now = history >> 1 | u8::from(young == Youth::Young) << 7;
        self.history.store(now, Ordering::Relaxed);
        Warmth {
            history,
            worth: self.worth.load(Ordering::Relaxed),
        }
    }

    /// Records the result of a sampled split.
    pub fn note_worth(&self, sixteenths: u64) {
        self.worth
            .store(sixteenths.min(255) as u8, Ordering::Relaxed);
    }

    /// Begins a sampled split. `read_back` is the number of pages read back from swap so far.
    pub fn begin_sample(&self, read_back: u64) {
        self.read_back.store(read_back as u32, Ordering::Relaxed);
        self.sampled.store(1, Ordering::Relaxed);
    }

    /// The number of pages read back from swap since the sampled split began. `read_back` is the
    /// number so far.
    pub fn read_back_since(&self, read_back: u64) -> u32 {
        (read_back as u32).wrapping_sub(self.read_back.load(Ordering::Relaxed))
    }

    /// Whether a sampled split is in progress.
    pub fn is_sampled(&self) -> bool {
        self.sampled.load(Ordering::Relaxed) != 0
    }

    /// Ends the sampled split. Returns whether there was one.
    pub fn end_sample(&self) -> bool {
        self.is_sampled() && self.sampled.swap(0, Ordering::Relaxed) != 0
    }
}

/// How much a block is used: its recent turns first, then the result of its last sampled split.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Warmth {
    history: u8,
    worth: u8,
}

/// Whether a block or page was accessed since the clock hand last passed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Youth {
    /// Accessed.
    Young,
    /// Not accessed.
    Old,
}

/// A block of pages with its present or future block of frames.
#[derive(Clone, Copy)]
pub struct Parts<'a> {
    /// The word of the block of pages.
    pub block_word: &'a BlockWord,
    /// The words of its pages.
    pub words: &'a [PageWord],
    /// The block of frames.
    pub number: BlockNo,
    /// Its descriptor.
    pub desc: &'a BlockDesc,
    /// The descriptors of its frames.
    pub frames: &'a [Desc],
}

impl Parts<'_> {
    /// Splits a compound page. The caller has isolated the block. The pages stay in their frames,
    /// so no MMU notifier has to unmap them.
    pub fn split(self, first: PageNo) {
        for (i, (word, desc)) in self.words.iter().zip(self.frames).enumerate() {
            desc.adopt(first.plus(i));
            let frame = self.number.frame(i);
            word.advance(|state| state.split_off(frame))
                .expect("no page word of a compound page changes alone");
        }
        let block = self.number;
        self.block_word
            .change(PageBlockState::Compound { block }, PageBlockState::Split)
            .expect("only the thread that isolated a block changes its word");
        self.desc.mark_split();
        if self.desc.dirty.swap(0, Ordering::AcqRel) != 0 {
            self.frames.iter().for_each(Desc::mark_dirty);
        }
        self.frames.iter().for_each(Desc::publish);
    }

    /// Split -> Compound, if each page word still has its state in `from`. Otherwise restores all
    /// words. A fault that sees Collapsed under Split waits for the caller's lock.
    pub fn collapse(self, from: &[PageState]) -> Result<(), TakenBack> {
        let pairs = || self.words.iter().zip(from);
        for (done, (word, &state)) in pairs().enumerate() {
            if word.change(state, PageState::Collapsed).is_err() {
                for (word, &state) in pairs().take(done) {
                    word.change(PageState::Collapsed, state)
                        .expect("no thread moves a collapsed page");
                }
                return Err(TakenBack);
            }
        }
        let block = self.number;
        self.block_word
            .change(PageBlockState::Split, PageBlockState::Compound { block })
            .expect("only the thread that isolated the pages changes the block word");
        Ok(())
    }
}

/// A fault took a page back during a collapse.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TakenBack;
