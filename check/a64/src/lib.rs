//! An assembler of A64 instructions (Arm ARM C4.1, C6.2) for the programs of tests and the fuzzer.
//!
//! ```
//! use lacuna_a64::{Asm, CBNZ, HVC};
//!
//! let mut a = Asm::at(0x4000_0000);
//! let again = a.label();
//! a.set(1, 10).place(again).add(1, 1, 4095).branch(CBNZ | 1, again).raw(HVC);
//! assert_eq!(a.words().len(), 4);
//! ```
//! Programs need only two dozen instructions, each a constant and its operands. An assembler from
//! another project is longer than this file. For x86-64 there is iced-x86.
#![forbid(unsafe_code)]

mod asm;
mod word;

pub use asm::{Asm, Label, Reg};
pub use word::*;
