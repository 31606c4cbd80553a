//! The integration tests of this crate, in one program.

mod races;
mod taken_pages;
mod touch;
mod touch_signal;
mod userfaultfd;
