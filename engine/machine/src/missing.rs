//! Memory whose pages the VMM provides to a running guest.

use crate::{ErrorKind, MemoryError};
use lacuna_addr::{GfnRange, Gpa, PageCount};

/// Names one exit on missing memory, among all exits of its VM. [`MissingMemory`] has the table of
/// its states.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct FaultToken(pub(crate) u64);

/// The number of low bits of a token that hold the vCPU.
const VCPU_BITS: u32 = 8;

impl FaultToken {
    /// The token of exit `number` of vCPU `vcpu`, for backends.
    pub const fn new(vcpu: usize, number: u64) -> Self {
        Self(number << VCPU_BITS | vcpu as u64)
    }

    /// The vCPU that exited.
    pub const fn vcpu(self) -> usize {
        (self.0 & ((1 << VCPU_BITS) - 1)) as usize
    }
}

/// Why a token is refused. Nothing has changed then, except as [`TokenError::CannotNotify`] says.
#[derive(Debug, thiserror::Error, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenError {
    /// The token is unknown: it is completed, or its vCPU was entered again without an accept.
    #[error("the token is completed or was never given: use the token of the vCPU's last exit")]
    Unknown,
    /// The token was accepted before.
    #[error("the token was accepted before: enter the vCPU, and say ready once")]
    Accepted,
    /// The page was reported ready before the token was accepted.
    #[error("the page is ready already: enter the vCPU")]
    Ready,
    /// The guest cannot get the event now. If the vCPU is entered, it waits for the page without
    /// another exit.
    #[error(
        "the guest cannot be notified of a missing page now: provide the page, or enter the vCPU, \
         which then waits for the page"
    )]
    CannotNotify,
}

impl TokenError {
    /// The refusal of a call for the page at `gpa`, with this cause. For backends.
    pub fn refuses(self, gpa: Gpa) -> MemoryError {
        let cause = self.to_string();
        MemoryError::Refused { gpa, cause }
    }

    /// The kind of the cause.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Unknown | Self::Accepted | Self::Ready => ErrorKind::Request,
            Self::CannotNotify => ErrorKind::Guest,
        }
    }
}

/// The outcome of [`MissingMemory::ready`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadyOutcome {
    /// The guest gets page-ready, as soon as it can take the event.
    Notified,
    /// The guest has forgotten the token: it has disabled async page faults, or its vCPU was reset.
    Cancelled,
    /// The token is not accepted yet: [`Vcpu::accept`](crate::Vcpu::accept) will be refused with
    /// [`TokenError::Ready`].
    Early,
}

/// The pages of a call of [`MissingMemory::provide`], by their state before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Provided {
    /// Formerly missing pages: the call provided them.
    pub taken: u64,
    /// Pages provided before. They keep their content.
    pub late: u64,
}

/// Memory that a VMM provides page by page. A VM has it if it was made with a page source. The
/// source gets the requests for pages that something other than a vCPU needs.
///
/// ```text
/// vCPU                            VMM                                        guest
/// run ── never provided ──► MemoryFault { gpa, token }
///        either  provide(gpa, bytes), run again ───────────────────────► repeats its access
///        or      accept(token), run again ─────────────────────────────► page-not-present
///                provide(gpa, bytes), then ready(token), any thread ───► page-ready
/// ```
/// Flag and exit are those of `KVM_MEM_EXIT_ON_MISSING` and `KVM_EXIT_MEMORY_FAULT` in the series
/// on the kvm list in 2023; tokens are not in it.
///
/// The exits come from slots with [`SlotFlags::EXIT_ON_MISSING`](crate::SlotFlags::EXIT_ON_MISSING)
/// and for a vCPU's own accesses only, stage-1 walks included. Other accesses to missing memory,
/// such as by devices and [`GuestMemory`](crate::GuestMemory), wait, and the VM's page source gets
/// a request for the page. A page provided and then evicted causes no exit: the backend brings it
/// back. In slots with
/// [`SlotFlags::EXIT_ON_NONRESIDENT`](crate::SlotFlags::EXIT_ON_NONRESIDENT) it does, with
/// [`MemoryFaultFlags::EVICTED`](crate::MemoryFaultFlags::EVICTED), as in that series. Only soft
/// supports that flag.
///
/// An exit makes its token *pending*. Then the token is *accepted*, or not, and *completed*:
///
/// | | pending | accepted | completed, unknown |
/// |---|---|---|---|
/// | accept | accepted, or `CannotNotify` | `Accepted` | `Unknown` |
/// | ready | `Early`; accept is then refused with `Ready` | `Notified` | `Unknown` |
/// | fetch with it | reported ready when the page has arrived | the same | `Refused` |
/// | run | completed | stays | |
/// | reset, restore | completed | stays; ready is `Cancelled` | |
/// | disable | | stays; ready is `Cancelled` | |
///
/// *accept* is [`Vcpu::accept`](crate::Vcpu::accept), *ready* is [`MissingMemory::ready`], and
/// *fetch* is [`MissingMemory::fetch`]. *disable*: the guest turns async page faults off.
/// [`TokenError`] has the refusals.
///
/// # Threads
/// Any thread may call these functions, the thread of a vCPU too. If a thread waits for a page, in
/// [`MissingMemory::populate`] or in [`GuestMemory`](crate::GuestMemory), another thread must
/// provide pages.
pub trait MissingMemory: Send + Sync {
    /// How many pages are missing together, and are put in place together: 512 for memory in huge
    /// pages, whose exits have that size; otherwise 1.
    fn unit(&self) -> PageCount;

    /// Provides whole pages from `gpa` on. Address and length are multiples of 4 KiB. A page
    /// provided before keeps its content. A part of a huge page takes 2 MiB of this process until
    /// the rest is provided. An exited vCPU needs no wake-up. Threads that wait for one of the
    /// pages are woken. Any thread may call this; it may wait for free memory, and for the end of a
    /// call that discards one of the pages.
    ///
    /// # Errors
    /// [`MemoryError::NoSlot`], [`MemoryError::Refused`] for unaligned addresses or sizes,
    /// [`MemoryError::Backing`]. The pages before the failed one are provided.
    fn provide(&self, gpa: Gpa, pages: &[u8]) -> Result<Provided, MemoryError>;

    /// Discards the pages of `gfns`, which lie in slots of the boot layout: they are missing again,
    /// as if they were never provided. A page whose request is in flight stays so, and the answer
    /// counts; so do the provided parts of its huge page. On return no vCPU sees the old bytes.
    /// Dirty tracking reports the pages, as after a write.
    ///
    /// # Errors
    /// No slot holds all of `gfns`; or [`MemoryError::Refused`]: a part of a huge page
    /// ([`MissingMemory::unit`]), or pages that no source provides. Pages before it may be
    /// discarded.
    fn make_missing(&self, gfns: GfnRange) -> Result<(), MemoryError>;

    /// Asks the VM's page source for the page at `gpa`, unless the page is present or already
    /// requested. If `token` is given, the VM reports it ready when the page has arrived. Returns
    /// at once, except that it may wait for free memory.
    ///
    /// # Errors
    /// [`MemoryError::NoSlot`], [`MemoryError::Backing`]. [`MemoryError::Refused`]: the token is
    /// neither pending nor accepted; the source is not asked.
    fn fetch(&self, gpa: Gpa, token: Option<FaultToken>) -> Result<(), MemoryError>;

    /// Brings every page of `gfns` in: the page source gets requests for missing pages, and evicted
    /// ones are read back. Returns when all have arrived; reclaim may have evicted some again.
    ///
    /// # Errors
    /// [`MemoryError::NoSlot`], [`MemoryError::Backing`].
    fn populate(&self, gfns: GfnRange) -> Result<(), MemoryError>;

    /// Reports that the page of `token` is provided. A guest that got page-not-present gets
    /// page-ready. Any thread may call this. If the page is not provided, the guest's next access
    /// exits again; a vCPU that waits for the page keeps waiting.
    ///
    /// # Errors
    /// [`TokenError::Unknown`], and [`TokenError::Ready`] after an earlier report.
    fn ready(&self, token: FaultToken) -> Result<ReadyOutcome, TokenError>;
}
