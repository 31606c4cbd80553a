//! Dirty logging: the pages that the guest and this process have written.
//!
//! When a harvest returns, its pages are re-armed and flushed, so the caller may copy them. KVM
//! does not see this process's writes through [`Vm`](crate::Vm). A bitmap for each slot records
//! them, and `get_dirty` returns them with the guest's.
//!
//! UNSAFETY: descriptors are borrowed from `kvm-ioctls` as raw numbers, because its types do not
//! implement `AsFd`.

use crate::kick::VcpuKicks;
use crate::memory::Memory;
use crate::ring::Ring;
use crate::slots::{KvmSlot, SlotTable, set_logging_flag};
use crate::tracker::Tracker;
use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, kvm_enable_cap,
};
use kvm_ioctls::VmFd;
use lacuna_addr::PAGE_SIZE;
use lacuna_slots::{Delivery, DetectedBy, DirtyError, Initially, Logging, SlotId};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use lacuna_sys::{Errno, Pagemap, Written, clear_dirty_log, reset_dirty_rings};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages of a new log that one call clears, 64 MiB: KVM holds its MMU lock during the call, and a
/// vCPU's fault waits for the lock.
const CLEARED_AT_ONCE: usize = 16384;

/// The parameter of the module kvm_intel that turns page-modification logging on.
const KVM_INTEL_PML: &str = "/sys/module/kvm_intel/parameters/pml";

fn detected_by(tracker: Tracker) -> DetectedBy {
    match tracker {
        Tracker::Pagemap => DetectedBy::PageMap,
        // Only Intel's processors have such a log.
        Tracker::Kvm => match std::fs::read_to_string(KVM_INTEL_PML) {
            Ok(text) if text.starts_with(['Y', '1']) => DetectedBy::Pml,
            _ => DetectedBy::WriteProtect,
        },
    }
}

/// For `map_err`: the kernel refused to `step`.
fn refused<E: Into<Errno>>(step: &'static str) -> impl Fn(E) -> DirtyError {
    move |e| DirtyError::Kernel {
        step,
        errno: e.into().raw_os_error(),
    }
}

/// The state of a VM's dirty logging.
pub struct Dirty {
    delivery: Delivery,
    tracker: Tracker,
    detected_by: DetectedBy,
    /// Whether KVM's bitmaps begin with all pages set. With this setting, a cleared bit also
    /// write-protects the huge leaf over its page. So it must not change while a slot logs.
    begins_set: bool,
    state: Mutex<DirtyState, lock_order::KvmDirty>,
    /// How often the rings were reset.
    resets: AtomicU64,
}

/// The state for one thread at a time, which switches logging or harvests.
pub struct DirtyState {
    /// One for each vCPU.
    rings: Vec<Ring>,
    /// Whether a ring has overflowed, and no reap has passed on all pages since.
    all_written: bool,
    /// Whether a ring has overflowed, and not all pages were re-armed since.
    rearms_all: bool,
    pagemap: Option<Pagemap>,
}

impl Dirty {
    /// `begins_set`: this KVM has `MemoryCapability::LogInitiallySet`.
    ///
    /// # Errors
    /// The page map cannot be opened, or the delivery is a ring, which a page map cannot fill.
    pub fn new(delivery: Delivery, tracker: Tracker, begins_set: bool) -> Result<Self, DirtyError> {
        let pagemap = match (tracker, delivery) {
            (Tracker::Pagemap, Delivery::Bitmap) => {
                Some(Pagemap::open().map_err(refused("open the page map"))?)
            }
            (Tracker::Pagemap, Delivery::Ring { .. }) => {
                return Err(DirtyError::Unsupported("rings filled from the page map"));
            }
            (Tracker::Kvm, _) => None,
        };
        let state = DirtyState {
            rings: Vec::new(),
            all_written: false,
            rearms_all: false,
            pagemap,
        };
        Ok(Self {
            delivery,
            tracker,
            detected_by: detected_by(tracker),
            begins_set: begins_set && (tracker, delivery) == (Tracker::Kvm, Delivery::Bitmap),
            state: Mutex::new(state),
            resets: AtomicU64::new(0),
        })
    }

    /// Adds a vCPU's ring, before it runs.
    pub fn add_ring(&self, ring: Ring) {
        self.state().rings.push(ring);
    }

    pub fn delivery(&self) -> Delivery {
        self.delivery
    }

    pub fn detected_by(&self) -> DetectedBy {
        self.detected_by
    }

    /// How often the rings were reset. A ring that was full at an older number may have room now.
    pub fn resets(&self) -> u64 {
        self.resets.load(Ordering::Acquire)
    }

    /// Excludes other harvests and changes of slots until the result is dropped.
    pub fn state(&self) -> MutexGuard<'_, DirtyState> {
        self.state.lock().expect("no panic under this lock")
    }
}

impl DirtyState {
    /// Protects the written pages, and sets their bits in `out`. After an error, `out` has the bits
    /// of the pages protected so far.
    fn take_bits(&self, slot: &KvmSlot, out: &mut [u64]) -> Result<(), DirtyError> {
        let pagemap = self.pagemap.as_ref().expect("opened with the VM");
        let scan = pagemap.written(slot.backing, Written::Protect, |run| {
            let first = (run.start().get() - slot.backing.start().get()) as usize / PAGE_SIZE;
            for page in first..first + run.pages() as usize {
                out[page / 64] |= 1 << (page % 64);
            }
        });
        scan.map_err(refused("scan the page map"))
    }

    /// Abandons the content of overflowed rings. No vCPU is in the guest.
    fn find_overflows(&mut self) {
        for ring in self.rings.iter_mut().filter(|ring| ring.has_overflowed()) {
            ring.abandon();
            (self.all_written, self.rearms_all) = (true, true);
        }
    }
}

/// The parts of a VM that dirty logging uses.
pub struct Log<'a> {
    pub dirty: &'a Dirty,
    pub fd: &'a VmFd,
    pub slots: &'a SlotTable,
    pub memory: &'a Memory,
    pub kicks: &'a VcpuKicks,
}

impl Log<'_> {
    /// Turns a slot's logging on or off.
    pub fn set_logging(&self, id: SlotId, logging: Logging) -> Result<(), DirtyError> {
        let state = self.dirty.state();
        let slot = self.slots.get(id)?;
        let on = logging != Logging::Off;
        if slot.attach.is_logging() == on {
            return Ok(());
        }
        let begins_set = matches!(
            logging,
            Logging::On {
                initially: Initially::AllSet,
                ..
            }
        );
        if begins_set && !self.dirty.begins_set {
            return Err(DirtyError::Unsupported(
                "a log in which all pages are set at first",
            ));
        }
        match (self.dirty.tracker, on) {
            (Tracker::Pagemap, _) if !slot.attach.is_of_boot() => {
                return Err(DirtyError::Unsupported(
                    "the page map of memory added later",
                ));
            }
            (Tracker::Pagemap, true) => {
                state.take_bits(&slot, &mut vec![0; words(&slot)])?;
            }
            (Tracker::Pagemap, false) => {
                let result = self.memory.unprotect(slot.backing);
                result.map_err(refused("remove the write protection"))?;
            }
            (Tracker::Kvm, _) => {
                if on && self.dirty.delivery == Delivery::Bitmap {
                    self.enable_manual_protect()?;
                }
                let set = |logging| set_logging_flag(self.fd, &slot, logging);
                set(logging).map_err(refused("switch a slot's logging"))?;
                if on && !begins_set {
                    let cleared = self.clear_set_log(&slot);
                    cleared.inspect_err(|_| _ = set(Logging::Off))?;
                }
            }
        }
        if on {
            let host = &slot.attach.host_writes;
            host.take(0, &mut vec![0; words(&slot)]);
        }
        slot.attach.set_logging(logging);
        Ok(())
    }

    /// Moves a slot's dirty bits into `out` and re-arms those pages.
    pub fn get_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        let state = self.dirty.state();
        let slot = self.logging(id, out.len())?;
        if !self.dirty.delivery.has_bitmaps() {
            return Err(DirtyError::NoBitmap);
        }
        let host = &slot.attach.host_writes;
        host.take(0, out);
        let guest = match (self.dirty.tracker, self.dirty.delivery) {
            (Tracker::Pagemap, _) => state.take_bits(&slot, out),
            (Tracker::Kvm, Delivery::Bitmap) => self.take_log(&slot, out),
            (Tracker::Kvm, Delivery::Ring { .. }) => Ok(()),
        };
        guest.inspect_err(|_| host.put_back(0, out))
    }

    /// Marks pages again that were taken from a slot but could not be used.
    pub fn put_back_dirty(&self, id: SlotId, dirty: &[u64]) -> Result<(), DirtyError> {
        let _state = self.dirty.state();
        let slot = self.logging(id, dirty.len())?;
        if !self.dirty.delivery.has_bitmaps() {
            return Err(DirtyError::NoBitmap);
        }
        slot.attach.host_writes.put_back(0, dirty);
        Ok(())
    }

    /// Whether a slot logs.
    pub fn is_logging(&self, id: SlotId) -> bool {
        self.slots
            .get(id)
            .is_ok_and(|slot| slot.attach.is_logging())
    }

    /// Copies a slot's dirty bits into `out`, and clears none.
    pub fn peek_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError> {
        let _state = self.dirty.state();
        let slot = self.logging(id, out.len())?;
        self.has_two_steps()?;
        slot.attach.host_writes.copy(0, out);
        join(out, &self.read_log(&slot)?);
        Ok(())
    }

    /// Clears the dirty bits set in `mask`, which covers `pages` pages from `first_page` on, and
    /// re-arms those pages.
    pub fn clear_dirty(
        &self,
        id: SlotId,
        first_page: usize,
        pages: usize,
        mask: &[u64],
    ) -> Result<(), DirtyError> {
        let _state = self.dirty.state();
        let slot = self.slots.get(id)?;
        self.logging(id, words(&slot))?;
        self.has_two_steps()?;
        let host = &slot.attach.host_writes;
        let mut of_host = mask.to_vec();
        host.clear(first_page, pages, &mut of_host)?;
        let by_kvm = match pages {
            // KVM refuses an empty range at the end of a slot.
            0 => Ok(()),
            _ => self.clear_log(&slot, first_page, pages, mask),
        };
        by_kvm.inspect_err(|_| host.put_back(first_page / 64, &of_host))
    }

    /// Calls `each` for the pages in all vCPUs' rings, and returns the number of calls. If a ring
    /// has overflowed, `each` gets all pages of the logging slots.
    ///
    /// No vCPU is in the guest meanwhile: see `ring.rs`. At an exit, KVM moves the processor's own
    /// log into the ring.
    pub fn reap(&self, each: &mut dyn FnMut(SlotId, usize)) -> usize {
        let mut state = self.dirty.state();
        let paused = self.kicks.pause();
        let reap = || {
            state.find_overflows();
            let rings = state.rings.iter_mut();
            let mut count = rings.map(|ring| ring.reap(&mut *each)).sum();
            if state.all_written {
                count += self.each_page(each);
                state.all_written = false;
            }
            count
        };
        let reaped = catch_unwind(AssertUnwindSafe(reap));
        // A panic in `each` is resumed after the locks are released, so that it does not poison
        // them.
        drop((paused, state));
        reaped.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Calls `each` for all pages of the logging slots, and returns their number.
    fn each_page(&self, each: &mut dyn FnMut(SlotId, usize)) -> usize {
        let mut count = 0;
        for slot in self.slots.snapshot().iter() {
            if slot.attach.is_logging() {
                let pages = slot.backing.pages() as usize;
                (0..pages).for_each(|page| each(slot.id, page));
                count += pages;
            }
        }
        count
    }

    /// Frees the reaped entries, re-arms their pages, and returns their number.
    pub fn reset(&self) -> Result<usize, DirtyError> {
        let mut state = self.dirty.state();
        self.reset_rings(&mut state)
    }

    /// Handles a ring of `vcpu` that KVM found full after `resets` resets. Returns whether the ring
    /// had no pages and is not full any more.
    ///
    /// The vCPU's own thread calls this, outside the guest. While the number of resets is the same,
    /// the ring is still full.
    pub fn empty_full_ring(&self, vcpu: usize, resets: u64) -> Result<bool, DirtyError> {
        let mut state = self.dirty.state();
        let is_empty = resets == self.dirty.resets() && state.rings[vcpu].pass_over_limit();
        if is_empty {
            self.reset_rings(&mut state)?;
        }
        Ok(is_empty)
    }

    fn reset_rings(&self, state: &mut DirtyState) -> Result<usize, DirtyError> {
        let _paused = self.kicks.pause();
        let mut all = 0;
        loop {
            state.find_overflows();
            // SAFETY: 1. it is the VM's descriptor.
            let reset = unsafe { reset_dirty_rings(self.raw()) };
            let some = reset.map_err(refused("reset the rings"))?;
            all += some;
            state.rings.iter_mut().for_each(Ring::was_reset);
            if state.rings.iter().all(Ring::is_reset) {
                break;
            }
            // A signal may have ended the call early. If an entry that was not reset is dirty
            // again, the ring has overflowed.
            if some == 0 && !state.rings.iter().any(Ring::has_overflowed) {
                return Err(refused("reset all entries of the rings")(Errno::IO));
            }
        }
        if state.rearms_all {
            self.rearm_all()?;
            state.rearms_all = false;
        }
        self.dirty.resets.fetch_add(1, Ordering::Release);
        Ok(all)
    }

    /// Re-arms all pages of the logging slots: KVM does that when a slot's logging begins.
    fn rearm_all(&self) -> Result<(), DirtyError> {
        for slot in self.slots.snapshot().iter() {
            if slot.attach.is_logging() {
                let set = |logging| set_logging_flag(self.fd, slot, logging);
                let set = set(Logging::Off).and_then(|()| set(Logging::LAZY));
                set.map_err(refused("switch a slot's logging"))?;
            }
        }
        Ok(())
    }

    /// Copies KVM's log of a slot into the bitmap of this process's own writes. KVM is about to
    /// delete the slot and its log.
    pub fn preserve(&self, slot: &KvmSlot) -> Result<(), DirtyError> {
        let by_kvm = (self.dirty.tracker, self.dirty.delivery) == (Tracker::Kvm, Delivery::Bitmap);
        if by_kvm && slot.attach.is_logging() {
            let words = self.read_log(slot)?;
            slot.attach.host_writes.put_back(0, &words);
        }
        Ok(())
    }

    fn logging(&self, id: SlotId, given: usize) -> Result<std::sync::Arc<KvmSlot>, DirtyError> {
        let slot = self.slots.get(id)?;
        if !slot.attach.is_logging() {
            return Err(DirtyError::NotLogging(id));
        }
        match words(&slot) {
            needed if needed == given => Ok(slot),
            needed => Err(DirtyError::Words { id, needed, given }),
        }
    }

    pub fn has_two_steps(&self) -> Result<(), DirtyError> {
        match (self.dirty.tracker, self.dirty.delivery) {
            (Tracker::Kvm, Delivery::Bitmap) => Ok(()),
            (Tracker::Kvm, Delivery::Ring { .. }) => Err(DirtyError::NoBitmap),
            (Tracker::Pagemap, _) => Err(DirtyError::OneStep),
        }
    }

    fn take_log(&self, slot: &KvmSlot, out: &mut [u64]) -> Result<(), DirtyError> {
        let words = self.read_log(slot)?;
        join(out, &words);
        if words.iter().all(|word| *word == 0) {
            return Ok(());
        }
        self.clear_log(slot, 0, slot.backing.pages() as usize, &words)
    }

    fn read_log(&self, slot: &KvmSlot) -> Result<Vec<u64>, DirtyError> {
        let bytes = slot.backing.pages() as usize * PAGE_SIZE;
        let words = self.fd.get_dirty_log(u32::from(slot.id.0), bytes);
        words.map_err(|e| refused("read the log")(errno(e)))
    }

    fn clear_log(
        &self,
        slot: &KvmSlot,
        first: usize,
        pages: usize,
        mask: &[u64],
    ) -> Result<(), DirtyError> {
        let slot = u32::from(slot.id.0);
        // SAFETY: 1. it is the VM's descriptor.
        let cleared =
            unsafe { clear_dirty_log(self.raw(), slot, first as u64, pages as u32, mask) };
        cleared.map_err(refused("clear the log"))
    }

    /// KVM has begun a log of `slot`. Clears the bits that are set at first, so that no page counts
    /// as written, and arms all pages.
    pub fn clear_set_log(&self, slot: &KvmSlot) -> Result<(), DirtyError> {
        if !self.dirty.begins_set {
            return Ok(());
        }
        let pages = slot.backing.pages() as usize;
        let all = [!0; CLEARED_AT_ONCE / 64];
        let mut firsts = (0..pages).step_by(CLEARED_AT_ONCE);
        firsts.try_for_each(|first| {
            self.clear_log(slot, first, CLEARED_AT_ONCE.min(pages - first), &all)
        })
    }

    /// Enables manual protect: only `KVM_CLEAR_DIRTY_LOG` clears KVM's log and re-arms its pages.
    fn enable_manual_protect(&self) -> Result<(), DirtyError> {
        let mut flags = KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE;
        if self.dirty.begins_set {
            flags |= KVM_DIRTY_LOG_INITIALLY_SET;
        }
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
            ..Default::default()
        };
        cap.args[0] = flags.into();
        let enabled = self.fd.enable_cap(&cap);
        enabled.map_err(|e| refused("enable manual protect of its log (Linux 5.1)")(errno(e)))
    }

    fn raw(&self) -> BorrowedFd<'_> {
        // SAFETY: 1. the descriptor is open as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.fd.as_raw_fd()) }
    }
}

fn errno(error: kvm_ioctls::Error) -> Errno {
    Errno::from_raw_os_error(error.errno())
}

/// Words of a slot's dirty bits.
fn words(slot: &KvmSlot) -> usize {
    (slot.backing.pages() as usize).div_ceil(64)
}

fn join(out: &mut [u64], words: &[u64]) {
    for (out, word) in out.iter_mut().zip(words) {
        *out |= word;
    }
}

#[cfg(test)]
mod tests;
