//! A copy of memory that is updated by replaying harvests is right, whatever else happens: reclaim,
//! splits, collapses, slot changes, switches of detection. The file `steps` makes one step after
//! the other; `chaos` does all of it at once. Each file is compiled once for each table format.
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
