//! The traits between the neutral half (the life of a token) and an architecture's contract with
//! its guests.

use crate::token::{Token, TokenFormat};
use lacuna_addr::{Access, Gfn, Gpa};

/// The result of an attempt to map a page before the guest retries its access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prefault {
    /// The retry will find the page mapped.
    Mapped,
    /// The page has been evicted again, or never arrived; the retry faults.
    NotMapped,
}

/// The guest on a vCPU, as a queue of any architecture uses it. The vCPU's thread makes all calls,
/// and holds no lock.
pub trait Guest {
    /// Whether the vCPU could take an event now: the guest has not masked events, none is pending
    /// or being delivered, and no instruction is half done except the faulting one. An event just
    /// injected by [`Deliver`] counts as pending.
    fn is_interruptible(&self) -> bool;

    /// Maps the page for `access`, if possible without a wait.
    fn prefault(&mut self, gfn: Gfn, access: Access) -> Prefault;

    /// Ends a halt by the guest itself (HLT): the vCPU is runnable.
    fn resume(&mut self);
}

/// The words that guest and host share, in guest memory. The vCPU's thread makes all calls, and
/// holds no lock.
pub trait SharedWords {
    /// Reads guest memory at `at`, a multiple of 4. `None`: there is no memory.
    fn read_u32(&mut self, at: Gpa) -> Option<u32>;

    /// Writes guest memory at `at`, a multiple of 4.
    ///
    /// # Errors
    /// There is no writable memory; nothing was written.
    fn write_u32(&mut self, at: Gpa, value: u32) -> Result<(), Unwritable>;
}

/// The event could not be delivered: it is disabled, or its words in guest memory are in use or not
/// writable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotDelivered;

/// A word of guest memory cannot be written: its address has no memory, read-only memory, or a
/// device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unwritable;

impl From<Unwritable> for NotDelivered {
    fn from(_: Unwritable) -> Self {
        Self
    }
}

/// One architecture's contract with its guests, as the guest has configured it on one vCPU.
pub trait Abi {
    /// The format of the tokens of new events.
    fn tokens(&self) -> TokenFormat;

    /// Whether the guest has enabled the events.
    fn is_enabled(&self) -> bool;

    /// The page with the shared words, while the contract is enabled. The host reads and writes
    /// them when it delivers an event.
    fn shared_page(&self) -> Option<Gfn>;

    /// The token of a signalled page-not-present that the vCPU has not taken yet. An architecture
    /// whose vCPUs take events at once has none.
    fn untaken(&self) -> Option<Token> {
        None
    }

    /// vCPU reset: restores the configuration at power-on.
    fn reset(&mut self);
}

/// Delivers the events to a guest of type `G`.
///
/// The trait is apart from [`Abi`] because each architecture needs different things of its guest.
/// x86's contract implements it for every `G` that is an [`x86::Guest`](crate::x86::Guest).
pub trait Deliver<G>: Abi {
    /// Whether [`Deliver::not_present`] would succeed now. Changes nothing. The caller has checked
    /// that the vCPU is interruptible and the contract enabled.
    fn takes_not_present(&mut self, guest: &mut G) -> bool;

    /// Delivers page-not-present for `token`, if the guest may get the event now. The caller has
    /// checked that the vCPU is interruptible and the contract enabled. An unread event is never
    /// overwritten.
    ///
    /// # Errors
    /// The guest was not notified, and sees no change.
    fn not_present(&mut self, token: Token, guest: &mut G) -> Result<(), NotDelivered>;

    /// The page of `token` has arrived. If that token is [`Abi::untaken`], takes the event back, so
    /// that the guest never sees it. Returns whether it did.
    fn withdraw(&mut self, token: Token, guest: &mut G) -> bool {
        let _ = (token, guest);
        false
    }

    /// Whether page-ready may be delivered now; false while the contract is disabled.
    fn takes_ready(&mut self, guest: &mut G) -> bool;

    /// Delivers page-ready for `token`. The caller has asked [`Deliver::takes_ready`] since the
    /// last event.
    ///
    /// # Errors
    /// The event was not delivered.
    fn ready(&mut self, token: Token, guest: &mut G) -> Result<(), NotDelivered>;
}

/// The queue's work after a change of the configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Request {
    /// The guest has enabled asynchronous page faults, perhaps a second time or with another area.
    Enabled,
    /// The guest has disabled them.
    Disabled,
    /// The guest has read an event, so the next may be delivered.
    Acknowledged,
    /// Nothing.
    None,
}
