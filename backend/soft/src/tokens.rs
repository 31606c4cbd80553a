//! The tokens of a vCPU's exits on missing memory.

use lacuna_addr::{Access, BackingAddr, Gfn};
use lacuna_host::Ticket;
use lacuna_sync::lock_order;

/// The tokens of one vCPU.
pub(crate) type Tokens = lacuna_machine::Tokens<BackingAddr, lock_order::SoftTokens>;

/// The missing page for which a vCPU has exited, and the vCPU's next reaction.
#[derive(Clone)]
pub(crate) struct Faulted {
    pub gfn: Gfn,
    /// The page behind `gfn` at the exit: after a change of the slots it is another page.
    pub page: BackingAddr,
    pub access: Access,
    /// Whether the VMM could not notify the guest: then the next run waits for the page instead of
    /// exiting again.
    pub waits: bool,
    /// The ticket of that wait, once it has begun. After it, an access to the page exits again.
    pub ticket: Option<Ticket>,
}

impl Faulted {
    /// Whether the next run waits for `page`.
    pub(crate) fn waits_for(&self, page: BackingAddr) -> bool {
        let is_over = self.ticket.as_ref().is_some_and(Ticket::is_done);
        self.waits && self.page == page && !is_over
    }
}
