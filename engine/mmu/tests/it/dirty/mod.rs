//! A copy of memory updated by harvests stays right during reclaim, splits, collapses, slot changes
//! and switches of detection. The file `steps` makes one step after the other; `chaos` makes them
//! all at once. Each file is compiled once for each table format.
#![allow(
    clippy::duplicate_mod,
    reason = "the same tests, with another `Mmu`: their bodies name no format"
)]

#[path = "."]
mod ept {
    type Mmu = lacuna_mmu::Mmu<lacuna_stage2::Ept>;

    #[path = "chaos.rs"]
    mod chaos;
    #[path = "fixture.rs"]
    mod fixture;
    #[path = "monitor.rs"]
    mod monitor;
    #[path = "steps.rs"]
    mod steps;
    #[path = "threads.rs"]
    mod threads;
}

#[path = "."]
mod arm64 {
    type Mmu = lacuna_mmu::Mmu<lacuna_stage2::Arm64>;

    #[path = "chaos.rs"]
    mod chaos;
    #[path = "fixture.rs"]
    mod fixture;
    #[path = "monitor.rs"]
    mod monitor;
    #[path = "steps.rs"]
    mod steps;
    #[path = "threads.rs"]
    mod threads;
}
