//! From a stage-2 violation to an installed leaf.
//!
//! ```text
//! sequence -> slot -> max_level -> host.resolve
//!     -> Ready   -> lock, retry? -> install, rmap -> Mapped
//!     -> Pending -> the caller waits, then tries again
//! ```
//! `max_level` is the largest leaf that the slot allows around the page; the host answers with what
//! it has. A 2 MiB leaf needs both. No function here sleeps, allocates on the resident path, or
//! holds a lock while it asks the host.

use crate::dirty::Count;
use crate::{Mmu, VcpuMmu};
use lacuna_addr::{Access, Gfn, Level, Pfn};
use lacuna_host::{Frame, LostPage, Resolution, Ticket};
use lacuna_slots::SlotFlags;
use lacuna_stage2::{Exhausted, Leaf};

/// A page with which the access may continue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    /// Its frame.
    pub pfn: Pfn,
    /// The size of the leaf around it.
    pub level: Level,
    /// Writes succeed without another fault.
    pub writable: bool,
}

/// The result of a fault.
#[must_use]
pub enum Outcome {
    /// Installed, or found installed: the access continues.
    Mapped(Page),
    /// An invalidation is in progress near the page: pass a quiescent point, then try again.
    Busy,
    /// The page is on its way, or will be once a thread starts the ticket.
    Pending(Ticket),
    /// The page was never provided: its region's page source is asked when the ticket is started.
    Missing(Ticket),
    /// No frame is free: reclaim, then try again.
    NoMemory,
    /// No slot, or a write to a read-only one.
    Mmio,
    /// The page's content is lost.
    Lost(LostPage),
    /// No table page is free.
    NoTables(Exhausted),
}

/// After so many lost races a fault lets others go first.
const ATTEMPTS: usize = 4;

impl Mmu {
    /// Handles the violation of `access` at `gfn`. The calling vCPU may be online.
    #[inline]
    pub fn fault(&self, vcpu: &mut VcpuMmu, gfn: Gfn, access: Access) -> Outcome {
        for _ in 0..ATTEMPTS {
            // Before the slot is looked up: the deletion of a slot increments the sequence.
            let seq = self.stage2.invalidate_seq(gfn);
            if seq.invalidate_in_progress() {
                return Outcome::Busy;
            }
            let Some(mut slot) = vcpu.reader.find(gfn) else {
                return Outcome::Mmio;
            };
            let read_only = slot.flags.contains(SlotFlags::READONLY);
            if read_only && access.is_write() {
                return Outcome::Mmio;
            }
            if access.is_write() && slot.attach.log().is_on() {
                if let Some(hit) = self.fast_page_fault(vcpu, gfn) {
                    return Outcome::Mapped(Page {
                        pfn: hit.pfn,
                        level: hit.level,
                        writable: true,
                    });
                }
                let Some(again) = vcpu.reader.find(gfn) else {
                    return Outcome::Mmio;
                };
                slot = again;
            }
            let (addr, max_level) = (slot.backing_of(gfn), slot.attach.max_level(gfn));
            let found = self.host.resolve(addr, access, max_level, &mut vcpu.cache);
            let Frame { pfn, level } = match found {
                Resolution::Ready(frame) => frame,
                Resolution::Pending(ticket) => return Outcome::Pending(ticket),
                Resolution::Missing(ticket) => return Outcome::Missing(ticket),
                Resolution::NoMemory => return Outcome::NoMemory,
                Resolution::Lost(page) => return Outcome::Lost(page),
            };
            let leaf = match access {
                _ if read_only => Leaf::read_only(pfn),
                Access::Write => Leaf::dirty(pfn),
                Access::Read | Access::Fetch => Leaf::clean(pfn),
            };
            let mut cursor = self.stage2.fault_cursor(gfn);
            if cursor.invalidate_retry(seq) {
                continue;
            }
            match self.install(&mut cursor, &slot.attach, gfn, leaf, level) {
                Ok(level) => {
                    // Under the range lock: the log's start has visited this block, or will.
                    if access.is_write() && slot.attach.log().is_on() {
                        vcpu.marker.mark(slot, gfn, Count::Fault);
                    }
                    return Outcome::Mapped(Page {
                        pfn,
                        level,
                        writable: leaf.is_writable(),
                    });
                }
                Err(error) => {
                    drop(cursor);
                    match self.tables_to_come() {
                        Tables::Freed => continue,
                        Tables::Waiting => return Outcome::Busy,
                        Tables::None => return Outcome::NoTables(error),
                    }
                }
            }
        }
        Outcome::Busy
    }

    /// Whether a retry is useful when tables are exhausted.
    #[cold]
    fn tables_to_come(&self) -> Tables {
        if self.stage2.reap(&*self.qsbr) > 0 {
            return Tables::Freed;
        }
        let usage = self.stage2.arena().usage();
        if usage.limbo + usage.detached > 0 {
            Tables::Waiting
        } else {
            Tables::None
        }
    }
}

/// There are no free tables: the state of those that were unlinked.
enum Tables {
    /// Some are free now.
    Freed,
    /// Some wait for a vCPU to pass a quiescent point, perhaps for this one.
    Waiting,
    None,
}
