//! Dirty logging: finds the pages that the guest writes.

use crate::{LogReaders, MemorySlots};
use lacuna_slots::{
    Delivery, DetectedBy, Detection, DirtyError, DirtyStats, Logging, SlotError, SlotId,
};

/// Dirty logging as every backend has it. [`Delivery`] is chosen with the VM.
///
/// ```text
/// set_logging(On)                     copy all memory
/// get_dirty, or reap + reset          copy the pages that they name; again and again
/// set_logging(Off)
/// ```
/// Before a harvest returns, it has re-armed its pages and flushed the TLBs. Copy the pages after
/// that, never before. If the copy then lacks a write, the next harvest reports it.
///
/// # Threads
/// A harvest waits until every vCPU has left the guest once. Any thread may call these functions,
/// a [`Device`](crate::Device) on a vCPU's thread too: its vCPU has left the guest. Two kinds of
/// callers may not. A [`PageSource`](crate::PageSource) may be called by a vCPU inside the guest,
/// which would wait for itself. A callback of [`DirtyRings::reap_rings`] or [`harvest`] runs under
/// locks that these functions take; a [`LogReader`](crate::LogReader) calls without locks.
pub trait DirtyTracking {
    /// Where writes are recorded.
    fn delivery(&self) -> Delivery;

    /// Turns the log of a slot on or off. If the log is on, every write after this call is
    /// reported. If the slot logs already, `On` changes nothing, not even with other settings.
    ///
    /// # Errors
    /// There is no such slot, or the backend lacks the mode.
    fn set_logging(&self, id: SlotId, logging: Logging) -> Result<(), DirtyError>;

    /// Moves a slot's dirty bits into `out`, one word for 64 pages, and re-arms those pages.
    ///
    /// # Errors
    /// [`DirtyError`]; no dirty bit is lost then.
    fn get_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError>;

    /// Marks pages as written: those that [`DirtyTracking::get_dirty`] has taken but the caller
    /// could not use, and those that another process has written in a shared memory file.
    ///
    /// # Errors
    /// As [`DirtyTracking::get_dirty`]; no page is marked then.
    fn put_back_dirty(&self, id: SlotId, dirty: &[u64]) -> Result<(), DirtyError>;

    /// Whether a slot logs.
    fn is_logging(&self, id: SlotId) -> bool;

    /// The readers that share the log of this VM.
    fn log_readers(&self) -> &LogReaders;

    /// The vCPUs' rings, if the VM delivers by rings.
    fn dirty_rings(&self) -> Option<&dyn DirtyRings>;

    /// Reading and clearing in two steps, if the VM supports that.
    fn two_step_log(&self) -> Option<&dyn TwoStepLog>;

    /// What detects the guest's writes at present, for reports.
    fn detected_by(&self) -> DetectedBy;

    /// The choice of detection, if the VMM has it.
    fn detection(&self) -> Option<&dyn DetectionChoice>;
}

/// Dirty rings, one for each vCPU. The rules for threads are in [`DirtyTracking`].
pub trait DirtyRings {
    /// Calls `each` for every page in the rings, and returns the number of calls. A page may be in
    /// the rings more than once, and its slot may have been removed. The entries stay in use until
    /// [`DirtyRings::reset_rings`]; copy the pages after that. `each` should only note the pages:
    /// locks are held, so it must not change slots or call dirty tracking.
    ///
    /// KVM can overwrite entries of a full ring. Then their pages are unknown, so `each` gets every
    /// page of every logging slot. A larger ring ([`Delivery::Ring`]) overflows less often.
    ///
    /// # Errors
    /// [`DirtyError`].
    fn reap_rings(&self, each: &mut dyn FnMut(SlotId, usize)) -> Result<usize, DirtyError>;

    /// Frees the reaped entries and re-arms their pages; returns the number of entries. A vCPU that
    /// left with [`Exit::DirtyRingFull`](crate::Exit::DirtyRingFull) may be entered after that.
    ///
    /// # Errors
    /// [`DirtyError`].
    fn reset_rings(&self) -> Result<usize, DirtyError>;
}

/// KVM's manual protect: the log is read first, and cleared in parts later.
pub trait TwoStepLog {
    /// Copies a slot's dirty bits into `out` and does not clear them.
    ///
    /// # Errors
    /// [`DirtyError`].
    fn peek_dirty(&self, id: SlotId, out: &mut [u64]) -> Result<(), DirtyError>;

    /// Clears the dirty bits set in `mask`, and re-arms those pages. The mask covers `pages` pages
    /// from `first_page` on; the range begins and ends with a word, or with the slot. If a backend
    /// knows the clean pages, it removes them from `mask`.
    ///
    /// # Errors
    /// [`DirtyError`].
    fn clear_dirty(
        &self,
        id: SlotId,
        first_page: usize,
        pages: usize,
        mask: &mut [u64],
    ) -> Result<(), DirtyError>;
}

/// The choice of how writes are detected, and the cost of dirty logging.
pub trait DetectionChoice {
    /// How writes are detected at present.
    fn current(&self) -> Detection;

    /// Sets how writes are detected from now on, also in slots that log already.
    fn choose(&self, detection: Detection);

    /// The cost of dirty logging for each vCPU.
    fn dirty_stats(&self) -> Vec<DirtyStats>;
}

/// Turns the log of every slot on or off. A slot that another thread removes meanwhile is skipped.
///
/// # Errors
/// The first slot that refuses; the slots before it have changed.
pub fn set_logging_everywhere<V>(vm: &V, logging: Logging) -> Result<(), DirtyError>
where
    V: DirtyTracking + MemorySlots + ?Sized,
{
    let mut slots = vm.memory_slots().into_iter();
    slots.try_for_each(|slot| match vm.set_logging(slot.id, logging) {
        Err(DirtyError::Slot(SlotError::Unknown { .. })) => Ok(()),
        result => result,
    })
}

/// Harvests every logging slot, from the rings, the bitmaps or both, as the VM delivers. A slot
/// that another thread removes meanwhile is skipped.
///
/// Calls `each` with the slot and the index of each dirty page, perhaps more than once for a page,
/// and returns the number of calls. The pages are re-armed then; copy them after this call.
///
/// `each` must not call [`DirtyTracking`], [`MemorySlots`] or [`LogReaders`] of this VM: locks are
/// held. A [`LogReader`](crate::LogReader) has no such rule.
///
/// # Errors
/// [`DirtyError`]; pages that `each` got before the error may be re-armed already.
pub fn harvest<V>(vm: &V, mut each: impl FnMut(SlotId, usize)) -> Result<usize, DirtyError>
where
    V: DirtyTracking + MemorySlots + ?Sized,
{
    let mut count = 0;
    if let Some(rings) = vm.dirty_rings() {
        count += rings.reap_rings(&mut each)?;
        rings.reset_rings()?;
    }
    if !vm.delivery().has_bitmaps() {
        return Ok(count);
    }
    for slot in vm.memory_slots() {
        let mut words = vec![0; slot.gfns.pages().div_ceil(64) as usize];
        match vm.get_dirty(slot.id, &mut words) {
            Ok(()) => {}
            Err(DirtyError::NotLogging(_) | DirtyError::Slot(SlotError::Unknown { .. })) => {
                continue;
            }
            Err(error) => return Err(error),
        }
        for page in pages(&words) {
            each(slot.id, page);
            count += 1;
        }
    }
    Ok(count)
}

/// The pages with set bits.
fn pages(words: &[u64]) -> impl Iterator<Item = usize> {
    let of_word = |(index, word): (usize, &u64)| {
        let (index, word) = (index * 64, *word);
        (0..64).filter_map(move |bit| (word >> bit & 1 == 1).then_some(index + bit))
    };
    words.iter().enumerate().flat_map(of_word)
}

#[cfg(test)]
mod tests {
    use super::pages;

    #[test]
    fn a_bit_is_a_page() {
        let found: Vec<_> = pages(&[1 | 1 << 63, 0, 1 << 5]).collect();
        assert_eq!(found, [0, 63, 133]);
    }
}
