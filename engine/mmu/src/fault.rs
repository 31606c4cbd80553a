//! From a stage-2 violation to an installed leaf.
//!
//! ```text
//! Fault --find_slot--> SlotFault --resolve--> PageFault --map--> Outcome::Mapped
//!  seq                  max_level             Ready               lock, retry? install, rmap
//! ```
//! `max_level` is the largest leaf that the slot allows around the page; the host answers with the
//! level of its frames. A 2 MiB leaf needs both. A 1 GiB leaf needs every range lock, so a fault
//! that could have one begins again, out of line (`Mmu::map_gib`). No function here sleeps,
//! allocates on the resident path, or holds a lock while it asks the host.

use crate::dirty::Count;
use crate::vcpu_mmu::Marker;
use crate::{Mmu, MmuFormat, Rmap, VcpuMmu};
use lacuna_addr::{Access, Gfn, GfnRange, Level, Pfn};
use lacuna_host::{Frame, Host, LostPage, PerCpuPages, Resolution, Ticket};
use lacuna_slots::{Reader, Slot, SlotFlags};
use lacuna_stage2::{Exhausted, InvalidateSeq, Leaf};
use std::sync::Arc;

/// The page with which the access continues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    /// The frame behind the gfn of the fault.
    pub pfn: Pfn,
    /// The size of the leaf that maps it.
    pub level: Level,
    /// Whether a write succeeds without another fault.
    pub writable: bool,
}

/// The result of a fault.
#[must_use]
pub enum Outcome {
    /// A leaf that allows the access maps the page: the access continues.
    Mapped(Page),
    /// The vCPU must wait for another thread: an invalidation is in progress near the page, or
    /// unlinked tables wait for a vCPU. Pass a quiescent point, then try again.
    Busy,
    /// The page is swapped out. Its read begins when a thread starts the ticket.
    Pending(Ticket),
    /// The page was never provided. Its region's page source is asked when a thread starts the
    /// ticket.
    Missing(Ticket),
    /// The page is not at hand, and its slot exits ([`SlotFlags::exits`]): the VMM provides the
    /// page, or brings it back. Nothing is in flight; see [`Mmu::wait_for_page`].
    NotAtHand,
    /// No frame is free: reclaim, then try again.
    NoMemory,
    /// The access goes to a device: no slot has the page, or the access writes to a read-only slot.
    Mmio,
    /// The page's content is lost, and waiting does not help.
    Lost(LostPage),
    /// No table page is free, and none will become free.
    NoTables(Exhausted),
}

/// After this many attempts a fault returns [`Outcome::Busy`], so that its vCPU passes a quiescent
/// point.
const ATTEMPTS: usize = 4;

/// Why an attempt ended without an outcome.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Again {
    /// An invalidation began or ended near the page since the sequence was read, table pages became
    /// free, or a 1 GiB leaf was split.
    Changed,
    /// The host has the 1 GiB around the page whole.
    Gib,
}

/// The first stage of a fault. Each stage consumes the previous one, so the host is only asked for
/// a page in a slot, and only a page of the host is mapped.
#[derive(Clone, Copy)]
struct Fault {
    gfn: Gfn,
    access: Access,
    /// The invalidation sequence, read before the slot is looked up. The other order has this race:
    /// the vCPU finds the slot; a thread deletes the slot, which increments the sequence; the vCPU
    /// reads the new sequence, and maps a page of the deleted slot.
    seq: InvalidateSeq,
}

/// A fault with a slot that allows the access.
struct SlotFault<'v> {
    fault: Fault,
    /// The slot in the newest snapshot. It may be deleted at any time: `fault.seq` shows that.
    slot: &'v Arc<Slot<Rmap>>,
}

/// A fault with a resolved page: the host has a frame for it.
struct PageFault<'v> {
    found: SlotFault<'v>,
    page: ResolvedPage,
}

/// A resolved page: the leaf to map, and its place.
#[derive(Clone, Copy)]
pub(crate) struct ResolvedPage {
    /// Where the page is mapped.
    pub(crate) gfn: Gfn,
    /// The 4 KiB leaf that maps the page.
    pub(crate) leaf: Leaf,
    /// [`Level::L2M`]: the host has the whole block around the page in one block of frames.
    /// [`Level::L1G`]: it has the whole 1 GiB in consecutive frames.
    pub(crate) level: Level,
}

/// Why a page has no leaf that grants the access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotInstalled {
    /// No table is free.
    Exhausted(Exhausted),
    /// A 1 GiB leaf denies the access. The caller splits it, without a cursor, and tries again.
    InGib,
}

impl<F: MmuFormat> Mmu<F> {
    /// Handles the violation of `access` at `gfn`. The calling vCPU may be online.
    #[inline]
    pub fn fault(&self, vcpu: &mut VcpuMmu, gfn: Gfn, access: Access) -> Outcome {
        match self.attempt(vcpu, gfn, access, Gib::Try) {
            Ok(outcome) => outcome,
            Err(why) => F::fault_again(self, vcpu, gfn, access, why),
        }
    }

    /// Resolves the page of `gfn` without mapping it, for a vCPU that waits for a page although its
    /// slot exits ([`SlotFlags::exits`]). `None`: the page is present, so the access can be
    /// retried.
    #[cold]
    pub fn wait_for_page(&self, vcpu: &mut VcpuMmu, gfn: Gfn, access: Access) -> Option<Outcome> {
        F::wait_for_page(self, vcpu, gfn, access)
    }

    #[inline(always)]
    pub(crate) fn resolve_page(
        &self,
        vcpu: &mut VcpuMmu,
        gfn: Gfn,
        access: Access,
    ) -> Option<Outcome> {
        let seq = self.stage2.invalidate_seq(gfn);
        let fault = Fault { gfn, access, seq };
        let found = fault.find_slot(&mut vcpu.reader)?;
        found.resolve_in(&self.host, &mut vcpu.cache).err()
    }

    /// The attempts after the first. They are out of line: in a loop around all attempts, the
    /// compiler would compute and spill values for the second attempt in advance.
    #[inline(always)]
    pub(crate) fn attempt_again(
        &self,
        vcpu: &mut VcpuMmu,
        gfn: Gfn,
        access: Access,
        why: Again,
    ) -> Outcome {
        if why == Again::Gib
            && let Some(page) = self.map_gib(vcpu, gfn, access)
        {
            return Outcome::Mapped(page);
        }
        (1..ATTEMPTS)
            .find_map(|_| self.attempt(vcpu, gfn, access, Gib::Tried).ok())
            .unwrap_or(Outcome::Busy)
    }

    /// Maps the 1 GiB around `gfn` by one leaf. `None` if that is not possible now. This is a fault
    /// of its own: its sequence is that of all range locks, and the host is asked again after that
    /// is read.
    #[inline(always)]
    fn map_gib(&self, vcpu: &mut VcpuMmu, gfn: Gfn, access: Access) -> Option<Page> {
        let gib = GfnRange::gib_of(gfn);
        let seq = self.stage2.invalidate_seq_of(gib);
        let fault = Fault { gfn, access, seq };
        let found = fault.find_slot(&mut vcpu.reader)?;
        let resolved = found.resolve_in(&self.host, &mut vcpu.cache).ok()?;
        let PageFault { found, page } = resolved;
        let mut cursor = self.stage2.cursor(gib);
        let mapped = page.level == Level::L1G
            && !cursor.invalidate_retry(seq)
            && self.install_gib(&mut cursor, &found.slot.attach, page);
        mapped.then(|| page.mapped_by(Level::L1G))
    }

    #[inline(always)]
    fn attempt(
        &self,
        vcpu: &mut VcpuMmu,
        gfn: Gfn,
        access: Access,
        gib: Gib,
    ) -> Result<Outcome, Again> {
        let seq = self.stage2.invalidate_seq(gfn);
        if seq.invalidate_in_progress() {
            return Ok(Outcome::Busy);
        }
        let fault = Fault { gfn, access, seq };
        let Some(mut found) = fault.find_slot(&mut vcpu.reader) else {
            return Ok(Outcome::Mmio);
        };
        if found.is_logged_write() {
            if let Some(page) = self.write_enabled(vcpu, gfn) {
                return Ok(Outcome::Mapped(page));
            }
            match fault.find_slot(&mut vcpu.reader) {
                Some(again) => found = again,
                None => return Ok(Outcome::Mmio),
            }
        }
        self.map_page(found, &mut vcpu.cache, &mut vcpu.marker, gib)
    }

    #[inline(always)]
    fn map_page(
        &self,
        found: SlotFault<'_>,
        cache: &mut PerCpuPages,
        marker: &mut Marker,
        gib: Gib,
    ) -> Result<Outcome, Again> {
        let fault = found.fault;
        match found.resolve(&self.host, cache) {
            Ok(resolved) if gib == Gib::Try && resolved.could_be_gib() => Err(Again::Gib),
            Ok(resolved) => resolved.map(self, marker).ok_or(Again::Changed),
            Err(Outcome::Lost(_)) if self.is_outdated(fault) => Err(Again::Changed),
            Err(outcome) => Ok(outcome),
        }
    }

    /// Whether an invalidation has begun or ended near the page since the fault began. Then the
    /// page is perhaps not lost, because of this race: the vCPU finds the slot; a thread deletes
    /// the slot, and removes its memory; the vCPU asks the host for the page.
    #[cold]
    fn is_outdated(&self, fault: Fault) -> bool {
        let cursor = self.stage2.fault_cursor(fault.gfn);
        cursor.invalidate_retry(fault.seq)
    }

    /// The page of a write fault that needed only W, after a fast page fault.
    fn write_enabled(&self, vcpu: &mut VcpuMmu, gfn: Gfn) -> Option<Page> {
        let hit = self.fast_page_fault(vcpu, gfn)?;
        Some(Page {
            pfn: hit.pfn,
            level: hit.level,
            writable: true,
        })
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

impl Fault {
    /// `None`: the access goes to a device. No slot has the page, or the access writes to a
    /// read-only slot.
    #[inline(always)]
    fn find_slot(self, reader: &mut Reader<Rmap>) -> Option<SlotFault<'_>> {
        let slot = reader.find(self.gfn)?;
        let to_device = self.access.is_write() && is_read_only(slot);
        (!to_device).then_some(SlotFault { fault: self, slot })
    }
}

impl<'v> SlotFault<'v> {
    /// Whether the access writes to a logging slot.
    #[inline(always)]
    fn is_logged_write(&self) -> bool {
        self.fault.access.is_write() && self.slot.attach.log().is_on()
    }

    #[inline(always)]
    fn resolve(self, host: &Host, cache: &mut PerCpuPages) -> Result<PageFault<'v>, Outcome> {
        // If the page arrives between this test and the next call, one exit is in vain.
        if self.slot.flags.exits() && self.is_not_at_hand(host, cache) {
            return Err(Outcome::NotAtHand);
        }
        self.resolve_in(host, cache)
    }

    /// Whether the page is one for which its slot exits.
    fn is_not_at_hand(&self, host: &Host, cache: &mut PerCpuPages) -> bool {
        let page = self.slot.backing_of(self.fault.gfn);
        match self.slot.flags.contains(SlotFlags::EXIT_ON_NONRESIDENT) {
            true => host.is_nonresident(page, cache),
            false => host.is_missing(page, cache),
        }
    }

    #[inline(always)]
    fn resolve_in(self, host: &Host, cache: &mut PerCpuPages) -> Result<PageFault<'v>, Outcome> {
        let Fault { gfn, access, .. } = self.fault;
        let (addr, max_level) = (self.slot.backing_of(gfn), self.slot.attach.max_level(gfn));
        let Frame { pfn, level } = match host.resolve(addr, access, max_level, cache) {
            Resolution::Ready(frame) => frame,
            Resolution::Pending(ticket) => return Err(Outcome::Pending(ticket)),
            Resolution::Missing(ticket) => return Err(Outcome::Missing(ticket)),
            Resolution::Busy => return Err(Outcome::Busy),
            Resolution::NoMemory => return Err(Outcome::NoMemory),
            Resolution::Lost(page) => return Err(Outcome::Lost(page)),
        };
        let leaf = match access {
            _ if is_read_only(self.slot) => Leaf::read_only(pfn),
            Access::Write => Leaf::dirty(pfn),
            Access::Read | Access::Fetch => Leaf::clean(pfn),
        };
        let page = ResolvedPage { gfn, leaf, level };
        Ok(PageFault { found: self, page })
    }
}

impl ResolvedPage {
    /// The page, mapped by a leaf of `level`.
    #[inline]
    fn mapped_by(self, level: Level) -> Page {
        Page {
            pfn: self.leaf.pfn,
            level,
            writable: self.leaf.is_writable(),
        }
    }
}

impl PageFault<'_> {
    /// Whether a 1 GiB leaf could map the page. If not, the fault does not take every range lock.
    #[inline(always)]
    fn could_be_gib(&self) -> bool {
        let rmap = &self.found.slot.attach;
        let is_gib = self.page.level == Level::L1G;
        is_gib && rmap.could_have_gib(self.page.gfn) && !rmap.log().is_on()
    }

    /// `None`: begin again.
    #[inline(always)]
    fn map<F: MmuFormat>(self, mmu: &Mmu<F>, marker: &mut Marker) -> Option<Outcome> {
        let Self { found, page } = self;
        let mut cursor = mmu.stage2.fault_cursor(page.gfn);
        if cursor.invalidate_retry(found.fault.seq) {
            return None;
        }
        match mmu.install(&mut cursor, &found.slot.attach, page) {
            Ok(level) => {
                // The range lock is held. A thread that turns the log on sets the slot's state,
                // then visits each block under its lock. If it has visited this block, this vCPU
                // sees the state and marks the page here. If not, it will find the leaf and re-arm
                // it.
                if found.is_logged_write() {
                    marker.mark(found.slot, page.gfn, Count::Fault);
                }
                Some(Outcome::Mapped(page.mapped_by(level)))
            }
            Err(NotInstalled::InGib) => {
                drop(cursor);
                mmu.split_gib(&found.slot.attach, page.gfn);
                None
            }
            Err(NotInstalled::Exhausted(error)) => {
                drop(cursor);
                match mmu.tables_to_come() {
                    Tables::Freed => None,
                    Tables::Waiting => Some(Outcome::Busy),
                    Tables::None => Some(Outcome::NoTables(error)),
                }
            }
        }
    }
}

#[inline]
fn is_read_only(slot: &Slot<Rmap>) -> bool {
    slot.flags.contains(SlotFlags::READONLY)
}

/// Whether an attempt may end for a 1 GiB leaf.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gib {
    /// It may.
    Try,
    /// The fault has tried that: the page gets a smaller leaf.
    Tried,
}

/// The outlook after all tables were in use.
enum Tables {
    /// Some unlinked tables are free now.
    Freed,
    /// Unlinked tables wait for a vCPU to pass a quiescent point, perhaps for this one.
    Waiting,
    /// Every table is linked: none will become free.
    None,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SlotSpec;
    use crate::tests::ept::common::{add, gfn, mmu};
    use lacuna_addr::{PAGE_SIZE, PageCount};
    use lacuna_host::MmuNotifier;
    use lacuna_slots::SlotId;

    const HOME: Gfn = Gfn::new(0x400).unwrap();
    const PAGES: u64 = 8;

    /// Removes a slot's memory between two steps of a fault, perhaps after the slot itself. Returns
    /// the fault's outcome.
    fn fault_while_memory_goes(delete: impl FnOnce(&Mmu, SlotId)) -> Option<Outcome> {
        let (mmu, id) = (mmu(64), SlotId(1));
        let notifier = Arc::clone(&mmu) as Arc<dyn MmuNotifier>;
        let backing = mmu.host.add_region(PageCount::new(PAGES), notifier);
        let backing = backing.expect("a small region");
        let spec = SlotSpec {
            id,
            guest: HOME.gpa().get(),
            backing: backing.start(),
            bytes: PAGES * PAGE_SIZE as u64,
            flags: SlotFlags::empty(),
        };
        mmu.add_slot(spec).expect("room");
        let mut vcpu = mmu.vcpu_mmu().expect("a large budget");
        let fault = Fault {
            gfn: HOME,
            access: Access::Read,
            seq: mmu.stage2.invalidate_seq(HOME),
        };
        let VcpuMmu {
            reader,
            cache,
            marker,
            ..
        } = &mut vcpu;
        let found = fault.find_slot(reader).expect("the slot is there");
        delete(&mmu, id);
        mmu.host.remove_region(backing).expect("just added");
        mmu.map_page(found, cache, marker, Gib::Try).ok()
    }

    /// The host has the 1 GiB whole, but one of its blocks excludes a leaf of that size.
    #[test]
    fn a_leaf_of_1_gib_is_not_tried_in_vain() {
        const GIB: u64 = Level::L1G.pages();
        let mmu = mmu(64);
        add(&mmu, &[(GIB, 0, GIB)]);
        let mut vcpu = mmu.vcpu_mmu().expect("a large budget");
        let mut could_be_gib = || {
            let (gfn, access) = (gfn(GIB + 5), Access::Read);
            let seq = mmu.stage2.invalidate_seq(gfn);
            let fault = Fault { gfn, access, seq };
            let found = fault.find_slot(&mut vcpu.reader).expect("a slot");
            let (leaf, level) = (Leaf::clean(Pfn::new(5)), Level::L1G);
            let page = ResolvedPage { gfn, leaf, level };
            PageFault { found, page }.could_be_gib()
        };
        assert!(could_be_gib());
        let other = GfnRange::new(gfn(GIB + 1024), 512).expect("a block");
        mmu.disallow_huge(other).expect("nothing is mapped");
        assert!(!could_be_gib());
    }

    #[test]
    fn a_page_of_a_deleted_slot_is_not_lost() {
        let outcome = fault_while_memory_goes(|mmu, id| {
            mmu.delete_slot(id).expect("just added");
        });
        assert!(outcome.is_none(), "it begins again, and finds no slot");
    }

    #[test]
    fn a_page_without_its_memory_is_lost() {
        let outcome = fault_while_memory_goes(|_, _| ());
        assert!(matches!(outcome, Some(Outcome::Lost(_))));
    }
}
