//! A device that fails when told to: for tests of whatever must survive it.

use super::{Slot, SwapStore};
use crate::error::{SwapError, WriteFailed};
use crate::pool::Page;
use lacuna_addr::PageCount;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// How an operation goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Reads fail with an I/O error.
    Read,
    /// Writes fail with an I/O error after this many pages.
    WriteAfter(usize),
    /// The device is full from this slot on.
    EndsAt(u32),
}

/// A device in plain memory, outside the budget, whose faults are switched by its clones.
#[derive(Clone)]
pub struct FaultyStore(Arc<Mutex<Inner>>);

struct Inner {
    pages: BTreeMap<Slot, Page>,
    capacity: PageCount,
    fault: Option<Fault>,
}

impl FaultyStore {
    /// A device of `capacity` slots that works until told otherwise.
    pub fn new(capacity: PageCount) -> Self {
        let inner = Inner {
            pages: BTreeMap::new(),
            capacity,
            fault: None,
        };
        Self(Arc::new(Mutex::new(inner)))
    }

    /// From now on this goes wrong; `None` heals the device.
    pub fn set_fault(&self, fault: Option<Fault>) {
        self.lock().fault = fault;
    }

    /// How many slots hold something.
    pub fn stored(&self) -> usize {
        self.lock().pages.len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SwapStore for FaultyStore {
    fn describe(&self) -> String {
        "faulty device".into()
    }

    fn capacity(&self) -> PageCount {
        self.lock().capacity
    }

    fn read(&self, slot: Slot, page: &mut Page) -> Result<(), SwapError> {
        let inner = self.lock();
        if inner.fault == Some(Fault::Read) {
            return Err(SwapError::Io("Input/output error (os error 5)".into()));
        }
        let missing = || SwapError::Io(format!("{slot:?} was never written"));
        *page = inner.pages.get(&slot).ok_or_else(missing)?.clone();
        Ok(())
    }

    fn write(&self, first: Slot, pages: &[Page]) -> Result<(), WriteFailed> {
        let mut inner = self.lock();
        for (done, page) in pages.iter().enumerate() {
            let slot = first.plus(done as u32);
            let error = match inner.fault {
                Some(Fault::WriteAfter(count)) if done >= count => {
                    SwapError::Io("Input/output error (os error 5)".into())
                }
                Some(Fault::EndsAt(end)) if slot.get() >= end => {
                    SwapError::Ends("No space left on device (os error 28)".into())
                }
                _ => {
                    inner.pages.insert(slot, page.clone());
                    continue;
                }
            };
            return Err(WriteFailed { done, error });
        }
        Ok(())
    }

    fn discard(&self, slot: Slot) {
        self.lock().pages.remove(&slot);
    }
}
