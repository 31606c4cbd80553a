//! Defects that are known and being mended: the fuzzer meets them, counts them and goes on.
//!
//! A run without any entry here is the aim. To see whether one is mended, take it out of
//! [`TOLERATED`] and run again.

/// A known defect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Known {
    /// A vCPU that executes code in a slot that the VM did not boot with makes no progress.
    CodeBeyondBootMemory,
}

/// What does not end a run.
pub const TOLERATED: &[Known] = &[Known::CodeBeyondBootMemory];

impl Known {
    /// Whether a run goes on when it meets this.
    pub fn is_tolerated(self) -> bool {
        TOLERATED.contains(&self)
    }
}
