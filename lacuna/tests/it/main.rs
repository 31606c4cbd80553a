//! The integration tests of this crate, in one program.

mod examples;
mod run;
mod shared;
mod vm_memory;
mod vmm;
