//! The userfaultfds of a region that this process fills.
//!
//! A fill writes to counts and locks of its userfaultfd and of its mapping, so fills of one mapping
//! delay each other. A large region therefore has several parts, each with its own userfaultfd.
//! Linux makes a mapping of each part, because the userfaultfds differ.

use lacuna_addr::Level;
use lacuna_sys::{Errno, Userfaultfd, Waiters};
use std::ops::Range;
use std::sync::Arc;

/// Pages of the smallest part, 32 MiB: a small region takes one descriptor.
const LEAST: u64 = 8192;

/// What a thread does that touches a missing page of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touched {
    /// It gets `SIGBUS`. No thread of the host touches a missing page, because each access first
    /// reads the page word.
    Signals,
    /// It sleeps until the page is filled: a guest for which the kernel maps the memory, as KVM
    /// does. A reader of the region's userfaultfds has to resolve the page.
    Sleeps,
    /// As `Sleeps`, and the kernel also records writes
    /// ([`Userfaultfd::open_tracking`](lacuna_sys::Userfaultfd::open_tracking)).
    SleepsAndRecords,
}

impl Touched {
    fn open(self) -> Result<Userfaultfd, Errno> {
        match self {
            Self::Signals => Userfaultfd::open_without_events(),
            Self::Sleeps => Userfaultfd::open_for_guest(),
            Self::SleepsAndRecords => Userfaultfd::open_tracking(),
        }
    }
}

/// Parts of equal length, of whole huge pages. The last part may be shorter.
pub struct Parts {
    /// Pages of each part.
    each: u64,
    uffds: Box<[Arc<Userfaultfd>]>,
    touched: Touched,
}

impl Parts {
    /// The most descriptors and mappings that a region takes.
    pub const MOST: u64 = 16;

    /// Descriptors for a region of `pages` pages.
    ///
    /// # Errors
    /// A userfaultfd cannot be made.
    pub fn open(pages: u64, touched: Touched) -> Result<Self, Errno> {
        let each = pages.div_ceil(Self::MOST).max(LEAST);
        let each = each.next_multiple_of(Level::L2M.pages());
        let uffds = (0..pages.div_ceil(each)).map(|_| touched.open().map(Arc::new));
        Ok(Self {
            each,
            uffds: uffds.collect::<Result<_, _>>()?,
            touched,
        })
    }

    /// Whether a fill wakes the threads that sleep for its pages.
    pub fn waiters(&self) -> Waiters {
        match self.touched {
            Touched::Signals => Waiters::LeaveAsleep,
            Touched::Sleeps | Touched::SleepsAndRecords => Waiters::Wake,
        }
    }

    /// The userfaultfd of the page at `index` of the region.
    pub fn of(&self, index: u64) -> &Arc<Userfaultfd> {
        &self.uffds[(index / self.each) as usize]
    }

    /// The pages with the indices `pages`, cut where parts begin.
    pub fn cut(&self, pages: Range<u64>) -> impl Iterator<Item = (Range<u64>, &Arc<Userfaultfd>)> {
        let part = move |(part, uffd)| {
            let start = part as u64 * self.each;
            let cut = start.max(pages.start)..(start + self.each).min(pages.end);
            (cut, uffd)
        };
        let parts = self.uffds.iter().enumerate().map(part);
        parts.filter(|(pages, _)| !pages.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(pages: u64) -> Option<Parts> {
        let parts = Parts::open(pages, Touched::Signals).ok();
        if parts.is_none() {
            lacuna_skip::skip("no userfaultfd");
        }
        parts
    }

    fn cut(parts: &Parts, pages: Range<u64>) -> Vec<(u64, u64)> {
        let cut = parts.cut(pages);
        cut.map(|(part, _)| (part.start, part.end)).collect()
    }

    #[test]
    fn a_small_region_is_one_part() {
        let Some(parts) = parts(LEAST) else { return };
        assert_eq!(parts.uffds.len(), 1);
        assert_eq!(cut(&parts, 3..LEAST), [(3, LEAST)]);
    }

    /// The parts cover the region, and each page has the descriptor of its part.
    #[test]
    fn a_range_is_cut_where_parts_begin() {
        for pages in [LEAST + 1, 5 * LEAST, Parts::MOST * LEAST + 1, 1 << 28] {
            let Some(parts) = parts(pages) else { return };
            assert!(parts.uffds.len() as u64 <= Parts::MOST, "{pages} pages");
            let mut next = 0;
            for (part, uffd) in parts.cut(0..pages) {
                assert_eq!(part.start, next, "{pages} pages");
                assert!(part.start.is_multiple_of(512), "{pages} pages");
                for index in [part.start, part.end - 1] {
                    assert!(Arc::ptr_eq(parts.of(index), uffd), "page {index}");
                }
                next = part.end;
            }
            assert_eq!(next, pages);
            let each = parts.each;
            assert_eq!(
                cut(&parts, each - 1..each + 1),
                [(each - 1, each), (each, each + 1)]
            );
        }
    }
}
