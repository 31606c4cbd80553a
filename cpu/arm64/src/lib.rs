//! A software AArch64 processor: A64 at EL0 and EL1, integer instructions, Armv8.0 with LSE, CRC32
//! and RCpc.
//!
//! The processor uses a [`Bus`](lacuna_cpu::Bus) and knows no hypervisor. It requests the page
//! behind a guest frame from the bus, and gets a host page or a reason to stop. One [`Cpu`] is one
//! vCPU.
//!
//! There is no floating point and no Advanced SIMD (`ID_AA64PFR0_EL1` says so). Their instructions
//! are undefined, as on a processor without them: the exception has class 0. Class 7 would mean
//! that software has switched off an existing feature.
//!
//! ```text
//! decode.rs   words -> encoding.rs: the table of all encodings -> lower*.rs -> 16-byte Ops, one
//!             basic block at a time (lacuna_cpu::code keeps them, with their links)
//! op.rs, operand.rs  what an Op is, and its operands
//! dispatch.rs the hot loop over Ops     general.rs  the rarer ones     flags.rs  NZCV, lazy
//! mem.rs      lacuna_cpu::Memory: walk + bus + TLB, devices      atomics.rs  barriers, LSE
//! monitor.rs  the exclusive monitor, and why it costs a plain store nothing
//! cpu.rs      the run loop: traps, exits       outside.rs  Processor
//! state.rs    registers, PSTATE, exceptions    processor.rs  one vCPU's state without its code
//! system.rs   instructions that end a basic block: exceptions, waits, system registers
//! sysreg.rs   the table of system registers    exception.rs  entry and return
//! walk.rs     stage 1                           user_pages.rs  PAN and the TLB of EL1
//! fabric.rs   what the vCPUs of a machine share shootdown.rs   TLBI that reaches every vCPU
//! gic.rs      the interrupt controller          timer.rs       the generic timer
//! smccc.rs    hypercalls                        psci.rs        power states of vCPUs
//! ```
//! seam.rs says how a hypervisor drives it.
#![forbid(unsafe_code)]

mod atomics;
mod cpu;
mod decode;
mod dispatch;
mod encoding;
mod exception;
mod fabric;
mod flags;
mod general;
pub mod gic;
mod lower;
mod lower_branch;
mod lower_memory;
mod lower_register;
mod mem;
mod monitor;
mod op;
mod operand;
mod processor;
pub mod psci;
#[cfg(test)]
mod qemu;
mod seam;
#[doc(hidden)]
pub mod shootdown;
pub mod smccc;
mod state;
mod sysreg;
mod system;
#[cfg(test)]
mod testing;
mod timer;
mod user_pages;
mod walk;

pub use cpu::{Cpu, is_legal_pstate};
pub use fabric::Fabric;
pub use lacuna_state::arm64::Regs;
pub use seam::{Exit, Own};
pub use state::{Exception, pstate};
pub use sysreg::System;
pub use timer::{Counter, FREQUENCY, PHYSICAL_INTID, Timers, VIRTUAL_INTID};
