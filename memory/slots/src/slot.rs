//! One slot.

use crate::SlotError;
use lacuna_addr::{Gfn, GfnRange, PAGE_SIZE, SlotAddress, SlotAddressRange};
use std::sync::Arc;

/// A slot's number, as the VMM chose it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct SlotId(pub u16);

impl core::fmt::Display for SlotId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "slot {}", self.0)
    }
}

bitflags::bitflags! {
    /// Properties of a slot.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct SlotFlags: u32 {
        /// Guest writes do not change memory: they exit as MMIO.
        const READONLY = 1 << 0;
        /// A vCPU's access to a never provided page leaves the guest as a memory-fault exit, as
        /// with `KVM_MEM_EXIT_ON_MISSING` of the KVM series of 2023: the VMM provides the page and
        /// enters the vCPU again. Without the flag the vCPU waits for the page source. A slot that
        /// exits may not be `READONLY`, and its pages have a source.
        const EXIT_ON_MISSING = 1 << 3;
        /// As `EXIT_ON_MISSING`, but a vCPU's access to every page without a frame leaves the
        /// guest: also to a page that was provided and then evicted. The KVM series did the same.
        /// The VMM brings such a page back. In Linux memory the swap of Linux causes no exit.
        const EXIT_ON_NONRESIDENT = 1 << 4;
    }
}

impl SlotFlags {
    /// Refuses flags outside `supported`, the backend's set, and flags that exclude each other.
    ///
    /// # Errors
    /// [`SlotError::UnsupportedFlags`], [`SlotError::ReadOnlyExits`].
    pub fn check(self, id: SlotId, supported: Self) -> Result<(), SlotError> {
        let flags = self.difference(supported);
        if !flags.is_empty() {
            return Err(SlotError::UnsupportedFlags { id, flags });
        }
        match self.contains(Self::READONLY) && self.exits() {
            false => Ok(()),
            true => Err(SlotError::ReadOnlyExits { id }),
        }
    }

    /// Whether an access to memory that is not at hand may leave the guest.
    #[inline]
    pub const fn exits(self) -> bool {
        self.intersects(Self::EXIT_ON_MISSING.union(Self::EXIT_ON_NONRESIDENT))
    }
}

/// The data that the user of the slots attaches to each slot (the MMU: its reverse map). It decides
/// the type of the backing addresses.
pub trait SlotData {
    /// The addresses.
    type Addr: SlotAddress;
}

impl<X: SlotData> SlotData for Arc<X> {
    type Addr = X::Addr;
}

/// A slot as the VMM requests it, before any check; addresses are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotSpec<A> {
    /// The slot's number, which must be unused.
    pub id: SlotId,
    /// First guest-physical address; a multiple of 4 KiB.
    pub guest: u64,
    /// First address of the backing; a multiple of 4 KiB.
    pub backing: A,
    /// Bytes; a positive multiple of 4 KiB.
    pub bytes: u64,
    /// Its properties.
    pub flags: SlotFlags,
}

/// A range of guest frames with its backing, in one snapshot, and the user's data of type `X`.
#[derive(Clone, Debug)]
pub struct Slot<X: SlotData> {
    /// Its number.
    pub id: SlotId,
    /// The guest frames.
    pub gfns: GfnRange,
    /// Their backing, with as many pages.
    pub backing: SlotAddressRange<X::Addr>,
    /// Its properties.
    pub flags: SlotFlags,
    /// The user's data.
    pub attach: X,
}

impl<X: SlotData> Slot<X> {
    /// The page's number in the slot: the index into per-page arrays.
    ///
    /// # Panics
    /// If `gfn` is not in the slot.
    #[inline]
    pub fn page(&self, gfn: Gfn) -> usize {
        assert!(self.gfns.contains(gfn), "gfn {gfn} is not in {}", self.id);
        (gfn.get() - self.gfns.start().get()) as usize
    }

    /// The backing of `gfn`.
    ///
    /// # Panics
    /// If `gfn` is not in the slot.
    #[inline]
    pub fn backing_of(&self, gfn: Gfn) -> X::Addr {
        let offset = self.page(gfn) as u64 * PAGE_SIZE as u64;
        X::Addr::new(self.backing.start().get() + offset)
    }

    /// The guest frames whose backing lies in `range`; `None` if there are none.
    pub fn gfns_of(&self, range: SlotAddressRange<X::Addr>) -> Option<GfnRange> {
        let part = self.backing.intersect(range)?;
        let skip = (part.start().get() - self.backing.start().get()) / PAGE_SIZE as u64;
        GfnRange::new(self.gfns.start().checked_add(skip)?, part.pages())
    }
}

impl<A: SlotAddress> SlotSpec<A> {
    /// Its ranges, if they are valid.
    pub(crate) fn ranges(
        &self,
        gfn_limit: u64,
    ) -> Result<(GfnRange, SlotAddressRange<A>), SlotError> {
        let Self {
            id,
            guest,
            backing,
            bytes,
            ..
        } = *self;
        const PAGE: u64 = PAGE_SIZE as u64;
        if bytes == 0 {
            return Err(SlotError::Empty { id });
        }
        for (what, value) in [
            ("guest address", guest),
            ("backing address", backing.get()),
            ("size", bytes),
        ] {
            if !value.is_multiple_of(PAGE) {
                return Err(SlotError::Misaligned { id, what, value });
            }
        }
        let pages = bytes / PAGE;
        let gfns = gfn_range(id, guest / PAGE, pages, gfn_limit)?;
        let start = backing.get();
        let backing = SlotAddressRange::new(backing, pages);
        let backing = backing.ok_or(SlotError::BackingWraps { id, start, bytes })?;
        Ok((gfns, backing))
    }
}

/// `pages` frames from `first`, if they end at or below `gfn_limit`.
fn gfn_range(id: SlotId, first: u64, pages: u64, gfn_limit: u64) -> Result<GfnRange, SlotError> {
    first
        .checked_add(pages)
        .filter(|end| *end <= gfn_limit)
        .and_then(|_| GfnRange::new(Gfn::new(first)?, pages))
        .ok_or(SlotError::BeyondWidth {
            id,
            limit: gfn_limit.saturating_mul(PAGE_SIZE as u64),
        })
}
