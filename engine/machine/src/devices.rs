//! A guest's devices: the built-in ones, and those that the VMM adds.

mod device;
mod error;
mod life;
mod lines;
pub mod mmio;
mod pl011;
mod reserved;
mod state;
mod table;
mod uart;

use crate::{Arch, Kick, MemorySlot, VcpuError, Width};
use lacuna_addr::{Gfn, Gpa, PAGE_SIZE};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use lines::Lines;
use reserved::{OWN, overlap};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use table::{Bus, Devices};
use tracing::trace;
use uart::Uart;

pub use device::{Access, Device, DeviceState};
pub use error::DeviceError;
pub use life::PausedDevices;
pub use lines::Console;
pub use reserved::check_reserved;
pub(crate) use reserved::is_of_controller;
pub use state::{DevicesState, SerialRegisters};

/// Port numbers.
pub mod port {
    /// COM1's first port.
    pub const SERIAL: u16 = 0x3f8;
    /// COM1's last port.
    pub const SERIAL_LAST: u16 = 0x3ff;
    /// Exit code.
    pub const EXIT: u16 = 0xf4;
    /// Status page frame number.
    pub const STATUS: u16 = 0x5c0;
}

/// The ports of the two PICs, which KVM emulates in the kernel.
pub(crate) const PICS: [RangeInclusive<u16>; 3] = [0x20..=0x21, 0xa0..=0xa1, 0x4d0..=0x4d1];

/// How a run ended. Its `Display` is one line for the user of the VMM.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Ending {
    /// The guest wrote its exit code.
    Exited(u32),
    /// A vCPU shut down, at the place in the text.
    Shutdown(String),
    /// The guest has switched its machine off.
    PoweredOff,
    /// The guest has requested a reset of its machine, which ends the run.
    Reset,
    /// A vCPU could not continue.
    Failed(VcpuError),
    /// A device of the VMM's has failed.
    Device(DeviceError),
    /// The VMM stopped the run.
    Stopped,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "the guest exited with code {code}"),
            Self::Shutdown(text) => f.write_str(text),
            Self::PoweredOff => f.write_str("the guest switched its machine off"),
            Self::Reset => f.write_str("the guest asked for a reset of its machine"),
            Self::Failed(error) => error.fmt(f),
            Self::Device(error) => error.fmt(f),
            Self::Stopped => f.write_str("the VMM stopped the run"),
        }
    }
}

/// The offset of `gpa` in a device's range.
fn offset_in(range: &RangeInclusive<u64>, gpa: Gpa) -> Option<u64> {
    range
        .contains(&gpa.get())
        .then(|| gpa.get() - range.start())
}

const NO_STATUS: u64 = u64::MAX;

/// The guest's devices, shared by its vCPU threads. Every x86-64 guest has these:
///
/// | port | width | meaning |
/// |---|---|---|
/// | 0x3f8..=0x3ff | byte | 16550A serial line, output only |
/// | 0xf4 | any | end of the run; the value is the exit code (QEMU's `isa-debug-exit`) |
/// | 0x5c0 | long | frame number of the guest's status page, if the guest has one |
///
/// Every AArch64 guest has these, at the addresses of [`mmio`]:
///
/// | address | width | meaning |
/// |---|---|---|
/// | `UART` | any | PL011, output only; its interrupt is never raised |
/// | `HOST` + 0 | long | end of the run; the value is the exit code |
/// | `HOST` + 4 | long | frame number of the guest's status page, if the guest has one |
///
/// A VMM adds [`Device`]s of its own, at ports and at guest-physical addresses, before the guest
/// starts or while it runs. Every other port and address reads as ones and ignores writes, as an
/// empty bus does. A device interrupts the guest by a [`Line`](crate::Line).
pub struct PlatformDevices {
    arch: Arch,
    serial: Mutex<Uart, lock_order::Serial>,
    status: AtomicU64,
    ending: Mutex<Option<Ending>, lock_order::PlatformEnding>,
    /// The VMM's.
    embedded: Devices,
}

impl fmt::Debug for PlatformDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlatformDevices")
            .field("ending", &self.ending())
            .finish_non_exhaustive()
    }
}

impl PlatformDevices {
    /// The devices of an x86-64 guest; `console` gets the output of the serial line.
    pub fn new(console: impl Console + 'static) -> Self {
        Self::of(Arch::X86_64, console)
    }

    /// The devices of a guest for `arch`; `console` gets the output of the serial line.
    pub fn of(arch: Arch, console: impl Console + 'static) -> Self {
        Self {
            arch,
            serial: Mutex::new(Uart::new(arch, Lines::new(console))),
            status: AtomicU64::new(NO_STATUS),
            ending: Mutex::new(None),
            embedded: Devices::default(),
        }
    }

    /// The architecture of the guests for which the devices are.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Checks that the devices are for guests of this architecture.
    ///
    /// # Errors
    /// [`DeviceError::Arch`].
    pub fn check_arch(&self, guest: Arch) -> Result<(), DeviceError> {
        let devices = self.arch;
        match devices == guest {
            true => Ok(()),
            false => Err(DeviceError::Arch { devices, guest }),
        }
    }

    /// Checks that no device lies over a memory slot. [`Machine::new`](crate::Machine::new) calls
    /// this. A VMM with a run loop of its own calls it before the first run, with
    /// [`MemorySlots::memory_slots`](crate::MemorySlots::memory_slots).
    ///
    /// # Errors
    /// [`DeviceError::Memory`], with the range of the first such device.
    pub fn check_memory(&self, slots: &[MemorySlot]) -> Result<(), DeviceError> {
        let page = PAGE_SIZE as u64;
        let bytes = |slot: &MemorySlot| {
            let start = slot.gfns.start().gpa().get();
            start..=start + (slot.gfns.pages() * page - 1)
        };
        let over = |range: &RangeInclusive<u64>| slots.iter().any(|s| overlap(&bytes(s), range));
        match self.embedded.now().mmio_ranges().find(|range| over(range)) {
            Some(range) => Err(DeviceError::Memory {
                from: *range.start(),
                to: *range.end(),
            }),
            None => Ok(()),
        }
    }

    /// A write of vCPU `vcpu` to an address without memory.
    pub fn mmio_write(&self, gpa: Gpa, width: Width, value: u64, vcpu: usize, kick: &impl Kick) {
        if self.arch == Arch::Arm64 && self.own_write(gpa, width, value, kick) {
            return;
        }
        self.embedded_write((Bus::Mmio, gpa.get()), (width, vcpu), value, kick);
    }

    /// A write to a device of every AArch64 guest. Returns `false` if no such device is there.
    fn own_write(&self, gpa: Gpa, width: Width, value: u64, kick: &impl Kick) -> bool {
        if let Some(offset) = offset_in(&OWN[0], gpa) {
            if let Uart::Pl011(line) = &mut *self.serial() {
                line.write(offset, value);
            }
            return true;
        }
        match offset_in(&OWN[1], gpa).filter(|_| width == Width::Long) {
            Some(mmio::HOST_EXIT) => self.end(Ending::Exited(value as u32), kick),
            Some(mmio::HOST_STATUS) => self.status.store(value, Ordering::Release),
            _ => return false,
        }
        true
    }

    /// A read of vCPU `vcpu` from an address without memory.
    pub fn mmio_read(&self, gpa: Gpa, width: Width, vcpu: usize, kick: &impl Kick) -> u64 {
        if self.arch == Arch::Arm64
            && let Some(offset) = offset_in(&OWN[0], gpa)
            && let Uart::Pl011(line) = &*self.serial()
        {
            return line.read(offset, width);
        }
        self.embedded_read((Bus::Mmio, gpa.get()), (width, vcpu), kick)
    }

    /// A port write of vCPU `vcpu`.
    pub fn write(&self, port: u16, width: Width, value: u32, vcpu: usize, kick: &impl Kick) {
        match port {
            port::SERIAL..=port::SERIAL_LAST if width == Width::Byte => {
                if let Uart::Com1(serial) = &mut *self.serial() {
                    // No error is possible: `Lines` never fails, and there is no interrupt to
                    // trigger.
                    let _ = serial.write((port - port::SERIAL) as u8, value as u8);
                }
            }
            port::EXIT => self.end(Ending::Exited(value), kick),
            port::STATUS if width == Width::Long => {
                self.status.store(u64::from(value), Ordering::Release);
            }
            _ => {
                let at = (Bus::Ports, port.into());
                self.embedded_write(at, (width, vcpu), value.into(), kick);
            }
        }
    }

    /// A port read of vCPU `vcpu`.
    pub fn read(&self, port: u16, width: Width, vcpu: usize, kick: &impl Kick) -> u64 {
        match port {
            port::SERIAL..=port::SERIAL_LAST if width == Width::Byte => match &mut *self.serial() {
                Uart::Com1(serial) => u64::from(serial.read((port - port::SERIAL) as u8)),
                Uart::Pl011(_) => width.ones(),
            },
            _ => self.embedded_read((Bus::Ports, port.into()), (width, vcpu), kick),
        }
    }

    fn embedded_write(&self, at: (Bus, u64), by: (Width, usize), value: u64, kick: &impl Kick) {
        let write = |device: &dyn Device, access| device.write(access, value);
        if let Some(Some(ending)) = self.access(at, by, kick, write) {
            self.end(ending, kick);
        }
    }

    fn embedded_read(&self, at: (Bus, u64), by: (Width, usize), kick: &impl Kick) -> u64 {
        let value = self.access(at, by, kick, |device, access| device.read(access));
        value.unwrap_or(u64::MAX) & by.0.ones()
    }

    /// An access to a device of the VMM's. `None`: there is none, or it has panicked.
    fn access<T>(
        &self,
        (bus, at): (Bus, u64),
        (width, vcpu): (Width, usize),
        kick: &impl Kick,
        code: impl FnOnce(&dyn Device, Access) -> T,
    ) -> Option<T> {
        let (entry, offset) = self.embedded.find(bus, at, width)?;
        let access = Access {
            offset,
            width,
            vcpu,
        };
        trace!(target: "lacuna::device", name = entry.name, ?access, "access");
        let called = self.call(&entry, |device| code(device, access));
        called.unwrap_or_else(|_| {
            kick.kick_all();
            None
        })
    }

    /// The last status page that the guest has announced.
    pub fn status_page(&self) -> Option<Gfn> {
        match self.status.load(Ordering::Acquire) {
            NO_STATUS => None,
            gfn => Gfn::new(gfn),
        }
    }

    /// Ends the run and kicks every vCPU. Only the first call sets the ending.
    pub fn end(&self, ending: Ending, kick: &impl Kick) {
        self.set_ending(ending);
        kick.kick_all();
    }

    fn set_ending(&self, ending: Ending) {
        self.ending
            .lock()
            .expect("no panic under this lock")
            .get_or_insert(ending);
    }

    /// How the run ended; `None` until then.
    pub fn ending(&self) -> Option<Ending> {
        self.ending
            .lock()
            .expect("no panic under this lock")
            .clone()
    }

    /// Gives the console the unfinished last line.
    pub fn flush(&self) {
        self.serial().lines().flush();
    }

    /// The serial line. A panicking console leaves it intact.
    fn serial(&self) -> MutexGuard<'_, Uart> {
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
