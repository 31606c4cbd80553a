//! From a stage-2 violation to an installed leaf.
//!
//! ```text
//! snapshot -> slot -> host.resolve -> Ready   -> lock, admits? -> install, rmap -> Mapped
//!                                     Pending -> the caller waits for the ticket, then tries again
//! ```
//! Nothing here sleeps, allocates on the resident path, or holds a lock while the host is asked.

use crate::{Mmu, Rmap};
use lacuna_addr::{Access, Gfn, Pfn};
use lacuna_host::{FrameCache, HostError, LostPage, Resolution, Ticket};
use lacuna_slots::{Reader, SlotFlags};
use lacuna_stage2::{Exhausted, Leaf, MapError, Mapped};

/// One vCPU's side of the fault path: what it keeps between faults so that it shares nothing.
pub struct Faulter {
    pub(crate) reader: Reader<Rmap>,
    cache: FrameCache,
}

/// A page that the access may go on with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    /// Its frame.
    pub pfn: Pfn,
    /// Writes may go through without another fault.
    pub writable: bool,
}

/// What became of a fault.
#[must_use]
pub enum Outcome {
    /// Installed (or found installed): the access goes on.
    Mapped(Page),
    /// An invalidation is under way near the page: pass a quiescent point, then try again.
    Busy,
    /// The page is on its way, or would be if somebody starts the ticket.
    Pending(Ticket),
    /// No frame is free: reclaim, then try again.
    NoMemory,
    /// No slot, or a write to a read-only one.
    Mmio,
    /// The page's content is gone.
    Lost(LostPage),
    /// No table page is left.
    NoTables(Exhausted),
}

/// Lost races after which a fault lets others go first.
const ATTEMPTS: usize = 4;

impl Mmu {
    /// A new vCPU's faulter. An error means that the budget cannot promise one more vCPU its
    /// progress.
    pub fn faulter(&self) -> Result<Faulter, HostError> {
        Ok(Faulter {
            reader: self.slots.reader(),
            cache: self.host.frame_cache()?,
        })
    }

    /// Handles the violation of `access` at `gfn`. The calling vCPU may be online.
    #[inline]
    pub fn fault(&self, faulter: &mut Faulter, gfn: Gfn, access: Access) -> Outcome {
        for _ in 0..ATTEMPTS {
            // Before the slot is looked up: a slot that is deleted later moves the sequence.
            let snapshot = self.stage2.snapshot(gfn);
            if snapshot.is_busy() {
                return Outcome::Busy;
            }
            let Some(slot) = faulter.reader.find(gfn) else {
                return Outcome::Mmio;
            };
            let read_only = slot.flags.contains(SlotFlags::READONLY);
            if read_only && access.is_write() {
                return Outcome::Mmio;
            }
            let hva = slot.hva(gfn);
            let pfn = match self.host.resolve(hva, access, &mut faulter.cache) {
                Resolution::Ready(pfn) => pfn,
                Resolution::Pending(ticket) => return Outcome::Pending(ticket),
                Resolution::NoMemory => return Outcome::NoMemory,
                Resolution::Lost(page) => return Outcome::Lost(page),
            };
            let leaf = match access {
                _ if read_only => Leaf::read_only(pfn),
                Access::Write => Leaf::dirty(pfn),
                Access::Read | Access::Fetch => Leaf::clean(pfn),
            };
            let mut cursor = self.stage2.fault_cursor(gfn);
            if !cursor.admits(snapshot) {
                continue;
            }
            match cursor.map(gfn, leaf) {
                Ok(mapped) => {
                    if let Mapped::New(at) = mapped {
                        slot.attach.set(slot.page(gfn), at);
                    }
                    return Outcome::Mapped(Page {
                        pfn,
                        writable: leaf.is_writable(),
                    });
                }
                Err(MapError::Exhausted(error)) => return Outcome::NoTables(error),
                Err(error) => unreachable!("the recheck admits no stale frame: {error}"),
            }
        }
        Outcome::Busy
    }
}

impl Faulter {
    /// The instruction that faulted has retired: reclaim may have its pages.
    pub fn retired(&mut self) {
        self.cache.release_holds();
    }
}
