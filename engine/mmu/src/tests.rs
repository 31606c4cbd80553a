//! Leaves of all levels, compared with a plain model and verified after every step, on each table
//! format: each file below is compiled once for each. The host is not asked: page n of the backing
//! is in frame n, and a test chooses the level of the host's answer. So a test can make every
//! mixture of leaves.
#![allow(
    clippy::duplicate_mod,
    reason = "the same tests, with another `Mmu`: their bodies name no format"
)]

#[path = "."]
pub(crate) mod ept {
    type Mmu = crate::Mmu<lacuna_stage2::Ept>;

    #[path = "tests/common.rs"]
    pub(crate) mod common;
    #[path = "tests/gib.rs"]
    mod gib;
    #[path = "tests/legality.rs"]
    mod legality;
    #[path = "tests/plain.rs"]
    mod plain;
    #[path = "tests/retry.rs"]
    mod retry;
    #[path = "tests/rmap_walks.rs"]
    mod rmap_walks;
    #[path = "tests/tables.rs"]
    mod tables;
    #[path = "tests/threads.rs"]
    mod threads;
}

#[path = "."]
pub(crate) mod arm64 {
    type Mmu = crate::Mmu<lacuna_stage2::Arm64>;

    #[path = "tests/common.rs"]
    pub(crate) mod common;
    #[path = "tests/gib.rs"]
    mod gib;
    #[path = "tests/legality.rs"]
    mod legality;
    #[path = "tests/plain.rs"]
    mod plain;
    #[path = "tests/retry.rs"]
    mod retry;
    #[path = "tests/rmap_walks.rs"]
    mod rmap_walks;
    #[path = "tests/tables.rs"]
    mod tables;
    #[path = "tests/threads.rs"]
    mod threads;
}
