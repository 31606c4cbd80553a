//! The frames of the budget: the pool, its descriptors, the free map, and the watermarks.
//!
//! ```text
//! free frames   0 ....... reserve ........ low ................ high ............
//!                 store only   | direct reclaim  | background reclaim | nothing to do
//!                              |                 | is woken           |
//! ```
//! One lock guards the free map. A per-CPU page cache takes a batch of frames at a time. A 2 MiB
//! block is allocated only if `high` free frames remain, so a huge page never takes frames that a
//! vCPU may need to make progress. A thread that finds no free frame waits in a queue; the free map
//! keeps one frame for each thread in the queue (`turns`).
//!
//! A budget smaller than the pool withholds free frames: faults act as if these did not exist. A
//! budget that shrinks withholds them step by step, as reclaim in the background frees them. The
//! swap store may still take them, because a reclaim that compresses pages needs a frame before it
//! frees others; the next frames that it frees replace them.

use crate::block::{BlockDesc, FrameBlockState, Marked, Parts};
use crate::block_word::BlockNo;
use crate::desc::{Desc, FrameState};
use crate::free::FreeMap;
use crate::page_no::BLOCK;
use crate::pool::{Pool, prefetch, table_of};
use crate::span::Span;
use crate::turns::{Turn, Turns};
use lacuna_addr::{Level, Pfn};
use lacuna_swap::StoreFrames;
use lacuna_sync::{CachePadded, Mutex, MutexGuard, lock_order};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

/// Frames that a per-CPU page cache takes at once while free frames are few.
pub const BATCH: usize = 32;
/// The most that it takes at once while many frames are free. Each refill moves about ten cache
/// lines that other vCPUs have just written, and may wait for the lock.
const BATCH_MAX: usize = 256;

/// The budget: its memory, and which frames are free.
pub struct Frames {
    /// The memory.
    pub pool: Pool,
    descs: Box<[Desc]>,
    /// One for each block that the pool's end does not cut.
    blocks: Box<[BlockDesc]>,
    /// `free` and `count` are padded: a vCPU writes both when it refills its per-CPU page cache,
    /// and reads the fields above at every fault.
    free: CachePadded<Mutex<Free, lock_order::FreeFrames>>,
    count: CachePadded<Count>,
}

/// The number of frames in each use, for statistics.
struct Count {
    /// In the free map.
    free: AtomicUsize,
    /// The smallest number of frames in the free map so far.
    free_min: AtomicUsize,
    /// Held by the swap store.
    store: AtomicUsize,
    /// Free frames that only the swap store may take, so that reclaim can always compress more
    /// pages.
    reserve: AtomicUsize,
    /// Frames of the pool that the budget leaves out.
    left_out: AtomicUsize,
    /// Free frames that no fault may take: as many as the budget leaves out, or fewer while it
    /// shrinks.
    withheld: AtomicUsize,
    /// The number of frames that the existing vCPUs need to make progress.
    promised: AtomicUsize,
}

struct Free {
    map: FreeMap,
    turns: Turns,
}

impl Frames {
    /// All frames of `pool`, free.
    pub fn new(pool: Pool) -> Self {
        let frames = pool.frames();
        Self {
            descs: table_of(frames, Desc::default),
            blocks: (0..frames / BLOCK).map(|_| BlockDesc::default()).collect(),
            pool,
            free: CachePadded::new(Mutex::new(Free {
                map: FreeMap::new(frames),
                turns: Turns::default(),
            })),
            count: CachePadded::new(Count {
                free: AtomicUsize::new(frames),
                free_min: AtomicUsize::new(frames),
                store: AtomicUsize::new(0),
                reserve: AtomicUsize::new(0),
                left_out: AtomicUsize::new(0),
                withheld: AtomicUsize::new(0),
                promised: AtomicUsize::new(0),
            }),
        }
    }

    /// The number of frames in the pool: the largest budget.
    #[inline]
    pub fn total(&self) -> usize {
        self.descs.len()
    }

    /// The number of frames in the budget.
    pub fn budget(&self) -> usize {
        self.total() - self.count.left_out.load(Ordering::Relaxed)
    }

    /// Sets the budget, at most the whole pool. [`Frames::withhold`] must follow.
    pub fn set_budget(&self, frames: usize) {
        let left_out = self.total().saturating_sub(frames);
        self.count.left_out.store(left_out, Ordering::Relaxed);
    }

    /// Withholds free frames that the budget leaves out: those above the high watermark, and half
    /// of `freed`, the frames that reclaim has just freed. The other half is for faults, so that a
    /// guest runs while its budget shrinks, and the budget shrinks while the guest faults. If the
    /// budget has grown, no more frames are withheld than it leaves out.
    pub fn withhold(&self, freed: usize) {
        let free = self.lock();
        let withheld = self.count.withheld.load(Ordering::Relaxed);
        let left_out = self.count.left_out.load(Ordering::Relaxed);
        let spare = self.spare(&free);
        let taken = spare.saturating_sub(self.high()).max(spare.min(freed / 2));
        let withheld = (withheld + taken).min(left_out);
        self.count.withheld.store(withheld, Ordering::Relaxed);
    }

    /// The number of frames that the budget leaves out and that are not withheld yet.
    #[inline]
    pub fn left_to_withhold(&self) -> usize {
        let left_out = self.count.left_out.load(Ordering::Relaxed);
        left_out.saturating_sub(self.count.withheld.load(Ordering::Relaxed))
    }

    /// Extends the budget by at least an eighth of the withheld frames, because reclaim frees none.
    /// Returns whether any were withheld.
    pub fn extend_budget(&self) -> bool {
        let _free = self.lock();
        let withheld = self.count.withheld.load(Ordering::Relaxed);
        let left_out = self.count.left_out.load(Ordering::Relaxed);
        // Of a budget that has just grown, more frames are withheld than it leaves out.
        let left = withheld.saturating_sub((withheld / 8).max(BATCH));
        let left = left.min(left_out);
        self.count.withheld.store(left, Ordering::Relaxed);
        // This fails if a caller sets another budget meanwhile, and that one counts.
        let budget = &self.count.left_out;
        let _ = budget.compare_exchange(left_out, left, Ordering::Relaxed, Ordering::Relaxed);
        withheld > 0
    }

    /// The low watermark: below this number of free frames, reclaim in the background is woken.
    #[inline]
    pub fn low(&self) -> usize {
        let budget = self.budget();
        (budget / 64).clamp(16, 4096).min(budget / 4)
    }

    /// The high watermark, at which reclaim in the background stops.
    #[inline]
    pub fn high(&self) -> usize {
        2 * self.low()
    }

    /// The descriptor of a frame of the budget.
    #[inline]
    pub fn desc(&self, pfn: Pfn) -> &Desc {
        &self.descs[pfn.index()]
    }

    /// Whether `pfn` is Linux memory, not a frame of the budget.
    #[inline]
    pub fn is_linux(&self, pfn: Pfn) -> bool {
        pfn.index() >= self.descs.len()
    }

    /// The descriptor of a block of frames.
    #[inline]
    pub fn block(&self, block: BlockNo) -> &BlockDesc {
        &self.blocks[block.index()]
    }

    /// The block of `frame`; `None` if the pool's end cuts the block.
    #[inline]
    pub fn block_of(&self, frame: Pfn) -> Option<(BlockNo, &BlockDesc)> {
        let block = BlockNo::of(frame);
        self.blocks.get(block.index()).map(|desc| (block, desc))
    }

    /// The pages of `span` with `block`, their present or future block of frames.
    #[inline]
    pub fn parts<'a>(&'a self, span: Span<'a>, block: BlockNo) -> Parts<'a> {
        let first = block.index() * BLOCK;
        Parts {
            block_word: span.block_word,
            words: span.words,
            number: block,
            desc: self.block(block),
            frames: &self.descs[first..first + BLOCK],
        }
    }

    /// Prefetches the descriptor of frame `pfn`, because [`Frames::mark_dirty`] will follow soon.
    #[inline]
    pub fn prefetch(&self, pfn: Pfn) {
        // Linux memory has no descriptors.
        if let Some(desc) = self.descs.get(pfn.index()) {
            prefetch(desc);
        }
    }

    /// Records that the page in `pfn`, or the block of pages that begins there, was written.
    #[inline]
    pub fn mark_dirty(&self, pfn: Pfn, level: Level) {
        match level {
            // Linux memory has no descriptors, and needs no mark.
            Level::L4K => self.descs.get(pfn.index()).map_or((), Desc::mark_dirty),
            _ => self.mark_block_dirty(pfn),
        }
    }

    fn mark_block_dirty(&self, pfn: Pfn) {
        let block = BlockNo::of(pfn);
        // As above.
        let Some(desc) = self.blocks.get(block.index()) else {
            return;
        };
        if desc.mark_dirty() == Marked::Split {
            let first = block.index() * BLOCK;
            let frames = &self.descs[first..first + BLOCK];
            frames.iter().for_each(Desc::mark_dirty);
        }
    }

    /// The number of frames in the free map, a moment ago.
    #[inline]
    pub fn free_now(&self) -> usize {
        self.count.free.load(Ordering::Relaxed)
    }

    /// The number of free frames that a fault may take.
    #[inline]
    pub fn available(&self) -> usize {
        self.free_now().saturating_sub(self.kept())
    }

    /// The number of free frames that no fault may take.
    #[inline]
    fn kept(&self) -> usize {
        let count = &self.count;
        count.reserve.load(Ordering::Relaxed) + count.withheld.load(Ordering::Relaxed)
    }

    /// The smallest number of free frames so far.
    pub fn free_min(&self) -> usize {
        self.count.free_min.load(Ordering::Relaxed)
    }

    /// The number of frames that the swap store has.
    pub fn in_store(&self) -> usize {
        self.count.store.load(Ordering::Relaxed)
    }

    /// Moves up to a batch of free frames to `out`. It moves fewer when few frames are free, so
    /// that no per-CPU page cache hoards the last frames. Frames for waiting threads stay.
    pub fn take_batch(&self, out: &mut Vec<u32>) {
        let free = self.lock();
        let spare = self.spare(&free).saturating_sub(free.turns.len());
        let count = self.share(spare);
        self.move_out(free, count, out);
    }

    /// Moves up to `count` free frames to `out`, and leaves the low watermark and the frames for
    /// waiting threads.
    pub fn take_spare(&self, count: usize, out: &mut Vec<u32>) {
        let free = self.lock();
        let kept = self.low() + free.turns.len();
        let spare = self.spare(&free).saturating_sub(kept);
        self.move_out(free, count.min(spare), out);
    }

    /// A place at the end of the queue for frames.
    pub fn join_queue(&self) -> Turn {
        self.lock().turns.join()
    }

    /// Leaves the queue.
    pub fn leave_queue(&self, turn: Turn) {
        self.lock().turns.leave(turn);
    }

    /// The number of threads in the queue.
    pub fn queued(&self) -> usize {
        self.lock().turns.len()
    }

    /// As [`Frames::take_batch`], for a thread in the queue. If there are more free frames than
    /// threads before it in the queue, the thread gets at least one frame and leaves the queue.
    /// Otherwise nothing changes.
    pub fn take_turn(&self, turn: Turn, out: &mut Vec<u32>) {
        let mut free = self.lock();
        let spare = self.spare(&free);
        if spare <= free.turns.before(turn) {
            return;
        }
        free.turns.leave(turn);
        let unowed = spare.saturating_sub(free.turns.len());
        let count = self.share(unowed).max(1);
        self.move_out(free, count, out);
    }

    /// Sets how many frames all vCPUs together may need to make progress, including a batch in each
    /// per-CPU page cache.
    pub fn promise(&self, frames: usize) {
        self.count.promised.store(frames, Ordering::Relaxed);
    }

    /// The number of frames that one per-CPU page cache may take of `spare` free ones. It is an
    /// eighth while few are free, so that no cache hoards the last ones. It is more than [`BATCH`]
    /// only while more frames are free than all vCPUs may need.
    fn share(&self, spare: usize) -> usize {
        let of_few = spare.div_ceil(8).min(BATCH);
        let plenty = spare.saturating_sub(self.count.promised.load(Ordering::Relaxed));
        of_few.max((plenty / 64).min(BATCH_MAX))
    }

    /// The number of free frames outside the store's reserve and the withheld ones.
    fn spare(&self, free: &Free) -> usize {
        free.map.len().saturating_sub(self.kept())
    }

    fn move_out(&self, mut free: MutexGuard<'_, Free>, count: usize, out: &mut Vec<u32>) {
        let kept = out.len();
        free.map.take(count, out);
        self.note_free(free.map.len());
        // Setting the states may read descriptors from memory, so release the lock first.
        drop(free);
        for &index in &out[kept..] {
            self.descs[index as usize].set_state(FrameState::Cached);
        }
        // The cache hands out frames from its end. Reversed, it hands out neighbours in ascending
        // order.
        out[kept..].reverse();
    }

    /// Takes a whole block, if enough free frames remain.
    pub fn take_block(&self) -> Option<BlockNo> {
        if !self.has_plenty() {
            return None;
        }
        let mut free = self.lock();
        // Test again under the lock: other threads may have taken frames meanwhile.
        if self.spare(&free) < self.high() + BLOCK {
            return None;
        }
        let block = free.map.take_block()?;
        self.note_free(free.map.len());
        Some(block)
    }

    /// Takes the frame at `place` of `block`, or of any free block, if enough free frames remain.
    pub fn take_at(&self, place: usize, block: Option<BlockNo>) -> Option<Pfn> {
        let mut free = self.lock();
        if self.spare(&free) < self.high() + BLOCK {
            return None;
        }
        let frame = free.map.take_at(place, block)?;
        self.note_free(free.map.len());
        drop(free);
        self.desc(frame).set_state(FrameState::Cached);
        Some(frame)
    }

    /// Whether the free frames stay above the high watermark after a block is taken.
    #[inline]
    pub fn has_plenty(&self) -> bool {
        self.available() >= self.high() + BLOCK
    }

    /// Frees frames; their descriptors may be in any state.
    pub fn give(&self, frames: impl IntoIterator<Item = u32>) {
        let mut free = self.lock();
        for index in frames {
            self.descs[index as usize].free();
            free.map.give(index);
        }
        self.note_free(free.map.len());
    }

    /// Puts a whole block back. The descriptors of its frames say Free already.
    pub fn give_block(&self, block: BlockNo) {
        let mut free = self.lock();
        free.map.give_block(block);
        self.note_free(free.map.len());
    }

    /// Whether a thread has isolated a frame or a block. That thread will end the isolation.
    pub fn any_isolated(&self) -> bool {
        let mut frames = self.descs.iter().map(Desc::state);
        let mut blocks = self.blocks.iter().map(BlockDesc::state);
        frames.any(|state| state == FrameState::Isolated)
            || blocks.any(|state| state == FrameBlockState::Isolated)
    }

    /// Whether `pfn` is in the free map, for `verify`.
    pub fn is_free(&self, pfn: Pfn) -> bool {
        self.lock().map.contains(pfn)
    }

    /// Checks the free map, and returns how many frames it has.
    ///
    /// # Panics
    /// If its counts do not match.
    pub fn verify_free(&self) -> usize {
        let free = self.lock();
        free.map.verify();
        free.map.len()
    }

    fn note_free(&self, now: usize) {
        self.count.free.store(now, Ordering::Relaxed);
        self.count.free_min.fetch_min(now, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The budget, for a swap device that keeps pages in it.
pub struct BudgetFrames(pub Arc<Frames>);

impl StoreFrames for BudgetFrames {
    fn budget(&self) -> usize {
        self.0.budget()
    }

    fn reserve(&self, frames: usize) {
        self.0.count.reserve.store(frames, Ordering::Relaxed);
    }

    fn take(&self) -> Option<Pfn> {
        let mut free = self.0.lock();
        let mut taken = Vec::with_capacity(1);
        free.map.take(1, &mut taken);
        let pfn = Pfn::new(taken.pop()?);
        self.0.note_free(free.map.len());
        self.0.count.store.fetch_add(1, Ordering::Relaxed);
        self.0.desc(pfn).set_state(FrameState::Store);
        Some(pfn)
    }

    fn give(&self, pfn: Pfn) {
        self.check(pfn);
        self.0.count.store.fetch_sub(1, Ordering::Relaxed);
        self.0.give([pfn.index() as u32]);
    }

    fn read(&self, pfn: Pfn, offset: usize, into: &mut [u8]) {
        self.check(pfn);
        self.0.pool.frame(pfn).read(offset, into);
    }

    fn write(&self, pfn: Pfn, offset: usize, bytes: &[u8]) {
        self.check(pfn);
        self.0.pool.frame(pfn).write(offset, bytes);
    }
}

impl BudgetFrames {
    /// # Panics
    /// If the device has not taken the frame.
    fn check(&self, pfn: Pfn) {
        let state = self.0.desc(pfn).state();
        assert_eq!(state, FrameState::Store, "not the store's frame");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_larger_budget_is_not_undone_by_reclaim_that_frees_nothing() {
        let frames = Frames::new(Pool::new(1024, 0).unwrap());
        frames.set_budget(256);
        frames.withhold(0);
        assert_eq!(frames.left_to_withhold(), 0);
        frames.set_budget(1024);
        assert!(frames.extend_budget());
        assert_eq!((frames.budget(), frames.left_to_withhold()), (1024, 0));
        assert!(!frames.extend_budget());
    }

    #[test]
    fn a_frame_is_owed_to_the_longest_waiting() {
        let frames = Frames::new(Pool::new(64, 0).unwrap());
        let mut all = Vec::new();
        while frames.available() > 0 {
            frames.take_batch(&mut all);
        }
        let (first, second) = (frames.join_queue(), frames.join_queue());
        frames.give(all.drain(..1));
        let mut taken = Vec::new();
        frames.take_batch(&mut taken);
        frames.take_turn(second, &mut taken);
        assert_eq!(
            (taken.len(), frames.available()),
            (0, 1),
            "it is not theirs"
        );
        frames.take_turn(first, &mut taken);
        assert_eq!((taken.len(), frames.queued()), (1, 1));
        frames.give(all.drain(..1));
        frames.leave_queue(second);
        frames.take_batch(&mut taken);
        assert_eq!(
            (taken.len(), frames.queued()),
            (2, 0),
            "no thread waits any more"
        );
    }
}
