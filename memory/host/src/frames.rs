//! The frames of the budget: the pool, its descriptors, the free list, and the watermarks.
//!
//! ```text
//! free frames   0 ....... reserve ........ low ................ high ............
//!                 store only   | direct reclaim  | background reclaim | nothing to do
//!                              |                 | is woken           |
//! ```
//! The free list is one vector behind one lock, and nobody takes single frames from it: a vCPU's
//! magazine moves a batch at a time.

use crate::desc::{Desc, FrameState};
use crate::pool::{FramePtr, Pool};
use lacuna_addr::Pfn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Most frames that move between a magazine and the free list at once.
pub(crate) const BATCH: usize = 32;

pub(crate) struct Frames {
    pub pool: Pool,
    descs: Box<[Desc]>,
    free: Mutex<Vec<u32>>,
    /// Length of `free`, for those who only want to know.
    free_now: AtomicUsize,
    free_min: AtomicUsize,
    store: AtomicUsize,
    /// Frames that only the swap store may take, so that reclaim can always compress some more
    /// pages.
    reserve: AtomicUsize,
    pub low: usize,
    pub high: usize,
}

impl Frames {
    pub fn new(pool: Pool) -> Self {
        let frames = pool.frames();
        // Reversed: the first frames out are neighbours, in ascending order.
        let free: Vec<u32> = (0..frames as u32).rev().collect();
        let low = (frames / 64).clamp(16, 4096).min(frames / 4);
        Self {
            descs: (0..frames).map(|_| Desc::new()).collect(),
            free: Mutex::new(free),
            free_now: AtomicUsize::new(frames),
            free_min: AtomicUsize::new(frames),
            store: AtomicUsize::new(0),
            reserve: AtomicUsize::new(0),
            low,
            high: low * 2,
            pool,
        }
    }

    pub fn len(&self) -> usize {
        self.descs.len()
    }

    #[inline]
    pub fn desc(&self, pfn: Pfn) -> &Desc {
        &self.descs[pfn.index()]
    }

    /// Frames on the free list, a moment ago.
    pub fn free_now(&self) -> usize {
        self.free_now.load(Ordering::Relaxed)
    }

    /// Free frames that a fault may have.
    pub fn available(&self) -> usize {
        self.free_now()
            .saturating_sub(self.reserve.load(Ordering::Relaxed))
    }

    /// The fewest free frames there ever were.
    pub fn free_min(&self) -> usize {
        self.free_min.load(Ordering::Relaxed)
    }

    /// Frames that the swap store has.
    pub fn in_store(&self) -> usize {
        self.store.load(Ordering::Relaxed)
    }

    /// Moves up to a batch of free frames to `out`, fewer when they run short so that no magazine
    /// hoards the last ones.
    pub fn take_batch(&self, out: &mut Vec<u32>) {
        let mut free = self.lock();
        let available = free
            .len()
            .saturating_sub(self.reserve.load(Ordering::Relaxed));
        let count = available.div_ceil(8).min(BATCH);
        let kept = free.len() - count;
        // Reversed again: the magazine hands out from its end.
        out.extend(free.drain(kept..).rev());
        for &index in &out[out.len() - count..] {
            self.descs[index as usize].set_state(FrameState::Cached);
        }
        self.note_free(free.len());
    }

    /// Puts frames back, whoever had them.
    pub fn give(&self, frames: impl IntoIterator<Item = u32>) {
        let mut free = self.lock();
        for index in frames {
            self.descs[index as usize].set_state(FrameState::Free);
            free.push(index);
        }
        self.note_free(free.len());
    }

    /// Every free frame, for `verify`.
    pub fn free_list(&self) -> Vec<u32> {
        self.lock().clone()
    }

    fn note_free(&self, now: usize) {
        self.free_now.store(now, Ordering::Relaxed);
        self.free_min.fetch_min(now, Ordering::Relaxed);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A swap store's hold on the budget: what it takes is charged to it.
#[derive(Clone)]
pub struct StoreFrames(Arc<Frames>);

impl StoreFrames {
    pub(crate) const fn new(frames: Arc<Frames>) -> Self {
        Self(frames)
    }

    /// Frames of the whole budget.
    pub fn budget(&self) -> usize {
        self.0.len()
    }

    /// Keeps the last `frames` free ones for the store.
    pub fn reserve(&self, frames: usize) {
        self.0.reserve.store(frames, Ordering::Relaxed);
    }

    /// A frame, from the reserve too if need be. `None` when there is none left at all.
    pub fn take(&self) -> Option<Pfn> {
        let mut free = self.0.lock();
        let index = free.pop()?;
        self.0.note_free(free.len());
        self.0.store.fetch_add(1, Ordering::Relaxed);
        let pfn = Pfn::new(index);
        self.0.desc(pfn).set_state(FrameState::Store);
        Some(pfn)
    }

    /// Gives a frame of [`StoreFrames::take`] back.
    pub fn give(&self, pfn: Pfn) {
        assert_eq!(
            self.0.desc(pfn).state(),
            FrameState::Store,
            "not the store's frame"
        );
        self.0.store.fetch_sub(1, Ordering::Relaxed);
        self.0.give([pfn.index() as u32]);
    }

    /// The bytes of a frame that the store has.
    pub fn frame(&self, pfn: Pfn) -> FramePtr<'_> {
        self.0.pool.frame(pfn)
    }
}
