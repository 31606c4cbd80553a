//! The integration tests of this crate, in one program.

mod behaviour;
mod blocks;
mod flags;
mod hostile;
mod injection;
mod kernel;
mod native;
mod native_faults;
mod native_skipped;
mod nmi;
mod outside;
mod pcid;
mod state;
mod support;
mod system;
