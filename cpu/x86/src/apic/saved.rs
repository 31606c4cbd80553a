//! A local APIC's registers as a value, for saving and restoring it.

use super::lapic::{Lapic, Lvt, Mode};
use super::registers::{DIVIDE_VALID, ICR_VALID, LVT_STATUS, LVT_VALID, SVR_VALID, reg};
use super::timer;
use crate::saved::Refused;
use crate::tsc::Tsc;
use lacuna_sync::Nanos;

/// The registers of a local APIC.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApicRegisters {
    /// `IA32_APIC_BASE`.
    pub base: u64,
    /// One register for each 16 bytes of the register page, in xAPIC form, in x2APIC mode too.
    pub page: [u32; 64],
    /// `IA32_TSC_DEADLINE`.
    pub tsc_deadline: u64,
}

impl ApicRegisters {
    fn get(&self, number: u32) -> u32 {
        self.page[number as usize]
    }

    /// The 256 bits of ISR, TMR or IRR.
    fn vectors(&self, first: u32) -> [u64; 4] {
        let word = |i: u32| u64::from(self.get(first + i));
        [0, 2, 4, 6].map(|i| word(i) | word(i + 1) << 32)
    }

    fn mode(&self, index: usize) -> Option<Mode> {
        let modes = [Mode::Disabled, Mode::XApic, Mode::X2Apic];
        modes.into_iter().find(|mode| mode.base(index) == self.base)
    }

    /// Whether the APIC of vCPU `index` can have these registers.
    pub(crate) fn check(&self, index: usize) -> Result<(), Refused> {
        let invalid = |field, value: u32| Err(Refused::Invalid(field, value.into()));
        if self.mode(index).is_none() {
            return Err(Refused::Unsupported("apic.base", self.base));
        }
        match self.get(reg::ID) {
            id if id == (index as u32) << 24 => {}
            id => return Err(Refused::Unsupported("apic.id", id.into())),
        }
        let vectors = [
            ("apic.isr", reg::ISR),
            ("apic.tmr", reg::TMR),
            ("apic.irr", reg::IRR),
        ];
        for (field, first) in vectors {
            if self.get(first) & 0xffff != 0 {
                return invalid(field, self.get(first) & 0xffff);
            }
        }
        let masks = [
            ("apic.tpr", reg::TPR, 0xff),
            ("apic.svr", reg::SVR, SVR_VALID),
            ("apic.divide", reg::DIVIDE, DIVIDE_VALID),
            ("apic.esr", reg::ESR, 0xff),
        ];
        for (field, number, valid) in masks {
            if self.get(number) & !valid != 0 {
                return invalid(field, self.get(number) & !valid);
            }
        }
        for (index, valid) in LVT_VALID.into_iter().enumerate() {
            let entry = self.page[reg::LVT as usize + index] & !LVT_STATUS;
            if entry & !valid != 0 {
                return invalid("apic.lvt", entry & !valid);
            }
        }
        let timer = self.get(reg::LVT);
        match timer::Mode::from_lvt(timer) {
            Some(_) => Ok(()),
            None => invalid("apic.lvt_timer", timer),
        }
    }
}

impl Lapic {
    /// The registers now.
    pub(crate) fn registers(&mut self, now: Nanos) -> ApicRegisters {
        self.tick(now);
        let mut page = [0; 64];
        for (number, place) in (0..).zip(&mut page) {
            *place = self.mmio_read(number as usize * 16, now);
        }
        // The registers with another form in a read, or with only one mode.
        page[reg::ID as usize] = (self.index() as u32) << 24;
        page[reg::ICR_HIGH as usize] = (self.icr >> 32) as u32;
        page[reg::ESR as usize] = self.esr | self.errors;
        ApicRegisters {
            base: self.base(),
            page,
            tsc_deadline: self.timer.deadline(),
        }
    }

    /// Takes over registers checked by [`ApicRegisters::check`]. Forgets the interrupts requested
    /// here before.
    pub(crate) fn set_registers(&mut self, saved: &ApicRegisters, tsc: Tsc, now: Nanos) {
        let Some(mode) = saved.mode(self.index()) else {
            return;
        };
        *self = self.reset();
        self.mode = mode;
        self.isr = saved.vectors(reg::ISR);
        self.tpr = saved.get(reg::TPR) as u8;
        self.svr = saved.get(reg::SVR);
        // A guest writes ESR before a read, which then returns the errors so far.
        (self.esr, self.errors) = (saved.get(reg::ESR), saved.get(reg::ESR));
        self.ldr = match mode {
            Mode::X2Apic => Self::x2_ldr(self.index()),
            Mode::Disabled | Mode::XApic => saved.get(reg::LDR),
        };
        self.dfr = saved.get(reg::DFR) | 0x0fff_ffff;
        let low = u64::from(saved.get(reg::ICR) & ICR_VALID);
        self.icr = u64::from(saved.get(reg::ICR_HIGH)) << 32 | low;
        for (index, entry) in self.lvt.iter_mut().enumerate() {
            *entry = saved.page[reg::LVT as usize + index] & !LVT_STATUS;
        }
        let timer = self.lvt[Lvt::Timer as usize];
        if let Some(mode) = timer::Mode::from_lvt(timer) {
            let (initial, divide) = (saved.get(reg::INITIAL), saved.get(reg::DIVIDE));
            self.timer
                .restore(mode, initial, divide, saved.get(reg::CURRENT), now);
            self.timer.set_deadline(saved.tsc_deadline, tsc, now);
        }
        let (irr, tmr) = (saved.vectors(reg::IRR), saved.vectors(reg::TMR));
        self.bus.set_requests(self.index(), irr, tmr);
        self.publish();
    }
}
