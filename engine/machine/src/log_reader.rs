//! Readers of the log of writes that do not take pages from one another.

use crate::dirty::{DirtyTracking, harvest, set_logging_everywhere};
use crate::slots::MemorySlots;
use lacuna_slots::{DirtyError, Logging, SlotId};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::PoisonError;

/// The [`LogReader`]s of one VM. Each VM of a backend has one of these.
#[derive(Default)]
pub struct LogReaders(Mutex<Readers, lock_order::LogReaders>);

#[derive(Default)]
struct Readers {
    /// Those that read, in the order in which they came: each number is larger than the one before.
    ids: Vec<u64>,
    /// The slots that logged before the first of them came: their logs are the VMM's.
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
/// A harvest takes pages out of the log, so another reader would miss them. Therefore the last
/// reader that has come is the only one that may harvest, and when it is dropped, the log gets back
/// what this reader has taken. So readers may be nested, and a VMM that logs itself, without a
/// reader, finds all pages afterwards if it harvests nothing meanwhile. A reader begins with a copy
/// of all pages, because pages that were taken before it came are not given to it.
///
/// The last reader that is dropped turns off the logs that the first one has turned on. A reader
/// that is forgotten ([`std::mem::forget`]) blocks no thread: readers that came before it get
/// [`DirtyError::InUse`], and so does the next one if the VM delivers by rings alone. The logs that
/// it has turned on stay on.
///
/// A harvest waits until every vCPU has left the guest once, so the thread of a vCPU must not call
/// any function of a reader, and must not drop it.
pub struct LogReader<'a, V: DirtyTracking + MemorySlots> {
    vm: &'a V,
    id: u64,
    /// Pages that were taken from the log.
    taken: Pages,
    /// Of these pages, those that were not passed on yet.
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
    /// Turns on the log of every slot. Pages that were written before may be in the first harvest.
    ///
    /// # Errors
    /// [`DirtyError::InUse`]: there is a reader already, and the VM delivers by rings alone, to
    /// which no page can be given back. Otherwise as [`set_logging_everywhere`].
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
        // Before the reader is dropped after an error.
        drop(readers);
        turned_on.map(|()| reader)
    }

    /// As [`harvest`], and each page is passed on once. `each` is called without a lock, so it may
    /// use the VM and other readers. If it panics, the next harvest passes on the pages that it has
    /// not got, and the page at which it has panicked.
    ///
    /// # Errors
    /// [`DirtyError::InUse`]: another reader has come later, and was not dropped yet. Otherwise
    /// those of [`harvest`]; `each` has got the pages that were taken before the error.
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
        // A reader that comes from here on begins with a copy of all pages.
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
        harvested.map(|_| count)
    }

    /// Gives the log of a slot the pages back that were taken from it.
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
        // Without a bitmap, or without the slot, there is no place for them.
        let _ = self.vm.put_back_dirty(id, &words);
    }
}

impl<V: DirtyTracking + MemorySlots> Drop for LogReader<'_, V> {
    fn drop(&mut self) {
        let mut readers = self.vm.log_readers().lock();
        readers.ids.retain(|id| *id != self.id);
        // A later reader began with a copy of all pages, so it misses none of those taken before.
        let is_missed = readers.ids.iter().any(|id| *id < self.id);
        for slot in self.vm.memory_slots() {
            if is_missed || readers.lent.contains(&slot.id) {
                self.give_back(slot.id, slot.gfns.pages());
            } else if readers.ids.is_empty() {
                // A slot that does not log any more needs nothing.
                let _ = self.vm.set_logging(slot.id, Logging::Off);
            }
        }
        let is_read = !readers.ids.is_empty() || !readers.lent.is_empty();
        if !is_read && self.vm.dirty_rings().is_some() {
            // A vCPU whose ring is full does not run until its ring is emptied, even without a log.
            let _ = harvest(self.vm, |_, _| {});
        }
    }
}
