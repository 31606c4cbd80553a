//! The integration tests of this crate, in one program.

mod abi;
mod apf;
mod churn;
mod images;
mod qemu;
