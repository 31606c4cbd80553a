//! The errors of swap devices.

/// A VM has no swap file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupFailed {
    /// It cannot be made.
    #[error(
        "cannot create a swap file in {folder}: {reason}: give a folder on a disk with room for it"
    )]
    Create {
        /// The folder.
        folder: String,
        /// The system's error.
        reason: String,
    },
    /// A file serves one VM at a time.
    #[error("another VM uses this swap file in {0}: make one file for each VM")]
    Taken(String),
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
