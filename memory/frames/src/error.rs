//! The error of the pool.

/// The kernel refused the memory of the budget.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot get {bytes} bytes of memory for the budget: {reason}; give a smaller budget, or \
     raise the limit on this process's memory (ulimit -v, cgroup)"
)]
pub struct MapFailed {
    /// The requested bytes.
    pub bytes: u64,
    /// The system's error.
    pub reason: String,
}
