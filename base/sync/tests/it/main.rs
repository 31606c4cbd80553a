//! The integration tests of this crate, in one program.

mod lock_order;
mod tlb_filter;
