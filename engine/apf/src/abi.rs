//! The line between a token's life and the architecture's contract with its guests.

use crate::token::{Token, TokenFormat};
use lacuna_addr::{Access, Gfn};

/// What became of an attempt to map a page ahead of its retry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prefault {
    /// The retry will find it.
    Mapped,
    /// It is gone again, or never came; the retry faults.
    NotMapped,
}

/// What every architecture's queue needs of the guest on its vCPU. All calls come from the vCPU's
/// thread, with no lock held.
pub trait Guest {
    /// Whether the vCPU could take an event now: the guest has not masked events, none is pending
    /// or being delivered, and no instruction is half done except the one that faults. The answer
    /// reflects at once what the architecture's calls have injected.
    fn is_interruptible(&self) -> bool;

    /// Maps the page for `access`, if that takes no waiting.
    fn prefault(&mut self, gfn: Gfn, access: Access) -> Prefault;

    /// Ends a halt of the guest's own: the vCPU is runnable.
    fn resume(&mut self);
}

/// The guest could not be told: the words that the event needs are not in writable memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Untold;

/// One architecture's contract, as one vCPU's guest has configured it.
pub trait Abi {
    /// How its tokens are made.
    const TOKENS: TokenFormat;

    /// Whether the guest has asked to be told of pages.
    fn is_enabled(&self) -> bool;

    /// vCPU reset: the configuration is what it is at power-on.
    fn reset(&mut self);
}

/// The two questions that decide a token's life, about a guest of type `G`.
///
/// The trait is apart from [`Abi`] because each architecture needs other things of its guest: x86's
/// contract is implemented for every `G` that is an [`x86::Guest`](crate::x86::Guest).
pub trait Tell<G>: Abi {
    /// Tells the guest that the page of `token` is not present, if it may be told now. The caller
    /// knows that the vCPU is interruptible and the contract enabled. An event that the guest has
    /// not read is never overwritten.
    ///
    /// # Errors
    /// The guest was not told; nothing that it can see has changed.
    fn not_present(&mut self, token: Token, guest: &mut G) -> Result<(), Untold>;

    /// Whether the guest may be told of a ready page now; false while the contract is disabled.
    fn takes_ready(&mut self, guest: &mut G) -> bool;

    /// Tells the guest that the page of `token` is ready. The caller has asked
    /// [`Tell::takes_ready`] since the last event.
    ///
    /// # Errors
    /// The guest was not told.
    fn ready(&mut self, token: Token, guest: &mut G) -> Result<(), Untold>;
}

/// What a change of the configuration asks of the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Request {
    /// Asynchronous page faults are on, perhaps again or elsewhere.
    Enabled,
    /// They are off.
    Disabled,
    /// The guest has read an event: the next may come.
    Acknowledged,
    /// Nothing.
    None,
}
