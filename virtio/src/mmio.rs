//! The register map of virtio-mmio (virtio 1.2, 4.2.2).

use crate::device::VirtioDevice;
use crate::guest::{Fault, Host};
use crate::queue::SIZE_MAX;
use crate::registers::Registers;
use crate::shared::{Control, Shared};
use lacuna_addr::Gpa;
use lacuna_machine::{Access, Device, DeviceState, Ending, Line, Vm, Width};
use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
/// Ours; drivers ignore it.
const VENDOR: u32 = u32::from_le_bytes(*b"LCNA");
/// The version of the states that devices save.
const VERSION: u32 = 1;
/// The status bits that a driver sets.
const DRIVER_STATUS: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE
    | VIRTIO_CONFIG_S_DRIVER
    | VIRTIO_CONFIG_S_FEATURES_OK
    | VIRTIO_CONFIG_S_DRIVER_OK
    | VIRTIO_CONFIG_S_FAILED;

/// A virtio device with the registers of virtio-mmio. [`PlatformDevices::add_mmio`] puts it at an
/// address of the guest, with [`Mmio::BYTES`] bytes.
///
/// Dropping it waits for the request in progress.
///
/// [`PlatformDevices::add_mmio`]: lacuna_machine::PlatformDevices::add_mmio
pub struct Mmio<D: VirtioDevice> {
    pub(crate) shared: Arc<Shared<D>>,
    worker: Option<JoinHandle<()>>,
}

impl<D: VirtioDevice> Mmio<D> {
    /// The size of its address range.
    pub const BYTES: u64 = 0x200;

    /// The word of a kernel command line that names a device at `at` with the line `line` to Linux.
    ///
    /// ```
    /// use lacuna_addr::Gpa;
    /// use lacuna_virtio::{Block, Mmio};
    ///
    /// let word = Mmio::<Block>::kernel_parameter(Gpa::truncate(0xd000_0000), 5);
    /// assert_eq!(word, "virtio_mmio.device=0x200@0xd0000000:5");
    /// ```
    pub fn kernel_parameter(at: Gpa, line: u32) -> String {
        let (bytes, at) = (Self::BYTES, at.get());
        format!("virtio_mmio.device={bytes:#x}@{at:#x}:{line}")
    }

    /// The device `device` of `vm`, which interrupts by `line`. Its worker thread starts.
    ///
    /// # Errors
    /// The host has no thread, or a [`Balloon`](crate::Balloon) cannot discard pages of this VM
    /// ([`io::ErrorKind::Unsupported`]).
    pub fn new<V: Vm>(vm: &Arc<V>, line: Line, device: D) -> io::Result<Self> {
        if device.discards() && vm.balloon().is_none() {
            let why = "this VM's pages cannot be discarded, because a handler fills its memory: \
                       leave the balloon out, or build the VM without a handler";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        let vm = Arc::downgrade(vm) as Weak<dyn Host>;
        let shared = Arc::new(Shared::new(vm, line, device));
        let named = thread::Builder::new().name("lacuna-virtio".into());
        let worker = named.spawn({
            let shared = Arc::clone(&shared);
            move || shared.work()
        })?;
        Ok(Self {
            shared,
            worker: Some(worker),
        })
    }

    /// The device behind the registers.
    pub fn device(&self) -> &D {
        &self.shared.device
    }

    /// Why the device needs a reset, if it does.
    pub fn fault(&self) -> Option<Fault> {
        self.shared.lock().fault.clone()
    }

    /// The offered features.
    pub(crate) fn features(&self) -> u64 {
        self.device().features() | 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn register(&self, offset: u32) -> u32 {
        let mut control = self.shared.lock();
        let registers = &mut control.registers;
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => 2,
            VIRTIO_MMIO_DEVICE_ID => self.device().id(),
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => match registers.device_features_select {
                0 => self.features() as u32,
                1 => (self.features() >> 32) as u32,
                _ => 0,
            },
            VIRTIO_MMIO_QUEUE_NUM_MAX => registers.queue().map_or(0, |_| SIZE_MAX.into()),
            VIRTIO_MMIO_QUEUE_READY => registers.queue().map_or(0, |queue| queue.ready.into()),
            VIRTIO_MMIO_INTERRUPT_STATUS => registers.interrupt,
            VIRTIO_MMIO_STATUS => registers.status,
            // There is no shared memory.
            VIRTIO_MMIO_SHM_LEN_LOW..=VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            VIRTIO_MMIO_CONFIG_GENERATION => registers.config_generation,
            _ => 0,
        }
    }

    fn set_register(&self, offset: u32, value: u32) {
        let shared = &*self.shared;
        match (offset, value) {
            (VIRTIO_MMIO_STATUS, 0) => return shared.reset(&mut shared.quiet()),
            (VIRTIO_MMIO_QUEUE_READY, 0) => {
                if let Some(queue) = shared.quiet().registers.queue() {
                    queue.ready = false;
                }
                return;
            }
            _ => {}
        }
        let mut control = shared.lock();
        let registers = &mut control.registers;
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => registers.device_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => registers.driver_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES if !registers.has(VIRTIO_CONFIG_S_FEATURES_OK) => {
                let shift = match registers.driver_features_select {
                    select @ 0..=1 => 32 * select,
                    _ => return,
                };
                registers.driver_features &= !(u64::from(u32::MAX) << shift);
                registers.driver_features |= u64::from(value) << shift;
            }
            VIRTIO_MMIO_QUEUE_SEL => registers.queue_select = value,
            VIRTIO_MMIO_QUEUE_NOTIFY if (value as usize) < registers.queues.len() => {
                shared.notify(&mut control, 1 << value);
            }
            VIRTIO_MMIO_INTERRUPT_ACK => shared.acknowledge(registers, value),
            VIRTIO_MMIO_STATUS => self.set_status(&mut control, value),
            _ => set_queue(registers, offset, value),
        }
    }

    /// A driver only adds bits, except by a reset.
    fn set_status(&self, control: &mut Control, value: u32) {
        let registers = &mut control.registers;
        let mut new = value & DRIVER_STATUS & !registers.status;
        let accepted = registers.driver_features;
        if accepted & !self.features() != 0 || accepted >> VIRTIO_F_VERSION_1 & 1 == 0 {
            new &= !VIRTIO_CONFIG_S_FEATURES_OK;
        }
        if (registers.status | new) & VIRTIO_CONFIG_S_FEATURES_OK == 0 {
            new &= !VIRTIO_CONFIG_S_DRIVER_OK;
        }
        registers.status |= new;
        if new & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            // A driver may have made buffers available before this.
            self.shared.notify(control, u32::MAX);
        }
    }
}

/// Changes a register of the selected queue, which the device does not use yet.
fn set_queue(registers: &mut Registers, offset: u32, value: u32) {
    let Some(queue) = registers.queue().filter(|queue| !queue.ready) else {
        return;
    };
    let low = |address: &mut u64| *address = *address >> 32 << 32 | u64::from(value);
    let high =
        |address: &mut u64| *address = *address & u64::from(u32::MAX) | u64::from(value) << 32;
    match offset {
        VIRTIO_MMIO_QUEUE_NUM => queue.size = u16::try_from(value).unwrap_or(0),
        VIRTIO_MMIO_QUEUE_DESC_LOW => low(&mut queue.descriptors),
        VIRTIO_MMIO_QUEUE_DESC_HIGH => high(&mut queue.descriptors),
        VIRTIO_MMIO_QUEUE_AVAIL_LOW => low(&mut queue.available),
        VIRTIO_MMIO_QUEUE_AVAIL_HIGH => high(&mut queue.available),
        VIRTIO_MMIO_QUEUE_USED_LOW => low(&mut queue.used),
        VIRTIO_MMIO_QUEUE_USED_HIGH => high(&mut queue.used),
        VIRTIO_MMIO_QUEUE_READY => {
            (queue.next_available, queue.next_used) = (0, 0);
            queue.ready = queue.is_valid();
        }
        _ => {}
    }
}

impl<D: VirtioDevice> Device for Mmio<D> {
    fn read(&self, Access { offset, width, .. }: Access) -> u64 {
        let Some(from) = offset.checked_sub(VIRTIO_MMIO_CONFIG.into()) else {
            // The registers are accessed by 32 bits.
            return match width == Width::Long && offset.is_multiple_of(4) {
                true => self.register(offset as u32).into(),
                false => 0,
            };
        };
        let control = self.shared.lock();
        let bytes = control.registers.config.iter().skip(from as usize);
        let bytes = bytes.take(width as usize).enumerate();
        bytes.fold(0, |value, (place, byte)| {
            value | u64::from(*byte) << (8 * place)
        })
    }

    fn write(&self, Access { offset, width, .. }: Access, value: u64) -> Option<Ending> {
        match offset.checked_sub(VIRTIO_MMIO_CONFIG.into()) {
            Some(from) => {
                let driver = self.device().driver_config();
                let mut control = self.shared.lock();
                let bytes = value.to_le_bytes().into_iter().take(width as usize);
                for (at, byte) in (from as usize..).zip(bytes) {
                    if driver.contains(&at) {
                        control.registers.config[at] = byte;
                    }
                }
            }
            None if width == Width::Long && offset.is_multiple_of(4) => {
                self.set_register(offset as u32, value as u32);
            }
            None => {}
        }
        None
    }

    /// Waits for the end of the request in progress, and lets no other begin. The driver's further
    /// requests stay in its rings. Guest memory does not change through this device any more.
    fn pause(&self) {
        self.shared.quiet().paused = true;
        self.device().paused();
    }

    /// Handles requests again.
    fn resume(&self) {
        let _vm = self.shared.hold();
        let mut control = self.shared.lock();
        control.paused = false;
        // The guest may have been restored since: the line has its device's level, and requests
        // that were made before are found.
        self.shared.set_line(&control.registers);
        self.shared.notify(&mut control, u32::MAX);
    }

    fn version(&self) -> u32 {
        VERSION
    }

    /// A [`MmioState`](crate::MmioState) in JSON.
    fn save(&self) -> Vec<u8> {
        serde_json::to_vec(&self.state()).expect("numbers and bytes have a JSON form")
    }

    fn restore(&self, state: &DeviceState) -> Result<(), String> {
        let state = serde_json::from_slice(&state.bytes).map_err(|error| error.to_string())?;
        self.set_state(&state).map_err(|error| error.to_string())
    }

    /// Resets the device, as its driver does. A request in progress ends first.
    fn reset(&self) {
        let _vm = self.shared.hold();
        self.shared.reset(&mut self.shared.quiet());
    }
}

impl<D: VirtioDevice> Drop for Mmio<D> {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(worker) = self.worker.take() {
            lacuna_sync::join(worker);
        }
    }
}

impl<D: VirtioDevice> fmt::Debug for Mmio<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mmio")
            .field("id", &self.device().id())
            .finish_non_exhaustive()
    }
}
