//! A VMM's devices: which one has an address, and how many threads are in its code.
//!
//! ```text
//! access                               remove
//! load the table, find the device      replace the table
//! count in; leave if it is removed     mark the device as removed
//! the device's code                    wait until no thread is in the device's code
//! count out, wake the remover
//! ```
//! No lock is held while a device's code runs.

use super::reserved::overlap;
use crate::{Device, DeviceError, Width};
use arc_swap::ArcSwap;
use std::cell::Cell;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use tracing::debug;

/// The longest name of a device in bytes.
pub(super) const NAME_MAX: usize = 64;

/// The devices of one address space, in ascending order. Their ranges do not overlap.
type Space = Vec<(RangeInclusive<u64>, Arc<Entry>)>;

/// An address space of the guest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Bus {
    Ports,
    Mmio,
}

/// The devices at one time.
#[derive(Clone, Default)]
pub(super) struct Table {
    ports: Space,
    mmio: Space,
}

impl Table {
    fn space(&mut self, bus: Bus) -> &mut Space {
        match bus {
            Bus::Ports => &mut self.ports,
            Bus::Mmio => &mut self.mmio,
        }
    }

    /// The ranges in guest-physical memory.
    pub(super) fn mmio_ranges(&self) -> impl Iterator<Item = &RangeInclusive<u64>> {
        self.mmio.iter().map(|(range, _)| range)
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = &Arc<Entry>> {
        self.ports.iter().chain(&self.mmio).map(|(_, entry)| entry)
    }

    fn add(
        &mut self,
        bus: Bus,
        added: (RangeInclusive<u64>, Arc<Entry>),
    ) -> Result<(), DeviceError> {
        let (range, entry) = &added;
        let name = &entry.name;
        let is_name =
            (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic());
        if !is_name || self.devices().any(|other| other.name == *name) {
            return Err(DeviceError::Name(name.clone()));
        }
        let space = self.space(bus);
        if space.iter().any(|(other, _)| overlap(other, range)) {
            let (from, to) = (*range.start(), *range.end());
            return Err(DeviceError::Overlap { from, to });
        }
        let at = space.partition_point(|(other, _)| other.start() < range.start());
        space.insert(at, added);
        Ok(())
    }

    fn remove(&mut self, name: &str) -> Result<Arc<Entry>, DeviceError> {
        let found = self.devices().find(|entry| entry.name == name).cloned();
        let entry = found.ok_or_else(|| DeviceError::NoDevice(name.to_owned()))?;
        for bus in [Bus::Ports, Bus::Mmio] {
            self.space(bus)
                .retain(|(_, other)| !Arc::ptr_eq(other, &entry));
        }
        Ok(entry)
    }
}

/// The devices, while threads access, add and remove them.
#[derive(Default)]
pub(super) struct Devices(ArcSwap<Table>);

impl Devices {
    /// The present devices.
    pub(super) fn now(&self) -> Arc<Table> {
        self.0.load_full()
    }

    /// The device with a range that contains the whole access, and the access's offset in it.
    pub(super) fn find(&self, bus: Bus, at: u64, width: Width) -> Option<(Arc<Entry>, u64)> {
        let table = self.0.load();
        let space = match bus {
            Bus::Ports => &table.ports,
            Bus::Mmio => &table.mmio,
        };
        let last = at.checked_add(width as u64 - 1)?;
        let (range, entry) = space.get(space.partition_point(|(range, _)| *range.end() < at))?;
        let is_inside = range.contains(&at) && range.contains(&last);
        is_inside.then(|| (Arc::clone(entry), at - range.start()))
    }

    pub(super) fn add(
        &self,
        bus: Bus,
        name: &str,
        range: RangeInclusive<u64>,
        device: Arc<dyn Device>,
    ) -> Result<(), DeviceError> {
        let entry = Arc::new(Entry {
            name: name.to_owned(),
            device,
            inside: AtomicUsize::new(0),
            remover: OnceLock::new(),
            is_held: AtomicBool::new(false),
        });
        self.change(|table| table.add(bus, (range.clone(), Arc::clone(&entry))))?;
        debug!(target: "lacuna::device", name, ?range, "device added");
        Ok(())
    }

    pub(super) fn remove(&self, name: &str) -> Result<Arc<dyn Device>, DeviceError> {
        let entry = self.change(|table| table.remove(name))?;
        debug!(target: "lacuna::device", name, "device removed");
        entry.wait_until_unused();
        Ok(Arc::clone(&entry.device))
    }

    /// Replaces the table by a changed one. Calls `change` again if another thread was first.
    fn change<T>(
        &self,
        change: impl Fn(&mut Table) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        loop {
            let before = self.now();
            let mut table = Table::clone(&before);
            let done = change(&mut table)?;
            let found = self.0.compare_and_swap(&before, Arc::new(table));
            if Arc::ptr_eq(&found, &before) {
                return Ok(done);
            }
        }
    }
}

/// The bit of [`Entry::inside`] for a removed device.
const REMOVED: usize = 1 << (usize::BITS - 1);

/// A device with its name.
pub(super) struct Entry {
    pub(super) name: String,
    device: Arc<dyn Device>,
    /// How many threads are in the device's code, and [`REMOVED`].
    inside: AtomicUsize,
    /// The thread that removes the device. Set before [`REMOVED`].
    remover: OnceLock<Thread>,
    /// A restore has paused the device, and no run has resumed it.
    pub(super) is_held: AtomicBool,
}

thread_local! {
    /// In how many devices' code this thread is, one called by the other.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

impl Entry {
    /// Runs code of the device. `None`: it was removed.
    ///
    /// # Errors
    /// [`DeviceError::Panicked`].
    pub(super) fn call<T>(
        &self,
        code: impl FnOnce(&dyn Device) -> T,
    ) -> Result<Option<T>, DeviceError> {
        let Some(_inside) = Inside::enter(self) else {
            return Ok(None);
        };
        let done = catch_unwind(AssertUnwindSafe(|| code(&*self.device)));
        let panicked = |panic: Box<_>| DeviceError::panicked(&self.name, &*panic);
        done.map(Some).map_err(panicked)
    }

    /// Marks the device as removed, and waits until no thread is in its code. A thread that is in
    /// a device's code does not wait: two devices that remove each other would wait for ever.
    fn wait_until_unused(&self) {
        self.remover.get_or_init(thread::current);
        self.inside.fetch_or(REMOVED, Ordering::SeqCst);
        let is_outside = DEPTH.get() == 0;
        while is_outside && self.inside.load(Ordering::SeqCst) != REMOVED {
            thread::park();
        }
    }
}

/// A thread in a device's code.
struct Inside<'a>(&'a Entry);

impl<'a> Inside<'a> {
    fn enter(entry: &'a Entry) -> Option<Self> {
        DEPTH.set(DEPTH.get() + 1);
        let before = entry.inside.fetch_add(1, Ordering::SeqCst);
        let inside = Self(entry);
        (before & REMOVED == 0).then_some(inside)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        let before = self.0.inside.fetch_sub(1, Ordering::SeqCst);
        if before == REMOVED | 1
            && let Some(remover) = self.0.remover.get()
        {
            remover.unpark();
        }
    }
}
