//! Which pages of a window are mapped, and in which frame each belongs.

use lacuna_addr::{Level, PageCount, Pfn};

/// A page of a guest's memory, by its number there.
pub type Page = u32;

/// Pages in a block.
pub(super) const BLOCK: Page = Level::L2M.pages() as Page;

/// The state of a window, under its lock.
pub(super) struct Table {
    pub entries: Vec<Entry>,
    /// Pages that were copied to the window, and whose frames are not emptied yet.
    pub copied: Vec<Page>,
    pub stream: Stream,
    /// The VM has ended: missing pages are zeros, and no page moves.
    pub is_closed: bool,
}

/// First touches in the order of addresses. Each fault costs two wake-ups, so the window maps pages
/// after the touched one too. It maps no more of them than the guest has touched in this order: a
/// guest that stops has at most twice the pages that it has touched.
#[derive(Default)]
pub(super) struct Stream {
    /// The page after the last one that was touched or mapped ahead.
    pub next: Page,
    /// The pages that the last touch has mapped ahead.
    pub ahead: Page,
}

/// The entry of a page: the number of its frame plus 1 while it is mapped, otherwise 0; and how
/// many turns of the clock hand spare it. All zeros: neither mapped, nor unmapped by aging.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Entry(u32);

impl Entry {
    /// Frame numbers have fewer bits.
    const TURNS_SHIFT: u32 = 30;
    const FRAME: u32 = (1 << Self::TURNS_SHIFT) - 1;
    /// A page that is touched again after aging has unmapped it.
    const IN_USE: u32 = 3;
    /// Unmapped by aging.
    pub const AGED: Self = Self(1 << Self::TURNS_SHIFT);

    pub const fn frame(self) -> Option<Pfn> {
        match self.0 & Self::FRAME {
            0 => None,
            frame => Some(Pfn::new(frame - 1)),
        }
    }

    /// The entry of the page when it is mapped.
    pub fn mapped(self, frame: Pfn) -> Self {
        let turns = if self == Self::AGED { Self::IN_USE } else { 0 };
        Self((frame.index() as u32 + 1) | (turns << Self::TURNS_SHIFT))
    }

    /// The turns that spare the page.
    pub const fn turns(self) -> u32 {
        self.0 >> Self::TURNS_SHIFT
    }

    /// Whether this turn of the hand spares the page, which then has one turn less.
    pub fn is_spared(&mut self) -> bool {
        let is_spared = self.turns() != 0;
        self.0 -= u32::from(is_spared) << Self::TURNS_SHIFT;
        is_spared
    }
}

impl Table {
    /// A table for `pages` pages. None is mapped.
    pub fn new(pages: PageCount) -> Self {
        Self {
            entries: vec![Entry::default(); pages.get() as usize],
            copied: Vec::new(),
            stream: Stream::default(),
            is_closed: false,
        }
    }

    /// The entries of the block that begins at `at`.
    pub fn block(&mut self, at: Page) -> &mut [Entry] {
        &mut self.entries[at as usize..(at + BLOCK) as usize]
    }

    /// The first frame of the block that begins at `at`, if all of it is mapped and one aligned
    /// block of frames is its place.
    pub fn frames_of(&mut self, at: Page) -> Option<Pfn> {
        let is_open = !self.is_closed;
        let entries = self.block(at);
        let first = entries[0];
        let mut own = (first.0..).zip(entries);
        let is_whole = is_open && own.all(|(own, entry)| own == entry.0);
        let frame = first.frame().filter(|_| is_whole)?;
        frame.get().is_multiple_of(BLOCK.into()).then_some(frame)
    }
}
