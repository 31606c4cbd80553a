//! The kinds of errors when a VM cannot be made: caused by the request or by the host.
//!
//! The crates below do not know [`ErrorKind`], because `host`, `mmu` and `slots` serve more than a
//! machine. Their closed enums are matched without a catch-all arm, so a new error gets a kind
//! before the code compiles.

use crate::error::SoftError;
use lacuna_machine::ErrorKind;
use lacuna_mmu::MmuError;
use lacuna_slots::SlotError;
use lacuna_stage2::ArenaError;

impl SoftError {
    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Vcpus(_)
            | Self::TscFrequency
            | Self::NoArm64
            | Self::NoTsc
            | Self::Processor(_)
            | Self::Booted
            | Self::Dirty(_)
            | Self::HandlerMemory => ErrorKind::Request,
            Self::Handler(_) => ErrorKind::Host,
            // Only this slot error is due to the host. The type is open to new errors.
            Self::Slot(SlotError::NoRoom { .. }) | Self::Tables(_) => ErrorKind::Host,
            Self::Slot(_) => ErrorKind::Request,
            Self::Host(error) if error.is_of_request() => ErrorKind::Request,
            Self::Host(_) => ErrorKind::Host,
            Self::Mmu(MmuError::Arena(ArenaError::Cap(_))) => ErrorKind::Request,
            Self::Mmu(MmuError::Arena(ArenaError::Reserve { .. }) | MmuError::Exhausted(_)) => {
                ErrorKind::Host
            }
            Self::Boot(error) => error.kind(),
            Self::Machine(error) => error.kind(),
        }
    }
}
