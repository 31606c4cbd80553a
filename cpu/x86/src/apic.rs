//! The local APIC (SDM vol 3 chapter 11). The guest reaches its registers as x2APIC MSRs or by the
//! xAPIC page.
//!
//! ```text
//! any thread            ApicBus (shared)                     Lapic (its vCPU's own)
//! post(i, vector) --->  Inbox i: IRR, 256 atomic bits  ---> pending(): highest IRR above PPR
//!   + Wake::wake(i)     LDR: the APIC's address              accept(v): IRR -> ISR, then EOI
//!                                                            timer: deadline in Nanos, tick(now)
//! ```
//! A requested interrupt is one bit, so a storm of posts allocates nothing and wakes the target
//! once.
//!
//! Left out on purpose: INIT and SIPI (Lacuna starts every vCPU in long mode), NMI, SMI and ExtINT
//! delivery (no device raises them), level triggering (there is no I/O APIC), lowest-priority
//! arbitration (the lowest-numbered destination takes the interrupt), moving the xAPIC page. ICR
//! and LVT accept INIT, SIPI, NMI, SMI and ExtINT and ignore them.

mod bus;
mod lapic;
mod registers;
mod saved;
mod timer;

pub use bus::ApicBus;
pub(crate) use lapic::Lapic;
pub use saved::ApicRegisters;

#[cfg(test)]
pub(crate) mod tests;
