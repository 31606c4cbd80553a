//! The outcome of one step of a vCPU.

use lacuna_host::Ticket;
use lacuna_machine::{Exit, VcpuError, Width};
use lacuna_sync::Nanos;

/// The result of one step.
pub enum Step {
    /// Guest code ran; step again.
    Ran,
    /// The VMM must handle an exit.
    Exit(Exit),
    /// Nothing can run before this happens.
    Wait(Wait),
    /// The vCPU cannot continue.
    Failed(VcpuError),
}

/// The event for which a vCPU waits.
pub enum Wait {
    /// An interrupt; if a timer is armed, the wait ends at this time.
    Halt(Option<Nanos>),
    /// A page. The caller starts its read, or asks its source.
    Page(Ticket),
    /// A page that the VMM provides. Its source is not asked.
    Provided(Ticket),
    /// A free frame.
    Memory,
    /// The end of an invalidation near its page, a short time.
    Busy,
}

/// The width of a guest's access of `size` bytes.
pub(crate) fn width(size: u8) -> Width {
    match size {
        1 => Width::Byte,
        2 => Width::Word,
        4 => Width::Long,
        _ => Width::Quad,
    }
}
