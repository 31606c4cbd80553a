//! The I/O APIC (82093AA, October 1996): 24 pins, and for each a redirection entry that makes an
//! interrupt message of it.
//!
//! ```text
//! set_pin --- edge: the line has become high ----.
//!         `-- level: it is high, no remote IRR --+- not masked -> message to the local APICs
//!                          ^                          level: sets remote IRR
//!  write of the entry -----+
//!  EOI of a local APIC ----+-- clears remote IRR of the level entries with that vector
//! ```
//! As KVM: an edge on a masked pin is lost, and the polarity bit has no effect, because a device
//! asserts a line and does not set its voltage.
//!
//! Left out on purpose: delivery modes other than fixed, lowest priority and NMI. Their entries
//! send nothing.

use super::message::Message;
use lacuna_addr::Gpa;
use lacuna_state::x86::IoApic;

/// Pins of the I/O APIC.
pub const PINS: usize = 24;

/// The registers have this address, and this many bytes belong to them.
const BASE: u64 = 0xfec0_0000;
const BYTES: u64 = 0x100;
/// The two registers in memory: the number of an indirect register, and its value.
const SELECT: u64 = 0x00;
const WINDOW: u64 = 0x10;
/// The indirect registers.
const ID: u8 = 0;
const VERSION: u8 = 1;
const ARBITRATION: u8 = 2;
const ENTRIES: u8 = 0x10;
/// Version 1.1, and the number of the last entry.
const VERSION_VALUE: u32 = 0x11 | (PINS as u32 - 1) << 16;

/// Bits of a redirection entry.
const REMOTE_IRR: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;
/// Vector, delivery mode, destination mode, polarity, trigger mode, mask; destination. The delivery
/// status is always 0: a message is never on its way.
const WRITABLE: u64 = 0xff00_0000_0001_afff;

/// Sends a message. Returns whether a local APIC has taken it.
type Send<'a> = &'a mut dyn FnMut(Message) -> bool;

/// The registers of an I/O APIC. Here, `high` has a bit for each pin that is high.
pub(super) struct Pins(IoApic);

/// The offset of `gpa` in the registers of the I/O APIC.
pub(crate) fn io_apic_offset(gpa: Gpa) -> Option<u64> {
    let offset = gpa.get().checked_sub(BASE)?;
    (offset < BYTES).then_some(offset)
}

impl Pins {
    /// As after a reset.
    pub(super) fn new() -> Self {
        Self(IoApic::default())
    }

    /// The state `saved` without bits that do not exist.
    pub(super) fn restored(saved: &IoApic) -> Self {
        let entry = |entry: u64| match entry & LEVEL {
            0 => entry & WRITABLE,
            _ => entry & (WRITABLE | REMOTE_IRR),
        };
        Self(IoApic {
            id: saved.id & 15,
            select: saved.select,
            entries: saved.entries.map(entry),
            high: saved.high & ((1 << PINS) - 1),
        })
    }

    pub(super) fn saved(&self) -> IoApic {
        let now = &self.0;
        IoApic::new(now.id, now.select, now.entries, now.high)
    }

    pub(super) fn set_pin(&mut self, pin: usize, high: bool, send: Send<'_>) {
        if pin >= PINS {
            return;
        }
        let was_high = self.is_high(pin);
        self.0.high = self.0.high & !(1 << pin) | u32::from(high) << pin;
        let is_edge = self.0.entries[pin] & LEVEL == 0;
        if high && !(is_edge && was_high) {
            self.service(pin, send);
        }
    }

    pub(super) fn read(&self, offset: u64) -> u32 {
        match (offset, self.0.select, self.half()) {
            (SELECT, ..) => self.0.select.into(),
            (WINDOW, _, Some((pin, shift))) => (self.0.entries[pin] >> shift) as u32,
            (WINDOW, ID | ARBITRATION, _) => u32::from(self.0.id) << 24,
            (WINDOW, VERSION, _) => VERSION_VALUE,
            (WINDOW, ..) => u32::MAX,
            _ => 0,
        }
    }

    pub(super) fn write(&mut self, offset: u64, value: u32, send: Send<'_>) {
        match (offset, self.0.select, self.half()) {
            (SELECT, ..) => self.0.select = value as u8,
            (WINDOW, ID, _) => self.0.id = (value >> 24 & 15) as u8,
            (WINDOW, _, Some((pin, shift))) => {
                let written = u64::from(u32::MAX) << shift & WRITABLE;
                let entry = &mut self.0.entries[pin];
                *entry = *entry & !written | u64::from(value) << shift & written;
                // Guests end a level-triggered interrupt in this way: there is no EOI register.
                if *entry & LEVEL == 0 {
                    *entry &= !REMOTE_IRR;
                }
                self.service_level(pin, send);
            }
            _ => {}
        }
    }

    /// A local APIC has ended the level-triggered interrupt `vector`.
    pub(super) fn end(&mut self, vector: u8, send: Send<'_>) {
        for pin in 0..PINS {
            let entry = &mut self.0.entries[pin];
            if *entry as u8 == vector && *entry & REMOTE_IRR != 0 {
                *entry &= !REMOTE_IRR;
                self.service_level(pin, send);
            }
        }
    }

    /// The entry that the selected register is a half of, and the first bit of the half.
    fn half(&self) -> Option<(usize, u32)> {
        let number = self.0.select.checked_sub(ENTRIES)?;
        let pin = usize::from(number / 2);
        (pin < PINS).then_some((pin, u32::from(number % 2) * 32))
    }

    fn is_high(&self, pin: usize) -> bool {
        self.0.high >> pin & 1 != 0
    }

    /// Sends the message of a level-triggered pin that is high.
    fn service_level(&mut self, pin: usize, send: Send<'_>) {
        if self.0.entries[pin] & LEVEL != 0 && self.is_high(pin) {
            self.service(pin, send);
        }
    }

    /// Sends the message of `pin`, unless the pin is masked or waits for an EOI.
    fn service(&mut self, pin: usize, send: Send<'_>) {
        let entry = &mut self.0.entries[pin];
        let is_level = *entry & LEVEL != 0;
        if *entry & MASKED != 0 || is_level && *entry & REMOTE_IRR != 0 {
            return;
        }
        let (destination, low) = ((*entry >> 56) as u8, *entry as u32);
        let logical = low & 1 << 11 != 0;
        let message = Message::from_device(destination, logical, low, is_level);
        if message.is_some_and(send) && is_level {
            *entry |= REMOTE_IRR;
        }
    }
}

#[cfg(test)]
mod tests;
