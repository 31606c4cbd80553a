//! The errors of swap devices.

/// A swap file cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot create a swap file in {path}: {reason}")]
pub struct SetupFailed {
    /// The folder.
    pub path: String,
    /// The system's error.
    pub reason: String,
}

/// Why a swap device failed a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SwapError {
    /// No space is left.
    #[error("{0}")]
    Full(String),
    /// The device has no room for this entry or any after it. Earlier entries can be used.
    #[error("{0}")]
    Ends(String),
    /// The device failed.
    #[error("{0}")]
    Io(String),
    /// The read bytes differ from the written ones.
    #[error(
        "it is not what was written there: the device, or another program that wrote to it, has \
         damaged it; check the device, and start the guest anew"
    )]
    Damaged,
}

/// A write that stopped part-way: only the first `done` pages are stored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error} (after {done} pages)")]
pub struct WriteFailed {
    /// Pages stored before the failure.
    pub done: usize,
    /// The failure.
    pub error: SwapError,
}
