//! Experiments, their statistics, and the stable form of their results.
//!
//! A result is a ratio inside one run on one machine; tests compare no absolute times. The arms of
//! an experiment take turns, a null arm among them. A figure is a median with its 95 % interval:
//!
//! ```text
//! closures ─▶ stats::compare ─▶ Summary ─▶ result::Measurement ─▶ result::Report ─▶ JSON
//!                                                                             └───▶ report::table
//! ```
//!
//! * [`stats`]: interleaving, medians, intervals.
//! * [`result`]: the stable JSON form; result ids are part of the interface.
//! * [`report`]: the table for people, and progress on stderr.
//! * [`host_info`]: the machine a figure was measured on.
//! * [`native`]: the cost of the host kernel's own page fault, to compare ours with.
//! * [`interrupt`]: ends an experiment early.
//! * [`experiment`]: the options and errors of all experiments. [`base`], [`apf`], [`apf::arm64`],
//!   [`thp`], [`pml`], [`paging`], [`postcopy`], [`restore`], [`migrate`],
//!   [`pager`], [`letters`]: the experiments.
//! * [`demand_paging`]: `lacuna test demand-paging`, whose options [`paging`] compares.
//! * [`size`]: numbers as people write them.
//! * [`first_look`]: one row of each experiment, in less than a minute.
//! * [`external`]: the same guest program natively and in other machines (QEMU).
#![forbid(unsafe_code)]

pub mod access_tracking;
pub mod apf;
mod backed;
pub mod base;
pub mod cores;
pub mod demand_paging;
pub mod dirty_log;
mod exit_cost;
pub mod experiment;
pub mod external;
pub mod first_look;
mod fixture;
mod gib;
mod guests;
pub mod host_info;
pub mod interrupt;
pub mod letters;
pub mod migrate;
pub mod native;
pub mod options;
pub mod pager;
pub mod paging;
mod players;
pub mod pml;
pub mod postcopy;
pub mod report;
pub mod restore;
pub mod result;
mod session;
pub mod size;
mod slices;
pub mod stalls;
pub mod stats;
mod sweeps;
pub mod thp;
mod turns;
