//! A local APIC's registers as a value, for saving and restoring it.

use super::lapic::{Lapic, Lvt, Mode};
use super::registers::{DIVIDE_VALID, ICR_VALID, LVT_STATUS, LVT_VALID, SVR_VALID, reg};
use super::timer;
use crate::tsc::Tsc;
use lacuna_state::StateError;
use lacuna_state::x86::Apic;
use lacuna_sync::Nanos;

fn get(apic: &Apic, number: u32) -> u32 {
    apic.regs[number as usize]
}

/// The 256 bits of ISR, TMR or IRR.
fn vectors(apic: &Apic, first: u32) -> [u64; 4] {
    let word = |i: u32| u64::from(get(apic, first + i));
    [0, 2, 4, 6].map(|i| word(i) | word(i + 1) << 32)
}

fn mode(apic: &Apic, index: usize) -> Option<Mode> {
    let modes = [Mode::Disabled, Mode::XApic, Mode::X2Apic];
    modes.into_iter().find(|mode| mode.base(index) == apic.base)
}

/// Whether the APIC of vCPU `index` can have these registers.
pub(crate) fn check(apic: &Apic, index: usize) -> Result<(), StateError> {
    if mode(apic, index).is_none() {
        return StateError::unsupported("apic.base", apic.base);
    }
    match get(apic, reg::ID) {
        id if id == (index as u32) << 24 => {}
        id => return StateError::unsupported("apic.id", id),
    }
    let vectors = [
        ("apic.isr", reg::ISR),
        ("apic.tmr", reg::TMR),
        ("apic.irr", reg::IRR),
    ];
    for (field, first) in vectors {
        if get(apic, first) & 0xffff != 0 {
            return StateError::invalid(field, get(apic, first) & 0xffff);
        }
    }
    let masks = [
        ("apic.tpr", reg::TPR, 0xff),
        ("apic.svr", reg::SVR, SVR_VALID),
        ("apic.divide", reg::DIVIDE, DIVIDE_VALID),
        ("apic.esr", reg::ESR, 0xff),
    ];
    for (field, number, valid) in masks {
        if get(apic, number) & !valid != 0 {
            return StateError::invalid(field, get(apic, number) & !valid);
        }
    }
    for (index, valid) in LVT_VALID.into_iter().enumerate() {
        let entry = apic.regs[reg::LVT as usize + index] & !LVT_STATUS;
        if entry & !valid != 0 {
            return StateError::invalid("apic.lvt", entry & !valid);
        }
    }
    let timer = get(apic, reg::LVT);
    match timer::Mode::from_lvt(timer) {
        Some(_) => Ok(()),
        None => StateError::invalid("apic.lvt_timer", timer),
    }
}

impl Lapic {
    /// The registers now.
    pub(crate) fn registers(&mut self, now: Nanos) -> Apic {
        self.tick(now);
        let mut page = [0; 64];
        for (number, place) in (0..).zip(&mut page) {
            *place = self.mmio_read(number as usize * 16, now);
        }
        // The registers with another form in a read, or with only one mode.
        page[reg::ID as usize] = (self.index() as u32) << 24;
        page[reg::ICR_HIGH as usize] = (self.icr >> 32) as u32;
        page[reg::ESR as usize] = self.esr | self.errors;
        Apic {
            base: self.base(),
            regs: page,
            tsc_deadline: self.timer.deadline(),
        }
    }

    /// Takes over registers checked by [`check`]. Forgets the interrupts requested
    /// here before.
    pub(crate) fn set_registers(&mut self, saved: &Apic, tsc: Tsc, now: Nanos) {
        let Some(mode) = mode(saved, self.index()) else {
            return;
        };
        *self = self.reset();
        self.mode = mode;
        self.isr = vectors(saved, reg::ISR);
        self.tpr = get(saved, reg::TPR) as u8;
        self.svr = get(saved, reg::SVR);
        // A guest writes ESR before a read, which then returns the errors so far.
        (self.esr, self.errors) = (get(saved, reg::ESR), get(saved, reg::ESR));
        self.ldr = match mode {
            Mode::X2Apic => Self::x2_ldr(self.index()),
            Mode::Disabled | Mode::XApic => get(saved, reg::LDR),
        };
        self.dfr = get(saved, reg::DFR) | 0x0fff_ffff;
        let low = u64::from(get(saved, reg::ICR) & ICR_VALID);
        self.icr = u64::from(get(saved, reg::ICR_HIGH)) << 32 | low;
        for (index, entry) in self.lvt.iter_mut().enumerate() {
            *entry = saved.regs[reg::LVT as usize + index] & !LVT_STATUS;
        }
        let timer = self.lvt[Lvt::Timer as usize];
        if let Some(mode) = timer::Mode::from_lvt(timer) {
            let (initial, divide) = (get(saved, reg::INITIAL), get(saved, reg::DIVIDE));
            self.timer
                .restore(mode, initial, divide, get(saved, reg::CURRENT), now);
            self.timer.set_deadline(saved.tsc_deadline, tsc, now);
        }
        let (irr, tmr) = (vectors(saved, reg::IRR), vectors(saved, reg::TMR));
        self.bus.set_requests(self.index(), irr, tmr);
        self.publish();
    }
}
