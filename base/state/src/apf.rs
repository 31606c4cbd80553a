//! The switch of asynchronous page faults.

use serde::{Deserialize, Serialize};

/// Whether a VM offers asynchronous page faults to its guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Apf {
    /// Not offered: a vCPU waits for each non-resident page.
    #[default]
    Off,
    /// Offered: a guest that has enabled them gets events for non-resident pages.
    On,
}
