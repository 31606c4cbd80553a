//! A swap device that fails, stalls or damages pages on request, for tests.

use crate::entry::SwapEntry;
use crate::error::{SwapError, WriteFailed};
use crate::page::Page;
use crate::store::SwapStore;
use lacuna_addr::PageCount;
use lacuna_sync::{Condvar, Mutex, MutexGuard, lock_order};
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

/// The kinds of failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Reads fail with an I/O error.
    Read,
    /// The next read fails with an I/O error.
    OneRead,
    /// The next write fails with an I/O error.
    OneWrite,
    /// Reads and writes wait until the device is healed.
    Stall,
    /// Writes fail with an I/O error after this many pages.
    WriteAfter(usize),
    /// The device is full from this entry on.
    EndsAt(u32),
}

/// A device in plain memory, outside the budget. A clone is the same device; a test uses it to
/// switch the faults.
#[derive(Clone)]
pub struct FaultyStore(Arc<FaultyDevice>);

struct FaultyDevice {
    inner: Mutex<Inner, lock_order::FaultyDevice>,
    healed: Condvar,
}

struct Inner {
    pages: BTreeMap<SwapEntry, Page>,
    capacity: PageCount,
    fault: Option<Fault>,
    /// Operations that wait for the end of a stall.
    stalled: usize,
}

impl FaultyStore {
    /// A device of `capacity` entries that works until a test makes it fail.
    pub fn new(capacity: PageCount) -> Self {
        let inner = Inner {
            pages: BTreeMap::new(),
            capacity,
            fault: None,
            stalled: 0,
        };
        Self(Arc::new(FaultyDevice {
            inner: Mutex::new(inner),
            healed: Condvar::new(),
        }))
    }

    /// From now on operations fail with `fault`; `None` heals the device.
    pub fn set_fault(&self, fault: Option<Fault>) {
        self.lock().fault = fault;
        self.0.healed.notify_all();
    }

    /// The number of operations that wait for the end of a stall.
    pub fn stalled(&self) -> usize {
        self.lock().stalled
    }

    /// Lets `damage` change the stored pages, without the host.
    pub fn tamper(&self, damage: impl FnOnce(&mut BTreeMap<SwapEntry, Page>)) {
        damage(&mut self.lock().pages);
    }

    /// The number of entries with content.
    pub fn stored(&self) -> usize {
        self.lock().pages.len()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        let inner = self.0.inner.lock();
        inner.unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end of a stall. Returns the device and its fault. If the fault is `one`, also
    /// clears it in the device.
    fn begin(&self, one: Fault) -> (MutexGuard<'_, Inner>, Option<Fault>) {
        let mut inner = self.lock();
        inner.stalled += 1;
        let stalls = |inner: &mut Inner| inner.fault == Some(Fault::Stall);
        let waited = self.0.healed.wait_while(inner, stalls);
        inner = waited.unwrap_or_else(PoisonError::into_inner);
        inner.stalled -= 1;
        let fault = inner.fault;
        inner.fault.take_if(|fault| *fault == one);
        (inner, fault)
    }
}

impl SwapStore for FaultyStore {
    fn describe(&self) -> String {
        "faulty device".into()
    }

    fn capacity(&self) -> PageCount {
        self.lock().capacity
    }

    fn read(&self, entry: SwapEntry, page: &mut Page) -> Result<(), SwapError> {
        let (inner, fault) = self.begin(Fault::OneRead);
        if let Some(Fault::Read | Fault::OneRead) = fault {
            return Err(SwapError::Io("Input/output error (os error 5)".into()));
        }
        let missing = || SwapError::Io(format!("{entry:?} was never written"));
        *page = inner.pages.get(&entry).ok_or_else(missing)?.clone();
        Ok(())
    }

    fn write(&self, first: SwapEntry, pages: &[Page]) -> Result<(), WriteFailed> {
        let (mut inner, fault) = self.begin(Fault::OneWrite);
        for (done, page) in pages.iter().enumerate() {
            let entry = first.plus(done as u32);
            let error = match fault {
                Some(Fault::OneWrite) => SwapError::Io("Input/output error (os error 5)".into()),
                Some(Fault::WriteAfter(count)) if done >= count => {
                    SwapError::Io("Input/output error (os error 5)".into())
                }
                Some(Fault::EndsAt(end)) if entry.get() >= end => {
                    SwapError::Ends("No space left on device (os error 28)".into())
                }
                _ => {
                    inner.pages.insert(entry, page.clone());
                    continue;
                }
            };
            return Err(WriteFailed { done, error });
        }
        Ok(())
    }

    fn discard(&self, entry: SwapEntry) {
        self.lock().pages.remove(&entry);
    }
}
