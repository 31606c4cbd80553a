//! The pager against simulated VMMs, in this process or in a child.

mod faults;
mod handshake;
mod random;
mod removals;
mod vmm;
