//! Images of guest kernels, and the state in which a vCPU starts.
//!
//! `guest/build-guest.sh` of Lacuna's repository makes an image of one C file with a `main`. It
//! runs as a process on Lacuna's guest kernel. A workspace with the path dependency `lacuna-guest`
//! has the built-in guests: `lacuna_guest::image("churn")`.
//!
//! An [`Image`](crate::Image) is read from a file, or made of [`Segment`]s.
//! [`Vm::boot`](crate::Vm::boot) loads it. [`Boot`](crate::Boot) and [`arm64::Boot`] load it for a
//! VMM that makes the state of its vCPUs itself.

pub use lacuna_machine::boot::{BootError, arm64};
pub use lacuna_machine::{ImageError, Segment};
