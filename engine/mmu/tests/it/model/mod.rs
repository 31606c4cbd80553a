//! The MMU on each table format: the tests are compiled once for each.
#![allow(
    clippy::duplicate_mod,
    reason = "the same tests, with another `Mmu`: their bodies name no format"
)]

#[path = "."]
mod ept {
    type Mmu = lacuna_mmu::Mmu<lacuna_stage2::Ept>;

    #[path = "accesses.rs"]
    mod accesses;
}

#[path = "."]
mod arm64 {
    type Mmu = lacuna_mmu::Mmu<lacuna_stage2::Arm64>;

    #[path = "accesses.rs"]
    mod accesses;
}
