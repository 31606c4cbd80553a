//! The states of dirty tracking: how a VM detects writes, where it records them, and whether a slot
//! logs. `logging` switches them, `harvest` reads the marks.

use crate::Rmap;
use lacuna_slots::{
    Delivery, Detection, DirtyBitmap, DirtyError, DirtyStats, HugeLeaves, RingConsumer, Slot,
};
use lacuna_sync::shim::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence, yield_now};
use lacuna_sync::{Mutex, assert_may_wait, lock_order};
use std::sync::{Arc, OnceLock};

/// The counters of one vCPU: the vCPU writes them, any thread reads them. They have cache lines of
/// their own, because the counters of two vCPUs may be allocated side by side.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Counts([AtomicU64; 5]);

/// The counted events.
#[derive(Clone, Copy)]
pub(crate) enum Count {
    /// A write fault marked a page under its range lock.
    Fault,
    /// A fast page fault marked a page.
    FastPageFault,
    /// A walk ended because the vCPU's log was full.
    LogFull,
    /// A vCPU's nonempty log was flushed.
    Flush,
    /// A page was marked when a log was flushed.
    Logged,
}

impl Counts {
    #[inline]
    pub(crate) fn add(&self, what: Count, more: u64) {
        let count = &self.0[what as usize];
        // A load and a store suffice, because there is one writer.
        count.store(count.load(Ordering::Relaxed) + more, Ordering::Relaxed);
    }

    fn read(&self) -> DirtyStats {
        let [faults, fast_page_faults, log_full, flushes, logged] =
            [0, 1, 2, 3, 4].map(|i: usize| self.0[i].load(Ordering::Relaxed));
        DirtyStats {
            faults,
            fast_page_faults,
            log_full,
            flushes,
            logged,
        }
    }
}

/// The dirty tracking of a VM.
pub(crate) struct Tracking {
    /// Whether pages are re-armed by clearing D ([`Detection::Pml`]), not by write protection.
    /// Exact while `layout` is held.
    by_log: AtomicBool,
    /// Whether vCPUs log the pages for which they set D. False only while no leaf has W without D.
    pub(crate) vcpus_log: AtomicBool,
    /// Where marks go; unset until a caller chooses it or relies on the default.
    delivery: OnceLock<Delivery>,
    /// The reading ends of all vCPUs' rings.
    pub(crate) rings: Mutex<Vec<RingConsumer>, lock_order::DirtyRings>,
    /// The counters of all vCPUs.
    pub(crate) counts: Mutex<Vec<Arc<Counts>>, lock_order::DirtyCounts>,
}

impl Default for Tracking {
    fn default() -> Self {
        let logs = Detection::default() == Detection::Pml;
        Self {
            by_log: AtomicBool::new(logs),
            vcpus_log: AtomicBool::new(logs),
            delivery: OnceLock::new(),
            rings: Mutex::default(),
            counts: Mutex::default(),
        }
    }
}

impl Tracking {
    pub(crate) fn delivery(&self) -> Delivery {
        self.delivery.get().copied().unwrap_or(Delivery::Bitmap)
    }

    /// The delivery, for a caller that relies on it: it cannot change any more.
    pub(crate) fn settled_delivery(&self) -> Delivery {
        *self.delivery.get_or_init(|| Delivery::Bitmap)
    }

    pub(crate) fn choose(&self, delivery: Delivery) -> Result<(), DirtyError> {
        self.delivery.set(delivery).map_err(|_| DirtyError::TooLate)
    }

    pub(crate) fn has_bitmaps(&self) -> bool {
        self.delivery().has_bitmaps()
    }

    pub(crate) fn detection(&self) -> Detection {
        match self.by_log.load(Ordering::Relaxed) {
            true => Detection::Pml,
            false => Detection::WriteProtect,
        }
    }

    pub(crate) fn set_detection(&self, detection: Detection) {
        self.by_log
            .store(detection == Detection::Pml, Ordering::Relaxed);
    }

    pub(crate) fn stats(&self) -> Vec<DirtyStats> {
        let counts = self.counts.lock().expect("no panic under this lock");
        counts.iter().map(|counts| counts.read()).collect()
    }
}

/// A slot's log. The slot keeps it when it moves or changes its flags.
#[derive(Default)]
pub(crate) struct SlotLog {
    /// Whether the slot logs. For work on a block, the value is exact while the block's range lock
    /// is held. Otherwise it may change at any time.
    on: AtomicBool,
    /// Whether a huge leaf is split before its pages are re-armed ([`HugeLeaves::Eager`]), not by
    /// the first write to it.
    eager: AtomicBool,
    /// The number of [`crate::Writing`]s in progress that have not seen the log on.
    pub(crate) writers: AtomicU32,
    /// The marked pages. Made when logging first begins, if the VM has bitmaps.
    bitmap: OnceLock<DirtyBitmap>,
}

impl SlotLog {
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        // Acquire: a caller that sees a new log as on also sees how the previous log left the
        // tables.
        self.on.load(Ordering::Acquire)
    }

    pub(crate) fn huge(&self) -> HugeLeaves {
        match self.eager.load(Ordering::Relaxed) {
            true => HugeLeaves::Eager,
            false => HugeLeaves::Lazy,
        }
    }

    pub(crate) fn turn_on(&self, huge: HugeLeaves) {
        self.eager
            .store(huge == HugeLeaves::Eager, Ordering::Relaxed);
        // Release: a vCPU that sees a leaf without D, after a log's flush, sees this too.
        self.on.store(true, Ordering::Release);
    }

    /// Waits until each host write in progress has ended, or has seen that the log is on.
    pub(crate) fn wait_for_writers(&self) {
        assert_may_wait();
        // Pairs with the fence in `Writing::begin`.
        fence(Ordering::SeqCst);
        while self.writers.load(Ordering::Acquire) > 0 {
            yield_now();
        }
    }

    pub(crate) fn turn_off(&self) {
        self.on.store(false, Ordering::Release);
    }

    pub(crate) fn bitmap(&self) -> Option<&DirtyBitmap> {
        self.bitmap.get()
    }

    /// The bitmap, with no page marked.
    pub(crate) fn clean_bitmap(&self, pages: usize) -> &DirtyBitmap {
        let bitmap = self.bitmap.get_or_init(|| DirtyBitmap::new(pages));
        let mut dropped = vec![0; bitmap.words()];
        bitmap.take(0, &mut dropped);
        bitmap
    }

    /// Marks a page written by the host, or by a vCPU of a VM without rings.
    #[inline]
    pub(crate) fn mark(&self, page: usize) {
        if let Some(bitmap) = self.bitmap.get() {
            let _ = bitmap.mark(page);
        }
    }

    /// Marks many pages. Returns their number.
    #[inline]
    pub(crate) fn mark_all(&self, pages: impl Iterator<Item = usize>) -> usize {
        let bitmap = self.bitmap.get();
        bitmap
            .expect("a slot that logs without rings has a bitmap")
            .mark_all(pages)
    }
}

/// The bitmap of a logging slot.
pub(crate) fn bitmap_of(slot: &Slot<Rmap>) -> Result<&DirtyBitmap, DirtyError> {
    let log = slot.attach.log();
    if !log.is_on() {
        return Err(DirtyError::NotLogging(slot.id));
    }
    log.bitmap().ok_or(DirtyError::NoBitmap)
}
