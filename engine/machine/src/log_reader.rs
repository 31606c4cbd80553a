//! Readers of the log of writes that do not take pages from one another.

use crate::dirty::{DirtyTracking, harvest, set_logging_everywhere};
use crate::slots::MemorySlots;
use lacuna_slots::{DirtyError, Logging, SlotId};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::PoisonError;
use tracing::debug;

/// The [`LogReader`]s of one VM. Each VM of a backend has one of these.
#[derive(Default)]
pub struct LogReaders(Mutex<Readers, lock_order::LogReaders>);

#[derive(Default)]
struct Readers {
    /// The numbers of the present readers. Each new reader gets a larger number.
    ids: Vec<u64>,
    /// The slots that logged before the first present reader began: their logs are the VMM's.
    lent: Vec<SlotId>,
}

impl LogReaders {
    fn lock(&self) -> MutexGuard<'_, Readers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LogReaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogReaders").finish_non_exhaustive()
    }
}

/// A reader of the log of writes of all slots, such as a copy of a VM's memory.
///
/// A harvest takes pages out of the log, so another reader would miss them. Therefore only the
/// newest reader may harvest. When it is dropped, the log gets its pages back. So readers may be
/// nested. A VMM with a log of its own finds all pages afterwards, if it harvests nothing
/// meanwhile. A reader begins with a copy of all pages, because it does not get the pages of
/// earlier harvests.
///
/// When the last reader is dropped, it turns off the logs that the first one has turned on. A
/// forgotten reader ([`std::mem::forget`]) blocks no thread: older readers get
/// [`DirtyError::InUse`], and so does the next new one if the VM delivers by rings alone. The logs
/// that the forgotten reader has turned on stay on.
///
/// The rules for threads are in [`DirtyTracking`]; they hold for the drop of a reader too.
pub struct LogReader<'a, V: DirtyTracking + MemorySlots> {
    vm: &'a V,
    id: u64,
    /// The pages taken from the log.
    taken: Pages,
    /// The taken pages that `each` has not got yet.
    pending: Pages,
}

/// A bit for each page of a slot.
type Pages = BTreeMap<SlotId, Vec<u64>>;

fn note(pages: &mut Pages, slot: SlotId, page: usize) {
    let words = pages.entry(slot).or_default();
    let word = page / 64;
    if words.len() <= word {
        words.resize(word + 1, 0);
    }
    words[word] |= 1 << (page % 64);
}

impl<'a, V: DirtyTracking + MemorySlots> LogReader<'a, V> {
    /// Turns on the log of every slot. The first harvest may have pages written before.
    ///
    /// # Errors
    /// [`DirtyError::InUse`]: there is a reader already, and the VM delivers by rings alone, which
    /// cannot take pages back. Otherwise as [`set_logging_everywhere`].
    pub fn begin(vm: &'a V) -> Result<Self, DirtyError> {
        let mut readers = vm.log_readers().lock();
        if readers.ids.is_empty() {
            let ids = vm.memory_slots().into_iter().map(|slot| slot.id);
            readers.lent = ids.filter(|id| vm.is_logging(*id)).collect();
        } else if !vm.delivery().has_bitmaps() {
            return Err(DirtyError::InUse);
        }
        let reader = Self {
            vm,
            id: readers.ids.last().map_or(0, |last| last + 1),
            taken: Pages::new(),
            pending: Pages::new(),
        };
        readers.ids.push(reader.id);
        let turned_on = set_logging_everywhere(vm, Logging::LAZY);
        // Release the lock before an error drops the reader, which takes it.
        drop(readers);
        turned_on.map(|()| reader)
    }

    /// As [`harvest`], but `each` gets each page once. `each` runs without a lock, so it may use
    /// the VM and other readers. If it panics, the next harvest gives it the remaining pages and
    /// the page at which it has panicked.
    ///
    /// # Errors
    /// [`DirtyError::InUse`]: there is a newer reader. Otherwise as [`harvest`]; `each` has got the
    /// pages taken before the error.
    pub fn harvest(&mut self, mut each: impl FnMut(SlotId, usize)) -> Result<usize, DirtyError> {
        let (taken, pending) = (&mut self.taken, &mut self.pending);
        let readers = self.vm.log_readers().lock();
        if readers.ids.last() != Some(&self.id) {
            return Err(DirtyError::InUse);
        }
        let harvested = harvest(self.vm, |slot, page| {
            note(taken, slot, page);
            note(pending, slot, page);
        });
        // From here on, a new reader begins with a copy of all pages.
        drop(readers);
        let mut count = 0;
        for (slot, words) in pending {
            for (index, word) in words.iter_mut().enumerate() {
                while *word != 0 {
                    each(*slot, index * 64 + word.trailing_zeros() as usize);
                    *word &= *word - 1;
                    count += 1;
                }
            }
        }
        harvested?;
        debug!(target: "lacuna::harvest", pages = count, "log is harvested");
        Ok(count)
    }

    /// Gives the taken pages of a slot back to its log.
    fn give_back(&self, id: SlotId, pages: u64) {
        let Some(taken) = self.taken.get(&id) else {
            return;
        };
        // The slot may have another size now.
        let mut words = taken.clone();
        words.resize(pages.div_ceil(64) as usize, 0);
        if let Some(last) = words.last_mut().filter(|_| !pages.is_multiple_of(64)) {
            *last &= (1 << (pages % 64)) - 1;
        }
        // The call fails if there is no bitmap or no slot: then the pages have no place.
        let _ = self.vm.put_back_dirty(id, &words);
    }
}

impl<V: DirtyTracking + MemorySlots> Drop for LogReader<'_, V> {
    fn drop(&mut self) {
        let mut readers = self.vm.log_readers().lock();
        readers.ids.retain(|id| *id != self.id);
        // A newer reader began with a copy of all pages, so it misses none of the taken ones.
        let is_missed = readers.ids.iter().any(|id| *id < self.id);
        for slot in self.vm.memory_slots() {
            if is_missed || readers.lent.contains(&slot.id) {
                self.give_back(slot.id, slot.gfns.pages());
            } else if readers.ids.is_empty() {
                // The call fails only if the slot is gone, and changes nothing if it does not log.
                let _ = self.vm.set_logging(slot.id, Logging::Off);
            }
        }
        let is_read = !readers.ids.is_empty() || !readers.lent.is_empty();
        if !is_read && self.vm.dirty_rings().is_some() {
            // A vCPU with a full ring does not run until the ring is emptied, even without a log.
            let _ = harvest(self.vm, |_, _| {});
        }
    }
}
