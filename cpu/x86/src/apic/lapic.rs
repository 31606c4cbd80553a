//! One vCPU's local APIC, from its processor's side. The guest's register accesses are in
//! `registers.rs`.

use super::bus::{Address, ApicBus, highest, split};
use super::message::Trigger;
use super::timer::Timer;
use crate::state::{Exception, Trap};
use lacuna_addr::{Gfn, Gpa};
use lacuna_sync::Nanos;
use std::sync::Arc;

/// The fixed address of the xAPIC page.
const MMIO_BASE: u64 = 0xfee0_0000;
/// `IA32_APIC_BASE` bits.
const BASE_BSP: u64 = 1 << 8;
const BASE_X2: u64 = 1 << 10;
const BASE_ENABLE: u64 = 1 << 11;

/// SVR's software enable.
pub(super) const SVR_ENABLE: u32 = 1 << 8;
/// The mask bit of every LVT entry.
pub(super) const LVT_MASKED: u32 = 1 << 16;
/// ESR: an LVT entry or message with a vector below 16 was received, or sent.
const ESR_RECEIVED_ILLEGAL: u32 = 1 << 6;
pub(super) const ESR_SENT_ILLEGAL: u32 = 1 << 5;

/// The state of `IA32_APIC_BASE` bits 11:10.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    Disabled,
    XApic,
    X2Apic,
}

impl Mode {
    /// `IA32_APIC_BASE` of vCPU `index` in this mode.
    pub(super) fn base(self, index: usize) -> u64 {
        let mode = match self {
            Self::Disabled => 0,
            Self::XApic => BASE_ENABLE,
            Self::X2Apic => BASE_ENABLE | BASE_X2,
        };
        MMIO_BASE | mode | if index == 0 { BASE_BSP } else { 0 }
    }
}

/// The entries of the local vector table with a source here, by their position from offset 0x320.
/// The entries between them (thermal sensor, performance counter, LINT0, LINT1) keep the guest's
/// values, and never raise an interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lvt {
    Timer = 0,
    Error = 5,
}

/// A local APIC. IRR and TMR live in its [`ApicBus`] inbox; everything else belongs to the vCPU.
#[derive(Debug)]
pub(crate) struct Lapic {
    pub(super) index: usize,
    pub(super) bus: Arc<ApicBus>,
    pub(super) mode: Mode,
    pub(super) isr: [u64; 4],
    pub(super) tpr: u8,
    pub(super) svr: u32,
    /// The errors so far, and in `esr` the errors latched by the guest's last write to ESR.
    pub(super) errors: u32,
    pub(super) esr: u32,
    pub(super) lvt: [u32; 6],
    pub(super) icr: u64,
    pub(super) ldr: u32,
    pub(super) dfr: u32,
    pub(super) timer: Timer,
}

impl Lapic {
    /// The APIC of vCPU `index` as after reset: xAPIC mode, software-disabled, everything masked.
    pub(crate) fn new(index: usize, bus: Arc<ApicBus>) -> Self {
        let apic = Self {
            index,
            bus,
            mode: Mode::XApic,
            isr: [0; 4],
            tpr: 0,
            svr: 0xff,
            errors: 0,
            esr: 0,
            lvt: [LVT_MASKED; 6],
            icr: 0,
            ldr: 0,
            dfr: u32::MAX,
            timer: Timer::new(),
        };
        apic.publish();
        apic
    }

    /// This APIC as after reset, with no interrupt requested.
    pub(crate) fn reset(&self) -> Self {
        let apic = Self::new(self.index, self.bus.clone());
        self.bus.clear(self.index);
        apic
    }

    /// The vCPU's number, which is its APIC ID.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// The bus, with the I/O APIC.
    pub(crate) fn bus(&self) -> &ApicBus {
        &self.bus
    }

    /// How many vCPUs share the bus.
    pub(crate) fn vcpus(&self) -> usize {
        self.bus.vcpus()
    }

    /// Whether `IA32_APIC_BASE` enables the APIC; CPUID's APIC bit says the same.
    pub(crate) fn is_enabled(&self) -> bool {
        self.mode != Mode::Disabled
    }

    /// Whether the APIC takes interrupts: `IA32_APIC_BASE` and SVR both enable it.
    pub(crate) fn is_accepting(&self) -> bool {
        self.is_enabled() && self.svr & SVR_ENABLE != 0
    }

    /// Takes a fixed interrupt. The caller is the vCPU's own thread, so no wake-up is needed.
    pub(crate) fn receive(&mut self, vector: u8) {
        if !self.is_accepting() {
            return;
        }
        match vector {
            0..16 => self.error(ESR_RECEIVED_ILLEGAL),
            vector => {
                self.bus.raise(self.index, vector, Trigger::Edge);
            }
        }
    }

    /// The highest requested vector, if it is above the processor priority. The processor delivers
    /// it as soon as interrupts are enabled.
    pub(crate) fn pending(&self) -> Option<u8> {
        if self.mode == Mode::Disabled {
            return None;
        }
        highest(&self.bus.irr(self.index)).filter(|v| v >> 4 > self.ppr() >> 4)
    }

    /// Moves `vector`, from [`Lapic::pending`], from requested to in service, because the processor
    /// delivers it. Call this after the push of the frame: a failed push is repeated.
    pub(crate) fn accept(&mut self, vector: u8) {
        if self.bus.take(self.index, vector) {
            let (word, bit) = split(vector);
            self.isr[word] |= bit;
        }
    }

    /// Whether an NMI waits for the processor.
    pub(crate) fn has_nmi(&self) -> bool {
        self.bus.has_nmi(self.index)
    }

    /// Sets whether an NMI waits. The caller is the vCPU's own thread, so no wake-up is needed.
    pub(crate) fn set_nmi(&self, waits: bool) {
        self.bus.set_nmi(self.index, waits);
    }

    /// The time at which [`Lapic::tick`] will raise an interrupt.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.timer
            .due()
            .filter(|_| self.lvt[Lvt::Timer as usize] & LVT_MASKED == 0)
    }

    /// Raises the timer's interrupt if the timer is due. Cheap if it is not.
    pub(crate) fn tick(&mut self, now: Nanos) {
        if self.timer.tick(now) {
            self.raise_lvt(Lvt::Timer);
        }
    }

    /// CR8: the task priority class.
    pub(crate) fn cr8(&self) -> u64 {
        u64::from(self.tpr >> 4)
    }

    /// # Errors
    /// #GP(0) for more than four bits.
    pub(crate) fn set_cr8(&mut self, value: u64) -> Result<(), Trap> {
        if value > 15 {
            return Err(Exception::GP0.into());
        }
        self.tpr = (value as u8) << 4;
        Ok(())
    }

    /// `IA32_APIC_BASE`.
    pub(crate) fn base(&self) -> u64 {
        self.mode.base(self.index)
    }

    /// The logical ID of vCPU `index` in x2APIC mode: its cluster of 16, and a bit of that.
    pub(super) fn x2_ldr(index: usize) -> u32 {
        let id = index as u32;
        (id >> 4) << 16 | 1 << (id & 15)
    }

    /// Writes `IA32_APIC_BASE`. The BSP bit keeps its value.
    ///
    /// # Errors
    /// #GP(0) if the page is moved (not supported), for reserved bits, and for the transitions that
    /// SDM vol 3 figure 11-27 forbids: x2APIC to xAPIC, disabled to x2APIC.
    pub(crate) fn set_base(&mut self, value: u64) -> Result<(), Trap> {
        let mode = match value & !BASE_BSP ^ MMIO_BASE {
            0 => Mode::Disabled,
            BASE_ENABLE => Mode::XApic,
            v if v == BASE_ENABLE | BASE_X2 => Mode::X2Apic,
            _ => return Err(Exception::GP0.into()),
        };
        match (self.mode, mode) {
            (Mode::X2Apic, Mode::XApic) | (Mode::Disabled, Mode::X2Apic) => {
                return Err(Exception::GP0.into());
            }
            (old, new) if old == new => return Ok(()),
            (_, Mode::Disabled) => *self = self.reset(),
            (_, Mode::X2Apic) => {
                self.ldr = Self::x2_ldr(self.index);
            }
            (_, Mode::XApic) => {}
        }
        self.mode = mode;
        self.publish();
        Ok(())
    }

    /// In xAPIC mode: the frame of the register page. Its accesses go to [`Lapic::mmio_read`] and
    /// [`Lapic::mmio_write`].
    pub(crate) fn mmio_frame(&self) -> Option<Gfn> {
        (self.mode == Mode::XApic).then(|| Gpa::truncate(MMIO_BASE).gfn())
    }

    /// The processor priority (SDM vol 3 11.8.3.1).
    pub(super) fn ppr(&self) -> u8 {
        let in_service = highest(&self.isr).unwrap_or(0) & 0xf0;
        if self.tpr >> 4 >= in_service >> 4 {
            self.tpr
        } else {
            in_service
        }
    }

    pub(super) fn eoi(&mut self) {
        if let Some(vector) = highest(&self.isr) {
            let (word, bit) = split(vector);
            self.isr[word] &= !bit;
            if self.bus.tmr(self.index)[word] & bit != 0 {
                self.bus.end_level(vector);
            }
        }
    }

    /// Passes this APIC's present address to the bus.
    pub(super) fn publish(&self) {
        self.bus.set_address(
            self.index,
            Address {
                ldr: self.ldr,
                x2: self.mode == Mode::X2Apic,
                flat: self.dfr >> 28 == 0xf,
                enabled: self.is_enabled(),
                accepting: self.is_accepting(),
            },
        );
    }

    /// Raises the vector of an LVT entry, unless the entry is masked.
    pub(super) fn raise_lvt(&mut self, lvt: Lvt) {
        let entry = self.lvt[lvt as usize];
        if entry & LVT_MASKED != 0 {
            return;
        }
        match entry as u8 {
            // The error entry itself has a bad vector, so the error is recorded but not reported.
            0..16 if lvt == Lvt::Error => self.errors |= ESR_RECEIVED_ILLEGAL,
            0..16 => self.error(ESR_RECEIVED_ILLEGAL),
            vector => {
                self.bus.raise(self.index, vector, Trigger::Edge);
            }
        }
    }

    /// Records an error, and raises the error interrupt.
    pub(super) fn error(&mut self, bit: u32) {
        self.errors |= bit;
        self.raise_lvt(Lvt::Error);
    }
}
