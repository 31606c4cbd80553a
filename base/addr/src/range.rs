//! Half-open page ranges.

use crate::{BackingAddr, Gfn, Hva, Level, PAGE_SHIFT, PAGE_SIZE, SlotAddress};

/// `start..end` in guest frames; never empty, never past 48 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct GfnRange {
    start: u64,
    end: u64,
}

impl GfnRange {
    /// `None` when empty or past the address space.
    pub const fn new(start: Gfn, pages: u64) -> Option<Self> {
        if pages == 0 {
            return None;
        }
        match start.get().checked_add(pages) {
            Some(end) if Gfn::new(end - 1).is_some() => Some(Self {
                start: start.get(),
                end,
            }),
            _ => None,
        }
    }

    /// The one-page range of `gfn`.
    pub const fn page(gfn: Gfn) -> Self {
        Self {
            start: gfn.get(),
            end: gfn.get() + 1,
        }
    }

    /// First frame.
    #[inline]
    pub const fn start(self) -> Gfn {
        Gfn::checked_before(self.start)
    }

    /// Last frame.
    #[inline]
    pub const fn last(self) -> Gfn {
        Gfn::checked_before(self.end - 1)
    }

    /// Raw end, one past the last frame.
    pub const fn end_raw(self) -> u64 {
        self.end
    }

    /// Pages in the range.
    pub const fn pages(self) -> u64 {
        self.end - self.start
    }

    /// Whether `gfn` lies inside.
    pub const fn contains(self, gfn: Gfn) -> bool {
        self.start <= gfn.get() && gfn.get() < self.end
    }

    /// The common part, or `None`.
    pub fn intersect(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end.min(other.end);
        (start < end).then_some(Self { start, end })
    }

    /// The aligned 1 GiB around `gfn`.
    #[inline]
    pub const fn gib_of(gfn: Gfn) -> Self {
        let start = gfn.get() & !(Level::L1G.pages() - 1);
        Self {
            start,
            end: start + Level::L1G.pages(),
        }
    }

    /// The first frame of each leaf of `level` that it takes to map the range, which is aligned to
    /// that level. Ascending.
    #[inline]
    pub fn steps(self, level: Level) -> impl Iterator<Item = Gfn> {
        (0..self.pages() >> level.page_shift())
            .map(move |i| Gfn::checked_before(self.start + (i << level.page_shift())))
    }

    /// Every frame, ascending.
    pub fn iter(self) -> impl Iterator<Item = Gfn> {
        (self.start..self.end).map(Gfn::checked_before)
    }
}

/// `start..end` in addresses that slots may point to, in whole pages; never empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct SlotAddressRange<A> {
    start: A,
    end: A,
}

/// A range of host virtual addresses.
pub type HvaRange = SlotAddressRange<Hva>;

/// A range of the host memory manager's own numbering.
pub type BackingRange = SlotAddressRange<BackingAddr>;

impl<A: SlotAddress> SlotAddressRange<A> {
    /// `None` when empty, unaligned or wrapping.
    #[inline]
    pub fn new(start: A, pages: u64) -> Option<Self> {
        if pages == 0 || !start.get().is_multiple_of(PAGE_SIZE as u64) {
            return None;
        }
        let end = start
            .get()
            .checked_add(pages.checked_mul(PAGE_SIZE as u64)?)?;
        let end = A::new(end);
        Some(Self { start, end })
    }

    /// First address.
    #[inline]
    pub fn start(self) -> A {
        self.start
    }

    /// One past the last address.
    #[inline]
    pub fn end(self) -> A {
        self.end
    }

    /// Pages in the range.
    #[inline]
    pub fn pages(self) -> u64 {
        (self.end.get() - self.start.get()) >> PAGE_SHIFT
    }

    /// Pages in disjoint ranges.
    pub fn pages_in(ranges: &[Self]) -> u64 {
        ranges.iter().map(|range| range.pages()).sum()
    }

    /// Whether `addr` lies inside.
    #[inline]
    pub fn contains(self, addr: A) -> bool {
        self.start <= addr && addr < self.end
    }

    /// The common part, or `None`.
    #[inline]
    pub fn intersect(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end.min(other.end);
        (start < end).then_some(Self { start, end })
    }

    /// Both ranges as one; `None` if there are addresses between them.
    pub fn join(self, other: Self) -> Option<Self> {
        let start = self.start.min(other.start);
        let end = self.end.max(other.end);
        let meet = self.start.max(other.start) <= self.end.min(other.end);
        meet.then_some(Self { start, end })
    }
}
