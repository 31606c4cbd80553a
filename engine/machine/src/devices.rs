//! The devices of a guest: the devices of every guest, and an embedder's own.

mod lines;
pub mod mmio;
mod pl011;
mod reserved;
mod state;
mod uart;

use crate::{Arch, ErrorKind, Kick, MemorySlot, VcpuError, Width};
use lacuna_addr::{Gfn, Gpa, PAGE_SIZE};
use lacuna_sync::{Mutex, MutexGuard, lock_order};
use lines::Lines;
use reserved::{OWN, controllers, overlap, own};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use uart::Uart;

pub use lines::Console;
pub use reserved::check_reserved;
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
const PICS: [RangeInclusive<u16>; 3] = [0x20..=0x21, 0xa0..=0xa1, 0x4d0..=0x4d1];

/// How a run ended. Its `Display` is one line for the user of the VMM.
#[derive(Clone, PartialEq, Eq, Debug)]
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
            Self::Stopped => f.write_str("the VMM stopped the run"),
        }
    }
}

/// A device of an embedder's own. Several vCPUs may access it at once.
pub trait Device: Send + Sync {
    /// A read, `offset` bytes from the beginning of the device's range. Bits beyond `width` are
    /// dropped.
    fn read(&self, offset: u64, width: Width) -> u64;

    /// A write of `value`, which is zero-extended. To end the run, the device returns the ending.
    fn write(&self, offset: u64, width: Width, value: u64) -> Option<Ending>;
}

/// Why a device is not added.
#[derive(Debug, thiserror::Error, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceError {
    /// Another device has a part of the range.
    #[error("{from:#x}..={to:#x} overlaps a device that is there already: choose another range")]
    Overlap {
        /// First port or address.
        from: u64,
        /// Last port or address.
        to: u64,
    },
    /// An interrupt controller of the VM has a part of the range, on one backend at least.
    #[error(
        "{from:#x}..={to:#x} overlaps an interrupt controller, which gets the accesses: choose \
         another range"
    )]
    InterruptController {
        /// First port or address.
        from: u64,
        /// Last port or address.
        to: u64,
    },
    /// The devices are for guests of another architecture.
    #[error(
        "the devices are for {devices} guests, and the image is for {image}: make them with \
             `PlatformDevices::of` for {image}"
    )]
    Arch {
        /// The architecture of the devices.
        devices: Arch,
        /// The architecture of the image.
        image: Arch,
    },
    /// A memory slot of the VM has a part of the range.
    #[error(
        "the device at {from:#x}..={to:#x} overlaps the guest's memory, which gets the accesses: \
         put the device where the VM has no memory slot, such as 0xc000_0000 to 0xfebf_ffff for \
         x86-64, and 0x0a00_0000 to 0x3fff_ffff for AArch64"
    )]
    Memory {
        /// First address.
        from: u64,
        /// Last address.
        to: u64,
    },
    /// The range is empty, or exceeds the address space.
    #[error("a device of {bytes} bytes at {from:#x}: give it at least one byte, below 2^48")]
    Range {
        /// First address.
        from: u64,
        /// Its size.
        bytes: u64,
    },
}

impl DeviceError {
    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Overlap { .. }
            | Self::InterruptController { .. }
            | Self::Arch { .. }
            | Self::Memory { .. }
            | Self::Range { .. } => ErrorKind::Request,
        }
    }
}

/// The offset of `gpa` in a device's range.
fn offset_in(range: &RangeInclusive<u64>, gpa: Gpa) -> Option<u64> {
    range
        .contains(&gpa.get())
        .then(|| gpa.get() - range.start())
}

/// The devices of one address space. Their ranges do not overlap.
#[derive(Default)]
struct Space(Vec<(RangeInclusive<u64>, Arc<dyn Device>)>);

impl Space {
    fn add(
        &mut self,
        range: RangeInclusive<u64>,
        device: Arc<dyn Device>,
    ) -> Result<(), DeviceError> {
        let (from, to) = (*range.start(), *range.end());
        if self.0.iter().any(|(other, _)| overlap(other, &range)) {
            return Err(DeviceError::Overlap { from, to });
        }
        self.0.push((range, device));
        Ok(())
    }

    /// The device with a range that contains the whole access, and the access's offset in it.
    fn find(&self, at: u64, width: Width) -> Option<(&dyn Device, u64)> {
        let last = at.checked_add(width as u64 - 1)?;
        let mut devices = self.0.iter();
        let (range, device) = devices.find(|(r, _)| r.contains(&at) && r.contains(&last))?;
        Some((&**device, at - range.start()))
    }
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
/// starts. Every other port and address reads as ones and ignores writes, as an empty bus does.
/// A device interrupts the guest by a [`Line`](crate::Line).
pub struct PlatformDevices {
    arch: Arch,
    serial: Mutex<Uart, lock_order::Serial>,
    status: AtomicU64,
    ending: Mutex<Option<Ending>, lock_order::PlatformEnding>,
    ports: Space,
    mmio: Space,
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
            ports: Space::default(),
            mmio: Space::default(),
        }
    }

    /// The architecture of the guests for which the devices are.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Adds `device` at `ports`. The ports of [`port`] and of the PICs are reserved.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing has changed then.
    pub fn add_ports(
        &mut self,
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
        self.ports.add(from..=to, device)
    }

    /// Adds `device` at `bytes` guest-physical addresses from `start` on. The addresses of
    /// interrupt controllers are reserved: for x86-64 the I/O APIC (0xfec0_0000) and the local APIC
    /// (0xfee0_0000), for AArch64 the GIC. For AArch64, the addresses of the devices of every guest
    /// are reserved too.
    ///
    /// If a memory slot overlaps the device, the guest accesses the memory. This function does not
    /// know the VM, so [`PlatformDevices::check_memory`] checks for overlaps before the run.
    /// [`Layout`](crate::Layout) names the addresses without memory at boot.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing has changed then.
    pub fn add_mmio(
        &mut self,
        start: Gpa,
        bytes: u64,
        device: Arc<dyn Device>,
    ) -> Result<(), DeviceError> {
        let from = start.get();
        let last = bytes
            .checked_sub(1)
            .and_then(|last| start.checked_add(last));
        let last = last.ok_or(DeviceError::Range { from, bytes })?;
        let range = from..=last.get();
        let to = last.get();
        if controllers(self.arch)
            .iter()
            .any(|taken| overlap(taken, &range))
        {
            return Err(DeviceError::InterruptController { from, to });
        }
        if own(self.arch).iter().any(|taken| overlap(taken, &range)) {
            return Err(DeviceError::Overlap { from, to });
        }
        self.mmio.add(range, device)
    }

    /// Checks that the devices are for guests of the architecture of an image.
    ///
    /// # Errors
    /// [`DeviceError::Arch`].
    pub fn check_arch(&self, image: Arch) -> Result<(), DeviceError> {
        let devices = self.arch;
        match devices == image {
            true => Ok(()),
            false => Err(DeviceError::Arch { devices, image }),
        }
    }

    /// Checks that no device lies over a memory slot. [`Builder::run`](crate::Builder::run) and
    /// [`run_watched`](crate::run_watched) call this. A VMM with a run loop of its own calls it
    /// with [`MemorySlots::memory_slots`](crate::MemorySlots::memory_slots) before the first run.
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
        match self.mmio.0.iter().find(|(range, _)| over(range)) {
            Some((range, _)) => Err(DeviceError::Memory {
                from: *range.start(),
                to: *range.end(),
            }),
            None => Ok(()),
        }
    }

    /// A write to an address without memory.
    pub fn mmio_write(&self, gpa: Gpa, width: Width, value: u64, kick: &impl Kick) {
        if self.arch == Arch::Arm64 && self.own_write(gpa, width, value, kick) {
            return;
        }
        let found = self.mmio.find(gpa.get(), width);
        let ending = found.and_then(|(device, offset)| device.write(offset, width, value));
        if let Some(ending) = ending {
            self.end(ending, kick);
        }
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

    /// A read from an address without memory.
    pub fn mmio_read(&self, gpa: Gpa, width: Width) -> u64 {
        if self.arch == Arch::Arm64
            && let Some(offset) = offset_in(&OWN[0], gpa)
            && let Uart::Pl011(line) = &*self.serial()
        {
            return line.read(offset, width);
        }
        let found = self.mmio.find(gpa.get(), width);
        found.map_or(width.ones(), |(device, offset)| {
            device.read(offset, width) & width.ones()
        })
    }

    /// A port write.
    pub fn write(&self, port: u16, width: Width, value: u32, kick: &impl Kick) {
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
                let found = self.ports.find(u64::from(port), width);
                let write = |(device, offset): (&dyn Device, u64)| {
                    device.write(offset, width, u64::from(value))
                };
                if let Some(ending) = found.and_then(write) {
                    self.end(ending, kick);
                }
            }
        }
    }

    /// A port read.
    pub fn read(&self, port: u16, width: Width) -> u64 {
        match port {
            port::SERIAL..=port::SERIAL_LAST if width == Width::Byte => match &mut *self.serial() {
                Uart::Com1(serial) => u64::from(serial.read((port - port::SERIAL) as u8)),
                Uart::Pl011(_) => width.ones(),
            },
            _ => match self.ports.find(u64::from(port), width) {
                Some((device, offset)) => device.read(offset, width) & width.ones(),
                None => width.ones(),
            },
        }
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
        self.ending
            .lock()
            .expect("no panic under this lock")
            .get_or_insert(ending);
        kick.kick_all();
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
