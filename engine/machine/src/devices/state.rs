//! The state of a guest's devices, saved with the VM.

use super::lines::{LINE_MAX, Lines};
use super::pl011::Pl011;
use super::table::NAME_MAX;
use super::uart::{NoInterrupt, Uart};
use super::{DeviceState, NO_STATUS, PausedDevices, PlatformDevices};
use crate::{Arch, DeviceError};
use lacuna_addr::Gfn;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use vm_superio::Serial;
use vm_superio::serial::{NoEvents, SerialState};

/// The state of [`PlatformDevices`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DevicesState {
    /// Frame number of the announced status page.
    pub status_page: Option<u64>,
    /// The guest's unfinished line.
    pub line: Vec<u8>,
    /// Registers of the serial line.
    pub serial: SerialRegisters,
    /// The VMM's devices by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub devices: BTreeMap<String, DeviceState>,
}

impl DevicesState {
    /// The most bytes that a VMM's devices may have together.
    pub const BYTES_MAX: usize = 16 << 20;

    /// The VMM's devices, and the versions of their states.
    pub fn versions(&self) -> BTreeMap<String, u32> {
        let devices = self.devices.iter();
        devices
            .map(|(name, state)| (name.clone(), state.version))
            .collect()
    }
}

/// Registers of a serial line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub enum SerialRegisters {
    /// COM1: divisor low and high, IER, IIR, LCR, LSR, MCR, MSR, scratch.
    Com1([u8; 9]),
    /// PL011: IBRD, FBRD, LCR_H, CR, IFLS, IMSC, RIS, DMACR.
    Pl011([u32; 8]),
}

impl PausedDevices<'_> {
    /// The devices' state.
    ///
    /// # Errors
    /// [`DeviceError::TooLong`], [`DeviceError::Panicked`]. After a panic, the run has this ending.
    pub fn save(&self) -> Result<DevicesState, DeviceError> {
        let (mut devices, mut bytes) = (BTreeMap::new(), 0);
        for entry in &self.entries {
            let saved = self.devices.call(entry, |device| DeviceState {
                version: device.version(),
                bytes: device.save(),
            });
            // It may have been removed meanwhile.
            let Some(state) = saved? else { continue };
            bytes += state.bytes.len();
            let name = entry.name.clone();
            if bytes > DevicesState::BYTES_MAX {
                return Err(DeviceError::TooLong { name });
            }
            devices.insert(name, state);
        }
        Ok(self.devices.own_state(devices))
    }
}

impl PlatformDevices {
    fn own_state(&self, devices: BTreeMap<String, DeviceState>) -> DevicesState {
        let mut serial = self.serial();
        let registers = match &*serial {
            Uart::Com1(line) => SerialRegisters::Com1(com1_registers(&line.state())),
            Uart::Pl011(line) => SerialRegisters::Pl011(line.registers()),
        };
        DevicesState {
            status_page: self.status_page().map(Gfn::get),
            line: serial.lines().partial().to_vec(),
            serial: registers,
            devices,
        }
    }

    /// The VMM's devices, and the versions of the states that they save.
    ///
    /// # Errors
    /// [`DeviceError::Panicked`]. The run has this ending then; kick vCPUs that run.
    pub fn versions(&self) -> Result<BTreeMap<String, u32>, DeviceError> {
        let mut versions = BTreeMap::new();
        for entry in self.embedded.now().devices() {
            if let Some(version) = self.call(entry, |device| device.version())? {
                versions.insert(entry.name.clone(), version);
            }
        }
        Ok(versions)
    }

    /// Checks that the VMM's devices are the saved ones, and accept the versions of their
    /// states.
    ///
    /// # Errors
    /// [`DeviceError::Missing`], [`DeviceError::Extra`], [`DeviceError::Version`], with the name of
    /// the first such device; [`DeviceError::Panicked`].
    pub fn check_versions(&self, saved: &BTreeMap<String, u32>) -> Result<(), DeviceError> {
        let now = self.embedded.now();
        if let Some(name) = (saved.keys()).find(|name| now.devices().all(|e| e.name != **name)) {
            // The name comes from a file or a peer.
            let end = name.floor_char_boundary(NAME_MAX);
            return Err(DeviceError::Missing(name[..end].to_owned()));
        }
        for entry in now.devices() {
            let name = entry.name.clone();
            let Some(&version) = saved.get(&name) else {
                return Err(DeviceError::Extra(name));
            };
            if self.call(entry, |device| device.accepts(version))? == Some(false) {
                return Err(DeviceError::Version { name, version });
            }
        }
        Ok(())
    }

    /// Puts the devices into `state`. No vCPU runs, and the VM has its memory, its shared state and
    /// the states of its vCPUs. The VMM's devices are paused first, and stay paused until
    /// [`PlatformDevices::resume`].
    ///
    /// # Errors
    /// [`DeviceError`]. If it is not due to a device of the VMM's, nothing has changed then.
    pub fn restore(&self, state: &DevicesState) -> Result<(), DeviceError> {
        let status = match state.status_page {
            None => NO_STATUS,
            Some(gfn) if Gfn::new(gfn).is_some() => gfn,
            Some(value) => {
                let field = "devices.status_page";
                return Err(DeviceError::Invalid { field, value });
            }
        };
        if state.line.len() >= LINE_MAX || state.line.contains(&b'\n') {
            let (field, value) = ("devices.line", state.line.len() as u64);
            return Err(DeviceError::Invalid { field, value });
        }
        let arch = match state.serial {
            SerialRegisters::Com1(_) => Arch::X86_64,
            SerialRegisters::Pl011(_) => Arch::Arm64,
        };
        self.check_arch(arch)?;
        self.restore_embedded(state)?;
        let mut serial = self.serial();
        let mut lines = serial.take_lines(self.arch);
        lines.set_partial(state.line.clone());
        *serial = match &state.serial {
            SerialRegisters::Com1(registers) => Uart::Com1(com1(registers, lines)),
            SerialRegisters::Pl011(registers) => {
                Uart::Pl011(Pl011::with_registers(lines, registers))
            }
        };
        self.status.store(status, Ordering::Release);
        Ok(())
    }

    fn restore_embedded(&self, state: &DevicesState) -> Result<(), DeviceError> {
        self.check_versions(&state.versions())?;
        let mut left = DevicesState::BYTES_MAX;
        for (name, device) in &state.devices {
            let rest = left.checked_sub(device.bytes.len());
            left = rest.ok_or_else(|| DeviceError::TooLong { name: name.clone() })?;
        }
        for entry in self.pause()?.hold() {
            let Some(saved) = state.devices.get(&entry.name) else {
                continue;
            };
            if let Some(Err(wrong)) = self.call(&entry, |device| device.restore(saved))? {
                return Err(DeviceError::Refused {
                    name: entry.name.clone(),
                    version: saved.version,
                    wrong,
                });
            }
        }
        Ok(())
    }
}

fn com1_registers(state: &SerialState) -> [u8; 9] {
    [
        state.baud_divisor_low,
        state.baud_divisor_high,
        state.interrupt_enable,
        state.interrupt_identification,
        state.line_control,
        state.line_status,
        state.modem_control,
        state.modem_status,
        state.scratch,
    ]
}

fn com1(registers: &[u8; 9], lines: Lines) -> Serial<NoInterrupt, NoEvents, Lines> {
    let [low, high, ier, iir, lcr, lsr, mcr, msr, scratch] = *registers;
    let state = SerialState {
        baud_divisor_low: low,
        baud_divisor_high: high,
        interrupt_enable: ier,
        interrupt_identification: iir,
        line_control: lcr,
        line_status: lsr,
        modem_control: mcr,
        modem_status: msr,
        scratch,
        // There is no input.
        in_buffer: Vec::new(),
    };
    // Its errors are a full input queue and a failing trigger, and there is neither.
    Serial::from_state(&state, NoInterrupt, NoEvents, lines)
        .unwrap_or_else(|_| unreachable!("no input, and a trigger that cannot fail"))
}
