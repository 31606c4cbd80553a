//! The behaviour of stage 2, on each table format: each file below is compiled once for each.
#![cfg(not(loom))]
#![allow(
    clippy::duplicate_mod,
    reason = "the same tests, with another `Stage2`: their bodies name no format"
)]

#[path = "."]
mod ept {
    type Stage2 = lacuna_stage2::Stage2<lacuna_stage2::Ept>;

    #[path = "gib.rs"]
    mod gib;
    #[path = "pml.rs"]
    mod pml;
    #[path = "refusals.rs"]
    mod refusals;
    #[path = "resize.rs"]
    mod resize;
    #[path = "threads.rs"]
    mod threads;
    #[path = "tlb_filter.rs"]
    mod tlb_filter;
}

#[path = "."]
mod arm64 {
    type Stage2 = lacuna_stage2::Stage2<lacuna_stage2::Arm64>;

    #[path = "gib.rs"]
    mod gib;
    #[path = "pml.rs"]
    mod pml;
    #[path = "refusals.rs"]
    mod refusals;
    #[path = "resize.rs"]
    mod resize;
    #[path = "threads.rs"]
    mod threads;
    #[path = "tlb_filter.rs"]
    mod tlb_filter;
}
