//! The pager against simulated VMMs, in this process or in a child.

mod cold;
mod ends;
mod faults;
mod fill;
mod handshake;
mod huge;
mod lost;
mod quotas;
mod random;
mod removals;
mod restart;
mod seen;
mod shared;
mod shared_hostile;
mod vmm;
