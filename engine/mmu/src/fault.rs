//! From a stage-2 violation to an installed leaf.
//!
//! ```text
//! sequence -> slot -> max_level -> host.resolve
//!     -> Ready   -> lock, retry? -> install, rmap -> Mapped
//!     -> Pending -> the caller waits, then tries again
//! ```
//! `max_level` is the largest leaf that the slot allows around the page; the host says what it has.
//! A 2 MiB leaf needs both. Nothing here sleeps, allocates on the resident path, or holds a lock
//! while the host is asked.

use crate::dirty::Count;
use crate::{Mmu, VcpuMmu};
use lacuna_addr::{Access, Gfn, Level, Pfn};
use lacuna_host::{Frame, LostPage, Resolution, Ticket};
use lacuna_slots::SlotFlags;
use lacuna_stage2::{Exhausted, Leaf};

/// A page that the access may go on with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    /// Its frame.
    pub pfn: Pfn,
    /// The size of the leaf around it.
    pub level: Level,
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
    /// Handles the violation of `access` at `gfn`. The calling vCPU may be online.
    #[inline]
    pub fn fault(&self, vcpu: &mut VcpuMmu, gfn: Gfn, access: Access) -> Outcome {
        for _ in 0..ATTEMPTS {
            // Before the slot is looked up: a slot that is deleted later moves the sequence.
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
                if let Some(hit) = self.repair(vcpu, gfn) {
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
            let max_level = slot.attach.max_level(gfn);
            let found = self
                .host
                .resolve(slot.hva(gfn), access, max_level, &mut vcpu.cache);
            let Frame { pfn, level } = match found {
                Resolution::Ready(frame) => frame,
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
            if cursor.invalidate_retry(seq) {
                continue;
            }
            match self.install(&mut cursor, &slot.attach, gfn, leaf, level) {
                Ok(level) => {
                    // Under the range lock, where who turns the log on has been or will come.
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

    /// Whether it is worth trying again when tables are exhausted.
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

/// Where there are no tables: what of those that were unlinked?
enum Tables {
    /// Some are free now.
    Freed,
    /// Some wait for a vCPU to pass, perhaps for this one.
    Waiting,
    None,
}
