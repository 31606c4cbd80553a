//! The daemons against a simulated Cloud Hypervisor, in this process.

mod refusals;
mod restores;
mod round_trips;
mod vmm;
