//! The parts that depend on the host's architecture, which is also the guests' architecture.
//!
//! | | `x86` | `other` |
//! |---|---|---|
//! | [`check`] | | the error that the backend cannot run here |
//! | [`make_controllers`] | interrupt controllers of a VM | |
//! | [`Features`] | CPUID, and a vCPU's first state | has no values |
//! | [`program_counter`] | RIP, for messages | |
//! | [`tsc_khz`] | the frequency of a vCPU's TSC | `None` |
//! | [`apf`] | registers and events of async page faults | refuses |
//! | [`interrupts`] | lines, messages, and the state of the I/O APIC | refuses |
//! | [`save`], [`accept`], [`restore`] | the state of an x86-64 vCPU | refuse |

#[cfg(not(target_arch = "x86_64"))]
mod other;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(not(target_arch = "x86_64"))]
pub use other::{
    Features, Fresh, accept, apf, check, interrupts, make_controllers, program_counter, restore,
    save, tsc_khz,
};
#[cfg(target_arch = "x86_64")]
pub use x86::{
    Features, Fresh, accept, apf, check, interrupts, make_controllers, program_counter, restore,
    save, tsc_khz,
};
