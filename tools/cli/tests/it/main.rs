//! The integration tests of this crate, in one program.

mod command;
mod ctl;
mod demand_paging;
mod guest;
mod handler;
mod lab;
mod metrics;
mod migrate;
mod monitors;
mod offload;
mod pager;
mod pager_test;
mod pages;
mod park;
mod pin;
mod signals;
mod snapshot;
mod sources;
mod table;
mod trace;
mod view;
