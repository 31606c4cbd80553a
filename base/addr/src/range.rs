//! Half-open page ranges.

use crate::{Gfn, Hva, PAGE_SHIFT};

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
    pub fn start(self) -> Gfn {
        Gfn::new(self.start).expect("checked at construction")
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

    /// Every frame, ascending.
    pub fn iter(self) -> impl Iterator<Item = Gfn> {
        (self.start..self.end).map(|g| Gfn::new(g).expect("checked at construction"))
    }
}

/// `start..end` in backing addresses, in whole pages; never empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct HvaRange {
    start: u64,
    end: u64,
}

impl HvaRange {
    /// `None` when empty, unaligned or wrapping.
    pub const fn new(start: Hva, pages: u64) -> Option<Self> {
        if pages == 0 || !start.is_page_aligned() {
            return None;
        }
        match start.checked_add_pages(pages) {
            Some(end) => Some(Self {
                start: start.get(),
                end: end.get(),
            }),
            None => None,
        }
    }

    /// First address.
    pub const fn start(self) -> Hva {
        Hva::new(self.start)
    }

    /// One past the last address.
    pub const fn end(self) -> Hva {
        Hva::new(self.end)
    }

    /// Pages in the range.
    pub const fn pages(self) -> u64 {
        (self.end - self.start) >> PAGE_SHIFT
    }

    /// Whether `hva` lies inside.
    pub const fn contains(self, hva: Hva) -> bool {
        self.start <= hva.get() && hva.get() < self.end
    }

    /// The common part, or `None`.
    pub fn intersect(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end.min(other.end);
        (start < end).then_some(Self { start, end })
    }
}
