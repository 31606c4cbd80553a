//! The guest's accesses: x2APIC MSRs 0x800 to 0x8ff, and the xAPIC page. Both name a register by
//! the same number: MSR 0x800 + n is page offset n * 16.

use super::lapic::{ESR_SENT_ILLEGAL, LVT_MASKED, Lapic, Lvt, Mode, SVR_ENABLE};
use super::message::{Delivery, Destination, Message, Trigger};
use super::timer;
use crate::state::{Exception, Trap};
use crate::tsc::Tsc;
use lacuna_sync::Nanos;

/// Register numbers (SDM vol 3 table 11-6).
pub(super) mod reg {
    pub(in crate::apic) const ID: u32 = 0x02;
    pub(in crate::apic) const VERSION: u32 = 0x03;
    pub(in crate::apic) const TPR: u32 = 0x08;
    pub(in crate::apic) const PPR: u32 = 0x0a;
    pub(in crate::apic) const EOI: u32 = 0x0b;
    pub(in crate::apic) const LDR: u32 = 0x0d;
    pub(in crate::apic) const DFR: u32 = 0x0e;
    pub(in crate::apic) const SVR: u32 = 0x0f;
    pub(in crate::apic) const ISR: u32 = 0x10;
    pub(in crate::apic) const TMR: u32 = 0x18;
    pub(in crate::apic) const IRR: u32 = 0x20;
    pub(in crate::apic) const IRR_END: u32 = 0x27;
    pub(in crate::apic) const ESR: u32 = 0x28;
    pub(in crate::apic) const ICR: u32 = 0x30;
    pub(in crate::apic) const ICR_HIGH: u32 = 0x31;
    pub(in crate::apic) const LVT: u32 = 0x32;
    pub(in crate::apic) const LVT_END: u32 = 0x37;
    pub(in crate::apic) const INITIAL: u32 = 0x38;
    pub(in crate::apic) const CURRENT: u32 = 0x39;
    pub(in crate::apic) const DIVIDE: u32 = 0x3e;
    pub(in crate::apic) const SELF_IPI: u32 = 0x3f;
}

/// Integrated APIC, six LVT entries, no EOI-broadcast suppression.
const VERSION: u32 = 0x14 | 5 << 16;

/// Bits of each LVT entry that software may set; bits 12 and 14 are read-only status, ignored.
pub(super) const LVT_VALID: [u32; 6] = [0x7_00ff, 0x1_07ff, 0x1_07ff, 0x1_a7ff, 0x1_a7ff, 0x1_00ff];
pub(super) const LVT_STATUS: u32 = 1 << 12 | 1 << 14;
pub(super) const SVR_VALID: u32 = 0x3ff;
pub(super) const DIVIDE_VALID: u32 = 0b1011;
/// Vector, delivery mode, destination mode, level, trigger, shorthand; bit 12 is read-only status.
pub(super) const ICR_VALID: u32 = 0x000c_cfff;
const ICR_STATUS: u32 = 1 << 12;

/// The architecture forbids the write or read. By MSR it raises #GP; by MMIO it is ignored.
struct Refused;

impl From<Refused> for Trap {
    fn from(_: Refused) -> Self {
        Exception::GP0.into()
    }
}

impl Lapic {
    /// RDMSR of x2APIC register `msr` (0x800 to 0x8ff).
    ///
    /// # Errors
    /// #GP(0) outside x2APIC mode, and for registers that do not exist or are write-only.
    pub(crate) fn rdmsr(&mut self, msr: u32, now: Nanos) -> Result<u64, Trap> {
        match msr.wrapping_sub(0x800) {
            _ if self.mode != Mode::X2Apic => Err(Exception::GP0.into()),
            reg::ICR => Ok(self.icr),
            reg::ID => Ok(self.index as u64),
            reg::ICR_HIGH | reg::DFR => Err(Exception::GP0.into()),
            n => Ok(self.read(n, now)?.into()),
        }
    }

    /// WRMSR of x2APIC register `msr` (0x800 to 0x8ff).
    ///
    /// # Errors
    /// #GP(0) outside x2APIC mode, for registers that do not exist or are read-only, and for
    /// reserved bits (SDM vol 3 11.12.1.3).
    pub(crate) fn wrmsr(&mut self, msr: u32, value: u64, now: Nanos) -> Result<(), Trap> {
        let number = msr.wrapping_sub(0x800);
        if self.mode != Mode::X2Apic {
            return Err(Exception::GP0.into());
        }
        if number == reg::ICR {
            let low = value as u32 & !ICR_STATUS;
            if low & !ICR_VALID != 0 {
                return Err(Exception::GP0.into());
            }
            self.icr = value & !u64::from(ICR_STATUS);
            self.send(low, (value >> 32) as u32);
            return Ok(());
        }
        let value = u32::try_from(value).map_err(|_| Exception::GP0)?;
        match (number, value) {
            (reg::EOI | reg::ESR, 1..) => Err(Exception::GP0.into()),
            (reg::LDR | reg::DFR | reg::ICR_HIGH, _) => Err(Exception::GP0.into()),
            (reg::SELF_IPI, 0..=0xff) => {
                // Shorthand "self", fixed.
                self.send(1 << 18 | value, 0);
                Ok(())
            }
            _ => Ok(self.write(number, value, now)?),
        }
    }

    /// A 32-bit read at `offset` of the xAPIC page. Reads between registers give 0.
    pub(crate) fn mmio_read(&mut self, offset: usize, now: Nanos) -> u32 {
        match (offset % 16, offset as u32 / 16) {
            (0, reg::ID) => (self.index as u32) << 24,
            (0, number) => self.read(number, now).unwrap_or(0),
            _ => 0,
        }
    }

    /// A 32-bit write at `offset` of the xAPIC page. If an x2APIC would refuse the write, invalid
    /// bits are masked off, or the write is ignored.
    pub(crate) fn mmio_write(&mut self, offset: usize, value: u32, now: Nanos) {
        if !offset.is_multiple_of(16) {
            return;
        }
        let number = offset as u32 / 16;
        let value = match number {
            reg::TPR => value & 0xff,
            reg::SVR => value & SVR_VALID,
            reg::DIVIDE => value & DIVIDE_VALID,
            reg::LVT..=reg::LVT_END => value & LVT_VALID[(number - reg::LVT) as usize],
            _ => value,
        };
        match number {
            reg::ICR => {
                let low = value & ICR_VALID & !ICR_STATUS;
                self.icr = self.icr >> 32 << 32 | u64::from(low);
                self.send(low, (self.icr >> 56) as u32);
            }
            reg::ICR_HIGH => self.icr = u64::from(value) << 32 | u64::from(self.icr as u32),
            reg::LDR => self.ldr = value & 0xff00_0000,
            reg::DFR => self.dfr = value | 0x0fff_ffff,
            // A missing register, or the reserved timer mode.
            _ => drop(self.write(number, value, now)),
        }
        self.publish();
    }

    fn read(&mut self, number: u32, now: Nanos) -> Result<u32, Refused> {
        let word = |bits: [u64; 4], n: u32| (bits[n as usize / 2] >> (n % 2 * 32)) as u32;
        Ok(match number {
            reg::VERSION => VERSION,
            reg::TPR => self.tpr.into(),
            reg::PPR => self.ppr().into(),
            reg::LDR => self.ldr,
            reg::DFR => self.dfr,
            reg::SVR => self.svr,
            reg::ISR..reg::TMR => word(self.isr, number - reg::ISR),
            reg::TMR..reg::IRR => word(self.bus.tmr(self.index), number - reg::TMR),
            reg::IRR..=reg::IRR_END => word(self.bus.irr(self.index), number - reg::IRR),
            reg::ESR => self.esr,
            reg::ICR => self.icr as u32,
            reg::ICR_HIGH => (self.icr >> 32) as u32,
            reg::LVT..=reg::LVT_END => self.lvt[(number - reg::LVT) as usize],
            reg::INITIAL => self.timer.initial(),
            reg::CURRENT => {
                self.tick(now);
                self.timer.current(now)
            }
            reg::DIVIDE => self.timer.divide(),
            _ => return Err(Refused),
        })
    }

    fn write(&mut self, number: u32, value: u32, now: Nanos) -> Result<(), Refused> {
        // A due timer fires with its settings from the moment when it became due.
        self.tick(now);
        match number {
            reg::TPR if value <= 0xff => self.tpr = value as u8,
            reg::EOI => self.eoi(),
            reg::SVR if value & !SVR_VALID == 0 => {
                self.svr = value;
                if value & SVR_ENABLE == 0 {
                    self.lvt = self.lvt.map(|entry| entry | LVT_MASKED);
                }
                self.publish();
            }
            reg::ESR => self.esr = std::mem::take(&mut self.errors),
            reg::LVT..=reg::LVT_END => self.write_lvt(number, value)?,
            reg::INITIAL => self.timer.set_initial(value, now),
            reg::DIVIDE if value & !DIVIDE_VALID == 0 => self.timer.set_divide(value, now),
            _ => return Err(Refused),
        }
        Ok(())
    }

    fn write_lvt(&mut self, number: u32, value: u32) -> Result<(), Refused> {
        let index = (number - reg::LVT) as usize;
        let mut value = value & !LVT_STATUS;
        if value & !LVT_VALID[index] != 0 {
            return Err(Refused);
        }
        if self.svr & SVR_ENABLE == 0 {
            value |= LVT_MASKED;
        }
        if index == Lvt::Timer as usize {
            self.timer
                .set_mode(timer::Mode::from_lvt(value).ok_or(Refused)?);
        }
        self.lvt[index] = value;
        Ok(())
    }

    /// Sends the interrupt of ICR: `low` is its low half, `to` the destination field in the form of
    /// the current mode.
    fn send(&mut self, low: u32, to: u32) {
        let broadcast = if self.mode == Mode::X2Apic {
            u32::MAX
        } else {
            0xff
        };
        let destination = match low >> 18 & 3 {
            1 => Destination::Physical(self.index as u32),
            2 => Destination::All,
            3 => Destination::AllBut(self.index),
            _ if to == broadcast => Destination::All,
            _ if low & 1 << 11 != 0 => Destination::Logical(to),
            _ => Destination::Physical(to),
        };
        let Some(delivery) = Delivery::of(low) else {
            return;
        };
        match low as u8 {
            0..16 if delivery != Delivery::Nmi => self.error(ESR_SENT_ILLEGAL),
            vector => self.bus.send(Message {
                to: destination,
                delivery,
                vector,
                trigger: Trigger::Edge,
            }),
        }
    }

    /// `IA32_TSC_DEADLINE`.
    pub(crate) fn tsc_deadline(&mut self, now: Nanos) -> u64 {
        self.tick(now);
        self.timer.deadline()
    }

    /// Writes `IA32_TSC_DEADLINE`. Also used to set it again after the TSC has moved.
    pub(crate) fn set_tsc_deadline(&mut self, deadline: u64, tsc: Tsc, now: Nanos) {
        self.tick(now);
        self.timer.set_deadline(deadline, tsc, now);
        // A deadline in the past fires now, not at the next check of the timer.
        self.tick(now);
    }
}
