//! The processor architectures of guests.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A processor architecture of guests. It need not be the host's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Arch {
    /// 64-bit x86.
    #[default]
    X86_64,
    /// 64-bit Arm: AArch64.
    Arm64,
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::X86_64 => "x86-64",
            Self::Arm64 => "AArch64",
        })
    }
}
