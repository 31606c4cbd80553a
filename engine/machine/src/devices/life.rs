//! The life of a VMM's devices: added, paused, restored, reset, removed.

use super::reserved::{controllers, overlap, own};
use super::table::{Bus, Entry};
use super::{NO_STATUS, PICS, PlatformDevices, port};
use crate::{Device, DeviceError, Ending};
use lacuna_addr::Gpa;
use std::mem;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tracing::error;

impl PlatformDevices {
    /// Adds `device` at `ports`. The ports of [`port`] and of the PICs are reserved. `name` is 1 to
    /// 64 printable ASCII characters without spaces: states of the device have it.
    ///
    /// The guest may run. If it is paused meanwhile ([`PlatformDevices::pause`]), the device
    /// belongs to it from its next pause on.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing has changed then.
    pub fn add_ports(
        &self,
        name: &str,
        ports: RangeInclusive<u16>,
        device: Arc<dyn Device>,
    ) -> Result<(), DeviceError> {
        let (from, to) = (u64::from(*ports.start()), u64::from(*ports.end()));
        if from > to {
            return Err(DeviceError::Range { from, bytes: 0 });
        }
        let own = [
            port::SERIAL..=port::SERIAL_LAST,
            port::EXIT..=port::EXIT,
            port::STATUS..=port::STATUS,
        ];
        if own.iter().any(|own| overlap(own, &ports)) {
            return Err(DeviceError::Overlap { from, to });
        }
        if PICS.iter().any(|pic| overlap(pic, &ports)) {
            return Err(DeviceError::InterruptController { from, to });
        }
        self.embedded.add(Bus::Ports, name, from..=to, device)
    }

    /// As [`PlatformDevices::add_ports`], at `bytes` guest-physical addresses from `start` on. The
    /// addresses of interrupt controllers are reserved: for x86-64 the I/O APIC (0xfec0_0000) and
    /// the local APIC (0xfee0_0000), for AArch64 the GIC. For AArch64, the addresses of the devices
    /// of every guest are reserved too.
    ///
    /// If a memory slot overlaps the device, the guest accesses the memory. This function does not
    /// know the VM, so [`PlatformDevices::check_memory`] checks for overlaps before the run. A VMM
    /// that adds a device while the guest runs calls it itself. [`Layout`](crate::Layout) names the
    /// addresses without memory at boot.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing has changed then.
    pub fn add_mmio(
        &self,
        name: &str,
        start: Gpa,
        bytes: u64,
        device: Arc<dyn Device>,
    ) -> Result<(), DeviceError> {
        let from = start.get();
        let last = bytes
            .checked_sub(1)
            .and_then(|last| start.checked_add(last));
        let to = last.ok_or(DeviceError::Range { from, bytes })?.get();
        let range = from..=to;
        let taken = |ranges: &[RangeInclusive<u64>]| ranges.iter().any(|r| overlap(r, &range));
        if taken(controllers(self.arch)) {
            return Err(DeviceError::InterruptController { from, to });
        }
        if taken(own(self.arch)) {
            return Err(DeviceError::Overlap { from, to });
        }
        self.embedded.add(Bus::Mmio, name, range, device)
    }

    /// Removes a device. The guest may run: its addresses read as ones then. Returns when no thread
    /// is in the device's code that this value has called. If the caller is in a device's code, for
    /// example in [`Device::write`] of this device, it returns at once: accesses that have begun
    /// may still be in progress.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`].
    pub fn remove(&self, name: &str) -> Result<Arc<dyn Device>, DeviceError> {
        self.embedded.remove(name)
    }

    /// Pauses the VMM's devices until the value is dropped. No vCPU runs meanwhile, so the
    /// caller has a [`Paused`](crate::Paused), and keeps it longer than this value.
    ///
    /// # Errors
    /// [`DeviceError::Panicked`]. The run has this ending then.
    pub fn pause(&self) -> Result<PausedDevices<'_>, DeviceError> {
        let paused = PausedDevices {
            devices: self,
            entries: self.embedded.now().devices().cloned().collect(),
        };
        for entry in &paused.entries {
            self.call(entry, |device| device.pause())?;
        }
        Ok(paused)
    }

    /// Resumes the devices that [`PlatformDevices::restore`] has paused.
    /// [`Machine::start`](crate::Machine::start) calls this; a VMM with a run loop of its own calls
    /// it when the guest runs.
    pub fn resume(&self) {
        for entry in self.embedded.now().devices() {
            if entry.is_held.swap(false, Ordering::SeqCst) {
                self.resume_one(entry);
            }
        }
    }

    /// Puts all devices into their states after power-on, the devices of every guest too, and
    /// forgets the ending of the run. No vCPU runs.
    ///
    /// # Errors
    /// [`DeviceError::Panicked`]. The run has this ending then.
    pub fn reset(&self) -> Result<(), DeviceError> {
        self.serial().reset(self.arch);
        self.status.store(NO_STATUS, Ordering::Release);
        *self.ending.lock().expect("no panic under this lock") = None;
        let now = self.embedded.now();
        let mut entries = now.devices();
        entries.try_for_each(|entry| self.call(entry, |device| device.reset()).map(drop))
    }

    /// Runs code of a device. `None`: it was removed. After a panic, the run has an ending.
    pub(super) fn call<T>(
        &self,
        entry: &Entry,
        code: impl FnOnce(&dyn Device) -> T,
    ) -> Result<Option<T>, DeviceError> {
        let called = entry.call(code);
        called.inspect_err(|error| {
            error!(target: "lacuna::device", %error, "device has panicked");
            self.set_ending(Ending::Device(error.clone()));
        })
    }

    fn resume_one(&self, entry: &Entry) {
        // After a panic, the run has an ending, and the caller needs no other sign.
        let _ = self.call(entry, |device| device.resume());
    }
}

/// Paused devices of a VMM. When this value is dropped, they are resumed, unless the run has
/// an ending.
pub struct PausedDevices<'a> {
    pub(super) devices: &'a PlatformDevices,
    pub(super) entries: Vec<Arc<Entry>>,
}

impl PausedDevices<'_> {
    /// Keeps them paused until [`PlatformDevices::resume`].
    pub(super) fn hold(mut self) -> Vec<Arc<Entry>> {
        let entries = mem::take(&mut self.entries);
        let hold = |entry: &Arc<Entry>| entry.is_held.store(true, Ordering::SeqCst);
        entries.iter().for_each(hold);
        entries
    }
}

impl Drop for PausedDevices<'_> {
    fn drop(&mut self) {
        for entry in &self.entries {
            if self.devices.ending().is_none() {
                self.devices.resume_one(entry);
            }
        }
    }
}
