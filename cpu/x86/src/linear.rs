//! Linear memory for the system instructions and event delivery.

use crate::state::{System, Trap};
use crate::walk::User;

/// Bytes of one access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Width {
    /// 1.
    W8,
    /// 2.
    W16,
    /// 4.
    W32,
    /// 8.
    W64,
}

impl Width {
    /// The size in bytes.
    pub(crate) const fn bytes(self) -> u64 {
        match self {
            Self::W8 => 1,
            Self::W16 => 2,
            Self::W32 => 4,
            Self::W64 => 8,
        }
    }

    /// `value` cut to this width.
    pub(crate) const fn truncate(self, value: u64) -> u64 {
        value & (u64::MAX >> (64 - 8 * self.bytes()))
    }
}

/// A processor's linear memory together with its system registers. Delivery, returns and segment
/// loads work on them. The executor implements the trait over its TLB.
///
/// Addresses may be misaligned, cross pages and be non-canonical (#GP(0)). The `user` argument is
/// the privilege of this access, whatever the current CPL: the processor reads descriptor tables
/// and the TSS as supervisor from CPL 3 too ("implicit supervisor-mode accesses", SDM vol 3 4.6). A
/// failed write has written nothing.
pub(crate) trait Linear {
    /// The system registers.
    fn system(&self) -> &System;

    /// The system registers, to change.
    fn system_mut(&mut self) -> &mut System;

    /// Reads `width` bytes, zero-extended.
    fn read(&mut self, va: u64, width: Width, user: User) -> Result<u64, Trap>;

    /// Writes the low `width` bytes of `value`.
    fn write(&mut self, va: u64, width: Width, value: u64, user: User) -> Result<(), Trap>;
}

#[cfg(test)]
pub(crate) mod mock;
