//! A software x86-64 processor: long mode, CPL 0 and 3, integer instructions.
//!
//! The processor uses a [`Bus`](lacuna_cpu::Bus) and knows no hypervisor. It requests the page
//! behind a guest frame from the bus, and gets a host page or a reason to stop. One [`Cpu`] is one
//! vCPU. It shares with other processors only the [`ApicBus`], where it posts interrupts, with the
//! I/O APIC.
//!
//! ```text
//! decode.rs   bytes -> iced instruction -> lower*.rs -> 16-byte Ops, one basic block at a time
//!             (lacuna_cpu::code keeps them, with their links)
//! dispatch.rs the hot loop over Ops      general.rs, bits.rs, string.rs  the rarer ones
//! mem.rs      lacuna_cpu::Memory: walk + bus + TLB, devices   flags.rs  lazy arithmetic flags
//! cpu.rs      the run loop: traps, exits   events.rs  events at RIP   outside.rs  Processor
//! system.rs   instructions that end a basic block                         msr.rs cpuid.rs apic.rs
//! walk.rs     stage-1 paging               deliver.rs  events through the IDT
//! ```
#![forbid(unsafe_code)]

mod apic;
mod arith;
mod bits;
mod control;
mod cpu;
mod cpuid;
mod decode;
mod deliver;
mod dispatch;
mod divide;
mod exit;
mod flags;
mod general;
mod linear;
mod lower;
mod lower_branch;
mod lower_rare;
mod lower_tables;
mod mem;
mod msr;
mod op;
mod processor;
mod quiet;
mod returns;
mod saved;
mod segments;
mod stack;
mod state;
mod string;
mod system;
#[cfg(test)]
mod translations_tests;
mod tsc;
mod walk;

pub use apic::{ApicBus, PINS as IO_APIC_PINS};
pub use cpu::Cpu;
pub use exit::{Exit, Own, Shutdown};
pub use lacuna_state::x86::{Exception, Regs};
pub use state::{System, Table, Trap};
pub use tsc::{Tsc, TscRate};
