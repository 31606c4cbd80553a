//! The state of a guest's devices, saved with the VM. An embedder moves its own devices itself.

use super::lines::{LINE_MAX, Lines};
use super::pl011::Pl011;
use super::uart::{NoInterrupt, Uart};
use super::{NO_STATUS, PlatformDevices};
use crate::{Arch, StateError};
use lacuna_addr::Gfn;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use vm_superio::Serial;
use vm_superio::serial::{NoEvents, SerialState};

/// The state of [`PlatformDevices`], without an embedder's own devices.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DevicesState {
    /// Frame number of the announced status page.
    pub status_page: Option<u64>,
    /// The guest's unfinished line.
    pub line: Vec<u8>,
    /// Registers of the serial line.
    pub serial: SerialRegisters,
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

impl PlatformDevices {
    /// The devices' present state. No vCPU runs.
    pub fn save(&self) -> DevicesState {
        let mut serial = self.serial();
        let registers = match &*serial {
            Uart::Com1(line) => SerialRegisters::Com1(com1_registers(&line.state())),
            Uart::Pl011(line) => SerialRegisters::Pl011(line.registers()),
        };
        DevicesState {
            status_page: self.status_page().map(Gfn::get),
            line: serial.lines().partial().to_vec(),
            serial: registers,
        }
    }

    /// Puts the devices into `state`. No vCPU runs.
    ///
    /// # Errors
    /// [`StateError`]; nothing has changed then.
    pub fn restore(&self, state: &DevicesState) -> Result<(), StateError> {
        let status = match state.status_page {
            None => NO_STATUS,
            Some(gfn) if Gfn::new(gfn).is_some() => gfn,
            Some(value) => {
                let field = "devices.status_page";
                return Err(StateError::Invalid { field, value });
            }
        };
        if state.line.len() >= LINE_MAX || state.line.contains(&b'\n') {
            let (field, value) = ("devices.line", state.line.len() as u64);
            return Err(StateError::Invalid { field, value });
        }
        let arch = match state.serial {
            SerialRegisters::Com1(_) => Arch::X86_64,
            SerialRegisters::Pl011(_) => Arch::Arm64,
        };
        if arch != self.arch {
            return Err(StateError::Architecture);
        }
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
