//! The local APIC (SDM vol 3 chapter 11), whose registers the guest reaches as x2APIC MSRs or by
//! the xAPIC page; and the I/O APIC (`ioapic`).
//!
//! ```text
//! any thread            ApicBus (shared)                     Lapic (its vCPU's own)
//! post(i, vector) --->  Inbox i: IRR, 256 atomic bits  ---> pending(): highest IRR above PPR
//!   + Wake::wake(i)     TMR, LDR: the APIC's address         accept(v): IRR -> ISR, then EOI
//! set_pin -> I/O APIC ----^     <-- end_level -------------- EOI of a level-triggered interrupt
//! signal_msi -------------'                                  timer: deadline in Nanos, tick(now)
//!                          NMI: one bit ------------------->  vector 2, unless its handler runs
//! ```
//! A requested interrupt is one bit, so a storm of posts allocates nothing and wakes the target
//! once.
//!
//! Left out on purpose: INIT and SIPI, because SIPI begins in real mode, which the processor does
//! not have; SMI and ExtINT delivery; lowest-priority arbitration (the lowest-numbered destination
//! takes the interrupt); moving the xAPIC page. ICR, LVT, redirection entries and messages accept
//! INIT, SIPI, SMI and ExtINT and ignore them.

mod bus;
mod ioapic;
mod lapic;
mod message;
mod registers;
mod saved;
mod timer;

pub use bus::ApicBus;
pub use ioapic::PINS;
pub(crate) use ioapic::io_apic_offset;
pub(crate) use lapic::Lapic;
pub(crate) use saved::check;

#[cfg(test)]
pub(crate) mod tests;
